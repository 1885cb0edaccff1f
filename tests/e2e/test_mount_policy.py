# SPDX-License-Identifier: Apache-2.0
"""Tests that pods are refused if they mount a volume over the library's files.

With the admission policy, a real API server refuses them. The tests send it each pod of doubles/mount_cases.py as a dry
run; unit tests apply the rule in Python to the same pods. Without the policy, the device plugin refuses the pods when a
real kubelet starts them. The module kube_mount_policy creates and removes the policy.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubebox import pods
from kubebox.api import ApiError
from kubebox.cluster import PODS, SERVER
from kubebox.gpunode import LIBRARIES
from kubebox.modules import run_module
from kubebox.process import until

sys.path.append(str(Path(__file__).resolve().parents[1]))  # This folder contains the package of doubles.mount_cases.

from doubles.mount_cases import ASKS, GPU, container
from doubles.mount_cases import PODS as TABLE
from doubles.mount_cases import pod as of_table

GPUS, SPLIT = ["T4"], 4
CONFIGURATION = {"vcuda": {"libraryRoot": str(LIBRARIES), "splitCount": SPLIT}}
EVENTS = "/api/v1/namespaces/default/events"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
POLICY = f"{POLICIES}/vgpu-device-plugin-mounts"
OVER = container("main", ASKS, "/dev/vgpu/0")


def write_policy(cluster: Any, names: list[str], check: bool = False) -> dict[str, Any]:
    kubeconfig = cluster.authority.kubeconfig("admin-of-module", SERVER, "/O=system:masters/CN=module")
    done = run_module("kube_mount_policy", check, kubeconfig=str(kubeconfig), nodes={cluster.node: names})
    assert "msg" not in done, done
    return done


def refusal(cluster: Any, made: dict[str, Any]) -> str:
    """Returns why the API server refuses the pod in a dry run, or "" if it accepts the pod."""
    try:
        cluster.api.create(f"{PODS}?dryRun=All", made)
    except ApiError as fault:
        return str(fault)
    return ""


@pytest.fixture(scope="module")
def node(machine: Any) -> Iterator[Any]:
    """Starts our programs; the plugin reads pods with the kubelet's credentials."""
    cluster, node = machine
    node.exchange(GPUS)
    node.configure(CONFIGURATION)
    kubeconfig = str(cluster.authority.folder / "kubelet.conf")
    node.plugin.command = [*node.plugin.command, "--kubeconfig", kubeconfig, "--node-name", cluster.node]
    node.start()
    until(lambda: cluster.allocatable() == SPLIT, f"{SPLIT} allocatable slices")
    yield node
    pods.delete_all(cluster)
    node.stop()


@pytest.fixture
def refusing(cluster: Any) -> Any:
    """Creates the policy for the resource names of several GPU-sharing projects, and waits until the API server applies
    it."""
    if cluster.api.get_or_none(POLICY) is None:
        write_policy(cluster, [GPU, "nvidia.com/gpumem", "aliyun.com/gpu-mem"])
    until(lambda: refusal(cluster, of_table(OVER)), "enforcement of the policy by the API server")
    return cluster


@pytest.fixture
def open_cluster(cluster: Any) -> Any:
    """Removes the policy and waits until the API server no longer applies it."""
    if cluster.api.get_or_none(POLICY) is not None:
        write_policy(cluster, [])
    until(lambda: not refusal(cluster, of_table(OVER)), "end of the policy's enforcement by the API server")
    return cluster


@pytest.fixture(scope="module", autouse=True)
def policy_removed(cluster: Any) -> Iterator[None]:
    yield
    write_policy(cluster, [])


@pytest.mark.parametrize(("about", "made", "expected"), TABLE, ids=[about for about, _made, _expected in TABLE])
def test_api_server_refuses_what_the_rule_refuses(refusing, about, made, expected):
    message = refusal(refusing, made)
    assert bool(message) is bool(expected), message
    for name, path, ours in expected:
        assert f'container {name}: "{path}" lies at, above or below {ours}' in message
    assert ("mount it elsewhere" in message) is bool(expected)


def test_expression_is_cheap_enough_for_pods_of_many_mounts(refusing):
    """The API server stops expressions above a cost limit, and the policy then refuses the pod."""
    many = [container(f"c{n}", ASKS, *(f"/data/{'long' * 10}/{m}" for m in range(60))) for n in range(10)]
    assert refusal(refusing, of_table(*many)) == ""
    assert "c9" in refusal(refusing, of_table(*many[:9], container("c9", ASKS, "/data/a", "/etc")))


@pytest.mark.parametrize("label", ["vgpu.fleet/webhook", "hami.io/webhook"])
def test_no_label_exempts_a_pod_from_the_policy(refusing, label):
    made = of_table(OVER)
    made["metadata"]["labels"] = {label: "ignore"}
    assert "/dev/vgpu/0" in refusal(refusing, made)


def test_ephemeral_container_cannot_request_a_gpu_and_may_mount(refusing, node):
    one = pods.create(refusing, pods.manifest("debugged", pods.container(["sleep", "60"]))).wait_running()
    body = one.object()
    debug = {"name": "debug", "image": body["spec"]["containers"][0]["image"], "imagePullPolicy": "Never"}
    body["spec"]["ephemeralContainers"] = [{**debug, "resources": {"limits": ASKS}}]
    with pytest.raises(ApiError, match="cannot be set for an Ephemeral Container"):
        refusing.api.call("PUT", f"{one.path}/ephemeralcontainers?dryRun=All", body)
    body["spec"]["ephemeralContainers"] = [debug]
    refusing.api.call("PUT", f"{one.path}/ephemeralcontainers?dryRun=All", body)
    one.delete()


def test_pod_with_a_slice_still_runs(refusing, node):
    one = pods.create(refusing, pods.manifest("honest", pods.container(["sleep", "60"]))).wait_running()
    assert one.running()
    one.delete()


def test_check_apply_repeat_undo(open_cluster):
    cluster = open_cluster
    assert write_policy(cluster, [GPU], check=True)["changed"] and cluster.api.get_or_none(POLICY) is None
    assert write_policy(cluster, [GPU])["changed"]
    assert not write_policy(cluster, [GPU])["changed"]
    found = cluster.api.get(POLICY)["metadata"]["annotations"]
    assert json.loads(found["vgpu.fleet/nodes"]) == {cluster.node: [GPU]}
    assert write_policy(cluster, [])["changed"] and cluster.api.get_or_none(POLICY) is None
    assert not write_policy(cluster, [])["changed"]


def unprivileged(name: str, path: str) -> dict[str, Any]:
    """Returns an ordinary user's pod with an empty volume over the files of its slice (part of a GPU)."""
    main = pods.container(["sleep", "60"])
    main["volumeMounts"].append({"name": "over", "mountPath": path})
    main["securityContext"] = {
        "runAsUser": 1000,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    made = pods.manifest(name, main)
    made["spec"]["volumes"].append({"name": "over", "emptyDir": {}})
    return made


OVER_OURS = ["/dev/vgpu", "/etc/vgpu", "/run/vgpu", "/usr/local/lib/vgpu", "/etc/ld.so.preload"]


@pytest.mark.parametrize("path", OVER_OURS)
def test_unprivileged_pod_is_refused_before_it_is_stored(refusing, path):
    assert f'"{path}" lies at, above or below {path}' in refusal(refusing, unprivileged("asks", path))


@pytest.mark.parametrize("path", OVER_OURS)
def test_kubelet_starts_no_unprivileged_pod_with_a_volume_over_our_files(open_cluster, node, path):
    """Without a policy the device plugin refuses to start the container and reports it on the pod."""
    cluster = open_cluster
    assert refusal(cluster, unprivileged("asks", path)) == ""
    name = "over" + re.sub(r"[^a-z]", "-", path)
    one = pods.create(cluster, unprivileged(name, path))

    def events() -> list[str]:
        found = cluster.api.get(f"{EVENTS}?fieldSelector=involvedObject.name%3D{name}")["items"]
        return [event["message"] for event in found if event["reason"] == "VgpuMountConflict"]

    until(events, "event of the refusal at the pod")
    assert f'"{path}" lies at, above or below {path}' in events()[0]
    assert not one.running() and one.log() == ""
    one.delete()
