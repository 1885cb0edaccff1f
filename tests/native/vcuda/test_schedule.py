# SPDX-License-Identifier: Apache-2.0
"""Tests the schedule of the arbiter, the node's service that gives containers (tenants) turns on a GPU.

The tests call schedule.c step by step through ctypes, with the input that the tenants' programs would write. They
check each tenant's credit (the GPU time in ns that it may still claim) and its gate. A tenant may launch while its gate
is open.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.own_build

VCUDA = Path(__file__).resolve().parents[3] / "native" / "vcuda"
MS = 1_000_000
TURN, CLOSED = 2, 3


class Input(ctypes.Structure):
    _fields_ = [
        ("share_ppm", ctypes.c_uint32),
        ("force", ctypes.c_bool),
        ("high", ctypes.c_bool),
        ("unlimited", ctypes.c_bool),
        *((name, ctypes.c_uint64) for name in ("active_ns", "waiting_ns", "busy_until_ns", "used_ns")),
    ]


class Output(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("gate", "flags", "rate_ppm", "outstanding_max_us")),
        ("turn_start_ns", ctypes.c_uint64),
        ("turn_end_ns", ctypes.c_uint64),
        ("turns", ctypes.c_uint32),
    ]


class Tenant(ctypes.Structure):
    _fields_ = [
        ("present", ctypes.c_bool),
        ("inputs", Input),
        ("out", Output),
        ("active", ctypes.c_bool),
        ("credit", ctypes.c_int64),
        ("waits_since", ctypes.c_uint64),
        ("gave_up", ctypes.c_uint32),
        ("burst", ctypes.c_uint64),
        ("served", ctypes.c_uint64),
        ("used_at", ctypes.c_uint64),
        ("late", ctypes.c_bool),
        ("beyond", ctypes.c_int64),
    ]


class Schedule(ctypes.Structure):
    _fields_ = [
        ("tenant", Tenant * 64),
        ("state", ctypes.c_int),
        ("holder", ctypes.c_int),
        ("alone", ctypes.c_uint),
        *((name, ctypes.c_uint64) for name in ("turn_start", "turn_end", "drain_until", "stepped")),
    ]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "size.c").write_text(
        '#include "schedule.h"\nunsigned long size(void) { return sizeof(struct schedule); }\n'
    )
    command = [os.environ.get("CC", "cc"), "-O1", "-std=c11", "-shared", "-fPIC", "-o", folder / "schedule.so"]
    command += [f"-I{VCUDA / name}" for name in ("include", "arbiter")]
    subprocess.run([*command, VCUDA / "arbiter/schedule.c", folder / "size.c"], check=True)
    library = ctypes.CDLL(str(folder / "schedule.so"))
    library.size.restype = ctypes.c_ulong
    library.schedule_step.restype = ctypes.c_uint64
    library.schedule_step.argtypes = [ctypes.POINTER(Schedule), ctypes.c_uint64]
    assert library.size() == ctypes.sizeof(Schedule)
    return library


class Node:
    """Simulates the tenants of one GPU. A busy tenant launches kernels or waits for its turn; the other tenants are
    idle."""

    def __init__(self, library: ctypes.CDLL, *percents: int, **every: bool) -> None:
        self.library, self.schedule, self.now = library, Schedule(holder=-1), 1000 * MS
        self.ends: dict = {}  # Key: the tenant. Value: the time at which its queued work really ends.
        for i, percent in enumerate(percents):
            self.schedule.tenant[i].present = True
            self.schedule.tenant[i].inputs = Input(share_ppm=percent * 10000, **every)

    def tenant(self, i: int) -> Tenant:
        return self.schedule.tenant[i]

    def run(self, ms: float, *busy: int) -> None:
        """Simulates `ms` milliseconds in steps of 250 us. A busy tenant launches a kernel of 1 ms if its gate is open,
        and otherwise waits."""
        end = self.now + int(ms * MS)
        while self.now < end:
            for i in busy:
                said, out = self.tenant(i).inputs, self.tenant(i).out
                said.active_ns = self.now
                runs = self.ends.get(i, 0) > self.now
                may = out.gate == 1 or (out.gate == TURN and self.now < out.turn_end_ns)
                said.waiting_ns = 0 if may or runs else self.now
                if may and not runs:
                    self.launch(i, 1)
            for i in list(self.ends):
                if self.ends[i] <= self.now:
                    self.tenant(i).inputs.busy_until_ns = 0
                    del self.ends[i]
            self.library.schedule_step(self.schedule, self.now)
            self.now += MS // 4

    def launch(self, i: int, ms: float, used: float | None = None) -> None:
        self.ends[i] = self.now + int(ms * MS)
        self.tenant(i).inputs.busy_until_ns = self.ends[i]
        self.tenant(i).inputs.used_ns += int((ms if used is None else used) * MS)

    def until_turn(self, i: int, *busy: int) -> None:
        for _unused in range(4000):
            if self.tenant(i).out.gate == TURN:
                return
            self.run(0.25, *busy)
        raise AssertionError(f"no turn of tenant {i} in a second")

    def lag(self, i: int, other: int) -> float:
        """Returns by how many ms tenant `i` is owed more than tenant `other`, each credit divided by the share."""
        at = [self.tenant(j).credit / (self.tenant(j).inputs.share_ppm / 1e6) for j in (i, other)]
        return (at[0] - at[1]) / MS


def test_work_queued_while_alone_is_charged_when_another_tenant_waits(library) -> None:
    """Tenant 0 queues 20 ms of work while it is alone. The work runs while tenant 1 waits, so it is charged. The lag is
    then 40 ms: 20 ms divided by the share 0.5."""
    node = Node(library, 50, 50)
    node.run(100, 0)
    node.launch(0, 20)
    node.until_turn(1, 0, 1)
    assert node.tenant(0).out.turns == 0
    assert 0.7 * 40 <= node.lag(1, 0) <= 1.3 * 40


def test_tenant_that_arrives_after_the_queue_drained_is_owed_nothing(library) -> None:
    node = Node(library, 50, 50)
    node.run(100, 0)
    node.run(2, 0)
    node.ends.clear()
    node.tenant(0).inputs.busy_until_ns = 0
    node.until_turn(1, 1)
    assert abs(node.lag(1, 0)) <= 2


@pytest.mark.parametrize(("rest_ms", "left"), [(70, 90), (500, 47), (1200, 0)])
def test_pause_recovers_overuse_at_the_rate_of_the_share(library, rest_ms: int, left: float) -> None:
    """A tenant that used too much GPU time recovers in pauses, at the rate of its share. At a share of 10 %, 100 ms of
    overuse take 1 s to recover, so a shorter pause must clear only a part."""
    node = Node(library, 10, 90)
    node.run(50, 0, 1)
    node.tenant(0).credit = -100 * MS
    node.run(rest_ms, 1)
    assert -node.tenant(0).credit / MS == pytest.approx(left, abs=8)


@pytest.mark.parametrize("alone", [0, 1])
def test_idle_or_lone_tenant_accumulates_no_credit(library, alone: int) -> None:
    node = Node(library, 50, 50)
    node.run(50, 0, 1)
    node.tenant(0).credit = 100 * MS
    node.run(200, alone)
    assert node.tenant(0).credit == 0


def test_kernel_that_outlasts_the_drain_is_charged_in_full(library) -> None:
    """The arbiter waits at most 25 ms until queued work has ended (the drain). A kernel of 100 ms is still charged in
    full."""
    node = Node(library, 50, 50)
    node.run(200, 0, 1)
    node.until_turn(0, 0, 1)
    before = node.lag(0, 1)
    node.launch(0, 100)
    node.until_turn(1, 0, 1)
    assert 170 <= before - node.lag(0, 1) <= 230


def test_overcharge_is_refunded_down_to_the_held_time(library) -> None:
    node = Node(library, 50, 50)
    node.run(200, 0, 1)
    node.until_turn(0, 0, 1)
    before = node.lag(0, 1)
    node.launch(0, 100)
    node.until_turn(1, 0, 1)
    node.tenant(0).inputs.used_ns -= 50 * MS
    node.run(1, 0, 1)
    assert 70 <= before - node.lag(0, 1) <= 130
    node.tenant(0).inputs.used_ns -= 10_000 * MS
    node.run(1, 0, 1)
    assert before - node.lag(0, 1) >= 30  # At least the time for which tenant 0 held the GPU stays charged.


def test_time_used_alone_after_a_late_turn_is_not_owed(library) -> None:
    """A turn is late if its work still runs after it. The arbiter later corrects the charge for this work. GPU time
    that the tenant uses alone must not enter the correction."""
    node = Node(library, 50, 50)
    node.run(200, 0, 1)
    node.until_turn(0, 0, 1)
    node.launch(0, 100)
    node.until_turn(1, 0, 1)
    node.run(70)  # While the rest of the kernel runs, tenant 1 is idle, so no tenant competes.
    node.run(3000, 0)
    node.run(200)
    node.run(200, 1)
    start = node.now
    node.until_turn(0, 0, 1)
    assert (node.now - start) / MS <= 150
    assert node.tenant(0).credit > -200 * MS


def test_forged_usage_of_one_tenant_changes_no_other_balance(library) -> None:
    node = Node(library, 10, 40, 50)
    node.run(300, 0, 1, 2)
    node.until_turn(0, 0, 1, 2)
    node.launch(0, 100)
    node.until_turn(1, 0, 1, 2)
    node.tenant(1).credit, node.tenant(2).credit = 0, 50 * MS  # Tenant 2 is owed 100 ms more than tenant 1.
    node.tenant(0).inputs.used_ns += 2**62
    node.run(0.5, 0, 1, 2)
    assert node.lag(2, 1) == pytest.approx(100, abs=5)
    assert node.tenant(0).credit >= -2000 * MS


@pytest.mark.parametrize(("owes_ms", "within_ms"), [(25, 100), (35, None)])
def test_tenant_that_waited_long_gets_a_turn_if_its_overuse_is_small(
    library, owes_ms: int, within_ms: int | None
) -> None:
    """At a share of 5 %, 25 ms of overuse take half a second to recover. A tenant with so little overuse must get a
    turn within 100 ms. A tenant with more overuse must wait longer."""
    node = Node(library, 5, 95)
    node.run(100, 0, 1)
    node.until_turn(1, 0, 1)
    node.tenant(0).credit, node.tenant(1).credit = -owes_ms * MS, owes_ms * MS
    start = node.now
    node.until_turn(0, 0, 1)
    waited = (node.now - start) / MS
    assert waited <= within_ms if within_ms else waited > 100


@pytest.mark.parametrize(("owed_ms", "soon"), [(3, True), (-3, False)])
def test_short_burst_goes_first_if_the_tenant_has_credit(library, owed_ms: int, soon: bool) -> None:
    node = Node(library, 10, 90)
    for _unused in range(4):  # Tenant 0 uses 1 ms of each turn, so the schedule learns that its bursts are short.
        node.run(10, 1)
        node.tenant(0).inputs.active_ns = node.tenant(0).inputs.waiting_ns = node.now
        node.until_turn(0, 0, 1)
        node.launch(0, 1)
        node.tenant(0).inputs.waiting_ns = 0
        node.run(5, 1)
    assert node.tenant(0).burst > 0
    node.until_turn(1, 1)
    node.run(2, 1)
    node.tenant(0).credit, node.tenant(1).credit = owed_ms * MS, -owed_ms * MS
    start = node.now
    node.until_turn(0, 0, 1)
    assert (node.now - start <= 3 * MS) == soon
