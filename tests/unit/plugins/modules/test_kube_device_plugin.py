# SPDX-License-Identifier: Apache-2.0
"""Tests the module kube_device_plugin, which deploys the device plugin as a DaemonSet, with an API server in memory:
missing nodes, nodes of other runs, the replacement of pods, and the removal of the plugin's traces from nodes.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from ansible_collections.vgpu.fleet.plugins.modules import kube_device_plugin as module_under_test
from doubles.kube_api import KubeClient

LABEL = "vgpu.fleet/device-plugin"
DAEMON_SET = "/apis/apps/v1/namespaces/kube-system/daemonsets/vgpu-device-plugin"
PODS = "/api/v1/namespaces/kube-system/pods"
CONFIGS = "/api/v1/namespaces/kube-system/configmaps/vgpu-configs"


def cluster(version="v1.34.2"):
    api = KubeClient(version)
    for name in ("n1", "n2"):
        api.put(f"/api/v1/nodes/{name}", {"kind": "Node", "metadata": {"name": name, "labels": {}, "annotations": {}}})
    return api


def deleted(api):
    return [path for method, path in api.writes if method == "DELETE"]


class Ended(Exception):
    pass


def call(api, nodes=("n1",), check=False, warnings=None, **more):
    params = {
        "state": "present",
        "namespace": "kube-system",
        "image": "i",
        "pull_policy": "Never",
        "configs": {},
        "exact_configs": True,
        "rollout": "RollingUpdate",
        "config_path": "/etc/vgpu/node.yaml",
        "kubelet_dir": "/var/lib/kubelet",
        "library_root": "/usr/local/lib/vgpu",
        "options": [],
        "environment": {},
        "tolerations": [],
        "nodes": list(nodes),
        **more,
    }

    def fail_json(msg):
        raise Ended(msg)

    warn = ([] if warnings is None else warnings).append
    module = SimpleNamespace(params=params, check_mode=check, fail_json=fail_json, warn=warn)
    return module_under_test.run(module, api)


def labelled(api):
    return [name for name in ("n1", "n2") if LABEL in api.objects[f"/api/v1/nodes/{name}"]["metadata"]["labels"]]


def test_check_mode_deployment_repetition_and_removal():
    api = cluster()
    assert call(api, check=True)["changed"] and api.writes == []
    assert call(api)["changed"] and labelled(api) == ["n1"]
    assert not call(api)["changed"]
    before = len(api.writes)
    assert call(api, state="absent", check=True)["changed"] and len(api.writes) == before
    call(api, state="absent")
    assert labelled(api) == [] and DAEMON_SET not in api.objects
    assert [path for path in api.objects if "/nodes/" not in path] == []
    assert not call(api, state="absent")["changed"]


@pytest.mark.parametrize("version", ["v1.9.11", "v1.8.0-gke.1"])
def test_old_kubernetes_is_refused(version):
    with pytest.raises(Ended, match=r"expected 1\.10 or newer"):
        call(cluster(version))


def test_missing_node_is_not_created():
    api = cluster()
    with pytest.raises(Ended, match="no node n3"):
        call(api, nodes=("n1", "n3"))
    assert api.writes == []
    call(api, nodes=("n3",), state="absent")  # A removal must not fail for a node that is not in the cluster.
    assert "/api/v1/nodes/n3" not in api.objects


# columns: nodes of the first run, nodes of the removal; expected words of each warning
@pytest.mark.parametrize(
    ("with_one", "taken", "words"),
    [
        (["n1"], ["n1"], []),
        (["n1"], ["n3"], ["no node n3, and the device plugin stays on n1;"]),
        (["n1", "n2"], ["n1", "n3"], ["no node n3, and the device plugin stays on n2;"]),
        (["n1", "n2"], ["n1"], []),
        (["n1"], ["n1", "n3"], []),
    ],
)
def test_a_node_that_may_have_another_name_is_reported(with_one, taken, words):
    api, warnings = cluster(), []
    call(api, nodes=with_one)
    call(api, nodes=taken, state="absent", warnings=warnings)
    assert len(warnings) == len(words) and all(word in text for word, text in zip(words, warnings, strict=True))


def test_objects_stay_while_another_node_has_a_pod():
    api = cluster()
    call(api, nodes=("n1", "n2"))
    call(api, nodes=("n1",), state="absent")
    assert labelled(api) == ["n2"] and DAEMON_SET in api.objects
    call(api, nodes=("n2",), state="absent")
    assert labelled(api) == [] and DAEMON_SET not in api.objects


def controller(api):
    """Acts like the DaemonSet controller of Kubernetes: it creates a pod on each labelled node that has none."""
    daemon_set = api.objects[DAEMON_SET]
    daemon_set["metadata"].setdefault("generation", 1)
    daemon_set["status"] = {"observedGeneration": daemon_set["metadata"]["generation"]}
    for name in labelled(api):
        pod = copy.deepcopy(daemon_set["spec"]["template"])
        pod["kind"], pod["metadata"]["name"], pod["spec"]["nodeName"] = "Pod", f"p-{name}", name
        api.objects.setdefault(f"{PODS}/p-{name}", pod)


def images(api):
    return [api.objects[f"{PODS}/p-{name}"]["spec"]["containers"][0]["image"] for name in ("n1", "n2")]


def test_pods_of_the_named_nodes_alone_are_replaced():
    api = cluster()
    call(api, nodes=("n1", "n2"), rollout="OnDelete")
    assert api.objects[DAEMON_SET]["spec"]["updateStrategy"] == {"type": "OnDelete"}
    controller(api)
    assert not call(api, nodes=("n1", "n2"), rollout="OnDelete")["changed"] and deleted(api) == []
    before = len(api.writes)
    foretold = call(api, rollout="OnDelete", image="new", check=True)
    # Check mode reports the pods that would be replaced, but writes nothing.
    assert "Pod kube-system/p-n1" in foretold["objects"] and len(api.writes) == before
    found = call(api, rollout="OnDelete", image="new")
    assert deleted(api) == [f"{PODS}/p-n1"] and "Pod kube-system/p-n1" in found["objects"]
    controller(api)
    assert images(api) == ["new", "i"]
    # The next run is for n2. The former run has already written the new template, so only the pod of n2 is replaced.
    assert call(api, nodes=("n2",), rollout="OnDelete", image="new")["objects"] == ["Pod kube-system/p-n2"]
    controller(api)
    assert images(api) == ["new", "new"]
    assert not call(api, nodes=("n1", "n2"), rollout="OnDelete", image="new")["changed"]


def test_pods_of_a_rolling_daemonset_are_left_to_kubernetes():
    api = cluster()
    call(api)
    controller(api)
    call(api, image="new")
    assert api.objects[DAEMON_SET]["spec"]["updateStrategy"]["type"] == "RollingUpdate" and deleted(api) == []


def test_terminating_pod_is_not_deleted_again():
    api = cluster()
    call(api, rollout="OnDelete")
    controller(api)
    api.objects[f"{PODS}/p-n1"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    call(api, rollout="OnDelete", image="new")
    assert deleted(api) == []


def test_a_pod_that_waits_for_room_on_its_node_is_replaced():
    """A pending pod must also be replaced. It was created from the former template and would later start from it."""
    api = cluster()
    call(api, nodes=("n1", "n2"), rollout="OnDelete")
    controller(api)
    for name in ("n1", "n2"):  # The controller makes pods with this affinity and without nodeName.
        spec = api.objects[f"{PODS}/p-{name}"]["spec"]
        del spec["nodeName"]
        field = {"key": "metadata.name", "operator": "In", "values": [name]}
        terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    assert call(api, rollout="OnDelete", image="new")["objects"][-1] == "Pod kube-system/p-n1"
    assert deleted(api) == [f"{PODS}/p-n1"]


@pytest.mark.parametrize(("gone_after", "rounds"), [(3, 3), (None, 6)])
def test_run_waits_until_the_former_pod_is_gone(monkeypatch, gone_after, rounds):
    """The run must wait until the former pod is gone, because its program would look like the new one if only options
    changed. The wait has a time limit."""
    api, slept = cluster(), []
    call(api, rollout="OnDelete")
    controller(api)

    def sleep(_seconds):
        slept.append(1)
        if len(slept) == gone_after:
            api.objects.pop(f"{PODS}/p-n1")

    def delete(path):
        api.objects[path]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    api.delete = delete
    monkeypatch.setattr(module_under_test.time, "sleep", sleep)
    monkeypatch.setattr(module_under_test.time, "monotonic", lambda: len(slept) * 10)
    assert call(api, rollout="OnDelete", options=["--x"])["objects"][-1] == "Pod kube-system/p-n1"
    assert len(slept) == rounds


def test_no_pod_is_replaced_before_the_controller_has_seen_the_template(monkeypatch):
    """If a pod were deleted before the DaemonSet controller has seen the new template, the controller would create the
    pod again from the former one."""
    api, slept = cluster(), []
    monkeypatch.setattr(module_under_test.time, "sleep", slept.append)
    monkeypatch.setattr(module_under_test.time, "monotonic", lambda: len(slept) * 10)
    call(api, rollout="OnDelete")
    controller(api)
    real = api.apply

    def apply(path, body, dry_run):
        after = real(path, body, dry_run)
        if path == DAEMON_SET:
            api.objects[path]["metadata"]["generation"] = 2
            api.objects[path]["status"] = {"observedGeneration": 1}
        return after

    api.apply = apply
    with pytest.raises(ValueError, match="has not seen generation 2 of kube-system/vgpu-device-plugin"):
        call(api, rollout="OnDelete", image="new")
    assert deleted(api) == [] and slept


def test_part_of_the_hosts_keeps_the_configurations_of_the_others():
    api = cluster()
    call(api, configs={"n1": {"a.yaml": "1"}})
    call(api, configs={"n2": {"b.yaml": "2"}}, exact_configs=False)
    assert api.objects[CONFIGS]["data"] == {"a.yaml": "1", "b.yaml": "2"}
    call(api, configs={"n2": {"b.yaml": "2"}})
    assert api.objects[CONFIGS]["data"] == {"b.yaml": "2"}


def test_absent_removes_the_traces_of_the_program_on_its_node():
    api = cluster()
    call(api)
    node = api.objects["/api/v1/nodes/n1"]
    ours = {"vgpu.fleet/gpus": "[]", "vgpu.fleet/capacity": "nvidia.com/gpumem", "vgpu.fleet/drained-gpus": "GPU-a"}
    node["metadata"]["annotations"] = {**ours, "a.b/c": "1"}
    node["status"] = {
        "conditions": [{"type": "Ready"}, {"type": "VgpuConfiguration"}],
        **{name: {"cpu": "8", "nvidia.com/gpumem": "15360"} for name in ("capacity", "allocatable")},
    }
    call(api, state="absent")
    node = api.objects["/api/v1/nodes/n1"]
    assert node["metadata"]["annotations"] == {"a.b/c": "1"}
    assert node["status"]["conditions"] == [{"type": "Ready"}]
    assert node["status"]["capacity"] == node["status"]["allocatable"] == {"cpu": "8"}
