# SPDX-License-Identifier: Apache-2.0
"""Tests the cache in the scheduler's ledger (which pod holds how much of which GPU). The cache keeps the results for
nodes. They must be the same as without the cache, and only changed nodes may be evaluated again.
"""

from __future__ import annotations

import random

import pytest
from vgpu_scheduler import memo as memo_module
from vgpu_scheduler.ledger import Ledger, NoRoom

from .samples import PERCENT, ask, node, pod_ask

ASKS = [
    pod_ask(ask(3000)),
    pod_ask(ask(9000, cores=30)),
    pod_ask(ask(50, kind=PERCENT)),
    pod_ask(ask(3000, gpus=2)),
    pod_ask(ask(3000), node_policy="spread"),
    pod_ask(ask(3000, gpus=2), node_policy="topology"),
    pod_ask(ask(3000), avoid_models=("t4",)),
    pod_ask(ask(3000), use_uuids=("gpu-n3-1",)),
    pod_ask(ask(3000), ask(5000)),
]

# Uid → plan (the GPUs of a pod), for each pod in the tested ledger.
PLANS: dict = {}


def fresh(ledger):
    """Returns a new ledger with the same nodes and pods as the given one, and with an empty cache."""
    made = Ledger()
    for name, gpus in ledger.nodes.items():
        made.set_node(name, gpus)
    for uid, held in ledger.held_by():
        parts = PLANS[uid]
        made.hold(uid, held.pod, held.node, parts)
    return made


@pytest.mark.parametrize("seed", range(4))
def test_cached_results_equal_uncached_results(seed):
    chance = random.Random(seed)
    ledger = Ledger()
    PLANS.clear()
    names = [f"n{n}" for n in range(9)]
    for name in names[:6]:
        ledger.set_node(name, node(name, chance.choice((1, 2, 4)), model=chance.choice(("Tesla T4", "V100"))))
    for step in range(150):
        one = chance.choice(ASKS)
        answer, other = ledger.filter(one, names), fresh(ledger)
        assert answer == other.filter(one, names), step
        assert ledger.prioritize(one, names) == other.prioritize(one, names), step
        what = chance.random()
        if what < 0.5 and answer.fits:
            name = chance.choice(answer.fits)
            try:
                plan = ledger.place(one, name)
            except NoRoom:
                continue
            PLANS[f"u{step}"] = plan
            ledger.hold(f"u{step}", "default/p", name, plan)
        elif what < 0.7 and PLANS:
            uid = chance.choice(sorted(PLANS))
            ledger.release(uid)
            del PLANS[uid]
        elif what < 0.8:
            name = chance.choice(names)
            if name in ledger.nodes:
                ledger.drop_node(name)
            else:
                ledger.set_node(name, node(name, 2, healthy=chance.random() < 0.7))


def test_only_changed_nodes_are_evaluated_again():
    ledger = Ledger()
    names = [f"n{n}" for n in range(100)]
    for name in names:
        ledger.set_node(name, node(name, 2))
    one, memo = pod_ask(ask(3000)), ledger._memo
    ledger.filter(one, names)
    assert memo.looked == 100
    for n in range(10):
        ledger.prioritize(one, names)
        ledger.filter(one, names)
        ledger.hold(f"u{n}", "default/p", "n7", ledger.place(one, "n7"))
    # One node was changed ten times. No query came after the last change, so the node was evaluated only nine more
    # times.
    assert memo.looked == 109
    # A query for a preemption treats some pods as gone, so its result is not cached.
    ledger.filter(one, names, {"n7": ["u1"]})
    assert memo.looked == 109
    ledger.filter(pod_ask(ask(3001)), names)
    assert memo.looked == 209


def test_tests_notice_a_stale_cache(monkeypatch):
    """Control of the tests: if the table does not count its changes, an outdated result stays in the cache, and the
    comparison with a new ledger shows that.
    """
    ledger = Ledger()
    ledger.set_node("n0", node("n0", 1))
    one = pod_ask(ask(16160))
    assert ledger.filter(one, ["n0"]).fits == ["n0"]
    PLANS.clear()
    PLANS["u"] = ledger.place(one, "n0")
    monkeypatch.setattr(ledger._table, "_changed", str)
    ledger.hold("u", "default/p", "n0", PLANS["u"])
    assert ledger.filter(one, ["n0"]).fits == ["n0"]
    assert fresh(ledger).filter(one, ["n0"]).fits == []


def test_cache_is_limited_and_grows_with_the_table():
    ledger = Ledger()
    ledger.set_node("n0", node("n0", 1))
    for n in range(memo_module.MAX_ASKS + 5):
        ledger.filter(pod_ask(ask(1000 + n)), ["n0"])
    assert len(ledger._memo._known) == memo_module.MAX_ASKS
    names = [f"n{n}" for n in range(300)]
    for name in names:
        ledger.set_node(name, node(name, 1))
    assert ledger.filter(pod_ask(ask(1000 + n)), names).fits == names
