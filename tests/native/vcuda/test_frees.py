# SPDX-License-Identifier: Apache-2.0
"""Every combination of allocation and free, in any order, leaves the ledger equal to the driver's account.

The ledger is the library's record of the GPU memory that a container's processes use.

Strings such as ``alloc 10 4096`` (allocate 4096 bytes, keep the address in register 10) and ``call cuMemFree_v2 $10``
are commands to programs/puppet.c: $10 is the value of register 10, @10 its address."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from conftest import LIBRARY, LIMIT, MIB, OK, OOM, Host, Puppet
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run
from test_coverage_graphs import say
from test_probe_finds import MUTANTS, broken

pytestmark = pytest.mark.slow

SIZE = 6 * MIB + 5
UNITS = 6 * MIB
STREAM, POOL, GRAPH, EXEC, PLACE = 2, 3, 4, 5, 6
# Keys: kinds of memory. Values: puppet commands that allocate such memory into register 10.
PLAIN = {
    "cuMemAlloc": [f"alloc 10 {SIZE}"],
    "cuMemAlloc, first version": [f"alloc1 10 {SIZE}"],
    "managed": [f"managed 10 {SIZE}"],
    "pitched memory": ["pitch 10 1000 777"],
    "memory exported by IPC": [f"alloc 10 {SIZE}", "call cuIpcGetMemHandle @200 $10"],
}
ORDERED = {
    "default pool of the device": [f"async 10 {SIZE}"],
    "default pool, per-thread stream": [f"async-ptsz 10 {SIZE}"],
    "separate pool": [f"pool {POOL} 0", f"frompool 10 {SIZE} {POOL}"],
    "allocation in a separate stream": [
        f"call cuStreamCreate @{STREAM} 1",
        f"call cuMemAllocAsync @10 {SIZE} ${STREAM}",
    ],
}
OF_A_GRAPH = {
    "graph memory that is not freed in the graph": [
        f"graph {GRAPH}",
        f"graph-alloc 10 {GRAPH} {UNITS} 0",
        f"instantiate {EXEC} {GRAPH} 0",
        f"launch-graph {EXEC} 0",
    ],
}
OTHERS = {
    "handle": [f"create 10 {UNITS} 0"],
    "handle and mapping": [f"create 10 {UNITS} 0", f"reserve {PLACE} {UNITS}", f"map {PLACE} {UNITS} 10"],
    "array": ["array 10 1024 333 32"],
    "mipmapped array": ["mipmap 10 1024 512 8"],
}
# Keys: ways to free. Values: puppet commands that free all of the memory; a synchronization follows.
BY_POINTER = {
    "cuMemFree": ["free 10"],
    "cuMemFreeAsync": ["free-async 10"],
    "cuMemFreeAsync in the per-thread stream": ["call cuMemFreeAsync_ptsz $10 0"],
    "cuMemFreeAsync in another stream": [
        "call cuStreamCreate @7 1",
        "call cuMemFreeAsync $10 $7",
        "call cuStreamSynchronize $7",
    ],
}
ENDS = {"cuCtxDestroy": ["ctx-destroy 1"], "cuCtxDetach": ["call cuCtxDetach $1"]}
PRIMARY_ENDS = {
    "cuDevicePrimaryCtxReset": ["reset 0"],
    "cuDevicePrimaryCtxRelease": ["release 0"],
    "cuDevicePrimaryCtxRelease, first version": ["call cuDevicePrimaryCtxRelease 0"],
    "cuDevicePrimaryCtxReset, first version": ["call cuDevicePrimaryCtxReset 0"],
}
POOL_FIRST = {
    "pool destroyed before its memory": [f"pool-destroy {POOL}", "free-async 10"],
    "pool destroyed after its memory": ["free 10", f"pool-destroy {POOL}"],
}
EXEC_FIRST = {
    "graph destroyed before its memory": [
        f"exec-destroy {EXEC}",
        f"graph-destroy {GRAPH}",
        "free 10",
        "sync",
        "trim 0",
    ],
    "graph memory trimmed before the graph is destroyed": [
        "free 10",
        "sync",
        "trim 0",
        f"exec-destroy {EXEC}",
        "trim 0",
    ],
    "graph memory freed in stream order and trimmed": ["free-async 10", "sync", f"exec-destroy {EXEC}", "trim 0"],
}
BY_KIND = {
    "handle": {"handle released": ["release-handle 10"]},
    "handle and mapping": {
        "handle released before the unmap": ["release-handle 10", f"unmap {PLACE} {UNITS}"],
        "handle released after the unmap": [f"unmap {PLACE} {UNITS}", "release-handle 10"],
        "mapping retained as a second handle": [
            f"retain-handle 11 {PLACE}",
            "release-handle 10",
            f"unmap {PLACE} {UNITS}",
            "release-handle 11",
        ],
    },
    "array": {"array destroyed": ["array-destroy 10"]},
    "mipmapped array": {"array destroyed": ["mipmap-destroy 10"]},
    "cuMemAlloc, first version": {"cuMemFree, first version": ["free1 10"]},
    "separate pool": POOL_FIRST,
    "graph memory that is not freed in the graph": EXEC_FIRST,
}
PAIRS = [*itertools.product(PLAIN, BY_POINTER), *itertools.product(ORDERED, BY_POINTER)]
PAIRS += [(kind, free) for kind, frees in BY_KIND.items() for free in frees]
TAKES = {**PLAIN, **ORDERED, **OF_A_GRAPH, **OTHERS}
# Physical memory belongs to the process, not to a context.
COLLECTED = [kind for kind in TAKES if kind not in ("handle", "handle and mapping")]


def agree(host: Host) -> int:
    held = host.on_card()
    assert host.charged() == held
    return held


@pytest.mark.parametrize(("kind", "free"), PAIRS)
def test_every_legal_free_uncharges_every_allocation(host: Host, kind: str, free: str) -> None:
    puppet = host.puppet().start()
    if kind == "separate pool" and free in BY_POINTER:
        before = agree(host)
        say(puppet, *TAKES[kind], *BY_POINTER[free], "sync", f"pool-destroy {POOL}")
    else:
        frees = BY_KIND.get(kind, {}).get(free) or BY_POINTER[free]
        before = agree(host)
        say(puppet, *TAKES[kind])
        assert agree(host) >= before + UNITS // 8, "the driver took no memory, so the test proves nothing"
        say(puppet, *frees, "sync")
    if kind in ORDERED:
        say(puppet, "call cuDeviceGetDefaultMemPool @20 0", "call cuMemPoolTrimTo $20 0")
    assert agree(host) == before
    say(puppet, f"alloc 30 {LIMIT - before}")


@pytest.mark.parametrize("kind", COLLECTED)
@pytest.mark.parametrize("end", [*ENDS, *PRIMARY_ENDS])
def test_destroyed_context_uncharges_its_memory(host: Host, kind: str, end: str) -> None:
    puppet = host.puppet()
    say(puppet, "init", *(["ctx 1 0"] if end in ENDS else ["retain 1 0", "set 1"]))
    context = agree(host)
    say(puppet, *TAKES[kind])
    assert agree(host) > context
    say(puppet, *{**ENDS, **PRIMARY_ENDS}[end])
    assert agree(host) == 0


def test_host_memory_is_not_charged_or_freed(host: Host) -> None:
    puppet = host.puppet().start()
    before = agree(host)
    say(puppet, f"call cuMemAllocHost_v2 @10 {SIZE}", f"call cuMemHostAlloc @11 {SIZE} 0")
    assert agree(host) == before
    say(puppet, "call cuMemFreeHost $10", "call cuMemFreeHost $11")
    assert agree(host) == before


@pytest.mark.parametrize("kind", [*PLAIN, *ORDERED])
def test_double_free_is_credited_once(host: Host, kind: str) -> None:
    puppet = host.puppet().start()
    say(puppet, f"alloc 40 {100 * MIB}", *TAKES[kind], "free 10", "sync")
    for word in ("free 10", "free-async 10"):
        assert puppet.result(word) != OK
    say(puppet, "sync")
    agree(host)


# --- random sequences, generated by hypothesis -----------------------------------------------------------------------


class OneProcess(RuleBasedStateMachine):
    programs: Path  # the test sets this attribute
    library = str(LIBRARY)

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.host = Host(Path(self.folder.name), self.programs)
        self.host.write_limits()
        self.puppet: Puppet = self.host.puppet(route="proc", LD_PRELOAD=self.library)
        self.next = 100
        self.held: dict = {}  # key: register; value: puppet commands that free its memory
        self.graphs: list = []  # registers of executable graphs

    def teardown(self) -> None:
        self.host.close()
        self.folder.cleanup()

    @initialize()
    def begin(self) -> None:
        say(self.puppet, "init")
        self.enter()

    def enter(self) -> None:
        say(self.puppet, "retain 1 0", "set 1", f"pool {POOL} 0")
        self.held, self.graphs = {}, []

    @invariant()
    def the_ledger_says_what_the_driver_holds(self) -> None:
        assert self.host.charged() == self.host.on_card() <= LIMIT

    def register(self) -> int:
        self.next += 10
        return self.next

    @rule(verb=st.sampled_from(["alloc", "managed", "async", "async-ptsz", "frompool"]), size=st.integers(1, 900 * MIB))
    def take(self, verb: str, size: int) -> None:
        register = self.register()
        status = self.puppet.result(f"{verb} {register} {size} {POOL if verb == 'frompool' else 0}")
        assert status in (OK, OOM)
        if status == OK:
            self.held[register] = [f"free {register}", f"free-async {register}"]

    @rule(width=st.integers(1, 4096), height=st.integers(1, 4096))
    def take_array(self, width: int, height: int) -> None:
        register = self.register()
        if self.puppet.result(f"array {register} {width} {height} 32") == OK:
            self.held[register] = [f"array-destroy {register}"]

    @rule(units=st.integers(1, 300))
    def take_handle(self, units: int) -> None:
        register, size = self.register(), units * 2 * MIB
        if self.puppet.result(f"create {register} {size} 0") != OK:
            return
        say(self.puppet, f"reserve {register + 1} {size}", f"map {register + 1} {size} {register}")
        release, unmap = f"release-handle {register}", f"unmap {register + 1} {size}"
        self.held[register] = [f"{release};{unmap}", f"{unmap};{release}"]

    @rule(units=st.integers(1, 300), freed=st.booleans())
    def take_graph(self, units: int, freed: bool) -> None:
        register = self.register()
        graph, node, executable = register, register + 2, register + 4
        say(self.puppet, f"graph {graph}", f"graph-alloc {node} {graph} {units * 2 * MIB} 0")
        if freed:
            say(self.puppet, f"graph-free {graph} {node}")
        if self.puppet.result(f"instantiate {executable} {graph} 0") != OK:
            return
        if self.puppet.result(f"launch-graph {executable} 0") == OK and not freed:
            self.held[node] = [f"free {node}", f"free-async {node}"]
        self.graphs.append(executable)

    @precondition(lambda self: self.graphs)
    @rule(data=st.data())
    def end_graph(self, data: st.DataObject) -> None:
        executable = self.graphs.pop(data.draw(st.integers(0, len(self.graphs) - 1)))
        say(self.puppet, f"exec-destroy {executable}")

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        register = data.draw(st.sampled_from(sorted(self.held)))
        say(self.puppet, *data.draw(st.sampled_from(self.held.pop(register))).split(";"))

    @rule(word=st.sampled_from(["sync", "stream-sync", "trim 0", "info"]))
    def wait(self, word: str) -> None:
        assert self.puppet.result(word) == OK

    @precondition(lambda self: not any("map" in way for ways in self.held.values() for way in ways))
    @rule(word=st.sampled_from(["reset 0", "release 0"]))
    def end_context(self, word: str) -> None:
        say(self.puppet, "sync", word)
        assert self.host.on_card() == 0
        self.enter()


def test_random_sequences_keep_the_ledger_exact(programs: Path) -> None:
    run(
        type("Machine", (OneProcess,), {"programs": programs}),
        settings=settings(
            max_examples=6,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
            phases=(Phase.generate,),
        ),
    )


def test_sequences_find_a_library_that_does_not_credit_a_free(programs: Path, tmp_path: Path) -> None:
    """The negative control: the sequences find a library that does not credit a free."""
    file, before, after, _unused = MUTANTS["free not credited"]
    library = str(broken(tmp_path, file, before, after))
    machine = type("Machine", (OneProcess,), {"programs": programs, "library": library})()
    try:
        machine.begin()
        register = machine.puppet.get("alloc", SIZE)
        machine.the_ledger_says_what_the_driver_holds()
        say(machine.puppet, f"free {register}")
        with pytest.raises(AssertionError):
            machine.the_ledger_says_what_the_driver_holds()
    finally:
        machine.teardown()
