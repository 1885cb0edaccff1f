# SPDX-License-Identifier: Apache-2.0
"""Tests the choice of victims (pods that must end so that a pod of higher priority fits), and the reservation of their
memory for this pod. The ledger is the scheduler's record of which pod holds how much of which GPU.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from itertools import combinations

import pytest
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods.annotations import APP, Device, Part
from vgpu_scheduler import preemption, wire
from vgpu_scheduler.extender import KEPT

from .samples import gpu
from .test_cluster import item, parts
from .test_service import pod_object

CARD, SLOTS = 10000, 4


def bound(cluster, name, node, *devices, priority=0, ending=False):
    """Enters a bound pod with GPUs of a node, as an event of the watch does. ``devices``: (UUID, MiB) of each GPU."""
    made = pod_object(name, nodeName=node, priority=priority)
    plan = pod_annotations.write_plan([Part("main", APP, tuple(Device(uuid, mib, 0) for uuid, mib in devices))])
    made["metadata"]["annotations"][pod_annotations.PLAN] = plan
    if ending:
        made["metadata"]["deletionTimestamp"] = "2026-11-22T00:00:00Z"
    cluster.pod(False, item(made))


def waiting(name, memory, priority=0, nominated="", gpus=1, **annotations):
    made = pod_object(name, memory=memory, gpus=gpus, priority=priority)
    made["metadata"].update(annotations=annotations, resourceVersion=str(memory))
    if nominated:
        made["status"]["nominatedNodeName"] = nominated
    return made


def preempt(extender, pod, **picked):
    """Asks for victims. Returns node → names of the victims. ``picked``: node → names of the victims that the
    kube-scheduler picked.
    """
    meta = {
        node: wire.MetaVictims([wire.MetaPod(f"uid-{name}") for name in names], 1) for node, names in picked.items()
    }
    found = extender.preempt(wire.PreemptArgs(pod, meta)).NodeNameToMetaVictims
    assert all(one.NumPDBViolations == 1 for one in found.values())
    return {node: sorted(pod.UID.removeprefix("uid-") for pod in one.Pods or []) for node, one in found.items()}


def stage(*names, gpus=1):
    server, extender, cluster = parts()
    extender.ledger.drop_node("n0")
    for name in names:
        extender.ledger.set_node(name, [gpu(f"{name}-{n}", CARD, slots=SLOTS) for n in range(gpus)])
    return server, extender, cluster


# columns: bound pods (name, GPU, MiB, priority), request of a pod of priority 5 (MiB, or MiB and number of GPUs),
# victims that the kube-scheduler picked; expected victims (None if no eviction on the node helps). The node has one or
# two GPUs of 10000 MiB.
FULL = [("a", 0, 4000, 1), ("b", 0, 3000, 2), ("c", 0, 2000, 3), ("d", 0, 1000, 4)]
TABLE = [
    (FULL, 1000, "d", "d"),
    (FULL, 1500, "d", "ad"),
    (FULL, 4000, "a", "a"),
    (FULL, 5000, "a", "ab"),
    (FULL, 7000, "a", "ab"),
    (FULL, 10000, "a", "abcd"),
    # Among pods of equal priority the largest are evicted, so that few pods are evicted.
    ([("a", 0, 1000, 1), ("b", 0, 6000, 1), ("c", 0, 1500, 1), ("d", 0, 1500, 1)], 7000, "a", "ab"),
    # No pod of equal or higher priority is evicted.
    ([("a", 0, 5000, 1), ("b", 0, 5000, 5)], 6000, "a", None),
    ([("a", 0, 5000, 1), ("b", 0, 5000, 9)], 6000, "a", None),
    ([("a", 0, 5000, 1), ("b", 0, 5000, 5)], 5000, "a", "a"),
    # All victims are on one GPU, on which the fewest evictions are necessary.
    ([("a", 0, 5000, 1), ("b", 0, 5000, 1), ("c", 1, 9000, 1), ("d", 1, 500, 1)], 9500, "d", "cd"),
    # Two victims of low priority are preferred to one of higher priority.
    ([("a", 0, 5000, 1), ("b", 0, 5000, 1), ("c", 1, 9000, 2), ("d", 1, 500, 2)], 9500, "a", "ab"),
    # The pod requests two GPUs, and the second GPU has enough free memory already.
    ([("a", 0, 9000, 1), ("b", 0, 500, 1), ("c", 1, 100, 1)], (9500, 2), "b", "ab"),
    # The pod requests two GPUs, of which only one can be freed.
    ([("a", 0, 9000, 1), ("c", 1, 1000, 7)], (9500, 2), "a", None),
    # The request is larger than the GPU.
    (FULL, 10001, "a", None),
]


@pytest.mark.parametrize(("there", "asked", "picked", "expected"), TABLE)
def test_victims_of_a_preemption(there, asked, picked, expected):
    _server, extender, cluster = stage("n", gpus=2 if any(one[1] for one in there) else 1)
    for name, n, mib, priority in there:
        bound(cluster, name, "n", (f"n-{n}", mib), priority=priority)
    before = extender.ledger.use("n")
    asked, gpus = asked if isinstance(asked, tuple) else (asked, 1)
    found = preempt(extender, waiting("p", asked, 5, gpus=gpus), n=picked)
    assert found == ({} if expected is None else {"n": sorted(expected)})
    assert extender.ledger.use("n") == before


def test_ending_pods_are_first_victims_and_unknown_pods_never():
    _server, extender, cluster = stage("n")
    bound(cluster, "a", "n", ("n-0", 2000))
    bound(cluster, "b", "n", ("n-0", 4000), priority=4, ending=True)
    # The bind of pod c is not confirmed yet, so its priority is unknown.
    extender.ledger.hold("uid-c", "default/c", "n", [Part("main", APP, (Device("n-0", 4000, 0),))])
    assert preempt(extender, waiting("p", 3000, 5), n="") == {"n": ["b"]}
    assert preempt(extender, waiting("p", 7000, 5), n="") == {}
    bound(cluster, "c", "n", ("n-0", 4000), priority=1)
    assert preempt(extender, waiting("p", 7000, 5), n="") == {"n": ["b", "c"]}


def test_node_without_gpus_does_not_help_preemption():
    """The kube-scheduler also names nodes that publish no GPUs of ours, because its own check of resources fails before
    it calls an extender.
    """
    _server, extender, cluster = stage("n")
    for name, n, mib, priority in FULL:
        bound(cluster, name, "n", (f"n-{n}", mib), priority=priority)
    assert preempt(extender, waiting("p", 5000, 5), stock="x", n="a") == {"n": ["a", "b"]}
    extender.ledger.drop_node("n")
    assert preempt(extender, waiting("p", 5000, 5), stock="x", n="a") == {}


def test_useless_nodes_do_not_use_up_the_limit_of_nodes(monkeypatch):
    """One call completes the victims of a limited number of nodes, and the nodes always come in alphabetical order. So
    nodes on which no eviction helps must not count.
    """
    monkeypatch.setattr(preemption, "MAX_COMPLETED", 2)
    names = ["a", "b", "c", "d", "e", "f", "g"]
    _server, extender, cluster = stage(*names)
    for name in names:
        bound(cluster, f"low-{name}", name, (f"{name}-0", 3000))
        bound(cluster, f"rest-{name}", name, (f"{name}-0", 5000), priority=9 if name < "d" else 1)
    picked = {name: [f"low-{name}"] for name in names}
    found = preempt(extender, waiting("p", 9000, 5), **picked)
    assert found == {name: [f"low-{name}", f"rest-{name}"] for name in ("d", "e", "f")}


@pytest.mark.parametrize(("hard", "expected"), [("15000", {"n": ["a", "b"]}), ("14999", {})])
def test_no_victims_for_a_pod_over_its_quota(hard, expected):
    """The pods of the namespace use 10000 MiB of its quota. If the quota is too small for 5000 MiB more, no pod may be
    evicted, because preemption must not free quota.
    """
    _server, extender, cluster = stage("n")
    for name, n, mib, priority in FULL:
        bound(cluster, name, "n", (f"n-{n}", mib), priority=priority)
    spec = wire.QuotaSpec({"limits.nvidia.com/gpumem": hard})
    extender.quotas.enter(False, wire.Quota(wire.Meta("q", "default"), spec))
    assert preempt(extender, waiting("p", 5000, 5), n="a") == expected


def test_victims_make_room_for_all_containers():
    _server, extender, cluster = stage("n", gpus=2)
    for name, n, mib in (("a", 0, 5000), ("b", 0, 3000), ("c", 1, 9000), ("d", 1, 100)):
        bound(cluster, name, "n", (f"n-{n}", mib))
    pod = waiting("p", 6000, 5)
    pod["spec"]["containers"].append({**pod["spec"]["containers"][0], "name": "second"})
    # The kube-scheduler picked d. Once a, c and d are gone, the GPUs have 7000 and 9900 MiB free, so b stays.
    assert preempt(extender, pod, n="d") == {"n": ["a", "c", "d"]}
    bound(cluster, "c", "n", ("n-1", 9000), priority=5)
    assert preempt(extender, pod, n="d") == {}


def test_victims_are_minimal_on_random_nodes():
    """Checks the victims on random nodes. Once they are gone, the pod fits; if any of the added victims stays, it does
    not fit. All victims have a lower priority. A node is missing in the result only if the eviction of all pods of
    lower priority would not help. If all pods have equal priority, no smaller set of victims would be enough.
    """
    chance = random.Random(6)
    seen = {"helped": 0, "useless": 0, "added": 0}
    for number in range(150):
        nodes = [f"n{n}" for n in range(3)]
        _server, extender, cluster = stage(*nodes, gpus=2)
        held = {}
        for node in nodes:
            for n in range(2):
                free = CARD
                for k in range(SLOTS):
                    size = chance.randrange(500, 4000)
                    if size <= free:
                        free -= size
                        held[f"{node}-{n}-{k}"] = (node, f"{node}-{n}", size, chance.randrange(8) if number % 3 else 1)
        for name, (node, uuid, size, priority) in held.items():
            bound(cluster, name, node, (uuid, size), priority=priority)
        asked, picked = chance.randrange(1000, CARD + 1), {}
        lower = {node: [name for name, one in held.items() if one[0] == node and one[3] < 5] for node in nodes}
        for node in nodes:
            picked[node] = chance.sample(lower[node], min(1, len(lower[node])))

        room = partial(is_room, held, asked)
        found = preempt(extender, waiting("p", asked, 5), **picked)
        for node in nodes:
            assert (node in found) == room(node, lower[node])
            gone = set(found.get(node, ()))
            seen["helped" if node in found else "useless"] += 1
            if node not in found:
                continue
            assert gone >= set(picked[node]) and gone <= set(lower[node]) and room(node, gone)
            for name in gone - set(picked[node]):
                seen["added"] += 1
                assert not room(node, gone - {name}), "this victim was not necessary"
            fewest = next(
                count
                for count in range(len(lower[node]) + 1)
                if any(room(node, {*picked[node], *some}) for some in combinations(lower[node], count))
            )
            assert number % 3 or len(gone - set(picked[node])) == fewest
    assert min(seen.values()) > 20, seen


def is_room(held, asked, node, gone):
    """Returns whether a GPU of the node has enough free memory once these pods are gone."""
    for n in range(2):
        stay = [one[2] for name, one in held.items() if one[1] == f"{node}-{n}" and name not in gone]
        if len(stay) < SLOTS and sum(stay) + asked <= CARD:
            return True
    return False


def names_of(extender, pod, *nodes):
    found = extender.filter(wire.ExtenderArgs(pod, list(nodes)))
    assert not found.Error
    return found.NodeNames, {**found.FailedNodes, **found.FailedAndUnresolvableNodes}


def bind(extender, name, node="n"):
    return asyncio.run(extender.bind(wire.BindArgs(name, "default", f"uid-{name}", node))).Error


def test_memory_is_reserved_from_nomination_to_bind():
    async def go():
        _server, extender, cluster = stage("n")
        bound(cluster, "victim", "n", ("n-0", 6000), ending=True)
        important = waiting("important", 9000, 5, nominated="n")
        cluster.pod(False, item(important))
        before = extender.ledger.use("n")
        # While the victim still runs, the memory that is free already is reserved too.
        for name, priority, fits in (("low", 0, False), ("same", 5, False), ("high", 6, True)):
            other = waiting(name, 3000, priority)
            found, why = names_of(extender, other, "n")
            assert (found == ["n"]) == fits and (KEPT in why.values()) != fits, other
        # A pod of equal priority must not get reserved memory by a preemption, but a pod of higher priority must.
        assert preempt(extender, waiting("same", 3000, 5), n="") == {}
        assert preempt(extender, waiting("high", 7000, 6), n="") == {"n": ["victim"]}
        # The victim has ended. Now the nominated pod fits, and other pods get only the memory that it leaves.
        cluster.pod(True, item(pod_object("victim")))
        assert names_of(extender, waiting("low", 3000), "n")[0] == []
        assert names_of(extender, waiting("small", 1000), "n")[0] == ["n"]
        assert names_of(extender, important, "n")[0] == ["n"]
        assert before["n-0"].memory_mib == 6000 and extender.ledger.use("n")["n-0"].memory_mib == 0
        return extender

    asyncio.run(go())


@pytest.mark.parametrize("end", ["bound", "gone", "cleared", "unreadable", "unlisted"])
def test_reservation_ends_with_the_nomination(end):
    _server, extender, cluster = stage("n")
    cluster.pod(False, item(waiting("important", 9000, 5, nominated="n")))
    low = waiting("low", 3000)
    assert names_of(extender, low, "n")[0] == []
    if end == "bound":
        bound(cluster, "important", "n", ("n-0", 7000), priority=5)
    elif end == "gone":
        cluster.pod(True, item(waiting("important", 9000, 5, nominated="n")))
    elif end == "cleared":
        cluster.pod(False, item(waiting("important", 9000, 5)))
    elif end == "unreadable":
        wrong = {"hami.io/gpu-scheduler-policy": "no such"}
        cluster.pod(False, item(waiting("important", 9000, 5, nominated="n", **wrong)))
    else:
        cluster.all_pods([], 0.0)
    assert names_of(extender, low, "n")[0] == ["n"]


def test_one_of_two_pods_nominated_for_the_same_memory_gets_it():
    """Two nominated pods must not block each other, even if the second is nominated before the event of the first
    arrives.
    """
    _server, extender, cluster = stage("n")
    pods = {name: waiting(name, 6000, 5, nominated="n") for name in ("b", "a", "c")}
    for pod in pods.values():
        cluster.pod(False, item(pod))
    assert {name: names_of(extender, pod, "n")[0] for name, pod in pods.items()} == {"a": ["n"], "b": [], "c": []}
    assert bind(extender, "b") != "" and bind(extender, "a") == ""


def test_refusal_names_reserved_memory():
    """The reason must say that memory is reserved, because the ledger itself would report the memory as free."""
    _server, extender, cluster = stage("n")
    bound(cluster, "victim", "n", ("n-0", 6000), ending=True)
    cluster.pod(False, item(waiting("important", 9000, 5, nominated="n")))
    assert names_of(extender, waiting("low", 3000), "n")[0] == []
    assert names_of(extender, waiting("large", 5000), "n")[0] == []
    assert {uid: one.over for uid, one in extender.waiting._due.items()} == {"uid-low": KEPT, "uid-large": ""}


@pytest.mark.parametrize("lost", ["", "sick", "equal", "away"])
def test_no_reservation_if_no_victim_can_free_enough(lost):
    """The nomination remains although it cannot help, because the kube-scheduler clears it only when it tries the pod
    again, or never. Other pods must be able to use the node.
    """
    _server, extender, cluster = stage("n", gpus=2)
    bound(cluster, "victim", "n", ("n-0", 4000), ending=True)
    bound(cluster, "other", "n", ("n-1", 6000), priority=5)
    cluster.pod(False, item(waiting("important", 9000, 5, nominated="n")))
    if lost == "sick":
        gpus = extender.ledger.nodes["n"]
        extender.ledger.set_node("n", [gpus[0]._replace(healthy=False), gpus[1]])
    elif lost == "equal":
        bound(cluster, "above", "n", ("n-0", 2000), priority=5)
    elif lost == "away":
        extender.ledger.set_node("n", [gpu("n-1", CARD, slots=SLOTS)])
    fits, why = names_of(extender, waiting("low", 3000), "n")
    assert fits == (["n"] if lost else []), why
    assert (why == {"n": KEPT}) == (not lost)
    # A pod of the same priority may start a preemption on this node.
    assert ("n" in preempt(extender, waiting("same", 3000, 5), n="victim")) == bool(lost)


@pytest.mark.parametrize(("limit", "fits"), [(2, ["a", "b", "c"]), (1, ["a", "c"])])
def test_nominated_pods_per_filter_call_are_limited(limit, fits, monkeypatch):
    monkeypatch.setattr(preemption, "MAX_KEPT", limit)
    _server, extender, cluster = stage("a", "b", "c")
    for name, priority in (("a", 6), ("b", 5)):
        cluster.pod(False, item(waiting(f"important-{name}", 6000, priority, nominated=name)))
    assert names_of(extender, waiting("low", 3000), "a", "b", "c")[0] == fits
    assert list(extender.ledger.held_by()) == []


def test_placements_per_filter_call_are_limited(monkeypatch):
    """A job may have hundreds of nominated pods. Without a limit, each filter call would try to place them all."""
    monkeypatch.setattr(preemption, "MAX_KEPT", 3)
    names = [f"n{n}" for n in range(9)]
    _server, extender, cluster = stage(*names)
    for name in names:
        bound(cluster, f"victim-{name}", name, (f"{name}-0", 6000), ending=True)
        cluster.pod(False, item(waiting(f"important-{name}", 9000, 5, nominated=name)))
    tried, place = [], extender.ledger.place
    monkeypatch.setattr(extender.ledger, "place", lambda ask, node: tried.append(node) or place(ask, node))
    assert names_of(extender, waiting("low", 3000), *names)[0] == []
    assert len(tried) == 3


def test_bind_avoids_the_gpu_of_a_nominated_pod():
    """By its policy the pod would take the emptiest GPU. But only this GPU is large enough for the nominated pod, so
    the pod must take another one.
    """
    taken = {}
    for nominated in ("", "n"):
        _server, extender, cluster = stage("n", gpus=2)
        bound(cluster, "other", "n", ("n-1", 6000))
        cluster.pod(False, item(waiting("important", 9000, 5, nominated=nominated)))
        low = waiting("low", 3000)
        assert names_of(extender, low, "n")[0] == ["n"]
        assert bind(extender, "low") == ""
        (taken[nominated],) = [use[0] for use in extender.ledger.held("uid-low").uses]
        fits = names_of(extender, waiting("important", 9000, 5, nominated=nominated), "n")[0]
        assert fits == (["n"] if nominated else [])
    assert taken == {"": "n-0", "n": "n-1"}


def test_bind_after_a_nomination_is_refused():
    _server, extender, cluster = stage("n")
    low = waiting("low", 3000)
    assert names_of(extender, low, "n")[0] == ["n"]
    cluster.pod(False, item(waiting("important", 9000, 5, nominated="n")))
    assert "not a GPU with 3000 MiB free" in bind(extender, "low")
    assert extender.ledger.held("uid-low") is None and extender.ledger.held("uid-important") is None
