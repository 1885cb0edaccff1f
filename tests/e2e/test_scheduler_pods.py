# SPDX-License-Identifier: Apache-2.0
"""Runs the scheduler as the module deploys it: as a Deployment whose pods the kubelet starts in a pod network.

The API server calls the webhook through its Service, without a kube-proxy. Pods are admitted, placed, bound and run.
The stock kube-scheduler runs next to vgpu-scheduler in an image that contains only its binary.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubebox import deployments, pods
from kubebox.api import ApiError
from kubebox.cluster import PODS, SERVER
from kubebox.gpunode import LIBRARIES, MIB
from kubebox.pods import WORKER
from kubebox.process import NeverCame, until
from kubebox.programs import SCHEDULER_IMAGE
from vgpu_plugin._shared.pods import annotations as pod_annotations

ROOT = Path(__file__).resolve().parents[2]
GPUS, SLOTS = ["T4"], 10
CONFIGURATION = {"vcuda": {"libraryRoot": str(LIBRARIES), "splitCount": SLOTS, "sliceSizing": "requested"}}
NAME = "vgpu-scheduler"
SYSTEM = "/api/v1/namespaces/kube-system"
DEPLOYMENT = f"/apis/apps/v1/namespaces/kube-system/deployments/{NAME}"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/{NAME}-extender"
OURS = f"labelSelector=app.kubernetes.io/name%3D{NAME}"
REPOSITORY = "localhost/kube-scheduler"
GPU, MEM = "nvidia.com/gpu", "nvidia.com/gpumem"


def call(cluster: Any, check: bool = False, **params: Any) -> dict[str, Any]:
    """Runs the module as a process, as Ansible does, and returns its result."""
    kubeconfig = cluster.authority.kubeconfig("admin-of-module", SERVER, "/O=system:masters/CN=module")
    given = {"kubeconfig": str(kubeconfig), "_ansible_check_mode": check, **params}
    if params.get("state") != "absent":
        given = {"image": SCHEDULER_IMAGE, "kube_scheduler_repository": REPOSITORY, **given}
    arguments = {"ANSIBLE_MODULE_ARGS": {**given, "_ansible_remote_tmp": "/tmp", "_ansible_keep_remote_files": False}}
    name = "ansible_collections.vgpu.fleet.plugins.modules.kube_scheduler"
    done = subprocess.run(
        [sys.executable, "-c", f"import runpy; runpy.run_module({name!r}, run_name='__main__')"],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".build" / "collections"), "no_proxy": "*"},
    )
    assert done.stdout, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert not found.get("failed"), found
    return found


def load_images(cluster: Any) -> None:
    name, packed = f"{REPOSITORY}:{deployments.version(cluster)}", cluster.folder / "kube-scheduler.tar"
    deployments.pack_program(cluster.programs.kubernetes / "kube-scheduler", name, packed)
    for file, image in ((packed, name), (cluster.programs.scheduler_image, SCHEDULER_IMAGE)):
        cluster.ctr("images", "import", str(file))
        cluster.ctr("images", "label", image, "io.cri-containerd.pinned=pinned")
    packed.unlink()


def remove_images(cluster: Any) -> None:
    """Removes the images, because the cluster is shared and the tests of another file load the images themselves."""
    cluster.ctr("images", "rm", f"{REPOSITORY}:{deployments.version(cluster)}", SCHEDULER_IMAGE)


def our_pods(cluster: Any) -> list[dict[str, Any]]:
    found = cluster.api.get(f"{SYSTEM}/pods?{OURS}")["items"]
    return [one for one in found if not one["metadata"].get("deletionTimestamp")]


def names(cluster: Any) -> set[str]:
    """Returns the names of all pods of the Deployment, also of terminating pods."""
    return {one["metadata"]["name"] for one in cluster.api.get(f"{SYSTEM}/pods?{OURS}")["items"]}


def ready(cluster: Any, count: int = 2) -> bool:
    """Returns whether the Deployment has exactly ``count`` ready pods, all of the newest template."""
    found = cluster.api.get(DEPLOYMENT)
    status = found.get("status") or {}
    same = status.get("observedGeneration") == found["metadata"]["generation"]
    return same and [status.get(key, 0) for key in ("replicas", "updatedReplicas", "readyReplicas")] == [count] * 3


def wait_until_ready(cluster: Any, about: str) -> None:
    try:
        until(lambda: ready(cluster), about, limit_s=240)
    except NeverCame as fault:
        states = [one["status"] for one in our_pods(cluster)]
        logs = [one.read_text()[-2000:] for one in sorted(cluster.pod_logs.glob(f"kube-system_{NAME}*/*/*.log"))]
        raise AssertionError(f"{fault}\npods: {json.dumps(states)[:6000]}\nlogs: {logs}") from None


def gpu_pod(name: str, limits: dict[str, Any]) -> dict[str, Any]:
    container = pods.container([WORKER, "fill"], slices=0)
    container["resources"] = {"limits": {key: str(value) for key, value in limits.items()}}
    return pods.manifest(name, container)


def refused(cluster: Any, body: dict[str, Any]) -> str:
    """Returns why the API server refuses the pod in a dry run, or "" if it accepts the pod."""
    try:
        cluster.api.create(f"{PODS}?dryRun=All", body)
    except ApiError as fault:
        return str(fault)
    return ""


@pytest.fixture(scope="module")
def deployed(machine: Any) -> Iterator[Any]:
    cluster, node = machine
    deployments.write_network(cluster)
    load_images(cluster)
    node.exchange(GPUS)
    node.configure(CONFIGURATION)
    kubeconfig = str(cluster.authority.folder / "kubelet.conf")
    node.plugin.command = [*node.plugin.command, "--kubeconfig", kubeconfig, "--node-name", cluster.node]
    controllers = cluster.start_controllers(*deployments.CONTROLLERS)
    try:
        node.start()
        until(lambda: cluster.allocatable() == SLOTS, f"{SLOTS} allocatable slices")
        assert call(cluster)["changed"]
        wait_until_ready(cluster, "two ready replicas")
        until(lambda: not refused(cluster, gpu_pod("try", {MEM: 1000})), "admission through the Service", 120)
        yield cluster
    finally:
        call(cluster, state="absent")
        until(lambda: our_pods(cluster) == [], "deletion of the scheduler's pods")
        remove_images(cluster)
        controllers.stop()
        deployments.network_file(cluster).unlink()
        node.stop()


@pytest.fixture
def pod(deployed: Any, machine: Any) -> Iterator[Callable[..., pods.Pod]]:
    cluster, node = machine
    made: list[pods.Pod] = []

    def make(name: str, limits: dict[str, Any]) -> pods.Pod:
        made.append(pods.create(cluster, gpu_pod(name, limits)))
        return made[-1]

    yield make
    for one in made:
        one.ask_to_end()
    for one in made:
        one.delete()
    until(lambda: not node.held(), "kubelet without allocated devices")


def holder(cluster: Any) -> str:
    """Returns the name of the pod that holds the Lease; the holder identity starts with the pod's host name."""
    found = cluster.api.get_or_none(LEASE) or {}
    return str((found.get("spec") or {}).get("holderIdentity") or "").rpartition("_")[0]


def test_the_deployment_runs_two_replicas(deployed):
    """Two pods run in the pod network, with the manifest's user and without restarts."""
    found = our_pods(deployed)
    assert len(found) == 2 and len({one["status"]["podIP"] for one in found}) == 2
    for one in found:
        assert one["status"]["podIP"].startswith("10.77.0.") and not one["spec"].get("hostNetwork")
        states = {each["name"]: each for each in one["status"]["containerStatuses"]}
        assert {each["restartCount"] for each in states.values()} == {0}, states
        assert states[NAME]["image"].endswith("vgpu-scheduler:e2e") and set(states) == {NAME, "kube-scheduler"}
        told = in_container(deployed, one, "id", "-u").stdout.split()
        assert told == ["65532"]
        assert in_container(deployed, one, "touch", "/opt/x").returncode != 0, "expected a read-only root file system"
    slices = deployed.api.get(
        "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices"
        f"?labelSelector=kubernetes.io/service-name%3D{NAME}"
    )["items"]
    addresses = {address for one in slices for each in one.get("endpoints") or [] for address in each["addresses"]}
    assert addresses == {one["status"]["podIP"] for one in found}
    assert not call(deployed)["changed"]


def in_container(cluster: Any, one: dict[str, Any], *words: str) -> subprocess.CompletedProcess:
    """Runs a command in our program's container, as ``kubectl exec`` does."""
    states = {each["name"]: each for each in one["status"]["containerStatuses"]}
    container = states[NAME]["containerID"].rpartition("/")[2]
    name = f"t{uuid.uuid4().hex[:8]}"
    done: subprocess.CompletedProcess = cluster.ctr(
        "tasks", "exec", "--exec-id", name, "--user", "65532", container, *words, check=False
    )
    return done


def test_a_pod_is_admitted_placed_bound_and_runs_in_its_size(deployed, pod):
    one = pod("sized", {MEM: 3000})
    made = one.object()
    assert made["spec"]["schedulerName"] == NAME
    assert made["spec"]["containers"][0]["resources"]["limits"][GPU] == "1"
    one.wait_running()
    assert int(one.wait_log(r"^total (\d+)$").group(1)) == 3000 * MIB
    (part,) = pod_annotations.read_plan(one.object()["metadata"]["annotations"][pod_annotations.PLAN])
    assert [device.memory_mib for device in part.devices] == [3000]
    names = {each["metadata"]["name"] for each in our_pods(deployed)}
    assert holder(deployed) in names
    assert "101" in refused(deployed, gpu_pod("odd", {"nvidia.com/gpumem-percentage": 101}))


def test_explain_says_why_a_pod_waits(deployed, pod):
    one = pod("big", {MEM: 12000}).wait_running()
    waits = pod("waits", {MEM: 9000})
    until(waits.why_not_scheduled, "message of the scheduler why pod waits is pending")
    bound_by = next(each for each in our_pods(deployed) if each["metadata"]["name"] == holder(deployed))
    text = in_container(deployed, bound_by, "vgpu-scheduler", "--explain", "default/waits").stdout
    assert "not a GPU with 9000 MiB free" in text and "default/big" in text, text
    one.ask_to_end()
    waits.wait_running()


def test_the_pod_that_binds_is_deleted_and_another_binds(deployed, pod):
    first = holder(deployed)
    deployed.api.delete(f"{SYSTEM}/pods/{first}")
    one = pod("after", {MEM: 1000}).wait_running()
    assert int(one.wait_log(r"^total (\d+)$").group(1)) == 1000 * MIB
    assert holder(deployed) not in ("", first)
    wait_until_ready(deployed, "two ready replicas")


def kube_scheduler(cluster: Any, name: str) -> dict[str, Any]:
    """Returns the status of the pod's kube-scheduler container."""
    (one,) = [each for each in our_pods(cluster) if each["metadata"]["name"] == name]
    found: dict[str, Any] = next(
        each for each in one["status"]["containerStatuses"] if each["name"] == "kube-scheduler"
    )
    return found


def test_kube_scheduler_that_hangs_is_started_again(deployed, pod):
    name = our_pods(deployed)[0]["metadata"]["name"]
    before = kube_scheduler(deployed, name)
    tasks = [line.split() for line in deployed.ctr("tasks", "list").stdout.splitlines()]
    (pid,) = [int(words[1]) for words in tasks if words[0] == before["containerID"].rpartition("/")[2]]
    os.kill(pid, signal.SIGSTOP)
    until(
        lambda: kube_scheduler(deployed, name)["restartCount"] == before["restartCount"] + 1,
        "restart of the stopped kube-scheduler",
        300,
    )
    wait_until_ready(deployed, "two ready replicas")
    one = pod("after-hang", {MEM: 1000}).wait_running()
    assert int(one.wait_log(r"^total (\d+)$").group(1)) == 1000 * MIB


def test_admission_has_no_gap_while_another_configuration_rolls_out(deployed, pod):
    stays = pod("stays", {MEM: 2000}).wait_running()
    before = {one["metadata"]["name"] for one in our_pods(deployed)}
    said, stop = [], threading.Event()

    def ask() -> None:
        while not stop.is_set():
            said.append(refused(deployed, gpu_pod("asks", {MEM: 1000})))
            time.sleep(0.2)

    asks = threading.Thread(target=ask)
    asks.start()
    try:
        assert call(deployed, config={"defaultMemoryMiB": 700})["changed"]
        wait_until_ready(deployed, "two ready replicas with the new configuration")
        # A terminating pod may still hold the Lease and bind with the former configuration.
        until(lambda: not before & names(deployed), "deletion of the former pods", 120)
    finally:
        stop.set()
        asks.join(60)
    assert len(said) > 5 and set(said) == {""}, set(said)
    one = pod("default", {"nvidia.com/gpucores": 20}).wait_running()
    assert int(one.wait_log(r"^total (\d+)$").group(1)) == 700 * MIB
    assert stays.running() and stays.restarts() == 0


def test_without_replicas_only_gpu_pods_are_refused(deployed):
    deployed.api.patch(DEPLOYMENT, {"spec": {"replicas": 0}})
    try:
        until(lambda: our_pods(deployed) == [], "deletion of both pods")
        until(lambda: refused(deployed, gpu_pod("gpu", {MEM: 1000})), "refusal of a GPU pod while no replica runs")
        assert NAME in refused(deployed, gpu_pod("gpu", {MEM: 1000}))
        assert refused(deployed, pods.manifest("plain", pods.container(["true"], slices=0))) == ""
    finally:
        assert call(deployed)["changed"]
        wait_until_ready(deployed, "two ready replicas")
    until(lambda: not refused(deployed, gpu_pod("gpu", {MEM: 1000})), "admission of a GPU pod by the new replicas", 120)


def test_removal_ends_the_pods_of_the_deployment(deployed):
    assert call(deployed, state="absent")["changed"]
    until(lambda: our_pods(deployed) == [], "deletion of the scheduler's pods")
    assert deployed.api.get_or_none(DEPLOYMENT) is None
    assert refused(deployed, gpu_pod("gpu", {MEM: 1000})) == ""
    assert not call(deployed, state="absent")["changed"]
