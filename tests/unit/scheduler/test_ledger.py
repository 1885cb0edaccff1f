# SPDX-License-Identifier: Apache-2.0
"""Tests the scheduler's ledger (which pod holds how much of which GPU): tables of requests that fit or not, the reasons
of refusals, and properties of random pods and nodes.
"""

from __future__ import annotations

import contextlib
import random
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vgpu_plugin._shared.pods.annotations import APP, Device, Part, Use, use_of
from vgpu_plugin._shared.pods.requests import size_on
from vgpu_scheduler import placement, search
from vgpu_scheduler.ledger import Ledger, NoRoom
from vgpu_scheduler.table import GpuTable

from .samples import CARD, MIB, PERCENT, SLICE, UNITS, ask, can_place, card_of, faults, gpu, node, pod_ask


def ledger_of(nodes, **policies):
    ledger = Ledger(**policies)
    for name, gpus in nodes.items():
        ledger.set_node(name, gpus)
    return ledger


def bind(ledger, uid, asked, name):
    plan = ledger.place(asked, name)
    ledger.hold(uid, f"default/{uid}", name, plan)
    return plan


def one_gpu(memory=0, cores=0, shares=0, **card):
    """Returns the ledger of a node with one GPU, on which another pod uses this memory (MiB), compute (%) and number of
    slots.
    """
    ledger = ledger_of({"a": (gpu("GPU-a", **card),)})
    devices = [Device("GPU-a", memory or 1, cores)] if shares else []
    ledger.hold("other", "default/other", "a", [Part(f"c{n}", APP, tuple(devices)) for n in range(shares)])
    return ledger


# columns: request of a container, what other pods use of the GPU (16160 MiB, 10 slots); expected result: None if the
# request fits, otherwise words of the reason. The reason begins with "never" if the end of other pods cannot help, with
# "failed" if it can.
FITS = [
    (ask(3000), {}, None),
    (ask(16160), {}, None),
    (ask(16161), {}, ("never", "not a GPU large enough for 16161 MiB")),
    (ask(3000), {"memory": 13160, "shares": 1}, None),
    (ask(3000), {"memory": 13161, "shares": 1}, ("failed", "not a GPU with 3000 MiB free")),
    (ask(3000, 40), {"cores": 60, "shares": 1}, None),
    (ask(3000, 41), {"cores": 60, "shares": 1}, ("failed", "not a GPU with 3000 MiB and 41 % of the compute")),
    (ask(3000), {"cores": 99, "shares": 1}, None),
    (ask(3000), {"cores": 100, "shares": 1}, ("failed", "compute free")),
    (ask(3000, 100), {}, None),
    (ask(3000, 100), {"shares": 1}, ("failed", "compute free")),
    (ask(3000), {"shares": 9}, None),
    (ask(3000), {"shares": 10}, ("failed", "not a GPU with a free slot")),
    (ask(3000, gpus=2), {}, ("never", "fewer than 2 GPUs")),
    (ask(50, kind=PERCENT), {"memory": 8080, "shares": 1}, None),
    (ask(50, kind=PERCENT), {"memory": 8081, "shares": 1}, ("failed", "50 % of the memory free")),
    (ask(15, kind=UNITS), {}, None),
    (ask(16, kind=UNITS), {}, ("never", "large enough for 16 GiB")),
    (ask(0, 100, kind=CARD), {}, None),
    (ask(0, 100, kind=CARD), {"shares": 1}, ("failed", "all of the memory")),
    (ask(0, kind=SLICE), {"memory": 14544, "shares": 1}, None),
    (ask(0, kind=SLICE), {"memory": 14545, "shares": 1}, ("failed", "an equal slice free")),
    (ask(20000), {"capacity": 32320}, None),
    (ask(3000), {"healthy": False}, ("never", "not a GPU in health")),
]


@pytest.mark.parametrize(("wanted", "there", "why"), FITS)
def test_requests_that_fit_on_a_gpu_and_refusals(wanted, there, why):
    ledger = one_gpu(**there)
    answer = ledger.filter(pod_ask(wanted), ["a"])
    if why is None:
        assert answer == (["a"], {}, {})
        ledger.place(pod_ask(wanted), "a")
        return
    place, words = why
    assert answer.fits == [] and words in getattr(answer, place)["a"], answer
    with pytest.raises(NoRoom, match="node a: "):
        ledger.place(pod_ask(wanted), "a")


SELECTED = [
    ({"use_uuids": ("gpu-a-1",)}, ["GPU-a-1"]),
    ({"avoid_uuids": ("gpu-a-0", "gpu-a-1")}, ["GPU-a-2"]),
    ({"use_models": ("v100",)}, ["GPU-a-0"]),
    ({"avoid_models": ("v100",)}, ["GPU-a-2"]),
    ({"use_models": ("h100",)}, None),
    ({"use_uuids": ("gpu-b",)}, None),
]


# columns: MiB promised to the pod, its additional burst MiB, MiB promised to other pods on the GPU of 16160 MiB;
# expected device in the plan (None if the pod does not fit)
BURST = [
    (2000, 6000, 0, Device("GPU-a", 2000, 0, 6000)),
    (2000, 6000, 14160, Device("GPU-a", 2000, 0, 6000)),
    (2000, 6000, 14161, None),
    (2000, 90000, 0, Device("GPU-a", 2000, 0, 14160)),
    (16160, 1, 0, Device("GPU-a", 16160, 0, 0)),
]


@pytest.mark.parametrize(("promised", "burst", "others", "expected"), BURST)
def test_promise_is_counted_and_burst_limit_is_planned(promised, burst, others, expected):
    ledger = one_gpu(memory=others, shares=bool(others))
    asked = pod_ask(ask(promised, burst_mib=burst))
    assert ledger.filter(asked, ["a"]).fits == (["a"] if expected else [])
    if expected is None:
        with pytest.raises(NoRoom, match=f"not a GPU with {promised} MiB"):
            ledger.place(asked, "a")
        return
    assert bind(ledger, "one", asked, "a") == (Part("c0", APP, (expected,)),)
    assert ledger.use("a")["GPU-a"].memory_mib == promised + others
    assert ledger.held_in("default")[0] == promised + others


@pytest.mark.parametrize(("preferences", "uuids"), SELECTED)
def test_gpus_by_uuid_and_model(preferences, uuids):
    gpus = (gpu("GPU-a-0"), gpu("GPU-a-1"), gpu("GPU-a-2", model="NVIDIA A100-SXM4-40GB"))
    ledger = ledger_of({"a": gpus})
    asked = pod_ask(ask(), **preferences)
    answer = ledger.filter(asked, ["a"])
    if uuids is None:
        assert "annotations accept" in answer.never["a"]
    else:
        assert [device.uuid for device in ledger.place(asked, "a")[0].devices] == uuids


def test_policies_choose_the_gpu():
    for policy, chosen in (("binpack", "GPU-a-1"), ("spread", "GPU-a-0"), ("topology", "GPU-a-1")):
        ledger = ledger_of({"a": node("a", 3)})
        ledger.hold("x", "default/x", "a", [Part("c", APP, (Device("GPU-a-1", 4000, 0),))])
        for ledger.gpu_policy, preferences in ((policy, {}), ("binpack", {"gpu_policy": policy})):
            assert ledger.place(pod_ask(ask(), **preferences), "a")[0].devices[0].uuid == chosen, policy


def test_policies_rank_nodes():
    near = (gpu("GPU-c-0", numa=0), gpu("GPU-c-1", numa=0))
    far = (gpu("GPU-d-0", numa=0), gpu("GPU-d-1", numa=1))
    ledger = ledger_of({"a": node("a", 2), "b": node("b", 2), "c": near, "d": far})
    ledger.hold("x", "default/x", "b", [Part("c", APP, (Device("GPU-b-0", 16160, 0),))])
    assert ledger.prioritize(pod_ask(), ["a", "b", "nobody"]) == [1, 6, 0]
    assert ledger.prioritize(pod_ask(node_policy="spread"), ["a", "b"]) == [9, 4]
    assert ledger.prioritize(pod_ask(ask(gpus=2), node_policy="topology"), ["c", "d", "a"]) == [10, 0, 0]


def test_linked_gpus_are_taken_together():
    links = {("0", "2"): 50, ("1", "3"): 50, ("0", "1"): 10}
    gpus = [
        gpu(f"GPU-{n}", links=tuple((f"GPU-{b}", score) for (a, b), score in links.items() if a == str(n)))
        for n in range(4)
    ]
    ledger = ledger_of({"a": tuple(gpus)}, gpu_policy="topology")
    ledger.hold("x", "default/x", "a", [Part("c", APP, (Device("GPU-0", 16160, 0),))])
    assert [one.uuid for one in ledger.place(pod_ask(ask(gpus=2)), "a")[0].devices] == ["GPU-1", "GPU-3"]


def test_preemption_query_does_not_change_the_ledger():
    ledger = one_gpu(memory=15000, shares=1)
    before = ledger.use("a")
    assert ledger.filter(pod_ask(), ["a"], {"a": ["other"]}).fits == ["a"]
    assert ledger.filter(pod_ask(), ["a"], {"a": ["nobody"]}).fits == []
    assert ledger.use("a") == before


def test_init_containers_and_containers_share_their_gpus():
    ledger = ledger_of({"a": (gpu("GPU-a"),)})
    asked = pod_ask(ask(16000, init=True), ask(9000), ask(7000))
    plan = bind(ledger, "x", asked, "a")
    assert [(part.container, part.kind) for part in plan] == [("c0", "init"), ("c1", "app"), ("c2", "app")]
    assert ledger.use("a") == {"GPU-a": Use(16000, 0, 2)}
    ledger.release("x")
    whole, sidecar = ask(0, 100, kind=CARD, init=True), ask(9000, sidecar=True)
    plan = bind(ledger, "x", pod_ask(whole, sidecar, ask(2000)), "a")
    assert faults({"a": (gpu("GPU-a"),)}, [("a", plan)]) == []
    ledger.release("x")
    for one in (whole, ask(16000, init=True)):
        with pytest.raises(NoRoom):
            ledger.place(pod_ask(sidecar, one), "a")


# columns: what another pod holds of the GPUs "a" and "b" of 16160 MiB (MiB and percent), the containers of a pod; the
# expected GPUs of each container, or None if the node must be refused. The kubelet gives the GPUs of an init container
# to the next container, wherever that was planned.
REUSED = [
    # The container fits on "a" only, and its init container on "b" only.
    ((8000, 0), (1000, 80), [ask(10000, init=True), ask(4000, 30)], None),
    ((8000, 0), (1000, 80), [ask(10000, init=True), ask(4000, sidecar=True), ask(4000, 30)], ["b", "b", "a"]),
    # The container would get the emptier GPU "a", but its init container needs "b".
    ((4000, 40), (7000, 0), [ask(1000, 70, init=True), ask(4000, 30)], ["b", "b"]),
    ((4000, 40), (7000, 0), [ask(1000, 70, init=True), ask(500), ask(9000, 30)], ["b", "b", "a"]),
    # Two init containers get the same GPU.
    ((9000, 0), (1000, 50), [ask(9000, init=True), ask(9, 60, init=True), ask(9)], None),
    ((9000, 0), (1000, 50), [ask(9000, init=True), ask(9, 60, init=True), ask(9, gpus=2)], None),
    ((9000, 0), (1000, 50), [ask(9000, init=True), ask(9, init=True), ask(9, gpus=2)], ["b", "b", "ab"]),
    ((9000, 0), (1000, 50), [ask(9, gpus=2, init=True), ask(9000, init=True), ask(9)], None),
]


@pytest.mark.parametrize(("a", "b", "containers", "expected"), REUSED)
def test_init_container_is_placed_where_the_next_container_runs(a, b, containers, expected):
    ledger = ledger_of({"n": (gpu("a"), gpu("b"))})
    ledger.hold("other", "default/other", "n", [Part("main", APP, (Device("a", *a), Device("b", *b)))])
    asked = pod_ask(*containers)
    assert ledger.filter(asked, ["n"]).fits == (["n"] if expected else [])
    if expected:
        plan = ledger.place(asked, "n")
        assert ["".join(sorted(one.uuid for one in part.devices)) for part in plan] == expected
    else:
        with pytest.raises(NoRoom, match="not all containers fit at once"):
            ledger.place(asked, "n")


# columns: memory of the node's GPUs and of the pod's containers (MiB). Each container in turn, the largest first, takes
# the GPU that the policy prefers, and the last container finds no room; another placement has room for all.
SEARCHED = [
    ((12000, 10000), (6000, 7000, 6000)),
    ((8000, 9000), (5000, 4000, 4000, 4000)),
    ((6000, 10000), (5000, 2000, 2000, 4000, 3000)),
    ((4000, 11000, 10000), (6000, 5000, 4000, 7000, 2000)),
]


@pytest.mark.parametrize(("gpus", "containers"), SEARCHED)
@pytest.mark.parametrize("policy", ["binpack", "spread"])
def test_placement_that_no_policy_prefers_is_found_by_search(monkeypatch, gpus, containers, policy):
    offered = tuple(gpu(f"GPU-{n}", memory) for n, memory in enumerate(gpus))
    asked = pod_ask(*(ask(memory) for memory in containers))
    ledger = ledger_of({"a": offered}, gpu_policy=policy)
    assert can_place(offered, asked.asks)
    assert ledger.filter(asked, ["a"]).fits == ["a"]
    assert faults({"a": offered}, [("a", bind(ledger, "x", asked, "a"))]) == []
    monkeypatch.setattr(search, "search", lambda *_given, **_options: None)
    assert ledger_of({"a": offered}, gpu_policy=policy).filter(asked, ["a"]).fits == []


def test_tight_placement_is_found_despite_spread():
    # With the policy "spread", the app takes GPU-0 and the sidecar would take GPU-1. But the init container needs both
    # GPUs while the sidecar runs, and GPU-1 has only one slot. So the sidecar must be on GPU-0.
    gpus = (gpu("GPU-0", slots=2), gpu("GPU-1", slots=1))
    asked = pod_ask(ask(1, sidecar=True), ask(1, gpus=2, init=True), ask(1))
    ledger = ledger_of({"a": gpus}, gpu_policy="spread")
    assert ledger.filter(asked, ["a"]).fits == ["a"]
    assert faults({"a": gpus}, [("a", bind(ledger, "x", asked, "a"))]) == []


def test_result_for_a_node_does_not_depend_on_other_nodes():
    # One container requests 50 % of a GPU, the other 5000 MiB. The larger request is placed first. On node b the 50 %
    # are larger, on node a they are not, so the order differs.
    nodes = {"a": (gpu("GPU-0", 900), gpu("GPU-1", 10000)), "b": (gpu("GPU-2", 40000, slots=1),)}
    asked = pod_ask(ask(5000, sidecar=True), ask(50, kind=PERCENT, sidecar=True), ask(2000, init=True))
    ledger = ledger_of(nodes, gpu_policy="binpack")
    placed = []
    for name in nodes:
        with contextlib.suppress(NoRoom):
            ledger.place(asked, name)
            placed.append(name)
    assert ledger.filter(asked, list(nodes)).fits == placed
    assert [name for name in nodes if ledger.filter(asked, [name]).fits] == placed


def test_returning_node_keeps_its_usage():
    ledger = ledger_of({"a": node("a", 2)})
    bind(ledger, "x", pod_ask(ask(5000, 20)), "a")
    before = ledger.use("a")
    ledger.drop_node("a")
    assert ledger.filter(pod_ask(), ["a"]).never["a"].startswith("the node publishes no GPUs")
    ledger.set_node("a", ())
    # If a node publishes an empty list of GPUs, it no longer offers parts of GPUs.
    assert list(ledger.filter(pod_ask(), ["a"]).never) == ["a"] and ledger.prioritize(pod_ask(), ["a"]) is not None
    ledger.set_node("a", node("a", 2))
    assert ledger.use("a") == before
    ledger.set_node("a", node("a", 3))
    assert {uuid: use for uuid, use in ledger.use("a").items() if use.slots} == {
        uuid: use for uuid, use in before.items() if use.slots
    }
    ledger.drop_node("a")
    ledger.release("x")
    ledger.set_node("a", node("a", 2))
    assert set(ledger.use("a").values()) == {Use(0, 0, 0)}


def test_oversold_gpu_takes_no_more_pods():
    ledger = one_gpu(memory=15000, shares=2)
    assert ledger.oversold() == [("a", "GPU-a")]
    assert ledger.filter(pod_ask(ask(1)), ["a"]).fits == []


def test_difference_of_ledger_and_cluster_is_found():
    ledger = ledger_of({"a": node("a", 2)})
    plan = bind(ledger, "x", pod_ask(), "a")
    bind(ledger, "y", pod_ask(), "a")
    truth = {"x": ("default/x", "a", plan), "z": ("default/z", "a", plan)}
    assert sorted((one.uid, bool(one.found), bool(one.expected)) for one in ledger.drift(truth)) == [
        ("y", True, False),
        ("z", False, True),
    ]
    assert [one.uid for one in ledger.drift({**truth, "x": ("default/x", "b", plan)})] != []


cards = st.builds(
    lambda memory, scaling, slots, healthy, model: gpu(
        "", memory, memory * scaling // 2, slots, model, healthy=healthy
    ),
    st.sampled_from([900, 8192, 11178, 15360, 16160, 81920]),
    st.integers(2, 4),
    st.integers(1, 4),
    st.sampled_from([True] * 9 + [False]),
    st.sampled_from(["Tesla T4", "A100"]),
)
asks = st.builds(
    lambda kind_amount, cores, gpus, init, sidecar: ask(
        kind_amount[1], cores, gpus, kind_amount[0], init=init, sidecar=sidecar and not init
    ),
    st.one_of(
        st.tuples(st.just(MIB), st.integers(1, 20000)),
        st.tuples(st.just(PERCENT), st.integers(1, 100)),
        st.tuples(st.just(UNITS), st.integers(1, 20)),
        st.tuples(st.sampled_from([CARD, SLICE]), st.just(0)),
    ),
    st.sampled_from([0, 0, 10, 50, 90, 100]),
    st.integers(1, 3),
    st.sampled_from([False] * 4 + [True]),
    st.sampled_from([False] * 4 + [True]),
)
fleets = st.lists(st.lists(cards, min_size=1, max_size=4), min_size=1, max_size=3).map(
    lambda nodes: {
        f"n{i}": tuple(one._replace(uuid=f"GPU-{i}-{j}") for j, one in enumerate(gpus)) for i, gpus in enumerate(nodes)
    }
)
pods = st.lists(st.tuples(st.lists(asks, min_size=1, max_size=3), st.integers(0, 2)), max_size=14)


@settings(deadline=None, max_examples=80)
@given(fleets, pods, st.sampled_from(["binpack", "spread", "topology"]), st.randoms(use_true_random=False))
def test_never_oversold_and_rebuilt_ledger_is_equal(nodes, wanted, policy, chance):
    ledger = ledger_of(nodes, gpu_policy=policy)
    plans = {}
    for n, (one, _node) in enumerate(wanted):
        asked = pod_ask(*one)
        answer = ledger.filter(asked, list(nodes))
        assert sorted([*answer.fits, *answer.failed, *answer.never]) == sorted(nodes)
        for name in nodes:
            try:
                ledger.place(asked, name)
                placed = True
            except NoRoom:
                placed = False
            assert placed == (name in answer.fits) or len(one) > 1
            # For a pod with several containers, the filter tries more than the greedy placement only if the greedy
            # placement finds no node at all.
            assert placed or name not in answer.fits
        if answer.fits:
            name = chance.choice(answer.fits)
            plans[str(n)] = (name, bind(ledger, str(n), asked, name))
        if plans and chance.random() < 0.3:
            gone = chance.choice(list(plans))
            ledger.release(gone)
            del plans[gone]
        assert faults(nodes, plans.values()) == []
        assert ledger.oversold() == []
    rebuilt = Ledger(gpu_policy=policy)
    facts = [("node", name) for name in nodes] + [("pod", uid) for uid in plans]
    chance.shuffle(facts)
    for kind, key in facts:
        if kind == "node":
            rebuilt.set_node(key, nodes[key])
        else:
            rebuilt.hold(key, f"default/{key}", *plans[key])
    assert {name: rebuilt.use(name) for name in nodes} == {name: ledger.use(name) for name in nodes}
    assert rebuilt.drift({uid: (f"default/{uid}", *plan) for uid, plan in plans.items()}) == []


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_container_without_compute_is_placed_next_to_containers_that_take_all_of_it(order):
    """GPU-0 has one slot, GPU-1 two and GPU-2 three. The pod fits only if all three containers get a slot of GPU-2."""
    gpus = tuple(gpu(f"GPU-{n}", 900, 900, n + 1) for n in range(3))
    wanted = [ask(1, 0, 1, MIB), ask(1, 10, 3, MIB), ask(1, 90, 2, MIB)]
    ledger = ledger_of({"a": gpus})
    assert ledger.filter(pod_ask(*(wanted[n] for n in order)), ["a"]).fits == ["a"]


@settings(deadline=None, max_examples=120)
@given(st.lists(cards, min_size=1, max_size=3), st.lists(asks, min_size=1, max_size=3))
def test_every_possible_placement_is_found(gpus, wanted):
    gpus = tuple(one._replace(uuid=f"GPU-{n}", healthy=True) for n, one in enumerate(gpus))
    wanted = [one._replace(init=False, sidecar=False) for one in wanted]
    ledger = ledger_of({"a": gpus})
    assert bool(ledger.filter(pod_ask(*wanted), ["a"]).fits) == can_place(gpus, wanted)


@settings(deadline=None, max_examples=150)
@given(asks, cards)
def test_array_sizes_equal_the_request_sizes(wanted, card):
    table = GpuTable()
    table.put("a", [card])
    view = table.view(table.rows(["a"]))
    need, cores = placement.memory_of(view, wanted)[0, 0], placement.cores_of(view, wanted)[0, 0]
    size = size_on(wanted, card_of(card))
    assert size == (None if need == placement.IMPOSSIBLE else (int(need), int(cores)))


def test_gpu_table_grows_and_removes_nodes():
    table = GpuTable(rows=2, columns=1)
    chance = random.Random(1)
    there = {}
    for n in range(300):
        name = f"n{chance.randrange(40)}"
        if chance.random() < 0.3 and name in there:
            table.drop(name)
            del there[name]
        else:
            there[name] = node(name, chance.randrange(12))
            table.put(name, there[name])
            uses = {one.uuid: Use(n, 1, 1) for one in there[name]}
            table.add(name, uses, +1)
            assert table.use(name) == uses
    assert sorted(table.names) == sorted(there) and len(table) == len(there)
    rows = table.rows([*there, "nobody"])
    assert rows[-1] == -1 and len(set(rows.tolist())) == len(rows)
    assert table.view(rows[:-1]).there.sum(axis=1).tolist() == [len(gpus) for gpus in there.values()]
    assert table.view(np.array([], np.intp)).there.shape[0] == 0


def test_use_of_a_plan_is_its_peak():
    def part(kind, memory, cores=0, uuid="GPU-a"):
        return Part("c", kind, (Device(uuid, memory, cores),))

    plan = [
        part("init", 500, 90),
        part("init", 300),
        part("sidecar", 100, 10),
        part("app", 350),
        part("app", 1, 0, "b"),
    ]
    # The sidecar starts after both init containers, so it runs with neither.
    assert use_of(plan) == {"GPU-a": Use(500, 90, 2), "b": Use(1, 0, 1)}
    plan[1:3] = [plan[2], plan[1]._replace(devices=(Device("GPU-a", 420, 95),))]
    assert use_of(plan) == {"GPU-a": Use(520, 105, 2), "b": Use(1, 0, 1)}
