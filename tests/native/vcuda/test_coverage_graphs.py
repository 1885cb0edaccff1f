# SPDX-License-Identifier: Apache-2.0
"""Tests graphs that allocate memory. The driver keeps a reserve of memory for graphs. The library charges this reserve,
so that it counts against the limit. A trim (cuDeviceGraphMemTrim) releases the unused reserve, and with it the charge.
Strings such as ``launch-graph 30 0`` (launch the graph in register 30) are commands to programs/puppet.c."""

from __future__ import annotations

import pytest
from conftest import LIMIT, MIB, OK, OOM, Host, Puppet

SIZE = 64 * MIB
# Keys: cases. Values: puppet commands that create a graph in register 10. The memory's address is in register 20, or in
# register 11 if the allocation is captured.
MADE = {
    "node": ("graph 10", f"graph-alloc 20 10 {SIZE} 0"),
    "general node": ("graph 10", f"graph-add 20 10 {SIZE} 0"),
    "freed in the graph": ("graph 10", f"graph-alloc 20 10 {SIZE} 0", "graph-free 10 20"),
    "captured": (f"capture 10 {SIZE} 0 0",),
    "captured, per-thread streams": (f"capture 10 {SIZE} 0 1",),
    "captured and freed": (f"capture 10 {SIZE} 1 0",),
}
# Keys: the number that the puppet command `instantiate` takes. Values: the driver function that it then calls.
FORMS = {
    0: "cuGraphInstantiateWithFlags",
    1: "cuGraphInstantiate",
    2: "cuGraphInstantiate_v2",
    3: "cuGraphInstantiateWithParams",
    4: "cuGraphInstantiateWithParams_ptsz",
}


def say(puppet: Puppet, *lines: str) -> None:
    for line in lines:
        assert puppet.result(line) == OK, f"{line}: {puppet.errors()}"


@pytest.mark.parametrize("route", ["link", "proc"])
@pytest.mark.parametrize("made", MADE)
def test_graph_memory_is_charged(host: Host, made: str, route: str) -> None:
    puppet = host.puppet(route).start()
    before = host.on_card()
    say(puppet, *MADE[made])
    assert host.charged() == host.on_card() == before, "a memory node was charged before its graph was instantiated"
    say(puppet, "instantiate 30 10 0", "launch-graph 30 0", "sync")
    assert host.on_card() >= before + SIZE, "the driver took no memory, so the test proves nothing"
    assert host.charged() == host.on_card()
    assert puppet.say("info")[1] == LIMIT - host.on_card()
    if "freed" in made:
        say(puppet, "launch-graph 30 1", "sync", "launch-graph 30 0", "sync")
        assert host.charged() == host.on_card() == before + SIZE
        say(puppet, "trim 0")
        assert host.charged() == host.on_card() == before
    else:
        say(puppet, f"free {11 if made.startswith('captured') else 20}")
        assert host.charged() == host.on_card()
    say(puppet, "exec-destroy 30", "graph-destroy 10", "trim 0")
    assert host.charged() == host.on_card() == before


@pytest.mark.parametrize("form", FORMS, ids=FORMS.get)
def test_instantiation_over_the_limit_is_refused(host: Host, form: int) -> None:
    puppet = host.puppet("proc").start()
    say(puppet, "graph 10", f"graph-alloc 20 10 {SIZE} 0", f"instantiate 30 10 {form}")
    assert host.charged() == host.on_card()
    say(puppet, f"graph-alloc 22 10 {LIMIT} 0")
    assert puppet.result(f"instantiate 31 10 {form}") == OOM
    assert host.charged() == host.on_card() <= LIMIT
    say(puppet, "exec-destroy 30", "trim 0", f"alloc 40 {LIMIT - host.on_card()}")
    assert host.on_card() == LIMIT


@pytest.mark.parametrize("form", FORMS, ids=FORMS.get)
def test_instantiation_that_cannot_reuse_the_reserve_is_refused(host: Host, form: int) -> None:
    """The first graph is not launched, so its memory counts as unused, but the second graph cannot reuse it."""
    puppet = host.puppet("proc").start()
    say(puppet, "graph 10", f"graph-alloc 20 10 {SIZE} 0", f"instantiate 30 10 {form}")
    say(puppet, f"alloc 40 {LIMIT - host.on_card() - MIB}", "graph 11", f"graph-alloc 22 11 {SIZE} 0")
    assert puppet.result(f"instantiate 31 11 {form}") == OOM
    assert host.charged() == host.on_card() <= LIMIT
    say(puppet, "launch-graph 30 0", "free 40", f"instantiate 31 11 {form}", "launch-graph 31 0", "sync")
    assert host.charged() == host.on_card()


@pytest.mark.parametrize("word", ["upload 30 0", "upload 30 1", "launch-graph 30 0", "launch-graph 30 1"])
def test_trimmed_graph_is_refused_until_its_memory_fits(host: Host, word: str) -> None:
    puppet = host.puppet().start()
    say(puppet, *MADE["freed in the graph"], "instantiate 30 10 0", "launch-graph 30 0", "sync", "trim 0")
    free = LIMIT - host.on_card()
    say(puppet, f"alloc 40 {free - SIZE + 1}")
    assert puppet.result(word) == OOM
    assert host.charged() == host.on_card() <= LIMIT
    say(puppet, "free 40", f"alloc 40 {free - SIZE}", word, "sync")
    assert host.charged() == host.on_card() == LIMIT == host.peak()


def test_graph_runs_repeatedly_at_the_limit(host: Host) -> None:
    """The device keeps memory for graphs. A launch reuses this memory, so it succeeds although no other memory is free.
    The library charges the memory only once."""
    puppet = host.puppet().start()
    say(puppet, *MADE["freed in the graph"], "instantiate 30 10 0", "launch-graph 30 0", "sync")
    puppet.get("alloc", LIMIT - host.on_card())
    for _unused in range(5):
        say(puppet, "launch-graph 30 0", "sync")
        assert host.charged() == host.on_card() == LIMIT


def test_allocation_reclaims_unused_graph_memory(host: Host) -> None:
    """Before it refuses an allocation, the library asks the driver to release memory that no graph uses."""
    puppet = host.puppet().start()
    say(puppet, *MADE["freed in the graph"], "instantiate 30 10 0", "launch-graph 30 0", "sync")
    assert puppet.result(f"alloc 40 {LIMIT - host.on_card() + SIZE}") == OK
    assert host.charged() == host.on_card() == LIMIT


def test_captured_graph_launch_is_charged_its_memory(host: Host) -> None:
    """If the launch of a graph is captured, the graph becomes a child of the captured graph. The memory of the child
    must be charged with the parent graph."""
    puppet = host.puppet().start()
    say(puppet, *MADE["freed in the graph"], "instantiate 30 10 0", "exec-destroy 30", "trim 0")
    before = host.on_card()
    say(puppet, "instantiate 31 10 0", "capture-launch 50 31", "instantiate 32 50 0", "launch-graph 32 0", "sync")
    assert host.charged() == host.on_card() > before


def test_graph_with_nodes_on_both_devices_is_charged_to_both(host: Host) -> None:
    puppet = host.puppet().start(0)
    puppet.get("ctx", 1)
    before = [host.on_card(0), host.on_card(1)]
    say(puppet, "graph 10", f"graph-alloc 20 10 {SIZE} 0", f"graph-alloc 22 10 {2 * SIZE} 1", "instantiate 30 10 0")
    assert [host.on_card(0), host.on_card(1)] == [before[0] + SIZE, before[1] + 2 * SIZE]
    assert [host.charged(0), host.charged(1)] == [host.on_card(0), host.on_card(1)]


def test_destroyed_context_uncharges_graph_memory(host: Host) -> None:
    puppet = host.puppet().start()
    say(puppet, *MADE["node"], "instantiate 30 10 0", "launch-graph 30 0", "sync", "ctx-destroy 1")
    assert host.charged() == host.on_card() == 0


def test_without_the_library_a_graph_exceeds_the_limit(host: Host) -> None:
    """The negative control: without the library graph memory exceeds the limit."""
    puppet = host.puppet(preload=False).start()
    say(puppet, "graph 10", f"graph-alloc 20 10 {LIMIT} 0", "instantiate 30 10 0", "launch-graph 30 0", "sync")
    assert host.on_card() > LIMIT


@pytest.mark.parametrize("word", ["graph-alloc 20 10 0 0", f"graph-alloc 20 10 {SIZE} 99", "instantiate 30 20 0"])
def test_invalid_graph_calls_get_the_drivers_errors(host: Host, word: str) -> None:
    answers = []
    for preload in (False, True):
        puppet = host.puppet(preload=preload).start()
        say(puppet, "graph 10")
        answers.append(puppet.result(word))
        puppet.end()
    assert answers[0] == answers[1] != OK
