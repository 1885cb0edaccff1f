# SPDX-License-Identifier: Apache-2.0
"""Victims for a pod of higher priority, and the room that is kept for it until they have left."""

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
    """A pod as the watch tells it, on GPUs of a node: (UUID, MiB)."""
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
    """By node, the uids that are to go. ``picked``: names of pods that the kube-scheduler chose."""
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


# What is bound on a GPU or two of 10000 MiB as (name, GPU, MiB, priority), what the pod of priority 5 asks for, whom
# the kube-scheduler picked, and who has to go; None: the node does not help.
FULL = [("a", 0, 4000, 1), ("b", 0, 3000, 2), ("c", 0, 2000, 3), ("d", 0, 1000, 4)]
TABLE = [
    (FULL, 1000, "d", "d"),
    (FULL, 1500, "d", "ad"),
    (FULL, 4000, "a", "a"),
    (FULL, 5000, "a", "ab"),
    (FULL, 7000, "a", "ab"),
    (FULL, 10000, "a", "abcd"),
    # Of one priority, the largest go: few and not many.
    ([("a", 0, 1000, 1), ("b", 0, 6000, 1), ("c", 0, 1500, 1), ("d", 0, 1500, 1)], 7000, "a", "ab"),
    # Nobody of the same priority, or of a higher one.
    ([("a", 0, 5000, 1), ("b", 0, 5000, 5)], 6000, "a", None),
    ([("a", 0, 5000, 1), ("b", 0, 5000, 9)], 6000, "a", None),
    ([("a", 0, 5000, 1), ("b", 0, 5000, 5)], 5000, "a", "a"),
    # On the GPU where few have to go, and nobody on the other.
    ([("a", 0, 5000, 1), ("b", 0, 5000, 1), ("c", 1, 9000, 1), ("d", 1, 500, 1)], 9500, "d", "cd"),
    # But rather two of a low priority than one of a higher.
    ([("a", 0, 5000, 1), ("b", 0, 5000, 1), ("c", 1, 9000, 2), ("d", 1, 500, 2)], 9500, "a", "ab"),
    # Two GPUs with the least: one has room already.
    ([("a", 0, 9000, 1), ("b", 0, 500, 1), ("c", 1, 100, 1)], (9500, 2), "b", "ab"),
    # Two of which one can be had, the other not.
    ([("a", 0, 9000, 1), ("c", 1, 1000, 7)], (9500, 2), "a", None),
    # More than a GPU has.
    (FULL, 10001, "a", None),
]


@pytest.mark.parametrize(("there", "asked", "picked", "expected"), TABLE)
def test_who_has_to_go(there, asked, picked, expected):
    _server, extender, cluster = stage("n", gpus=2 if any(one[1] for one in there) else 1)
    for name, n, mib, priority in there:
        bound(cluster, name, "n", (f"n-{n}", mib), priority=priority)
    before = extender.ledger.use("n")
    asked, gpus = asked if isinstance(asked, tuple) else (asked, 1)
    found = preempt(extender, waiting("p", asked, 5, gpus=gpus), n=picked)
    assert found == ({} if expected is None else {"n": sorted(expected)})
    assert extender.ledger.use("n") == before


def test_those_that_are_ending_go_first_and_unknown_ones_never():
    _server, extender, cluster = stage("n")
    bound(cluster, "a", "n", ("n-0", 2000))
    bound(cluster, "b", "n", ("n-0", 4000), priority=4, ending=True)
    # Its bind is on the way: nobody has told its priority yet.
    extender.ledger.hold("uid-c", "default/c", "n", [Part("main", APP, (Device("n-0", 4000, 0),))])
    assert preempt(extender, waiting("p", 3000, 5), n="") == {"n": ["b"]}
    assert preempt(extender, waiting("p", 7000, 5), n="") == {}
    bound(cluster, "c", "n", ("n-0", 4000), priority=1)
    assert preempt(extender, waiting("p", 7000, 5), n="") == {"n": ["b", "c"]}


def test_a_node_that_tells_no_gpus_does_not_help_and_disturbs_nobody():
    """The kube-scheduler asks about it: its own count of slots fails there before any extender is called."""
    _server, extender, cluster = stage("n")
    for name, n, mib, priority in FULL:
        bound(cluster, name, "n", (f"n-{n}", mib), priority=priority)
    assert preempt(extender, waiting("p", 5000, 5), stock="x", n="a") == {"n": ["a", "b"]}
    extender.ledger.drop_node("n")
    assert preempt(extender, waiting("p", 5000, 5), stock="x", n="a") == {}


def test_nodes_that_cannot_help_do_not_stand_before_one_that_can(monkeypatch):
    """Only so many nodes are completed in a call, and their names come in the order of the alphabet, each time."""
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
def test_nobody_goes_for_a_pod_that_its_quota_stops(hard, expected):
    """10000 MiB are in use of it. Nobody goes for a quota either, also who counts in it."""
    _server, extender, cluster = stage("n")
    for name, n, mib, priority in FULL:
        bound(cluster, name, "n", (f"n-{n}", mib), priority=priority)
    spec = wire.QuotaSpec({"limits.nvidia.com/gpumem": hard})
    extender.quotas.enter(False, wire.Quota(wire.Meta("q", "default"), spec))
    assert preempt(extender, waiting("p", 5000, 5), n="a") == expected


def test_a_pod_with_several_containers_gets_room_for_all_of_them():
    _server, extender, cluster = stage("n", gpus=2)
    for name, n, mib in (("a", 0, 5000), ("b", 0, 3000), ("c", 1, 9000), ("d", 1, 100)):
        bound(cluster, name, "n", (f"n-{n}", mib))
    pod = waiting("p", 6000, 5)
    pod["spec"]["containers"].append({**pod["spec"]["containers"][0], "name": "second"})
    # 7000 MiB on one GPU, and 9900 on the other; b stays.
    assert preempt(extender, pod, n="d") == {"n": ["a", "c", "d"]}
    bound(cluster, "c", "n", ("n-1", 9000), priority=5)
    assert preempt(extender, pod, n="d") == {}


def test_victims_are_the_fewest_by_an_account_of_our_own():
    """Random nodes: with the victims gone there is room, with any of the added ones back there is none, no victim is of
    the pod's priority, a node is left out exactly where all of them would not do, and where all have one priority no
    fewer would do."""
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
                assert not room(node, gone - {name}), "it could have stayed"
            fewest = next(
                count
                for count in range(len(lower[node]) + 1)
                if any(room(node, {*picked[node], *some}) for some in combinations(lower[node], count))
            )
            assert number % 3 or len(gone - set(picked[node])) == fewest
    assert min(seen.values()) > 20, seen


def is_room(held, asked, node, gone):
    """Whether a card of the node holds what is asked for once these pods are gone."""
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


def test_room_is_kept_from_the_nomination_to_the_bind():
    async def go():
        _server, extender, cluster = stage("n")
        bound(cluster, "victim", "n", ("n-0", 6000), ending=True)
        important = waiting("important", 9000, 5, nominated="n")
        cluster.pod(False, item(important))
        before = extender.ledger.use("n")
        # While the victim is there, what is free already is kept as well.
        for name, priority, fits in (("low", 0, False), ("same", 5, False), ("high", 6, True)):
            other = waiting(name, 3000, priority)
            found, why = names_of(extender, other, "n")
            assert (found == ["n"]) == fits and (KEPT in why.values()) != fits, other
        # Another pod of its priority is not sent there either, one above it is.
        assert preempt(extender, waiting("same", 3000, 5), n="") == {}
        assert preempt(extender, waiting("high", 7000, 6), n="") == {"n": ["victim"]}
        # It is gone: room for the one, and for another only beside it.
        cluster.pod(True, item(pod_object("victim")))
        assert names_of(extender, waiting("low", 3000), "n")[0] == []
        assert names_of(extender, waiting("small", 1000), "n")[0] == ["n"]
        assert names_of(extender, important, "n")[0] == ["n"]
        assert before["n-0"].memory_mib == 6000 and extender.ledger.use("n")["n-0"].memory_mib == 0
        return extender

    asyncio.run(go())


@pytest.mark.parametrize("end", ["bound", "gone", "cleared", "unreadable", "unlisted"])
def test_room_is_kept_no_longer_than_the_nomination(end):
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


def test_of_two_nominated_for_one_room_one_gets_it():
    """Neither waits for the other for ever; the second is nominated before the first is told."""
    _server, extender, cluster = stage("n")
    pods = {name: waiting(name, 6000, 5, nominated="n") for name in ("b", "a", "c")}
    for pod in pods.values():
        cluster.pod(False, item(pod))
    assert {name: names_of(extender, pod, "n")[0] for name, pod in pods.items()} == {"a": ["n"], "b": [], "c": []}
    assert bind(extender, "b") != "" and bind(extender, "a") == ""


def test_who_waits_for_kept_room_is_told_so():
    """Not that there is room, which is what the ledger says once the filter call is over."""
    _server, extender, cluster = stage("n")
    bound(cluster, "victim", "n", ("n-0", 6000), ending=True)
    cluster.pod(False, item(waiting("important", 9000, 5, nominated="n")))
    assert names_of(extender, waiting("low", 3000), "n")[0] == []
    assert names_of(extender, waiting("large", 5000), "n")[0] == []
    assert {uid: one.over for uid, one in extender.waiting._due.items()} == {"uid-low": KEPT, "uid-large": ""}


@pytest.mark.parametrize("lost", ["", "sick", "equal", "away"])
def test_nothing_is_kept_where_no_victims_end_makes_room_any_more(lost):
    """The nomination stands meanwhile: the kube-scheduler takes it back when it tries the pod again, or not at all."""
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
    # And a preemption of its own priority may begin there.
    assert ("n" in preempt(extender, waiting("same", 3000, 5), n="victim")) == bool(lost)


@pytest.mark.parametrize(("limit", "fits"), [(2, ["a", "b", "c"]), (1, ["a", "c"])])
def test_what_one_filter_call_looks_at_is_bounded(limit, fits, monkeypatch):
    monkeypatch.setattr(preemption, "MAX_KEPT", limit)
    _server, extender, cluster = stage("a", "b", "c")
    for name, priority in (("a", 6), ("b", 5)):
        cluster.pod(False, item(waiting(f"important-{name}", 6000, priority, nominated=name)))
    assert names_of(extender, waiting("low", 3000), "a", "b", "c")[0] == fits
    assert list(extender.ledger.held_by()) == []


def test_what_is_tried_is_bounded_also_where_victims_are_still_there(monkeypatch):
    """A job that takes the place of hundreds: each filter call would try them all, for as long as victims take."""
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


def test_a_bind_leaves_the_gpu_that_a_nominated_pod_needs():
    """The emptiest GPU is what the policy takes, and the only one that is large enough for the other."""
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


def test_a_bind_that_comes_after_the_nomination_is_refused():
    _server, extender, cluster = stage("n")
    low = waiting("low", 3000)
    assert names_of(extender, low, "n")[0] == ["n"]
    cluster.pod(False, item(waiting("important", 9000, 5, nominated="n")))
    assert "not a GPU with 3000 MiB free" in bind(extender, "low")
    assert extender.ledger.held("uid-low") is None and extender.ledger.held("uid-important") is None
