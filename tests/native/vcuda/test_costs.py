# SPDX-License-Identifier: Apache-2.0
"""Tests the arithmetic that limits launches. The library measures how much GPU time each kernel takes (its cost) and
keeps the costs in a table. Each launch is charged the cost of its kernel, and waits if its container's budget of GPU
time is empty. To save time, only some launches read the clock."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import compile_program

US, MS = 1000, 1_000_000
PURE = tuple(f"../../../../native/vcuda/src/compute/{name}.c" for name in ("pace", "cost"))


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory):
    program: Path = compile_program(tmp_path_factory.mktemp("costs"), "costs", "costs.c", *PURE)

    def run(*words: object) -> list:
        done = subprocess.run([program, *map(str, words)], check=True, stdout=subprocess.PIPE, text=True)
        return [int(line) for line in done.stdout.split()]

    return run


# The table has 4096 entries. If the keys of the 200 kernels were random, about five of them would share an entry with
# another kernel.
@pytest.mark.parametrize("base", [0x55D1C0A01000, 0x7F3A00000010, 0x1000])
@pytest.mark.parametrize("step", [0x10, 0x40, 0xC0, 0x200, 0x240, 0x1000, 0x4010, 0x10000])
@pytest.mark.parametrize("shape", [(1, 1), (132, 1), (4096, 64)])
def test_adjacent_functions_have_separate_entries(costs, base: int, step: int, shape: tuple) -> None:
    assert costs("entries", base, step, 200, *shape)[0] >= 180


def test_function_has_an_entry_for_each_grid(costs) -> None:
    keys = [costs("entries", 0x55D1C0A01000, 0, 1, x, y)[0] for x, y in ((1, 1), (2, 1))]
    assert keys == [1, 1]
    assert costs("entries", 0x55D1C0A01000, 0, 200, 7, 7) == [1], (
        "one kernel with one grid must always use the same entry"
    )


# Launch shapes as (grid x, grid y, grid z, block width). A kernel may take a different time for each shape, so each
# shape must have its own key.
SHAPES = [(x, y, z, block) for x in (1, 132) for y in (1, 3) for z in (1, 5) for block in (32, 256)]


def test_key_depends_on_the_grid_and_the_block_width(costs) -> None:
    assert costs("keys", *(part for shape in SHAPES for part in shape)) == [len(SHAPES)]


# Numbers of kernels: a few, about as many as the table can hold, and far more.
@pytest.mark.parametrize("count", [1000, 16_000, 60_000])
def test_kernels_beyond_the_table_size_are_charged_a_learned_cost(costs, count: int) -> None:
    """A kernel without an entry in the table must be charged a cost near that of other kernels. It must not be charged
    2 ms like a kernel that was never measured."""
    mean, most = costs("crowd", count, 10, 20_000)
    assert 20_000 <= mean <= 40_000 and most <= 40_000, (mean, most)


# Each row describes a segment (launches measured together) whose end could not be recorded at once. Columns: predicted,
# measured and host time in ms; the charge in ms if no other container used the GPU, and if another one may have used
# it. In the latter case at least 3/8 of the measured time without the host time is charged.
GOES_ON = [(5, 5, 5, 5, 5), (2, 6, 7, 2, 2), (200, 250, 4000, 200, 200), (5, 50, 1, 49, 18.375), (5, 1, 0, 1, 1)]


@pytest.mark.parametrize(("predicted", "took", "host", "alone", "shared"), GOES_ON)
@pytest.mark.parametrize("known", [0, 1])
def test_segment_that_goes_on_is_charged(costs, predicted, took, host, alone, shared, known) -> None:
    for exclusive, charge in ((1, alone), (0, shared)):
        found = costs("settles", 1, predicted * MS, known, exclusive, took * MS, host * MS, 0)
        assert found == [int(charge * MS)], exclusive


# Each row describes a segment of one stream during whose beginning another stream of the program ran. Columns: measured
# and host time in us; the part of the measured time that is already charged to the other stream; the charge in us of a
# segment whose kernels are not known yet. The stream can have been idle for at most the host time, which starts at the
# segment's begin. So the part of the host time that is charged already is not subtracted from the rest.
OVERLAPPED = [(400, 300, 350, 50), (400, 350, 350, 50), (400, 380, 350, 20), (400, 390, 350, 10), (400, 600, 350, 0)]


@pytest.mark.parametrize(("took", "host", "counted", "charge"), OVERLAPPED)
@pytest.mark.parametrize("goes_on", [0, 1])
def test_segment_behind_another_stream_is_charged_the_rest(costs, took, host, counted, charge, goes_on) -> None:
    assert costs("settles", goes_on, 0, 0, 1, took * US, host * US, counted * US) == [charge * US]


# Columns: predicted and measured time and the part that is already charged to another stream, in us; the charge in us.
@pytest.mark.parametrize(
    ("predicted", "took", "counted", "charge"), [(30, 400, 400, 30), (30, 400, 390, 30), (500, 400, 390, 400)]
)
def test_segment_that_goes_on_behind_another_stream_is_charged_as_predicted(
    costs, predicted, took, counted, charge
) -> None:
    found = costs("settles", 1, predicted * US, 1, 1, took * US, 10 * took * US, counted * US)
    assert found == [charge * US]


LOOKS = [
    ([1000] * 9, [1, 0, 0, 0, 1, 0, 0, 0, 1]),
    ([4999] * 5, [1, 0, 0, 0, 1]),
    ([5000] * 5, [1, 1, 1, 1, 1]),
    ([200, 200, 2_000_000, 200, 200], [1, 0, 1, 0, 1]),
]


@pytest.mark.parametrize(("kernels", "looks"), LOOKS)
def test_clock_is_read_before_long_kernels_and_every_fourth_launch(costs, kernels: list, looks: list) -> None:
    assert costs("looks", *kernels) == looks


def test_little_kernel_time_passes_between_clock_readings(costs) -> None:
    """At most 15 us of kernel time run between two clock readings, as README.md states."""
    for took in (200, 1000, 4999, 5000, 60_000):
        unasked = most = 0
        for looked in costs("looks", *[took] * 64):
            unasked = 0 if looked else unasked + took
            most = max(most, unasked)
        assert most <= 15_000


GAP = 46_000
PAUSES = [
    ("launch at the same time", [0], [1]),
    ("launch one gap later", [GAP], [1]),
    ("launch more than a gap later", [GAP + 1], [0]),
    ("three launches without a clock reading, a gap each", ["-", "-", "-", 4 * GAP], [1]),
    ("three launches without a clock reading, then a pause", ["-", "-", "-", 4 * GAP + 1], [0]),
    ("the next clock reading ends the allowance", ["-", "-", "-", 10, 10 + GAP + 1], [1, 0]),
    ("twelve launches without a clock reading", ["-"] * 12 + [50], [1]),
    ("clock read every fourth launch", [word for i in range(1, 9) for word in ("-", "-", "-", 4 * GAP * i)], [1] * 8),
    ("pause of half the counter's range", [1 << 31], [0]),
    ("pause of nearly the counter's range", [(1 << 32) - 50 * GAP], [0]),
]


@pytest.mark.parametrize(("words", "answers"), [row[1:] for row in PAUSES], ids=[row[0] for row in PAUSES])
def test_pauses_are_detected(costs, words: list, answers: list) -> None:
    assert costs("pauses", GAP, *words) == answers


GO, WAIT = 0, 1
# Columns 1 to 4: the budget's balance in ns; the rate at which the budget refills, in ppm of real time; the launch's
# cost in ns; the time in ns for which the launch has waited so far. Column 5: the expected longest further wait in ns;
# 0 means that the launch starts at once.
BUDGETS = [
    *[(1, 300_000, 20_000, 0, 0), (5 * MS, 10_000, 20_000, 0, 0), (-MS, 1_000_000, 20_000, 0, 0)],
    *[(0, 300_000, 2 * MS, 0, 4), (0, 10_000, 2 * MS, 0, 101), (0, 999_999, 2 * MS, 0, 2)],
    *[(0, 300_000, 20_000, 41 * MS, 4), (0, 1, 2 * MS, 0, MS + 1)],
    *[(-1, 300_000, 2 * MS, 0, 7), (-300_000, 300_000, 2 * MS, 0, MS + 5), (-3000, 300_000, 20_000, 41 * MS, 10_005)],
    *[(0, 300_000, 20_000, 0, 6_666_671), (-300 * MS, 300_000, 2 * MS, 0, 10 * MS)],
]


@pytest.mark.parametrize(("balance", "rate", "cost", "waited", "longest"), BUDGETS)
def test_launch_waits_only_until_the_budget_is_positive(
    costs, balance: int, rate: int, cost: int, waited: int, longest: int
) -> None:
    answer, waits, then = costs("decides", balance, rate, cost, waited)
    assert answer == (WAIT if longest else GO)
    assert (0 < waits <= longest) if longest else waits == 0
    # After the full wait the budget is positive, so the launch starts. No wait is longer than 10 ms, because the
    # library must then read the limits and the arbiter's page again. (The arbiter is the node's service that gives
    # containers turns.)
    assert not longest or waits == 10 * MS or then > 0


# Columns 1 and 2: the case; the measured times of single launches in ns. If a launch is a pair, the second number is
# the host time, in which the GPU may have been idle. Column 3: expected 1 if the kernel then counts as known, which
# means that several of its launches may share one measurement. Column 4: the expected range of the learned cost in ns.
LEARNED = [
    ("every launch takes the same time", [1000] * 8, 1, (1000, 1000)),
    ("the first launch loads the kernel", [60_000] + [1000] * 8, 1, (1000, 1000)),
    ("the first launch loads a long kernel", [9 * MS] + [50_000] * 8, 1, (50_000, 50_000)),
    ("every third launch is long", [20_000, 20_000, 5 * MS] * 4, 0, (600_000, 3 * MS)),
    ("short and long launches alternate", [20_000, 5 * MS] * 6, 1, (2 * MS, 4 * MS)),
    ("too few launches", [1000] * 4, 0, (1000, 2 * MS)),
    ("the host is slow at the first two launches", [(52_000, 300_000)] * 2 + [50_000] * 6, 1, (50_000, 50_000)),
    ("the host is slow at every second launch", [50_000, (52_000, 300_000)] * 5, 1, (50_000, 50_000)),
    ("the host is slow at a longer launch", [50_000] * 7 + [(400_000, 300_000)], 1, (50_001, 100_000)),
]


@pytest.mark.parametrize(("took", "known", "cost"), [row[1:] for row in LEARNED], ids=[row[0] for row in LEARNED])
def test_kernel_is_known_unless_its_durations_vary_widely(costs, took: list, known: int, cost: tuple) -> None:
    launches = [launch if isinstance(launch, tuple) else (launch, 0) for launch in took]
    answer, ns = costs("learns", *(f"{ns}:{host}" for ns, host in launches))
    assert answer == known and cost[0] <= ns <= cost[1], (answer, ns)
