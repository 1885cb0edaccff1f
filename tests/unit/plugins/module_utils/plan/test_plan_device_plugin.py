# SPDX-License-Identifier: Apache-2.0
"""Tests the plan (the changes that a run would make) of the role device_plugin: conflicts with other device plugins, a
DaemonSet instead of a service, a driver that does not work, and containers that lose their slices (parts of a GPU) by a
change.
"""

from __future__ import annotations

import copy

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.config import node_config, sharing
from ansible_collections.vgpu.fleet.plugins.module_utils.host.digest import sha256
from plan_samples import CONVERGED, RUNNING, SILENT, UNIT, made

# columns: facts of the state that differ, variables that differ; expected: whether the plan refuses to restart the
# device plugin, because the driver does not work
DRIVERLESS = [
    (SILENT, {"vgpu_split_count": 4}, True),
    ({**SILENT, (*UNIT, "active"): False}, {}, True),
    (SILENT, {}, False),  # The plan has no restart of the plugin.
    ({**SILENT, "packages.nvidia-smi": None}, {"vgpu_split_count": 4}, False),  # The plan first installs the driver.
    (SILENT, {"vgpu_split_count": 4, "nvidia_driver_state": None}, True),
    (SILENT, {"vgpu_split_count": 4, "vgpu_fail_on_init_error": False}, False),  # The plugin may wait for the driver.
    (SILENT, {"device_plugin_state": "absent"}, False),
    ({}, {"vgpu_split_count": 4}, False),
]
CONFLICTING = {"socket": "/var/lib/kubelet/device-plugins/nvidia-gpu.sock", "resource": "nvidia.com/gpu", "owner": ""}


def test_another_owner_of_the_resource_stops_the_run_unless_it_is_ignored():
    found = made({}, {"plugin.conflicting_plugins": [CONFLICTING]})
    assert ["nvidia-gpu.sock" in one and "device_plugin_conflicting_plugins" in one for one in found["errors"]] == [
        True
    ]
    ignored = made({"device_plugin_conflicting_plugins": "ignore"}, {"plugin.conflicting_plugins": [CONFLICTING]})
    assert ignored["errors"] == []
    assert any("nvidia-gpu.sock" in one for one in ignored["warnings"])
    other = made({}, {"plugin.conflicting_plugins": [dict(CONFLICTING, resource="nvidia.com/mig-1g.5gb")]})
    assert (other["errors"], len(other["warnings"])) == ([], 1)


def test_conflicting_plugin_with_consent_is_a_warning():
    found = made(
        {"device_plugin_conflicting_plugins_remove": ["DaemonSet a/b"]}, {"plugin.conflicting_plugins": [CONFLICTING]}
    )
    assert (found["errors"], len(found["warnings"])) == ([], 1)


KUBELETS = [(None, False), ((1, 9), True), ((1, 10), False), ((1, 34), False)]


@pytest.mark.parametrize(("version", "refused"), KUBELETS)
def test_kubernetes_before_1_10_is_refused(version, refused):
    told = made({}, {"kubelet": version})["errors"]
    assert ["the kubelet of this host is Kubernetes 1.9; expected 1.10" in one for one in told] == [True] * refused


DAEMONSET = {"device_plugin_deploy": "daemonset", "__device_plugin_daemonset_text": "{}"}
DAEMONSET_FILE = ("files", "/etc/vgpu/daemonset.json")
BY_POD = {
    DAEMONSET_FILE: {"sha256": sha256("{}"), "mtime": 900.0},
    ("files", "/etc/systemd/system/vgpu-device-plugin.service"): None,
    ("units", "vgpu-device-plugin.service"): {"present": False},
}

# columns: facts that differ on a node of the DaemonSet; expected change ("": none)
PODS = [
    ({}, ""),
    ({DAEMONSET_FILE: None}, "write /etc/vgpu/daemonset.json"),
    ({(*DAEMONSET_FILE, "sha256"): "other"}, "change /etc/vgpu/daemonset.json"),
    ({("units", "vgpu-device-plugin.service"): dict(RUNNING)}, "replace vgpu-device-plugin.service by the DaemonSet"),
    ({"plugin.status": None}, "restart the pod of the DaemonSet"),
    ({"plugin.status.version": "0.0.9"}, "restart the pod of the DaemonSet"),
    ({"plugin.versions": []}, "install /opt/vgpu/plugin/0.1.0-plug"),
]


@pytest.mark.parametrize(("different", "words"), PODS)
def test_node_of_the_daemonset_has_this_change(different, words):
    found = made(DAEMONSET, {**copy.deepcopy(BY_POD), **different})
    assert found["errors"] == []
    assert found["roles"][:1] == (["device_plugin"] if words else [])
    assert not words or words in found["steps"][0]["changes"]


def test_daemonset_is_replaced_by_a_service_in_two_steps():
    (told,) = made({}, BY_POD)["errors"]
    assert "device_plugin_state: absent with device_plugin_deploy: daemonset" in told
    gone = made({**DAEMONSET, "device_plugin_state": "absent"}, BY_POD)
    assert "remove this node from the DaemonSet" in gone["steps"][0]["changes"]


def test_requested_sizes_need_a_kubeconfig_only_outside_a_pod():
    asked = {"vgpu_slice_sizing": "requested"}
    assert any("device_plugin_kubeconfig" in one for one in made(asked)["errors"])
    assert made({**asked, **DAEMONSET}, BY_POD)["errors"] == []


@pytest.mark.parametrize(("state", "variables", "refused"), DRIVERLESS)
def test_a_working_device_plugin_is_not_restarted_without_a_driver(state, variables, refused):
    told = "\n".join(made(variables, state)["errors"])
    assert ("NVML does not answer (no driver) and no step repairs it" in told) is refused


def running(split, *held):
    """Returns the status of a device plugin that splits each GPU into ``split`` slices. ``held`` lists who uses a
    slice, as (kind of the allocation, slice)."""
    config = node_config.from_vars({"vgpu_split_count": split})
    allocations = [{"id": str(n), "kind": kind, "slice_ids": [one]} for n, (kind, one) in enumerate(held) if kind]
    used = {one for _kind, one in held}
    made_slices = [
        {**one._asdict(), "in_use": one.id in used} for one in sharing.pieces_for(CONVERGED["gpus"], config)[0]
    ]
    return {**CONVERGED["plugin"]["status"], "slices": made_slices, "allocations": allocations}


POD_A, POD_B, LEASE = ("kubelet", "GPU-a::1"), ("kubelet", "GPU-b::0"), ("lease", "GPU-b::1")
# Users of slices that a drain of the node does not move: a container started by vgpuctl run, a program started by
# vgpuctl exec, and a container of podman that uses a CDI name and so has no allocation.
ENGINE, PROGRAM, BY_NAME = ("container", "GPU-a::1"), ("exec", "GPU-b::0"), ("", "GPU-b::1")

# columns: variables that differ, users of slices; expected words of the warning ("": no warning). At present
# each GPU has three slices.
HOLDERS = [
    ({"vgpu_split_count": 4}, [POD_A, POD_B], "containers that keep slices of their former size until they end: 2"),
    ({"vgpu_split_count": 4}, [LEASE], ""),
    ({"vgpu_split_count": 4}, [ENGINE], "containers that keep slices of their former size until they end: 1"),
    (
        {"vgpu_split_count": 4},
        [ENGINE, PROGRAM, LEASE],
        "containers that keep slices of their former size until they end: 2",
    ),
    ({"vgpu_split_count": 4}, [BY_NAME], "containers that keep slices of their former size until they end: 1"),
    ({"device_plugin_state": "absent"}, [ENGINE], "containers that use slices, and whose allocations end: 1"),
    ({"vcuda_state": "absent"}, [BY_NAME], "containers that mount the library and cannot be started again: 1"),
    ({"vgpu_split_count": 4}, [], ""),
    ({"vgpu_memory_scaling": 2}, [POD_A], "containers that keep slices of their former size until they end: 1"),
    ({"vgpu_cores_scaling": 1}, [POD_A], "former size until they end: 1"),
    ({"vgpu_devices": [{"match": {"index": 0}, "split_count": 1}]}, [POD_A, POD_B], "former size until they end: 1"),
    ({"vgpu_sharing": "none"}, [POD_A, POD_B], "former size until they end: 2"),
    ({"vgpu_resource_names": {"count": "example.com/gpu"}}, [POD_A, POD_B], "former size until they end: 2"),
    ({"vgpu_log_level": 3}, [POD_A, POD_B], ""),  # the slices stay as they are
    ({"device_plugin_version": "0.2.0"}, [POD_A], ""),
    ({"device_plugin_state": "absent"}, [POD_A, LEASE], "containers that use slices, and whose allocations end: 1"),
    ({"device_plugin_state": "absent"}, [LEASE], ""),
    ({"vcuda_state": "absent"}, [POD_A], "containers that mount the library and cannot be started again: 1"),
    ({"vcuda_state": "absent"}, [], ""),
]


@pytest.mark.parametrize(("variables", "held", "words"), HOLDERS)
def test_plan_warns_of_containers_that_use_slices(variables, held, words):
    found = made(variables, {"plugin.status": {**running(3, *held), "resource": "nvidia.com/gpu"}})
    assert found["roles"] != []
    # Another slice size disturbs no container: each keeps its slice until it ends.
    assert found["disturbs"] is (bool(words) and "absent" in variables.values())
    assert len(found["warnings"]) == bool(words)
    assert words in "".join(found["warnings"])


# columns: users of slices; expected names of those that a drain of the node does not move
OUTSIDE = [
    ([], []),
    ([POD_A, LEASE], []),
    ([ENGINE, PROGRAM], ["container 0", "exec 1"]),
    ([BY_NAME], ["a container that has slice GPU-b::1 by its CDI name"]),
]


@pytest.mark.parametrize(("held", "outside"), OUTSIDE)
def test_containers_that_no_drain_moves_are_named(held, outside):
    state = {"plugin.status": {**running(3, *held), "resource": "nvidia.com/gpu"}}
    found = made({"nvidia_driver_packages": ["nvidia-smi=535.400*", "libcuda1=535.400*"]}, state)
    assert "nvidia_driver" in found["roles"]
    assert found["outside"] == outside
    ends = [one for one in found["warnings"] if "nvidia_driver: this step ends containers that no drain moves: " in one]
    assert len(ends) == bool(outside)
    assert all(one in ends[0] for one in outside)
    assert made({}, state)["outside"] == outside  # no step ends these containers, so they are only listed
    assert "no drain" not in "".join(made({}, state)["warnings"])


def test_holder_is_named_as_vgpuctl_names_it():
    status = running(3, ENGINE)
    status["allocations"][0]["holder"] = "docker web"
    assert made({}, {"plugin.status": status})["outside"] == ["docker web"]
