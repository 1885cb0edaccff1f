# SPDX-License-Identifier: Apache-2.0
"""Tests the Kubernetes objects by which the device plugin runs as a DaemonSet, and the removal of its trace: everything
that the plugin has written to a node object (labels, annotations, conditions, taint, resources). tests/e2e applies the
objects to a real API server.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import device_plugin_manifests as manifests
from ansible_collections.vgpu.fleet.plugins.module_utils.kube.device_plugin_manifests import ConfigsError, Desired

DESIRED = Desired("localhost/vgpu-device-plugin:1", configs={"big.yaml": "{}"})


def made(desired=DESIRED) -> dict:
    return {one["kind"]: one for one in manifests.manifests(desired)}


def pod(desired=DESIRED) -> dict:
    return made(desired)["DaemonSet"]["spec"]["template"]["spec"]


def mounts(desired=DESIRED) -> dict:
    """Returns the mounts of the plugin's container: path in the container → (path on the host, mount)."""
    volumes = {one["name"]: one for one in pod(desired)["volumes"]}
    found = {}
    for mount in pod(desired)["containers"][0]["volumeMounts"]:
        volume = volumes.pop(mount["name"])
        found[mount["mountPath"]] = (volume.get("hostPath", {}).get("path"), mount)
    assert volumes == {}  # every volume is mounted exactly once
    return found


def test_every_object_has_its_namespace_and_label():
    for kind, one in made().items():
        cluster = kind.startswith(("Cluster", "Validating"))
        assert ("namespace" in one["metadata"]) != cluster, kind
        assert one["metadata"]["labels"] == {"app.kubernetes.io/name": manifests.NAME}
    assert json.loads(json.dumps(manifests.manifests(DESIRED))) == manifests.manifests(DESIRED)


# These paths are passed to the kubelet, to container runtimes and to other containers, so they must be the same in the
# plugin's pod and on the host. columns: path; expected: whether the pod may write to it
SAME_PATHS = [
    ("/dev", True),
    ("/var/lib/kubelet/device-plugins", True),
    ("/var/lib/kubelet/pod-resources", True),
    ("/run/vgpu", True),
    ("/var/lib/vgpu", True),
    ("/var/run/cdi", True),
    ("/usr/local/lib/vgpu", False),
    ("/etc/vgpu", True),
]


@pytest.mark.parametrize(("path", "writable"), SAME_PATHS)
def test_shared_paths_are_equal_inside_and_outside(path, writable):
    host, mount = mounts()[path]
    assert host == path
    assert mount.get("readOnly", False) is not writable


def test_other_mounts_are_the_host_and_the_configurations():
    assert set(mounts()) == {path for path, _writable in SAME_PATHS} | {"/host", "/etc/vgpu/configs"}
    host, mount = mounts()["/host"]
    assert (host, mount["readOnly"]) == ("/", True)
    # The plugin mounts a tmpfs for each allocation below /run/vgpu. Other containers use it, so these mounts must
    # appear on the host; no other mounts may.
    leaves = [path for path, (_host, one) in mounts().items() if one.get("mountPropagation")]
    assert leaves == ["/run/vgpu"]
    # The pod mounts the host's /dev, and the default path of the termination log is below /dev. So without another
    # path, the container runtime would create this file on the host.
    assert not pod()["containers"][0]["terminationMessagePath"].startswith("/dev")


OPTIONS = [
    # columns: settings; expected argument of the plugin (None: not checked), expected mount (None: not checked)
    ({}, "--config=/etc/vgpu/node.yaml", None),
    ({"config_path": "/srv/vgpu/node.yaml"}, "--config=/srv/vgpu/node.yaml", "/srv/vgpu/configs"),
    ({"kubelet_dir": "/data/kubelet"}, "--kubelet-dir=/data/kubelet/device-plugins", "/data/kubelet/pod-resources"),
    ({"library_root": "/opt/lib"}, None, "/opt/lib"),
    ({"options": ["--labels"]}, "--labels", "/etc/kubernetes/node-feature-discovery/features.d"),
    ({}, "--kubeconfig=in-cluster", None),
    ({}, "--host-root=/host", None),
]


@pytest.mark.parametrize(("more", "argument", "mount"), OPTIONS)
def test_arguments_and_mounts_follow_the_settings(more, argument, mount):
    desired = DESIRED._replace(**more)
    assert argument is None or argument in pod(desired)["containers"][0]["command"]
    assert mount is None or mount in mounts(desired)


METRICS = [
    # columns: options of the plugin; expected ports of the pod ([] if the metrics listen on loopback only)
    ([], []),
    (["--metrics-listen=127.0.0.1:9410"], []),
    (["--metrics-listen=[::1]:9410"], []),
    (["--metrics-listen=localhost:9410"], []),
    (["--metrics-listen=:9410"], [9410]),
    (["--metrics-listen=[::]:9411"], [9411]),
    (["--metrics-listen=10.1.2.3:9410"], [9410]),
    (["--metrics-listen=127.0.0.1:9410", "--metrics-listen=:9500"], [9500]),
    (["--metrics-listen=odd"], []),
]


@pytest.mark.parametrize(("options", "ports"), METRICS)
def test_metrics_port_of_the_pod_is_named(options, ports):
    found = pod(DESIRED._replace(options=options))["containers"][0].get("ports", [])
    assert [(one["name"], one["containerPort"]) for one in found] == [("metrics", port) for port in ports]


def test_plugin_has_few_write_rights():
    rules = made()["ClusterRole"]["rules"]
    rights = {(resource, verb) for one in rules for resource in one["resources"] for verb in one["verbs"]}
    assert {one for one in rights if one[1] not in ("get", "list", "watch")} == {
        ("nodes", "patch"),
        ("nodes/status", "patch"),
        ("pods/status", "patch"),
        ("events", "create"),
    }
    assert not {resource for resource, _verb in rights} & {"secrets", "configmaps", "*"}


@pytest.mark.parametrize("restrict", [True, False])
def test_policy_is_created_only_on_request(restrict):
    kinds = set(made(DESIRED._replace(restrict=restrict)))
    assert ({"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"} <= kinds) is restrict


GPUS = "vgpu.fleet/gpus"
READY = {"type": "Ready"}
OURS = {"type": "VgpuConfiguration"}
TRACES = [
    # columns: annotations and conditions of the node; expected patches, as (subresource, body), that remove only ours
    ({}, [], []),
    ({"a.b/c": "1"}, [READY], []),
    ({"vgpu.fleet/resources": ""}, [READY], [("", {"metadata": {"annotations": {"vgpu.fleet/resources": None}}})]),
    ({GPUS: "[]", "a.b/c": "1"}, [READY], [("", {"metadata": {"annotations": {GPUS: None}}})]),
    (
        {},
        [READY, OURS],
        [("/status", {"status": {"conditions": [{"$patch": "delete", "type": "VgpuConfiguration"}]}})],
    ),
    (
        {},
        [{"type": "VgpuGpusHealthy", "status": "True"}, READY],
        [("/status", {"status": {"conditions": [{"$patch": "delete", "type": "VgpuGpusHealthy"}]}})],
    ),
]

UNHEALTHY, FULL = {"key": "vgpu.fleet/gpu-unhealthy", "effect": "NoSchedule"}, {"key": "full", "effect": "NoExecute"}


@pytest.mark.parametrize(
    ("taints", "patches"),
    [
        ([], []),
        ([FULL], []),
        ([UNHEALTHY], [("", {"spec": {"taints": None}})]),
        ([FULL, UNHEALTHY], [("", {"spec": {"taints": [FULL]}})]),
    ],
)
def test_trace_removes_our_taint(taints, patches):
    assert manifests.trace({"metadata": {}, "spec": {"taints": taints}}) == patches


def test_plugin_tolerates_its_own_taint():
    assert {"key": manifests.TAINT, "operator": "Exists", "effect": "NoSchedule"} in pod()["tolerations"]


OUR_LABELS, COUNT = "vgpu.fleet/labels", "nvidia.com/gpu.count"
TRACES_OF_LABELS = [
    # columns: labels and annotations of the node; expected labels in the patch. The plugin lists its labels in an
    # annotation; a label that NFD also lists is left to NFD.
    ({COUNT: "2", "a": "b"}, {OUR_LABELS: "gpu.count"}, {COUNT: None}),
    ({COUNT: "2"}, {OUR_LABELS: "gpu.count", "nfd.node.kubernetes.io/feature-labels": "x,nvidia.com/gpu.count"}, None),
    ({}, {OUR_LABELS: "gpu.count,gpu.product"}, None),
    ({COUNT: "2"}, {OUR_LABELS: ""}, None),
    # The annotation lists labels below nvidia.com/ without this prefix, and all other labels with their full names.
    (
        {COUNT: "2", "vgpu.fleet/memory-enforcement": "library"},
        {OUR_LABELS: "gpu.count,vgpu.fleet/memory-enforcement"},
        {COUNT: None, "vgpu.fleet/memory-enforcement": None},
    ),
]


@pytest.mark.parametrize(("labels", "annotations", "gone"), TRACES_OF_LABELS)
def test_trace_removes_our_labels(labels, annotations, gone):
    ((path, body),) = manifests.trace({"metadata": {"labels": labels, "annotations": annotations}})
    assert (path, body["metadata"].get("labels"), body["metadata"]["annotations"]) == ("", gone, {OUR_LABELS: None})


def test_trace_keeps_labels_of_others():
    assert manifests.trace({"metadata": {"labels": {COUNT: "2"}}}) == []


@pytest.mark.parametrize(("annotations", "conditions", "patches"), TRACES)
def test_trace_removes_our_annotations_and_conditions(annotations, conditions, patches):
    found = {"metadata": {"annotations": annotations}, "status": {"conditions": conditions}}
    assert manifests.trace(found) == patches


CAPACITY, GPUMEM, GPUCORES = "vgpu.fleet/capacity", "nvidia.com/gpumem", "nvidia.com/gpucores"
TRACES_OF_RESOURCES = [
    # columns: the annotation that lists our resources (None: missing), capacity and allocatable of the node; expected
    # resources that the patch removes from each (None: no patch)
    (None, {GPUMEM: "1"}, {GPUMEM: "1"}, None),
    (f"{GPUCORES},{GPUMEM}", {GPUMEM: "1", "cpu": "8"}, {GPUMEM: "1", GPUCORES: "1"}, ({GPUMEM}, {GPUMEM, GPUCORES})),
    (GPUMEM, {GPUMEM: "1"}, {}, ({GPUMEM}, set())),
    (GPUMEM, {"cpu": "8"}, {"cpu": "8"}, (set(), set())),
    ("", {GPUMEM: "1"}, {GPUMEM: "1"}, (set(), set())),
]


@pytest.mark.parametrize(("named", "capacity", "allocatable", "gone"), TRACES_OF_RESOURCES)
def test_trace_removes_our_resources_from_a_node(named, capacity, allocatable, gone):
    """The plugin sets the annotation and the resources by one request, so the annotation names every resource of ours
    on the node."""
    annotations = {} if named is None else {CAPACITY: named}
    status = {"capacity": capacity, "allocatable": allocatable}
    found = manifests.trace({"metadata": {"annotations": annotations}, "status": status})
    if gone is None:
        assert found == []
        return
    ((path, body),) = found
    assert path == "/status" and body["metadata"] == {"annotations": {CAPACITY: None}}
    taken = body.get("status", {})
    assert (taken.get("capacity", {}), taken.get("allocatable", {})) == tuple(dict.fromkeys(one) for one in gone)


def test_trace_removes_the_drain_of_a_gpu():
    ((path, body),) = manifests.trace({"metadata": {"annotations": {"vgpu.fleet/drained-gpus": "GPU-a"}}})
    assert (path, body) == ("", {"metadata": {"annotations": {"vgpu.fleet/drained-gpus": None}}})


UNIONS = [
    ({}, {}),
    ({"a": {"x.yaml": "1"}, "b": {"x.yaml": "1", "y.yaml": "2"}}, {"x.yaml": "1", "y.yaml": "2"}),
]


@pytest.mark.parametrize(("by_host", "out"), UNIONS)
def test_configurations_of_all_hosts_are_joined(by_host, out):
    assert manifests.union(by_host) == out


# columns: configuration files by host; expected words of the refusal
FAULTS = [
    ({"a": {"x.yaml": "1"}, "b": {"x.yaml": "2"}}, "x.yaml is not the same on a and b"),
    ({"a": {"x y.yaml": "1"}}, '"x y.yaml" cannot be a key'),
    ({"a": {"../x.yaml": "1"}}, "cannot be a key"),
]


@pytest.mark.parametrize(("by_host", "words"), FAULTS)
def test_different_or_unnameable_configurations_are_refused(by_host, words):
    with pytest.raises(ConfigsError, match=words):
        manifests.union(by_host)
