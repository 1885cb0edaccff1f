# SPDX-License-Identifier: Apache-2.0
"""Hypothesis generates sequences of allocations, frees, starts, exits, kills, forks and live changes of the limit.

After each step three accounts must be equal: the model in this file, the ledger (the library's record of the
container's memory), and the simulated driver's account of the card. Strings such as ``alloc 10 4096`` (allocate 4096
bytes, keep the address in register 10) are commands to programs/puppet.c.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import hypothesis.strategies as st
import layouts
import pytest
from conftest import LIMIT, MIB, OK, OOM, PRELOAD, Host
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_probe_finds import MUTANTS, broken

EXAMPLES = int(os.environ.get("VGPU_PROPERTY_EXAMPLES", "12"))
MOST = 4  # Maximum number of processes.
PAIRS = 20  # Number of allocations, each with a free, that are queued before the kill.
FREE = {"alloc": "free", "managed": "free", "create": "release-handle"}
SIZES = st.one_of(
    st.sampled_from([1, 511, 512, 4096, MIB - 1, MIB, 2 * MIB, 1000 * MIB]),
    st.integers(1, 64 * MIB),
    st.sampled_from(["rest", "rest + 1", "rest - 1"]),
)


class Process:
    """A puppet process with the memory that the model expects it to have."""

    def __init__(self, puppet: object, context: int) -> None:
        self.puppet, self.context = puppet, context
        self.blocks: dict = {}  # Key: the register. Value: the allocating command and the bytes.

    def held(self) -> int:
        return self.context + sum(size for _unused, size in self.blocks.values())


class Container(RuleBasedStateMachine):
    programs: Path  # The folder of the compiled test programs, which the test sets.
    library = PRELOAD

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.host = Host(Path(self.folder.name), self.programs)
        self.host.write_limits()
        self.limit = LIMIT
        self.living: list = []
        self.children: list = []
        self.context = 0  # Size of a context, known after the first process has started.

    def total(self) -> int:
        return sum(process.held() for process in self.living)

    def teardown(self) -> None:
        for child in self.children:
            os.kill(child, signal.SIGKILL)
        self.host.close()
        self.folder.cleanup()

    @invariant()
    def three_accounts_agree(self) -> None:
        accounts = {"ledger": self.host.charged(), "card": self.host.on_card(), "model": self.total()}
        assert len(set(accounts.values())) == 1, accounts

    @initialize()
    def begin(self) -> None:
        self.start_one("link")

    @precondition(lambda self: len(self.living) < MOST)
    @rule(route=st.sampled_from(["link", "proc", "handle", "next"]))
    def start(self, route: str) -> None:
        self.start_one(route)

    def start_one(self, route: str) -> None:
        puppet = self.host.puppet(route=route, LD_PRELOAD=self.library)
        assert puppet.result("init") == OK
        status = puppet.refused("ctx", 0)
        if status != OK:
            assert status == OOM
            assert self.context, "the first context must succeed, because it fits under every limit of this test"
            assert self.total() + self.context > self.limit
            puppet.end()
            return
        self.context = self.context or self.host.on_card() - self.total()
        assert self.total() + self.context <= self.limit
        self.living.append(Process(puppet, self.context))

    @precondition(lambda self: self.living)
    @rule(data=st.data(), verb=st.sampled_from(["alloc", "managed", "create"]), size=SIZES)
    def allocate(self, data: st.DataObject, verb: str, size: object) -> None:
        self.allocate_one(data, verb, size)

    @precondition(lambda self: self.living)
    @rule(data=st.data(), sizes=st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=4))
    def allocate_some(self, data: st.DataObject, sizes: list) -> None:
        for size in sizes:
            self.allocate_one(data, "alloc", size)

    def allocate_one(self, data: st.DataObject, verb: str, size: object) -> None:
        process = data.draw(st.sampled_from(self.living))
        rest = max(self.limit - self.total(), 0)
        bytes_ = {"rest": rest, "rest + 1": rest + 1, "rest - 1": rest - 1}.get(size, size)  # type: ignore[arg-type]
        if verb == "create":
            # The size is rounded down, because the driver accepts only multiples of its granularity.
            bytes_ = bytes_ // (2 * MIB) * (2 * MIB)
        if bytes_ < 1:
            return
        if bytes_ > rest:
            assert process.puppet.refused(verb, bytes_, 0) == OOM
            return
        process.blocks[process.puppet.get(verb, bytes_, 0)] = (verb, bytes_)

    @precondition(lambda self: any(process.blocks for process in self.living))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.free_one(data)

    @precondition(lambda self: sum(len(process.blocks) for process in self.living) > 3)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        for _unused in range(3):
            self.free_one(data)

    def free_one(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from([one for one in self.living if one.blocks]))
        register = data.draw(st.sampled_from(sorted(process.blocks)))
        verb, _unused = process.blocks.pop(register)
        assert process.puppet.result(f"{FREE[verb]} {register}") == OK

    @precondition(lambda self: len(self.living) > 1)
    @rule(data=st.data(), killed=st.booleans())
    def end(self, data: st.DataObject, killed: bool) -> None:
        process = self.living.pop(data.draw(st.integers(0, len(self.living) - 1)))
        if killed:
            process.puppet.process.kill()
            process.puppet.process.wait()
        else:
            process.puppet.end()

    @precondition(lambda self: len(self.living) > 1)
    @rule(data=st.data(), size=st.integers(1, 600 * MIB), wait_us=st.integers(0, 3000))
    def kill_among_calls(self, data: st.DataObject, size: int, wait_us: int) -> None:
        """All processes allocate and free concurrently; one is killed, possibly while it holds the ledger's lock."""
        victim = self.living.pop(data.draw(st.integers(0, len(self.living) - 1)))
        before = self.total()
        most = before + victim.held() + size * (len(self.living) + 1)
        registers = {}
        for process in (victim, *self.living):
            registers[process] = [process.puppet.register() for _unused in range(PAIRS + 1)]
            pairs = [f"{verb} {one} {size}" for one in registers[process][:-1] for verb in ("alloc", "free")]
            process.puppet.send(*pairs, f"alloc {registers[process][-1]} {size}")
        time.sleep(wait_us / 1e6)
        victim.puppet.process.kill()
        victim.puppet.process.wait()
        for process in self.living:
            answers = [process.puppet.answer()[0] for _unused in range(2 * PAIRS + 1)]
            assert set(answers[::2]) <= ({OK} if most <= self.limit else {OK, OOM}), answers
            assert all(freed == OK for took, freed in zip(answers[::2], answers[1::2], strict=False) if took == OK)
            if answers[-1] == OK:
                process.blocks[registers[process][-1]] = ("alloc", size)
        assert self.total() <= max(self.limit, before)
        self.three_accounts_agree()
        # Timing decides whose last allocation was granted. Free these allocations, so that the next steps do not depend
        # on timing.
        for process in self.living:
            if process.blocks.pop(registers[process][-1], None):
                assert process.puppet.result(f"free {registers[process][-1]}") == OK

    @precondition(lambda self: self.living and len(self.children) < 3)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A forked child that does not use CUDA is charged nothing, and does not keep its parent's memory charged."""
        child = data.draw(st.sampled_from(self.living)).puppet.say("fork-away")[1]
        self.children.append(child)
        # When the child has dropped the inherited driver state, it closes its standard input. Wait until then.
        until = time.monotonic() + 20
        while os.path.lexists(f"/proc/{child}/fd/0"):
            assert time.monotonic() < until, "the forked child must close its standard input within 20 s"
            time.sleep(0.001)

    @rule(memory=st.sampled_from([LIMIT, LIMIT // 2, LIMIT * 2, 700 * MIB]))
    def change_the_limit(self, memory: int) -> None:
        limits = layouts.parse_limits(self.host.limits.read_bytes())
        for device in limits["devices"]:
            device["memory_bytes"] = memory
        layouts.rewrite_limits(str(self.host.limits), layouts.as_packed(limits))
        self.limit = memory

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(self.living))
        status, free, total = process.puppet.say("info")
        assert status == OK
        # A dead process may still count as used for a tenth of a second, so `free` may be too low but never too high.
        assert total == self.limit
        assert free <= max(self.limit - self.total(), 0)


def check(programs: Path, **attributes: object) -> None:
    run_state_machine_as_test(
        type("Machine", (Container,), {"programs": programs, **attributes}),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=EXAMPLES <= 12,
            database=None,
            phases=(Phase.generate,),
        ),
    )


def test_accounts_agree_after_every_step(programs: Path) -> None:
    check(programs)


def test_checks_find_a_library_that_does_not_credit_a_free(programs: Path, tmp_path: Path) -> None:
    """The negative control: the sequences find a library that does not credit a free."""
    file, before, after, _unused = MUTANTS["free not credited"]
    with pytest.raises(AssertionError):
        check(programs, library=str(broken(tmp_path, file, before, after)))
