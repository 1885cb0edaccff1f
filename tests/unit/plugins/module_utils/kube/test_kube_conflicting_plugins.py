# SPDX-License-Identifier: Apache-2.0
"""Tests the search in a cluster for device plugins of other projects that advertise the same resource as ours. They are
removed only if the variable device_plugin_conflicting_plugins_remove names them.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import conflicting_plugins
from ansible_collections.vgpu.fleet.plugins.module_utils.kube.conflicting_plugins import ConflictError
from doubles.kube_api import KubeClient

OURS = ["nvidia.com/gpu"]
SETS = "/apis/apps/v1/namespaces/{}/daemonsets/{}"
POLICY = "/apis/nvidia.com/v1/clusterpolicies/cluster-policy"


def owner(kind, name, version):
    return {"controller": True, "apiVersion": version, "kind": kind, "name": name}


class Api(KubeClient):
    """A cluster with pods of device plugins. If the plugin is disabled in NVIDIA's ClusterPolicy, the GPU operator
    deletes its DaemonSet."""

    def __init__(self):
        super().__init__()
        self.put(POLICY, {"kind": "ClusterPolicy", "metadata": {"name": "cluster-policy"}})
        self.controllers.append(self.operate)

    def operate(self, method, path):
        if (method, path) == ("PATCH", POLICY):
            self.remove(SETS.format("kube-system", "nvidia-ds"))

    def pod(self, image, node="n1", name="p", keeper="", policy=False, phase="Running", meta=None, **more):
        meta = {"namespace": "kube-system", "name": f"{name}-{node}", **(meta or {})}
        if keeper:
            meta["ownerReferences"] = [owner("DaemonSet", keeper, "apps/v1")]
            above = [owner("ClusterPolicy", "cluster-policy", "nvidia.com/v1")] if policy else []
            kept = {"kind": "DaemonSet", "metadata": {"name": keeper, "ownerReferences": above}}
            self.put(SETS.format("kube-system", keeper), kept)
        spec = {"nodeName": node, "containers": [{"name": "c", "image": image, **more}]}
        path = f"/api/v1/namespaces/kube-system/pods/{name}-{node}"
        self.put(path, {"metadata": meta, "spec": spec, "status": {"phase": phase}})


IMAGES = [
    # columns: image of a pod, other fields of its container; expected name of the plugin (None: not a device plugin of
    # NVIDIA GPUs), resources that it advertises
    ("nvcr.io/nvidia/k8s-device-plugin:v0.17.1", {}, "NVIDIA's plugin", ("nvidia.com/gpu",)),
    ("mirror.example/k8s-device-plugin@sha256:00", {}, "NVIDIA's plugin", ("nvidia.com/gpu",)),
    ("projecthami/hami:v2.6.0", {}, "HAMi's plugin", ("nvidia.com/gpu",)),
    ("projecthami/hami:v2", {"command": ["x", "--resource-name=a.b/c"]}, "HAMi's plugin", ("a.b/c",)),
    ("projecthami/hami:v2", {"args": ["--resource-name", "a.b/c"]}, "HAMi's plugin", ("a.b/c",)),
    ("4pdosc/k8s-device-plugin:latest", {}, "4paradigm's plugin", ("nvidia.com/gpu",)),
    (
        "4pdosc/k8s-device-plugin:latest",
        {"env": [{"name": "RESOURCE_NAME", "value": "x.y/z"}]},
        "4paradigm's plugin",
        ("x.y/z",),
    ),
    ("registry.example/acs/k8s-gpushare-device-plugin:v2", {}, "Alibaba's gpushare plugin", ("aliyun.com/gpu-mem",)),
    (
        "tkestack/gpu-manager:v1.1.5",
        {},
        "Tencent's gpu-manager",
        ("tencent.com/vcuda-core", "tencent.com/vcuda-memory"),
    ),
    ("docker.io/projecthami/volcano-vgpu-device-plugin:v1", {}, "Volcano's vGPU plugin", ("volcano.sh/vgpu-number",)),
    (
        "registry.cn-hangzhou.aliyuncs.com/acs/k8s-gpushare-plugin:v2",
        {},
        "Alibaba's gpushare plugin",
        ("aliyun.com/gpu-mem",),
    ),
    (
        "projecthami/hami:v2.6.0",
        {"command": ["nvidia-device-plugin", "--config-file=/x"]},
        "HAMi's plugin",
        ("nvidia.com/gpu",),
    ),
    (
        "nvcr.io/nvidia/k8s-device-plugin:v0.17.1",
        {"command": ["/bin/bash", "-c"], "args": ["/bin/entrypoint.sh"]},
        "NVIDIA's plugin",
        ("nvidia.com/gpu",),
    ),
    # programs other than the device plugin in the same images
    ("nvcr.io/nvidia/k8s-device-plugin:v0.17.1", {"command": ["/usr/bin/gpu-feature-discovery"]}, None, ()),
    ("nvcr.io/nvidia/k8s-device-plugin:v0.17.1", {"command": ["config-manager"]}, None, ()),
    ("nvcr.io/nvidia/k8s-device-plugin:v0.17.1", {"args": ["mps-control-daemon"]}, None, ()),
    ("projecthami/hami:v2.6.0", {"command": ["scheduler", "--resource-name=nvidia.com/gpu"]}, None, ()),
    ("projecthami/hami:v2.6.0", {"command": ["vGPUmonitor"]}, None, ()),
    ("4pdosc/k8s-vdevice:latest", {"command": ["scheduler"]}, None, ()),
    # device plugins of other vendors, and images that are no device plugin
    ("rocm/k8s-device-plugin:latest", {}, None, ()),
    ("intel/intel-gpu-plugin:0.30", {}, None, ()),
    ("nvcr.io/nvidia/cuda:12.2", {}, None, ()),
    ("me/my-hami-tests:1", {}, None, ()),
    ("busybox", {}, None, ()),
]


@pytest.mark.parametrize(("image", "more", "owner", "resources"), IMAGES)
def test_plugin_is_recognised_by_its_image(image, more, owner, resources):
    api = Api()
    api.pod(image, keeper="ds", **more)
    found = conflicting_plugins.find(api, ["n1"])
    assert [(one.owner, one.resources) for one in found] == ([(owner, resources)] if owner else [])


NVIDIA = "nvcr.io/nvidia/k8s-device-plugin:v0.17.1"
KEEPERS = [
    # columns: controller of the pod; expected title in the message, whether the plugin can be removed through the API
    ({"keeper": "nvidia-ds"}, "DaemonSet kube-system/nvidia-ds", True),
    ({"keeper": "nvidia-ds", "policy": True}, "ClusterPolicy cluster-policy", True),
    ({}, "Pod kube-system/p-n1", True),
    ({"meta": {"annotations": {"kubernetes.io/config.mirror": "0"}}}, "static pod kube-system/p-n1", False),
]


@pytest.mark.parametrize(("how", "title", "removable"), KEEPERS)
def test_conflicting_plugin_is_removed_only_with_consent(how, title, removable):
    api = Api()
    api.pod(NVIDIA, **how)
    api.pod("busybox", name="work", keeper="other")
    found = conflicting_plugins.find(api, ["n1", "n2"])
    assert [(one.title, one.nodes) for one in found] == [(title, ("n1",))]
    remove, faults, _notes = conflicting_plugins.judge(found, OURS, [], False)
    assert (remove, len(faults)) == ([], 1)
    assert title in faults[0] and "device_plugin_conflicting_plugins_remove" in faults[0]
    # Consent that names another object, or only a similar name, must not remove anything.
    for consent in (["DaemonSet kube-system/other"], [title[:-1]], [title + "x"]):
        assert conflicting_plugins.judge(found, OURS, consent, False)[0] == []
        assert conflicting_plugins.judge(found, OURS, consent, False)[1] == faults
    remove, faults, _notes = conflicting_plugins.judge(found, OURS, [title], False)
    if not removable:
        assert remove == [] and "manifest" in faults[0]
        return
    assert (faults, [one.title for one in remove]) == ([], [title])
    conflicting_plugins.remove(api, remove, ["n1", "n2"], 5, sleep=lambda _s: pytest.fail("nothing to wait for"))
    assert conflicting_plugins.find(api, ["n1", "n2"]) == []
    assert len(api.writes) == 1
    if "ClusterPolicy" in title:
        assert api.objects[POLICY]["spec"] == {"devicePlugin": {"enabled": False}}
    assert any("work" in one["metadata"]["name"] for one in api.of("pods"))


JUDGED = [
    # columns: resources of our plugin, whether the variables ignore conflicts; expected number of faults, and of notes
    # (warnings, which do not stop the run)
    (["nvidia.com/gpu"], False, 1, 0),
    (["nvidia.com/gpu"], True, 0, 1),
    (["example.com/gpu"], False, 0, 1),
]


@pytest.mark.parametrize(("resources", "ignore", "faults", "notes"), JUDGED)
def test_only_a_plugin_of_our_resource_is_a_fault(resources, ignore, faults, notes):
    api = Api()
    api.pod(NVIDIA, keeper="ds")
    found = conflicting_plugins.judge(conflicting_plugins.find(api, ["n1"]), resources, [], ignore)
    assert (len(found[1]), len(found[2])) == (faults, notes)


def test_one_daemon_set_on_many_nodes_is_reported_once():
    api = Api()
    for node in ("n1", "n2", "n3"):
        api.pod(NVIDIA, node=node, keeper="ds")
    (one,) = conflicting_plugins.find(api, ["n1", "n2"])
    assert one.nodes == ("n1", "n2")


def test_other_pods_of_the_operators_image_stay():
    api = Api()
    api.pod(NVIDIA, keeper="nvidia-ds", policy=True)
    api.pod(NVIDIA, name="gfd", keeper="gpu-feature-discovery", policy=True, command=["gpu-feature-discovery"])
    remove = conflicting_plugins.judge(
        conflicting_plugins.find(api, ["n1"]), OURS, ["ClusterPolicy cluster-policy"], False
    )[0]
    conflicting_plugins.remove(api, remove, ["n1"], 5, sleep=lambda _s: pytest.fail("nothing to wait for"))
    assert [one["metadata"]["name"] for one in api.of("pods")] == ["gfd-n1"]
    assert conflicting_plugins.find(api, ["n1"]) == []


def test_ended_pods_and_our_own_do_not_conflict():
    api = Api()
    api.pod(NVIDIA, phase="Succeeded")
    api.pod("localhost/k8s-device-plugin:1", meta={"labels": {"app.kubernetes.io/name": "vgpu-device-plugin"}})
    assert conflicting_plugins.find(api, ["n1"]) == []


def test_pods_that_stay_are_reported():
    api = Api()
    api.keeps_dependents = True
    api.pod(NVIDIA, keeper="ds")
    waited = []
    with pytest.raises(ConflictError, match="after 3 s pods of DaemonSet kube-system/ds on n1 still run"):
        conflicting_plugins.remove(api, conflicting_plugins.find(api, ["n1"]), ["n1"], 3, sleep=waited.append)
    assert len(waited) == 3


def test_consent_without_a_matching_object_is_reported():
    assert "runs on none of these nodes" in conflicting_plugins.judge([], OURS, ["DaemonSet a/b"], False)[2][0]
