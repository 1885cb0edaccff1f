# SPDX-License-Identifier: Apache-2.0
"""Tests nodes whose kubelet admits a pod only if its devices are on one NUMA node. Filter and plan must respect that,
on these nodes only. The ledger is the scheduler's record of which pod holds how much of which GPU.
"""

from __future__ import annotations

import random

import pytest
from vgpu_plugin._shared.pods.annotations import CONTAINER, POD, SINGLE_NUMA_NODE, Topology
from vgpu_scheduler.ledger import Ledger, NoRoom

from .samples import ask, faults, gpu, pod_ask

CARD = 16160
PER_CONTAINER, PER_POD = Topology(SINGLE_NUMA_NODE, CONTAINER), Topology(SINGLE_NUMA_NODE, POD)
FREE = Topology()
# Words of the reason for a node whose topology manager allows only one NUMA node.
NUMA = "free on one NUMA node, as its topology manager requires"


def ledger_of(numas, topology, full=(), **policies):
    """Returns the ledger of a node. The list has the NUMA node of each GPU. GPUs in ``full`` have no free memory."""
    ledger = Ledger(**policies)
    ledger.set_node("a", [gpu(f"g{n}", CARD, numa=numa) for n, numa in enumerate(numas)], topology)
    for n in full:
        alone = pod_ask(ask(CARD), use_uuids=(f"g{n}",))
        ledger.hold(f"full-{n}", f"default/full-{n}", "a", ledger.place(alone, "a"))
    return ledger


def two(gpus=2, **more):
    return ask(CARD, gpus=gpus, **more)


def one():
    return ask(CARD)


# columns: NUMA node of each GPU, topology policy of the kubelet, GPUs that are full, requests of the containers;
# expected GPUs of each container, or words of the refusal
TABLE = [
    ([0, 1], FREE, (), [two()], [{0, 1}]),
    ([0, 1], Topology("restricted"), (), [two()], [{0, 1}]),
    ([0, 1], Topology("best-effort"), (), [two()], [{0, 1}]),
    ([0, 1], PER_CONTAINER, (), [two()], NUMA),
    ([0, 1], PER_POD, (), [two()], NUMA),
    ([0, 1], PER_CONTAINER, (), [one()], [{0}]),
    ([0, 0, 1, 1], PER_CONTAINER, (), [two()], [{0, 1}]),
    ([0, 1, 0, 1], PER_CONTAINER, (), [two()], [{0, 2}]),
    ([0, 0, 1, 1], PER_CONTAINER, (0,), [two()], [{2, 3}]),
    ([0, 0, 1, 1], PER_CONTAINER, (0, 2), [two()], NUMA),
    ([0, 0, 1, 1], FREE, (0, 2), [two()], [{1, 3}]),
    ([0, 0, 1, 1], PER_CONTAINER, (), [two(3)], NUMA),
    ([0, 0, 1, 1], PER_CONTAINER, (), [two(5)], "fewer than 5 GPUs"),
    ([0, 0, 1, 1], PER_CONTAINER, (0, 1, 2), [two()], "not 2 GPUs with"),
    # With the scope "container" each container may use another NUMA node; with the scope "pod" all containers must use
    # the same.
    ([0, 0, 1, 1], PER_CONTAINER, (), [two(), two()], [{0, 1}, {2, 3}]),
    ([0, 0, 1, 1], PER_POD, (), [two(), two()], NUMA),
    ([0, 0, 1, 1], PER_POD, (), [one(), one()], [{0}, {1}]),
    ([0, 1], PER_POD, (), [one(), one()], NUMA),
    ([0, 1], PER_CONTAINER, (), [one(), one()], [{0}, {1}]),
    ([0, 0, 1, 1, 1], PER_POD, (), [two(), one()], [{2, 3}, {4}]),
    ([0, 0, 1, 1], PER_POD, (0,), [one(), one()], [{2}, {3}]),
    # A greedy placement would give the first container one of the two GPUs that the second container needs.
    ([0, 0, 1], PER_CONTAINER, (), [one(), two()], [{2}, {0, 1}]),
    ([0, 1, 1], PER_CONTAINER, (), [one(), two()], [{0}, {1, 2}]),
    # Init containers run before the others, so they may use the same GPUs.
    ([0, 0, 1], PER_CONTAINER, (), [two(init=True), two()], [{0, 1}, {0, 1}]),
    ([0, 1], PER_CONTAINER, (), [two(init=True), one()], NUMA),
    ([0, 0, 1], PER_POD, (), [two(init=True), one()], [{0, 1}, {0}]),
    # A GPU with -1 reports no NUMA node. If no GPU reports one, the kubelet does not align devices.
    ([-1, -1], PER_CONTAINER, (), [two()], [{0, 1}]),
    ([-1, -1], PER_POD, (), [two()], [{0, 1}]),
    ([-1, -1, 0], PER_CONTAINER, (), [two()], NUMA),
    ([-1, 0, 0], PER_CONTAINER, (), [two()], [{1, 2}]),
]


@pytest.mark.parametrize("policy", ["binpack", "spread", "topology"])
@pytest.mark.parametrize(("numas", "topology", "full", "asks", "expected"), TABLE)
def test_gpus_of_each_container_by_numa_node(numas, topology, full, asks, expected, policy):
    ledger = ledger_of(numas, topology, full, gpu_policy=policy)
    asked = pod_ask(*asks)
    answer = ledger.filter(asked, ["a"])
    if isinstance(expected, str):
        assert answer.fits == [] and expected in {**answer.failed, **answer.never}["a"]
        with pytest.raises(NoRoom, match=expected):
            ledger.place(asked, "a")
        return
    assert answer.fits == ["a"], answer
    plan = ledger.place(asked, "a")
    found = [{int(device.uuid[1:]) for device in part.devices} for part in plan]
    assert [len(each) for each in found] == [each.gpus for each in asks]
    groups = [{numas[column] for column in each} for each in found]
    if topology in (PER_CONTAINER, PER_POD):
        assert all(len(each) == 1 for each in groups) or set(numas) == {-1}
    assert found == expected or policy == "topology" or len(set(numas)) == 1


def test_numa_policy_is_per_node_and_may_change():
    ledger = Ledger()
    gpus = [gpu(f"g{n}", CARD, numa=n) for n in range(2)]
    for name, topology in (("strict", PER_CONTAINER), ("free", FREE)):
        ledger.set_node(name, [one._replace(uuid=f"{name}-{one.uuid}") for one in gpus], topology)
    asked = pod_ask(two())
    answer = ledger.filter(asked, ["strict", "free"])
    assert answer.fits == ["free"] and NUMA in answer.failed["strict"]
    strict = ledger.nodes["strict"]
    assert not ledger.set_node("strict", strict, PER_CONTAINER)
    assert ledger.set_node("strict", strict, FREE)
    assert ledger.filter(asked, ["strict", "free"]).fits == ["strict", "free"]
    assert ledger.set_node("strict", strict, PER_POD)
    assert ledger.filter(asked, ["strict", "free"]).fits == ["free"]
    # A new node that reuses the row of a removed node in the table must not inherit its policy.
    ledger.drop_node("strict")
    ledger.set_node("other", gpus)
    assert ledger.filter(asked, ["other"]).fits == ["other"]


def test_victims_memory_counts_if_on_one_numa_node():
    ledger = ledger_of([0, 0, 1, 1], PER_CONTAINER, (0, 2))
    asked = pod_ask(two())
    assert ledger.filter(asked, ["a"], {"a": ["full-0"]}).fits == ["a"]
    assert ledger.filter(asked, ["a"], {"a": []}).fits == []


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_is_over_several_numa_nodes_and_filter_and_place_agree(seed):
    chance = random.Random(seed)
    topology = chance.choice((PER_CONTAINER, PER_POD))
    numas = [chance.choice((0, 0, 1, 1, 2)) for _each in range(chance.randrange(2, 9))]
    ledger = ledger_of(numas, topology, gpu_policy=chance.choice(("binpack", "spread", "topology")))
    numa_of = {one.uuid: one.numa for one in ledger.nodes["a"]}
    plans = []
    for n in range(30):
        asks = [
            ask(chance.choice((1000, 5000, 9000)), gpus=chance.choice((1, 1, 2, 3)), init=chance.random() < 0.2)
            for _each in range(chance.choice((1, 1, 1, 2, 3)))
        ]
        asked = pod_ask(*asks)
        fits = ledger.filter(asked, ["a"]).fits == ["a"]
        try:
            plan = ledger.place(asked, "a")
        except NoRoom:
            assert not fits
            continue
        assert fits
        ledger.hold(f"u{n}", f"default/p{n}", "a", plan)
        plans.append(("a", plan))
        groups = [{numa_of[device.uuid] for device in part.devices} for part in plan]
        assert all(len(each) == 1 for each in groups)
        assert topology == PER_CONTAINER or len(set.union(*groups)) == 1
    assert plans and faults(ledger.nodes, plans) == []
