# SPDX-License-Identifier: Apache-2.0
"""Schedules pods of each dialect (the resource names of one GPU-sharing project) with a real API server and
kube-scheduler, and with this project's extender and webhook, which one program (vgpu-scheduler) serves. There are two
replicas, each with its own kube-scheduler; only the replica that holds the Lease binds pods."""

from __future__ import annotations

import pytest
from fleet import QUOTAS
from kubebox.api import ApiError
from kubebox.cluster import PODS
from kubebox.process import until

GPU, MEM, CORES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"
ALI, COUNT = "aliyun.com/gpu-mem", "aliyun.com/gpu-count"

QGPU = "tke.cloud.tencent.com/qgpu"
# columns: the case, limits, labels and annotations of the pod; expected (MiB, percent of the SMs) of each GPU
DIALECTS = [
    ("hami", {GPU: 1, MEM: 3000, CORES: 30}, {}, {}, [(3000, 30)]),
    ("alibaba", {ALI: 8}, {COUNT: "2"}, {}, [(4309, 0), (4309, 0)]),
    ("tencent", {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 30}, {}, {}, [(7680, 50)]),
    ("qgpu", {f"{QGPU}-core": 30, f"{QGPU}-memory": 5}, {}, {}, [(5120, 30)]),
    ("volcano", {"volcano.sh/vgpu-number": 2, "volcano.sh/vgpu-memory": 3000}, {}, {}, [(3000, 0), (3000, 0)]),
    ("kai-fraction", {}, {}, {"gpu-fraction": "0.5"}, [(8080, 0)]),
    ("kai-memory", {}, {}, {"gpu-memory": "2000", "gpu-fraction-num-devices": "2"}, [(2000, 0), (2000, 0)]),
    ("kai-container", {}, {}, {"nvidia.com/container.main.gpu-memory.limit": "2000Mi"}, [(2000, 0)]),
    ("nvidia", {GPU: 1}, {}, {}, [(16160, 100)]),
    ("shared", {GPU + ".shared": 1}, {}, {}, [(1616, 10)]),
]


@pytest.mark.parametrize(
    ("name", "limits", "labels", "annotations", "sizes"), DIALECTS, ids=[one[0] for one in DIALECTS]
)
def test_each_dialect_gets_the_requested_sizes(fleet, name, limits, labels, annotations, sizes):
    fleet.node("plain", 0)
    fleet.node("a")
    fleet.pod(name, limits, annotations, labels)
    node, plan = fleet.bound(name)
    assert node == "a" and [(one.memory_mib, one.cores) for one in plan[0].devices] == sizes
    assert len({one.uuid for one in plan[0].devices}) == len(sizes)
    stored = fleet.get(name)["spec"]
    assert stored["schedulerName"] == "vgpu-scheduler"
    assert stored["containers"][0]["resources"]["limits"][GPU] == str(len(sizes))


# columns: limits and labels of the pod, more fields of its spec; expected text of the refusal
REFUSED = [
    ({GPU: 1, MEM: 0}, {}, {}, "gpumem"),
    ({ALI: 7}, {COUNT: "2"}, {}, "7 GiB over 2 GPUs"),
    ({GPU: 1, CORES: 101}, {}, {}, "gpucores"),
    ({GPU: 1, "nvidia.com/gpumen": 5}, {}, {}, "did you mean"),
    ({GPU: 1}, {}, {"nodeName": "a"}, "spec.nodeName"),
    ({GPU: 1, ALI: 1, MEM: 5}, {}, {}, "another dialect"),
]


@pytest.mark.parametrize(("limits", "labels", "spec", "words"), REFUSED)
def test_invalid_pods_are_refused_at_admission_with_field_and_reason(fleet, limits, labels, spec, words):
    with pytest.raises(ApiError) as fault:
        fleet.pod("wrong", limits, labels=labels, **spec)
    assert words in str(fault.value) and "pods.vgpu.fleet" in str(fault.value)


def test_annotations_of_kai_are_checked_unless_kai_schedules_the_pod(fleet):
    with pytest.raises(ApiError, match=r"from 0\.01 to 0\.99"):
        fleet.pod("wrong", {}, {"gpu-fraction": "1.5"})
    with pytest.raises(ApiError, match="the pod has no container"):
        fleet.pod("wrong", {}, {"nvidia.com/container.other.gpu-memory.limit": "2000Mi"})
    fleet.pod("kais", {}, {"gpu-fraction": "1.5"}, schedulerName="kai-scheduler")
    stored = fleet.get("kais")["spec"]
    assert stored["schedulerName"] == "kai-scheduler" and "limits" not in stored["containers"][0]["resources"]


def test_binpack_and_spread_choose_nodes_and_gpus(fleet):
    for name in ("a", "b"):
        fleet.node(name)
    for n in range(4):
        fleet.pod(f"p{n}", {GPU: 1, MEM: 3000})
        fleet.bound(f"p{n}")
    assert len({fleet.node_of(f"p{n}") for n in range(4)}) == 1
    spread = {"hami.io/node-scheduler-policy": "spread"}
    fleet.pod("s", {GPU: 1, MEM: 3000}, spread)
    assert fleet.bound("s")[0] != fleet.node_of("p0")
    binpack = {"hami.io/gpu-scheduler-policy": "binpack"}
    for n in range(2):
        fleet.pod(f"g{n}", {GPU: 1, MEM: 3000}, binpack, nodeSelector=None)
    gpus = [fleet.bound(f"g{n}")[1][0].devices[0].uuid for n in range(2)]
    assert gpus[0] == gpus[1]


def test_a_waiting_pod_has_the_reason_and_is_bound_once_it_fits(fleet):
    fleet.node("a", 1)
    fleet.pod("first", {GPU: 1, MEM: 12000})
    fleet.bound("first")
    fleet.pod("second", {GPU: 1, MEM: 8000})
    assert "not a GPU with 8000 MiB free" in fleet.waits("second")
    text = fleet.explain("second")
    assert "it would fit on a once default/first (12000 MiB) ends" in text
    fleet.delete("first")
    # The kube-scheduler retries the pod after an event or, at the latest, after five minutes.
    assert fleet.bound("second", 330)[0] == "a"


def test_many_pods_at_once_fill_the_nodes_exactly(fleet):
    for name in ("a", "b", "c"):
        fleet.node(name)
    # Each of the six GPUs has memory for five of these pods.
    for n in range(36):
        fleet.pod(f"p{n}", {GPU: 1, MEM: 3000})
    until(lambda: sum(bool(fleet.node_of(f"p{n}")) for n in range(36)) >= 30, "number of 30 bound pods", 120)
    fleet.pause(3)
    assert sum(bool(fleet.node_of(f"p{n}")) for n in range(36)) == 30
    assert fleet.faults() == []


def test_a_quota_is_kept_at_admission_and_by_many_at_once(fleet):
    fleet.node("a", 4)
    hard = {"limits.nvidia.com/gpumem": "12000", "limits.nvidia.com/gpucores": "100"}
    fleet.api.create(QUOTAS, {"metadata": {"name": "team"}, "spec": {"hard": hard}})
    fleet.pause(2)
    fleet.pod("first", {GPU: 2, MEM: 3000, CORES: 30})
    fleet.bound("first")
    for limits, words in (
        ({GPU: 3, MEM: 2001}, "6003 asked for on all GPUs of the pod together, 6000 of 12000 in use"),
        ({GPU: 1, MEM: 100, CORES: 41}, "limits.nvidia.com/gpucores: 41 asked for"),
        ({GPU: 1}, "quota team of namespace default"),
    ):
        with pytest.raises(ApiError, match=words) as fault:
            fleet.pod("over", limits)
        assert fault.value.code == 403
    admitted = 0
    for n in range(6):
        try:
            fleet.pod(f"p{n}", {GPU: 1, MEM: 2000})
            admitted += 1
            # Admission counts a stored pod for the quota only after the scheduler's watch has received the pod.
            fleet.pause(1)
        except ApiError as fault:
            assert "in use" in str(fault)
    assert admitted == 3
    until(
        lambda: sum(bool(one["spec"].get("nodeName")) for one in fleet.api.get(PODS)["items"]) == 4,
        "number of 4 bound pods",
    )
    # A pod that ends frees its part of the quota.
    fleet.delete("first")
    until(
        lambda: made(fleet, "later", {GPU: 1, MEM: 6000}),
        "admission of pod later, for which the quota has room again",
        30,
    )
    fleet.bound("later")


def made(fleet, name, limits):
    try:
        return fleet.pod(name, limits)
    except ApiError:
        return None


def test_pods_without_gpus_are_left_alone(fleet):
    fleet.node("a")
    made = fleet.pod("plain", {"cpu": "1"})
    assert made["spec"]["schedulerName"] == "default-scheduler" and "annotations" not in made["metadata"]
    fleet.pod("ignored", {GPU: 1, MEM: 5}, labels={"hami.io/webhook": "ignore"})
    assert fleet.get("ignored")["spec"]["schedulerName"] == "default-scheduler"


def test_without_the_webhook_gpu_pods_are_refused_and_others_are_not(fleet):
    fleet.node("a")
    fleet.replicas[0].ours.stop(kill=True)
    try:
        with pytest.raises(ApiError, match=r"failed calling webhook .*pods\.vgpu\.fleet"):
            fleet.pod("gpu", {GPU: 1, MEM: 5})
        fleet.pod("plain", {"cpu": "1"})
    finally:
        fleet.replicas[0].start()

    def admitted():
        try:
            return fleet.pod("gpu", {GPU: 1, MEM: 5})
        except ApiError:
            return None

    until(admitted, "admission of pod gpu by the restarted webhook", 60)
    fleet.bound("gpu")


def test_the_leader_is_killed_in_the_middle_and_nothing_is_oversold(fleet):
    for name in ("a", "b"):
        fleet.node(name, 8)
    count, fit = 84, 80
    for n in range(count):
        fleet.pod(f"p{n}", {GPU: 1, MEM: 3000})

    def bound():
        return sum(bool(one["spec"].get("nodeName")) for one in fleet.api.get(PODS)["items"])

    until(bound, "first bound pod")
    leader = until(fleet.leader, "leader of the kube-schedulers")
    assert until(fleet.writer, "program that holds the Lease to bind pods") is leader
    leader.stop(kill=True)
    try:
        until(lambda: bound() == fit, f"number of {fit} bound pods", 120)
        assert fleet.faults() == []
        other = until(fleet.leader, "new leader of the kube-schedulers")
        assert other is not leader
        # If all pods were bound before the kill, the Lease of the killed vgpu-scheduler must expire first. The waiting
        # pods then make the other vgpu-scheduler ask for the Lease.
        until(lambda: fleet.writer() is other, "Lease to bind pods of the other program", 120)
    finally:
        leader.start()
    fleet.pause(2)
    assert bound() == fit and fleet.faults() == []


def test_the_program_next_to_the_new_kube_scheduler_leader_binds(fleet):
    """Both replicas of vgpu-scheduler keep running; the Lease moves to the replica whose kube-scheduler becomes the
    leader."""
    fleet.node("a")
    fleet.pod("before", {GPU: 1, MEM: 3000})
    fleet.bound("before")
    leader = until(fleet.leader, "leader of the kube-schedulers")
    # A killed kube-scheduler does not release its lease, so the other one takes over after the lease expires.
    leader.kube.stop(kill=True)
    fleet.pod("after", {GPU: 1, MEM: 3000})
    fleet.bound("after", 90)
    other = fleet.writer()
    assert other is not None and other is not leader and leader.ours.running
    leader.kube.start()
    assert fleet.faults() == []
