# SPDX-License-Identifier: Apache-2.0
"""Tests the plan (the roles to run, with their changes) of a host whose pods get GPUs by ResourceClaims (dynamic
resource allocation): the requirements of the host, and the refusal to give up this allocation while claims are in use.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.config import node_config
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import plan
from plan_samples import VARIABLES, changed, made

CLAIMS = {"vgpu_allocation": "dra", "device_plugin_kubeconfig": "/etc/kubernetes/kubelet.conf"}
CONTAINERD = {"engine": "containerd", "endpoint": "unix:///run/containerd/containerd.sock", "cgroup_driver": "systemd"}
# a node that meets all requirements of claims
NODE = {"kubelet": (1, 36), "kubelet_engine": CONTAINERD, "containerd.config_text": "version = 3\n"}
OLD_CONTAINERD = ("packages", "containerd.io")
WITH_CLAIMS = node_config.dump(node_config.from_vars({"vgpu_split_count": 3, "vgpu_allocation": "dra"}))


def allocations(*kinds: tuple[str, str]) -> dict:
    found = [{"id": str(n), "kind": kind, "holder": whose, "slice_ids": []} for n, (kind, whose) in enumerate(kinds)]
    return {("plugin", "status", "allocations"): found}


# columns: variables that differ, facts of the node that differ; expected words of the error ("": none)
REFUSED = [
    ({}, {}, ""),
    ({}, {"kubelet": (1, 33)}, "is Kubernetes 1.33; expected 1.34 or newer"),
    ({}, {"kubelet": (1, 34)}, ""),
    ({}, {"kubelet": None, "kubelet_engine": None}, "this host has no kubelet"),
    # k3s has no kubelet program of its own, so the version of its kubelet is unknown and not checked.
    ({}, {"kubelet": None, "kubelet_engine": {"engine": "k3s"}}, ""),
    ({"device_plugin_kubeconfig": ""}, {}, "set device_plugin_kubeconfig"),
    ({"device_plugin_deploy": "daemonset"}, {}, "device_plugin_deploy is daemonset"),
    ({}, {OLD_CONTAINERD: "1.6.20~ds1-1"}, "containerd 1.6 has no CDI"),
    ({}, {OLD_CONTAINERD: "1.7.24-1", "containerd.config_text": "version = 2\n"}, "needs enable_cdi = true"),
    ({}, {OLD_CONTAINERD: "1.7.24-1", "containerd.config_text": "  enable_cdi = true\n"}, ""),
    # If several tables have the key enable_cdi, the last value counts.
    ({}, {OLD_CONTAINERD: "1.7.24-1", "containerd.config_text": "enable_cdi = false\nenable_cdi = true\n"}, ""),
    (
        {},
        {OLD_CONTAINERD: "2.1.4-1", "containerd.config_text": "enable_cdi = true\nenable_cdi = false\n"},
        "enable_cdi = false",
    ),
    ({}, {OLD_CONTAINERD: "2.0.0-1", "containerd.config_text": "version = 3\n"}, ""),
    ({}, {OLD_CONTAINERD: "2.1.4-1", "containerd.config_text": "version = 3\n"}, ""),
    ({}, {OLD_CONTAINERD: "2.1.4-1", "containerd.config_text": "    enable_cdi = false\n"}, "enable_cdi = false"),
    ({}, {"kubelet_engine": {"engine": "crio"}}, ""),
]


@pytest.mark.parametrize(("variables", "state", "words"), REFUSED)
def test_claims_name_an_unmet_requirement_of_the_host(variables, state, words):
    every = made({**CLAIMS, **variables}, {**NODE, **state})["errors"]
    found = [one for one in every if one.startswith("device_plugin: ")]
    assert [words in one and "vgpu_allocation is dra" in one for one in found] == [True] * bool(words), found


# columns: facts of the node that differ; expected words of the warning ("": none)
WARNED = [
    ({}, ""),
    ({"kubelet": (1, 34)}, "DRAConsumableCapacity"),
    ({"kubelet": (1, 35)}, "DRAConsumableCapacity"),
    ({"kubelet_engine": {"engine": "docker"}}, "cri-dockerd"),
    (allocations(("kubelet", ""), ("lease", "")), "containers with slices from the device plugin: 1;"),
    # The node already allocated by claims, so no container has slices from the device plugin.
    ({**allocations(("kubelet", "")), "node_config.text": WITH_CLAIMS}, ""),
    # A file that cannot be read configures no claims.
    ({**allocations(("kubelet", "")), "node_config.text": "not json"}, "slices from the device plugin: 1;"),
]


@pytest.mark.parametrize(("state", "words"), WARNED)
def test_claims_have_a_warning_for_limited_support(state, words):
    found = made(CLAIMS, {**NODE, **state})
    said = [one for one in found["warnings"] if one.startswith("device_plugin: ")]
    assert [words in one for one in said] == [True] * bool(words)
    assert found["errors"] == []


def test_plan_names_the_allocation_by_claims():
    found = made(CLAIMS, NODE)
    lines = plan.describe(found, changed({"gpus": [], "nvml": {"ok": False}}, {}))
    assert any("by claims (Dynamic Resource Allocation)" in one for one in lines)
    step = next(one for one in found["steps"] if one["role"] == "device_plugin")
    assert "/etc/vgpu/node.yaml: flags.allocation from unset to dra" in step["changes"]
    other = made({}, NODE)
    assert other["allocation"] == "" and other["errors"] == []


LEFT = allocations(("claim", "default/b"), ("claim", "default/a"), ("kubelet", ""))
LEAVES = [
    ({}, {"node_config.text": WITH_CLAIMS}, True),
    ({"device_plugin_state": "absent"}, {"node_config.text": WITH_CLAIMS}, True),
    (CLAIMS, {"node_config.text": WITH_CLAIMS}, False),
    ({}, {}, False),  # this node had no claims before
]


@pytest.mark.parametrize(("variables", "state", "refused"), LEAVES)
def test_claims_in_use_keep_the_allocation_of_the_node(variables, state, refused):
    """The kubelet needs the driver of claims to end a pod. Without it the claims stay prepared and their pods hang, so
    the plan refuses the change."""
    found = made(variables, {**NODE, **LEFT, **state})["errors"]
    assert ["containers have claim default/a, claim default/b on this node" in one for one in found] == [True] * refused


def test_node_without_claims_returns_to_the_device_plugin():
    assert made({}, {**NODE, "node_config.text": WITH_CLAIMS})["errors"] == []


def test_samples_use_the_default_allocation():
    assert "vgpu_allocation" not in VARIABLES
