# SPDX-License-Identifier: Apache-2.0
"""A launch within its budget looks up its kernel's learned GPU time in the cost table, and reads the clock only
sometimes.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import compile_program

PURE = tuple(f"../../../../native/vcuda/src/compute/{name}.c" for name in ("pace", "cost"))


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory):
    program: Path = compile_program(tmp_path_factory.mktemp("costs"), "costs", "costs.c", *PURE)

    def run(*words: object) -> list:
        done = subprocess.run([program, *map(str, words)], check=True, stdout=subprocess.PIPE, text=True)
        return [int(line) for line in done.stdout.split()]

    return run


# About five of 200 random keys collide in the table of 4096 entries.
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


# Launch shapes as (grid x, grid y, grid z, block width). Each shape may change a kernel's time, so each has a key.
SHAPES = [(x, y, z, block) for x in (1, 132) for y in (1, 3) for z in (1, 5) for block in (32, 256)]


def test_key_depends_on_the_grid_and_the_block_width(costs) -> None:
    assert costs("keys", *(part for shape in SHAPES for part in shape)) == [len(SHAPES)]


# The numbers of kernels are small, about the table's capacity, and far above the capacity.
@pytest.mark.parametrize("count", [1000, 16_000, 60_000])
def test_kernels_beyond_the_table_size_are_charged_a_learned_cost(costs, count: int) -> None:
    """The charge must not be the 2 ms of an unmeasured kernel."""
    mean, most = costs("crowd", count, 10, 20_000)
    assert 20_000 <= mean <= 40_000 and most <= 40_000, (mean, most)


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
    ("pause of nearly the counter's range", [(1 << 32) - 14 * GAP], [0]),
]


@pytest.mark.parametrize(("words", "answers"), [row[1:] for row in PAUSES], ids=[row[0] for row in PAUSES])
def test_pauses_are_detected(costs, words: list, answers: list) -> None:
    assert costs("pauses", GAP, *words) == answers


GO, WAIT, MS = 0, 1, 1_000_000
# columns: balance of the budget in ns, rate at which the budget refills in ppm of real time, cost of the launch in ns,
# time that the launch has waited in ns; expected longest further wait in ns, where 0 means that the launch starts at
# once
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
    # After the full wait the launch starts. A wait is cut at 10 ms, so that the library reads the limits and the
    # arbiter's page again.
    assert not longest or waits == 10 * MS or then > 0


# columns: case, measured times of single launches in ns; expected: 1 if the kernel then counts as known, so that its
# launches share a measurement, and the range of the learned cost in ns
LEARNED = [
    ("every launch takes the same time", [1000] * 8, 1, (1000, 1000)),
    ("the first launch loads the kernel", [60_000] + [1000] * 8, 1, (1000, 1000)),
    ("the first launch loads a long kernel", [9 * MS] + [50_000] * 8, 1, (50_000, 50_000)),
    ("every third launch is long", [20_000, 20_000, 5 * MS] * 4, 0, (600_000, 3 * MS)),
    ("short and long launches alternate", [20_000, 5 * MS] * 6, 1, (2 * MS, 4 * MS)),
    ("too few launches", [1000] * 4, 0, (1000, 2 * MS)),
]


@pytest.mark.parametrize(("took", "known", "cost"), [row[1:] for row in LEARNED], ids=[row[0] for row in LEARNED])
def test_kernel_is_known_unless_its_durations_vary_widely(costs, took: list, known: int, cost: tuple) -> None:
    answer, ns = costs("learns", *took)
    assert answer == known and cost[0] <= ns <= cost[1], (answer, ns)
