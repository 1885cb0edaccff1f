# SPDX-License-Identifier: Apache-2.0
"""Tests which pods a real kube-scheduler with this project's extender evicts for a pod of higher priority that fits no
node. A GPU has a number of slots, each for one pod, so slots, memory or both may be short. A nomination is the
node that the kube-scheduler notes in the pod's status while the evicted pods (victims) end.

No kubelet runs: a pod that the API server marks for deletion exists until the test deletes it.
"""

from __future__ import annotations

import pytest
import yaml
from fleet import FREED_S
from kubebox.cluster import PODS
from kubebox.process import Service, until
from vgpu_plugin._shared.kube import scheduler_manifests

GPU, MEM = "nvidia.com/gpu", "nvidia.com/gpumem"
CARD = 16160
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"
PRIORITIES = {"low": 10, "middle": 100, "high": 1000, "polite": 1000}
# Pods that use all slots of two GPUs with three slots each. columns: name, GPU, MiB, priority class
THERE = (
    ("p0", 0, 9000, "low"),
    ("p1", 0, 4000, "middle"),
    ("p2", 0, 3000, "middle"),
    ("q0", 1, 5000, "middle"),
    ("q1", 1, 5000, "middle"),
    ("q2", 1, 5000, "middle"),
)


@pytest.fixture(scope="module", autouse=True)
def classes(fleet):
    for name, value in PRIORITIES.items():
        policy = "Never" if name == "polite" else "PreemptLowerPriority"
        fleet.api.create(CLASSES, {"metadata": {"name": name}, "value": value, "preemptionPolicy": policy})
    yield
    for name in PRIORITIES:
        fleet.api.delete(f"{CLASSES}/{name}")


def full(fleet, there=THERE, slots=3):
    """Creates a node and pods, each bound to the GPU that ``there`` names."""
    fleet.node("a", 1 + max(one[1] for one in there), CARD, slots)
    for name, n, size, priority in there:
        pinned = {"nvidia.com/use-gpuuuid": f"GPU-a-{n}"}
        fleet.pod(name, {GPU: 1, MEM: size}, pinned, priorityClassName=priority)
        node, (part,) = fleet.bound(name)
        assert (node, part.devices[0].uuid) == ("a", f"GPU-a-{n}")


def ending(fleet):
    return {one["metadata"]["name"] for one in fleet.api.get(PODS)["items"] if one["metadata"].get("deletionTimestamp")}


def nominated(fleet, name):
    return fleet.get(name)["status"].get("nominatedNodeName") or ""


def nobody_goes(fleet, name):
    """Asserts that the scheduler tried the pod for some seconds and evicted no pod."""
    fleet.waits(name)
    fleet.pause(4)
    assert ending(fleet) == set() and nominated(fleet, name) == "" and not fleet.node_of(name)


def test_only_needed_pods_are_evicted_and_their_memory_is_reserved(fleet):
    full(fleet)
    # 160 MiB are free on GPU 0. The kube-scheduler alone counts only slots, so it would delete only p0. That would
    # leave 9160 MiB, which is not enough.
    fleet.pod("important", {GPU: 1, MEM: 12000}, priorityClassName="high")
    until(
        lambda: len(ending(fleet)) >= 2,
        f"eviction for pod important; its conditions and the log: {fleet.says('important')}",
        60,
    )
    assert ending(fleet) == {"p0", "p1"}
    assert until(lambda: nominated(fleet, "important"), "nomination of pod important to a node") == "a"
    fleet.pause(3)
    assert ending(fleet) == {"p0", "p1"} and nominated(fleet, "important") == "a" and not fleet.node_of("important")
    for name in ("p0", "p1"):
        fleet.delete(name)
    node, (part,) = fleet.bound("important", FREED_S)
    assert (node, part.devices[0].uuid, part.devices[0].memory_mib) == ("a", "GPU-a-0", 12000)
    assert {one for one, *_rest in THERE if fleet.api.get_or_none(f"{PODS}/{one}")} == {"p2", "q0", "q1", "q2"}
    assert fleet.faults() == []


def test_freed_memory_stays_reserved_until_the_last_victim_has_ended(fleet):
    """Memory freed by the first victims stays reserved for the preempting pod until the last victim has ended.

    All three pods of GPU 0 are victims. After two have ended, the kube-scheduler sees a free slot for another pod, but
    that pod's memory would leave too little for the preempting pod.
    """
    full(fleet, [("p0", 0, 9000, "low"), ("p1", 0, 4000, "low"), ("p2", 0, 3000, "low")])
    fleet.pod("important", {GPU: 1, MEM: 15000}, priorityClassName="high")
    until(lambda: ending(fleet) == {"p0", "p1", "p2"}, "eviction of p0, p1 and p2", 60)
    until(lambda: nominated(fleet, "important"), "nomination of pod important to a node")
    # On a busy machine the nomination reaches vgpu-scheduler's watch late.
    fleet.pause(2)
    for name in ("p0", "p1"):
        fleet.delete(name)
    fleet.pod("late", {GPU: 1, MEM: 6000}, priorityClassName="low")
    kept = "the freed room is reserved for a pod whose preemption victims are still ending"
    until(
        lambda: kept in fleet.waits("late"),
        f"message that pod late must wait for the reserved memory; {fleet.says('late')}",
        120,
    )
    fleet.delete("p2")
    assert fleet.bound("important", FREED_S)[0] == "a"
    assert not fleet.node_of("late") and fleet.faults() == []


# Case → (pods on the node, slots of each GPU, priority class of the new pod, its MiB). No pod may be evicted for it.
NOBODY = {
    # The bound pods have the same priority as the new pod, or its class has the preemption policy Never.
    "equal": (THERE, 3, "middle", 12000),
    "never": (THERE, 3, "polite", 12000),
    # Evicting p0 would free a slot, but the new pod would not fit even without all pods of lower priority.
    "useless": ([("p0", 0, 5000, "low"), ("h0", 0, 9000, "high"), ("h1", 0, 1000, "high")], 3, "high", 12000),
    # Slots are free, so the extender's program starts the preemption; the same rules apply.
    "memory, equal": ([("p0", 0, 9000, "middle"), ("p1", 0, 4000, "middle")], 10, "middle", 12000),
    "memory, never": ([("p0", 0, 9000, "low"), ("p1", 0, 4000, "low")], 10, "polite", 12000),
    "memory, useless": ([("p0", 0, 5000, "low"), ("h0", 0, 9000, "high")], 10, "high", 12000),
}


@pytest.mark.parametrize("case", NOBODY)
def test_no_pod_is_evicted(fleet, case):
    there, slots, priority, asked = NOBODY[case]
    full(fleet, there, slots)
    fleet.pod("asks", {GPU: 1, MEM: asked}, priorityClassName=priority)
    nobody_goes(fleet, "asks")


def test_memory_alone_is_short_and_slots_are_free(fleet):
    """If only memory is short, the kube-scheduler finds no victim, because it counts slots.

    The leading vgpu-scheduler then evicts pods itself. The kube-scheduler keeps the nomination as after its own
    preemption.
    """
    full(fleet, [("p0", 0, 9000, "low"), ("p1", 0, 4000, "middle"), ("q0", 1, 13000, "middle")], slots=10)
    fleet.pod("important", {GPU: 1, MEM: 12000}, priorityClassName="high")
    until(
        lambda: ending(fleet), f"eviction for pod important; its conditions and the log: {fleet.says('important')}", 60
    )
    assert until(lambda: nominated(fleet, "important"), "nomination of pod important to a node") == "a"
    fleet.pod("late", {GPU: 1, MEM: 3000}, priorityClassName="low")
    kept = "the freed room is reserved for a pod whose preemption victims are still ending"
    until(
        lambda: kept in fleet.waits("late"),
        f"message that pod late must wait for the reserved memory; {fleet.says('late')}",
        120,
    )
    fleet.pause(4)
    # Evicting p0 alone is enough: 16160 - 4000 MiB are then free.
    assert ending(fleet) == {"p0"} and nominated(fleet, "important") == "a" and not fleet.node_of("important")
    (condition,) = [one for one in fleet.get("p0")["status"]["conditions"] if one["type"] == "DisruptionTarget"]
    assert condition["reason"] == "PreemptionByScheduler"
    fleet.delete("p0")
    node, (part,) = fleet.bound("important", FREED_S)
    assert (node, part.devices[0].uuid, part.devices[0].memory_mib) == ("a", "GPU-a-0", 12000)
    assert {one for one in ("p0", "p1", "q0", "late") if fleet.api.get_or_none(f"{PODS}/{one}")} == {"p1", "q0", "late"}
    assert fleet.faults() == []


def test_memory_is_short_on_one_card_of_a_node_that_has_enough_in_sum(fleet):
    """Each GPU has 4000 MiB free, but the pod needs 8000 MiB on one GPU; the pod of lowest priority is evicted."""
    full(fleet, [("a0", 0, 12000, "middle"), ("b0", 1, 12000, "low")], slots=10)
    fleet.pod("important", {GPU: 1, MEM: 8000}, priorityClassName="high")
    until(lambda: ending(fleet) == {"b0"}, f"eviction of b0; {fleet.says('important')}", 60)
    fleet.delete("b0")
    _node, (part,) = fleet.bound("important", FREED_S)
    assert part.devices[0].uuid == "GPU-a-1"
    assert not ending(fleet) and fleet.faults() == []


def test_a_disruption_budget_keeps_a_pod_where_memory_is_short(fleet):
    """A pod protected by a PodDisruptionBudget is not evicted when only memory is short.

    No disruption controller runs here, so the test writes the budget's status itself.
    """
    budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
    full(fleet, [("p0", 0, 9000, "low"), ("p1", 0, 4000, "low")], slots=10)
    fleet.api.patch(f"{PODS}/p0", {"metadata": {"labels": {"app": "guarded"}}})
    # A budget protects only running pods.
    now = fleet.get("p0")["metadata"]["creationTimestamp"]
    ready = [{"type": "Ready", "status": "True", "lastTransitionTime": now}]
    fleet.api.patch(f"{PODS}/p0/status", {"status": {"phase": "Running", "conditions": ready}})
    selector = {"matchLabels": {"app": "guarded"}}
    made = {"metadata": {"name": "guard"}, "spec": {"minAvailable": 1, "selector": selector}}
    found = fleet.api.create(budgets, made)
    counted = {"observedGeneration": found["metadata"]["generation"], "disruptionsAllowed": 0, "currentHealthy": 1}
    counted |= {"desiredHealthy": 1, "expectedPods": 1}
    fleet.api.patch(f"{budgets}/guard/status", {"status": counted})
    try:
        fleet.pod("important", {GPU: 1, MEM: 12000}, priorityClassName="high")
        nobody_goes(fleet, "important")
        # The large pod fits only if p0 is evicted. A smaller pod fits next to p0 if p1 is evicted.
        fleet.pod("smaller", {GPU: 1, MEM: 7000}, priorityClassName="high")
        until(lambda: ending(fleet) == {"p1"}, f"eviction of p1; {fleet.says('smaller')}", 60)
    finally:
        fleet.api.delete(f"{budgets}/guard")


@pytest.fixture
def verbless(fleet):
    """Runs a kube-scheduler whose extender has no preemptVerb; stops all other kube-schedulers meanwhile."""
    for one in fleet.replicas:
        one.kube.stop()
    address = f"127.0.0.1:{fleet.replicas[0].extender}"
    configuration = scheduler_manifests.scheduler_configuration(fleet.desired)
    configuration["leaderElection"] = {"leaderElect": False}
    configuration["clientConnection"] = {"kubeconfig": str(fleet.kubeconfig)}
    configuration["extenders"] = [scheduler_manifests.extender(fleet.desired.config, address)]
    del configuration["extenders"][0]["preemptVerb"]
    path = fleet.cluster.folder / "verbless.yaml"
    path.write_text(yaml.safe_dump(configuration))
    kube = [str(fleet.cluster.programs.kubernetes / "kube-scheduler"), "--config", str(path)]
    kube += ["--bind-address", "127.0.0.1", "--secure-port", "18949"]
    service = Service("kube-verbless", kube, fleet.cluster.logs)
    service.start()
    yield
    service.stop()
    for one in fleet.replicas:
        one.kube.start()
    until(fleet.leader, "leader of the kube-schedulers", 60)


def test_without_the_preempt_verb_too_few_pods_are_evicted(fleet, verbless):
    """Negative control: without the extender's preempt verb, the kube-scheduler evicts only p0 to free one slot.

    After that only memory is short, and vgpu-scheduler evicts the remaining victim itself.
    """
    full(fleet)
    fleet.pod("important", {GPU: 1, MEM: 12000}, priorityClassName="high")
    until(lambda: ending(fleet), "eviction of the first victim", 60)
    fleet.pause(2)
    assert ending(fleet) == {"p0"}
    fleet.delete("p0")
    until(lambda: ending(fleet), f"eviction of the second victim for its memory; {fleet.says('important')}", 90)
    assert ending(fleet) == {"p1"} and not fleet.node_of("important")
    fleet.delete("p1")
    assert fleet.bound("important", FREED_S)[0] == "a"
    assert not ending(fleet) and fleet.faults() == []
