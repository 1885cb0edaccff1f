# SPDX-License-Identifier: Apache-2.0
"""Tests on a real kubelet pods that request the size of their part of a GPU (the sizing ``requested``). Each dialect is
tested; a dialect is the set of resource names of one GPU-sharing project. This project's webhook admits each pod, the
kube-scheduler with the extender places it, the kubelet starts it with the device plugin, and the library limits it. The
tests compare three sources: the bytes that the pod itself could allocate, the driver's memory usage, and the kubelet's
list of devices.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / "e2e_scheduler")]

from fleet import Fleet  # noqa: E402
from kubebox import pods, power  # noqa: E402
from kubebox.api import ApiError  # noqa: E402
from kubebox.cluster import PODS  # noqa: E402
from kubebox.gpunode import LIBRARIES, MIB  # noqa: E402
from kubebox.pods import WORKER  # noqa: E402
from kubebox.process import NeverCame, until  # noqa: E402
from vgpu_plugin._shared.abi import files as abi_files  # noqa: E402
from vgpu_plugin._shared.pods import annotations as pod_annotations  # noqa: E402

GPUS = ["T4", "T4"]
CARD, SLOTS = 15360, 10
CONFIGURATION = {"vcuda": {"libraryRoot": str(LIBRARIES), "splitCount": SLOTS, "sliceSizing": "requested"}}
EVENTS = "/api/v1/namespaces/default/events"
GPU, MEM, CORES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"
NAMES = (MEM, CORES, "nvidia.com/gpumem-percentage", "aliyun.com/gpu-mem", "tencent.com/vcuda-memory")
CARD_MIB = 15360
FILL = [WORKER, "fill"]
TRIALS, AT_ONCE = 52, 4


@pytest.fixture(scope="module")
def fleet(machine: Any) -> Iterator[Fleet]:
    """Starts two replicas of the scheduler, and the device plugin with the credentials of its node."""
    cluster, node = machine
    made = Fleet(cluster, ROOT / ".build" / "scheduler" / "bin" / "python", ROOT)
    node.exchange(GPUS)
    node.configure(CONFIGURATION)
    node.plugin.command = [
        *(*node.plugin.command, "--kubeconfig", str(cluster.authority.folder / "kubelet.conf")),
        *("--node-name", cluster.node),
    ]
    try:
        node.start()
        slices = len(GPUS) * SLOTS
        until(lambda: cluster.allocatable() == slices, f"number of {slices} allocatable slices")
        made.start()
        until(made.admits, "listening webhook")
        until(
            lambda: pod_annotations.GPUS in annotations(cluster),
            f"annotation with the node's GPUs:\n{node.plugin.tail(5)}",
        )
        yield made
        pods.delete_all(cluster)
        until(lambda: not node.held(), "kubelet without allocated devices")
    finally:
        made.withdraw()
        node.stop()


def annotations(cluster: Any) -> dict[str, str]:
    found: dict[str, str] = cluster.node_object().get("metadata", {}).get("annotations") or {}
    return found


@pytest.fixture
def pod(fleet: Fleet, machine: Any) -> Iterator[Callable[..., pods.Pod]]:
    """Makes pods: ``pod("a", {GPU: 1, MEM: 3000})``; all are deleted after the test."""
    cluster, node = machine

    def make(name: str, limits: dict[str, Any], labels: Any = None, notes: Any = None, **spec: Any) -> pods.Pod:
        container = pods.container(spec.pop("command", FILL), slices=0)
        container["env"] += spec.pop("env", [])
        container["resources"] = {"limits": {key: str(value) for key, value in limits.items()}}
        body = pods.manifest(name, container, **spec)
        body["metadata"].update(labels=labels or {}, annotations=notes or {})
        return pods.create(cluster, body)

    yield make
    pods.delete_all(cluster)
    until(lambda: not node.held(), "kubelet without allocated devices")


def limits_of(pid: int) -> list[tuple[int, int]]:
    """Returns (MiB, percent of the SMs) of each GPU in the limits file that the process sees."""
    found = abi_files.parse_limits(Path(f"/proc/{pid}/root/dev/vgpu/0/limits").read_bytes())
    return [(one["memory_bytes"] // MIB, one["sm_percent"]) for one in found["devices"]]


def held_gpus(node: Any, name: str) -> list[str]:
    return sorted({one.partition("::")[0] for (pod, _c), ids in node.held().items() if pod == name for one in ids})


def planned_gpus(one: pods.Pod) -> list[str]:
    """Returns the UUIDs of the GPUs in the pod's effective plan: the scheduler's plan, corrected to the GPUs that the
    kubelet chose."""
    plan = pod_annotations.read_annotations(one.object()["metadata"].get("annotations") or {})
    assert plan is not None
    return sorted({device.uuid for part in plan for device in part.devices})


def used(node: Any) -> dict[int, int]:
    return {one["pid"]: one["total"] for gpu in node.gpusimctl("usage", "--json")["gpus"] for one in gpu["processes"]}


DIALECTS = [
    # columns: the case, limits and labels of the pod; expected MiB on each GPU, expected percent of the SMs (100 means
    # no limit)
    ("hami", {GPU: 1, MEM: 3000, CORES: 30}, {}, [3000], 30),
    ("hami-percent", {"nvidia.com/gpumem-percentage": 50}, {}, [7680], 100),
    ("hami-defaults", {GPU: 1, CORES: 20}, {}, [5000], 20),
    ("alibaba", {"aliyun.com/gpu-mem": 8}, {"aliyun.com/gpu-count": "2"}, [4096, 4096], 100),
    ("tencent", {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 30}, {}, [7680], 50),
    ("nvidia", {GPU: 2}, {}, [CARD, CARD], 100),
    ("slice", {GPU + ".shared": 1}, {}, [CARD // SLOTS], 100),
]


@pytest.mark.parametrize(("name", "limits", "labels", "sizes", "percent"), DIALECTS, ids=[one[0] for one in DIALECTS])
def test_each_dialect_is_placed_started_and_limited_as_asked(machine, pod, name, limits, labels, sizes, percent):
    runs_in(machine[1], pod(name, limits, labels).wait_running(), sizes, percent)


def runs_in(node, one, sizes, percent):
    """Asserts that the pod's output, the driver's accounting and the limits file show these sizes, and that the
    kubelet's list and the plan show the same GPUs."""
    assert int(one.wait_log(r"^total (\d+)$").group(1)) == sizes[0] * MIB
    one.wait_log(r"^filled \d+$")
    (pid,) = one.pids()
    assert used(node)[pid] == sizes[0] * MIB, "expected exactly the limit, in bytes, by the driver's accounting"
    assert limits_of(pid) == [(size, percent) for size in sizes]
    assert len(held_gpus(node, one.name)) == len(sizes) and held_gpus(node, one.name) == planned_gpus(one)
    spec = one.object()["spec"]
    assert spec["schedulerName"] == "vgpu-scheduler"
    assert spec["containers"][0]["resources"]["limits"][GPU] == str(len(sizes))


MORE = {
    "CUDA_DEVICE_MEMORY_LIMIT": "15g",
    "CUDA_DEVICE_SM_LIMIT": "100",
    "GPU_CORE_UTILIZATION_POLICY": "disable",
    "CUDA_DISABLE_CONTROL": "true",
    "VGPU_LIMITS_FILE": "/tmp/mine",
    "LD_PRELOAD": "/tmp/mine.so",
}
NOTES = {"hami.io/vgpu-devices-allocated": "x,NVIDIA,15000,100:;", "tencent.com/predicate-gpu-idx-0": "1"}


def test_variables_and_annotations_of_a_pod_raise_no_limit(machine, pod):
    """A pod's limits follow its resources only, not its variables for the library or other schedulers' annotations."""
    env = [{"name": name, "value": value} for name, value in MORE.items()]
    one = pod("boasts", {GPU: 1, MEM: 3000, CORES: 30}, notes=NOTES, env=env).wait_running()
    runs_in(machine[1], one, [3000], 30)


def listed(cluster: Any) -> dict[str, tuple[str, str]]:
    """Returns the node's capacity and allocatable of the resource names by which pods request parts of GPUs."""
    status = cluster.node_object()["status"]
    found = {name: (status["capacity"].get(name, ""), status["allocatable"].get(name, "")) for name in NAMES}
    return {name: pair for name, pair in found.items() if any(pair)}


def test_node_lists_the_names_that_pods_request(machine, fleet):
    """From Kubernetes 1.36 on, a DeviceClass that maps the GPU count's resource name changes the scheduler's check.

    If the cluster has such a DeviceClass, a pod fits only nodes that list all of the pod's resource names.
    """
    cluster, _node = machine
    until(lambda: set(listed(cluster)) == set(NAMES), f"{NAMES} in the node's capacity")
    found = listed(cluster)
    # A GPU has several slots for pods. Each slot counts with the memory of the whole GPU, because a pod's limit may
    # exceed its guaranteed size.
    assert found[MEM] == (str(len(GPUS) * SLOTS * CARD_MIB),) * 2
    assert all(one == other and int(one) > 0 for one, other in found.values())


def test_4paradigm_counts_equal_slices(machine, fleet, pod):
    """A pod that requests only a count gets this number of equal slices if the scheduler is configured for it.

    As a negative control, the row ``nvidia`` above shows that the same pod gets two whole GPUs by default.
    """
    with fleet.configured({"plain": "slice"}):
        ones = [pod(f"slices-{n}", {GPU: 2}).wait_running() for n in range(2)]
        for one in ones:
            runs_in(machine[1], one, [CARD // SLOTS] * 2, 100)


def test_a_pod_that_bypasses_the_scheduler_gets_no_gpu(machine, pod):
    """Negative control: on the same node, a pod of the default scheduler that bypasses the webhook has no plan (the
    scheduler's choice of GPUs and sizes), so it gets no GPU.
    """
    cluster, _node = machine
    cluster_pod = pod("bare", {GPU: 1}, {"vgpu.fleet/webhook": "ignore"})
    text = until(lambda: refusal(cluster_pod), "refusal of pod bare by the device plugin")
    assert "no plan of its GPUs" in text, text
    assert cluster.node == cluster_pod.object()["spec"]["nodeName"]


def refusal(one: pods.Pod) -> str:
    status = one.object()["status"]
    waiting = [each["state"].get("waiting", {}).get("message", "") for each in status.get("containerStatuses", [])]
    ended = [each.get("lastState", {}).get("terminated", {}).get("message", "") for each in one.statuses()]
    ended += [each["state"].get("terminated", {}).get("message", "") for each in one.statuses()]
    return " ".join(filter(None, [status.get("message", ""), *waiting, *ended]))


def test_spread_uses_different_gpus_and_binpack_uses_one_gpu(machine, pod):
    _cluster, node = machine
    spread = [pod(f"spread-{n}", {GPU: 1, MEM: 2000}).wait_running() for n in range(2)]
    assert len({held_gpus(node, one.name)[0] for one in spread}) == 2
    binpack = {"vgpu.fleet/gpu-policy": "binpack"}
    packed = [pod(f"packed-{n}", {GPU: 1, MEM: 2100}, notes=binpack).wait_running() for n in range(3)]
    assert len({held_gpus(node, one.name)[0] for one in packed}) == 1


def test_pods_bound_in_the_same_moment_get_their_own_sizes(machine, fleet, pod):
    """Pods of pairwise different sizes are requested at the same time on one node, and each gets its own size."""
    cluster, node = machine
    chance = random.Random(20251121)
    seen, moved = 0, 0
    while seen < TRIALS:
        asked = {f"t{seen + n}": chance.randrange(200, 3000) for n in range(AT_ONCE)}
        assert len(set(asked.values())) == AT_ONCE
        made = {name: pod(name, {GPU: 1, MEM: size}) for name, size in asked.items()}
        for name, one in made.items():
            try:
                one.wait_running()
            except NeverCame as fault:
                raise AssertionError(f"{name}: {fault}\n{node.plugin.tail(20)}") from None
            assert int(one.wait_log(r"^total (\d+)$").group(1)) == asked[name] * MIB, name
            one.wait_log(r"^filled \d+$")
        for name, one in made.items():
            (pid,) = one.pids()
            assert used(node)[pid] == asked[name] * MIB, name
            # The kubelet may have chosen another GPU than planned; the effective plan must name the kubelet's GPU.
            assert held_gpus(node, name) == planned_gpus(one), name
            moved += pod_annotations.GIVEN in one.object()["metadata"]["annotations"]
        assert over(fleet) == []
        seen += AT_ONCE
        pods.delete_all(cluster)
    print(f"{seen} pods with correct sizes; for {moved} of them the kubelet chose another GPU than planned")


def events(cluster: Any, one: pods.Pod, reason: str) -> list[dict[str, Any]]:
    chosen = f"involvedObject.name={one.name},involvedObject.uid={one.uid},reason={reason}"
    items: list[dict[str, Any]] = cluster.api.get(EVENTS + "?fieldSelector=" + quote(chosen))["items"]
    return items


def leased(node: Any, uuid: str) -> str:
    """Leases (reserves) a slice. Returns its allocation, or "" if none is free yet. The plugin frees a slice up to two
    minutes after its pod's end."""
    try:
        return str(node.vgpuctl("lease", "--uuid", uuid, "--ttl", "900")["allocation"])
    except subprocess.CalledProcessError:
        return ""


def test_given_annotation_names_the_gpu_that_the_kubelet_chose(machine, pod):
    """The pod's annotation names the GPU that the kubelet allocated, which differs from the planned GPU.

    To cause this, the test leases every slice of the planned GPU on the host. The kubelet cannot allocate leased
    slices, and the scheduler does not know about them.
    """
    cluster, node = machine
    planned, other = (gpu["uuid"] for gpu in sorted(node.status()["gpus"], key=lambda gpu: gpu["index"]))
    wanted = {GPU: 1, MEM: 9000}, {}, {"nvidia.com/use-gpuuuid": planned}
    leases = []
    try:
        for _number in range(SLOTS):
            leases.append(until(lambda: leased(node, planned), "slice of the planned GPU that can be leased"))
        until(
            lambda: cluster.allocatable() == SLOTS,
            f"number of {SLOTS} allocatable slices, because the others are leased",
        )
        one = pod("moved", *wanted).wait_running()
        assert int(one.wait_log(r"^total (\d+)$").group(1)) == 9000 * MIB
        notes = one.object()["metadata"]["annotations"]
        written = [pod_annotations.read_plan(notes[key]) for key in (pod_annotations.PLAN, pod_annotations.GIVEN)]
        assert [[(device.uuid, device.memory_mib) for part in plan for device in part.devices] for plan in written] == [
            [(planned, 9000)],
            [(other, 9000)],
        ]
        assert held_gpus(node, "moved") == [other]
        assert events(cluster, one, "VgpuNoRoom") == []
        # A second pod of this size does not fit on the other GPU, the only one with free slices; an event reports that.
        refused = pod("no-room", *wanted)
        (event, *_more) = until(lambda: events(cluster, refused, "VgpuNoRoom"), "event VgpuNoRoom of pod no-room")
        assert "9000 MiB are asked for, 9000 of 15360 are held by others" in event["message"]
        assert pod_annotations.GIVEN not in refused.object()["metadata"]["annotations"]
        assert not refused.running()
    finally:
        for allocation in leases:
            node.vgpuctl("release", allocation)
        until(lambda: cluster.allocatable() == len(GPUS) * SLOTS, "all slices allocatable after the leases ended")


def test_watcher_reports_a_pod_that_bypasses_the_library(machine, pod):
    cluster, node = machine
    honest = pod("honest", {GPU: 1, MEM: 3000}).wait_running()
    honest.wait_log(r"^filled \d+$")
    probe = ["/usr/local/bin/vgpu-probe", "--json", "--checks", "bypass-symbol-table", "--hold", "60000"]
    rogue = pod("rogue", {GPU: 1, MEM: 2000}, command=probe)
    (event, *more) = until(
        lambda: events(cluster, rogue, "VgpuWatch"),
        f"event VgpuWatch of pod rogue; the plugin's log:\n{node.plugin.tail(5)}",
    )
    assert more == [], f"expected one event within a minute, found also {more}"
    assert (event["type"], event["source"]["component"]) == ("Warning", "vgpu-device-plugin")
    (found,) = [one for one in node.vgpuctl("watch")["findings"] if one["pod"] == "rogue"]
    assert (found["namespace"], found["container"], found["reason"]) == ("default", "main", "no-slot")
    assert event["message"] == found["text"]
    assert {one["pid"] for one in found["processes"]} <= set(rogue.pids()), "expected pids of the host"
    assert [found["uuid"]] == held_gpus(node, "rogue")
    assert events(cluster, honest, "VgpuWatch") == [], "expected no event for the pod that obeys its limit"
    assert rogue.running(), "expected pod rogue to run on: the policy of this node is only to report"


def over(fleet: Fleet) -> list[str]:
    """Returns the GPUs that are oversold, by the plans of all bound pods at the API server."""
    sums: dict[str, int] = {}
    for one in fleet.api.get(PODS)["items"]:
        for part in pod_annotations.read_annotations(one["metadata"].get("annotations") or {}) or ():
            for device in part.devices:
                sums[device.uuid] = sums.get(device.uuid, 0) + device.memory_mib
    return [f"{uuid}: {total}" for uuid, total in sums.items() if total > CARD]


def test_everything_is_restarted_in_turn_and_pods_run_on(machine, fleet, pod):
    cluster, node = machine
    before = [pod(f"old-{n}", {GPU: 1, MEM: 4000, CORES: 20}).wait_running() for n in range(3)]
    for one in before:
        one.wait_log(r"^filled \d+$")
    memory, held = used(node), node.held()
    leader = until(fleet.leader, "leader")
    first, second = leader, next(one for one in fleet.replicas if one is not leader)
    services = [
        *(first.kube, first.ours, second.ours, second.kube),
        *(node.plugin, node.arbiter, cluster.kubelet, cluster.apiserver, cluster.scheduler),
    ]
    for n, service in enumerate(services):
        print(f"restarting {service.name}")
        service.stop()
        service.start()
        until(cluster._api_ready, f"ready API server after the restart of {service.name}")
        # Running pods are not affected, and new pods start eventually without manual steps.
        assert used(node) == memory, service.name
        name = f"new-{n}"
        one = until(lambda name=name: runs(cluster, pod, name), f"new running pod after the restart of {service.name}")
        assert int(one.wait_log(r"^total (\d+)$").group(1)) == 500 * MIB, service.name
        until(lambda one=one: gone(one), f"deletion of {name} after the restart of {service.name}")
        until(
            lambda: set(listed(cluster)) == set(NAMES),
            f"{NAMES} in the node's capacity after the restart of {service.name}",
        )
    until(lambda: node.held() == held, "report of the kubelet with the same slices")
    assert used(node) == memory and all(one.restarts() == 0 for one in before)
    assert over(fleet) == []


def test_pods_that_a_boot_ended_use_no_memory(machine, fleet, pod):
    """After a boot the kubelet starts before the plugin and ends the pods; new pods can use all of their memory."""
    cluster, node = machine
    before = [pod(f"ended-{n}", {GPU: 1, MEM: 14000}).wait_running() for n in range(len(GPUS))]
    for one in before:
        one.wait_log(r"^filled \d+$")

    power.cut(cluster, node)
    power.boot_runtime(cluster)
    cluster.kubelet.start()
    for one in before:
        assert GPU in until(lambda one=one: ended(one), f"refusal of {one.name} by the kubelet")
    node.start()
    until(lambda: cluster.allocatable() == len(GPUS) * SLOTS, "all slices allocatable after the boot")

    for n in range(len(GPUS)):
        runs_in(node, pod(f"after-{n}", {GPU: 1, MEM: 14000}).wait_running(), [14000], 100)
    assert all(ended(one) for one in before), "expected the ended pods to stay until they are deleted"


def ended(one: pods.Pod) -> str:
    """Returns the kubelet's message if it refused the pod at admission, else ""."""
    status = one.object()["status"]
    return status["message"] if status.get("reason") == "UnexpectedAdmissionError" else ""


def gone(one: pods.Pod) -> bool:
    """Deletes the pod and returns whether it is gone. Returns False if the call fails, because the API server may have
    only just started."""
    try:
        one.ask_to_end()
        return one.cluster.api.get_or_none(one.path) is None
    except OSError:
        return False


def runs(cluster: Any, pod: Any, name: str) -> pods.Pod | None:
    """Does one step of a controller: creates the pod if it does not exist, or deletes it if the kubelet refused it.

    Returns the pod if it runs, else None, and the caller tries again.
    """
    one = pods.Pod(cluster, name)
    try:
        if cluster.api.get_or_none(one.path) is None:
            pod(name, {GPU: 1, MEM: 500})
        elif one.phase == "Failed":
            one.ask_to_end()
        return one if one.running() else None
    except (ApiError, OSError):
        return None
