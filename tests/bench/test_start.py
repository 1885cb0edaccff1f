# SPDX-License-Identifier: Apache-2.0
"""Measures what the library costs at the start of a program: of one CUDA program, of hundreds of CUDA programs at once,
and of a program without CUDA."""

from __future__ import annotations

import os
import subprocess
import time

from conftest import BARE, LIBRARY, Bench
from test_calls import Cost, cost


def started(bench: Bench, library: str) -> tuple[Cost, float, float]:
    """Returns three values: the additional cost of a start with the library (instructions, system calls), and the
    milliseconds of a start without and with the library, each the minimum of 9 starts."""
    one = cost(bench, library, "link", "start", 1)
    times = [min(bench.run("crowd", which, 1, "start")[0][3] for _unused in range(9)) for which in (BARE, library)]
    return one, times[0] / 1000, times[1] / 1000


def test_cost_of_a_program_start_is_within_its_gate(bench: Bench, row) -> None:
    # The container's first process measures the size of a context; later processes read it.
    bench.run("crowd", LIBRARY, 1, "start")
    ours, theirs = started(bench, LIBRARY), started(bench, bench.naive)
    row(
        "start",
        "at most 500 000 instructions outside the driver, and at most 15 times the time of a start without the library",
        lambda one: one[0].beside <= 500_000 and one[2] <= 15 * one[1],
        ours,
        f"{ours[0].beside} instructions outside the driver, {ours[0].driver} calls into it; {ours[2] - ours[1]:.1f} ms",
        theirs,
        f"{theirs[0].beside} instructions outside the driver; {theirs[2] - theirs[1]:.1f} ms",
    )


def test_hundreds_start_at_once(bench: Bench, sizes: dict, row) -> None:
    """If processes had to start one after the other, they would sleep far longer than they run or are ready to run. A
    busy machine only makes processes longer ready to run."""
    count = sizes["together"]
    bench.run("crowd", LIBRARY, 1, "start")
    found: dict = {}
    # On a busy machine the negative control may be ready to run for long too, so its greatest ratio of three runs
    # counts.
    for library in (BARE, LIBRARY, *[bench.naive] * 3):
        failed, wall, processor, slowest, slept, ready = bench.run("crowd", library, count, "start")[0]
        assert failed == 0
        walls = wall / (processor / (os.cpu_count() or 1))
        one = (slept / ready, processor / count / 1000, slowest / 1000, walls)
        found[library] = max(one, found.get(library, one))
    row(
        "together",
        "asleep at most 30 times as long as running or ready to run, with the waits for the simulated driver's locks",
        lambda one: one[0] <= 30,
        found[LIBRARY],
        f"{count} at once: asleep {found[LIBRARY][0]:.2f} times as long as running or ready (without the library "
        f"{found[BARE][0]:.2f}); elapsed {found[LIBRARY][3]:.1f} times the processor time divided by the processors; "
        f"{found[LIBRARY][1]:.1f} ms of processor time each (without the library {found[BARE][1]:.1f}), slowest start "
        f"{found[LIBRARY][2]:.0f} ms",
        found[bench.naive],
        f"asleep {found[bench.naive][0]:.0f} times as long as running or ready, "
        f"slowest start {found[bench.naive][2]:.0f} ms",
    )


def spawn_us(library: str, rounds: int) -> float:
    env = {"PATH": os.environ["PATH"], **({"LD_PRELOAD": library} if library else {})}
    each = []
    for _unused in range(rounds):
        began = time.perf_counter()
        subprocess.run(["/bin/true"], env=env, check=True)
        each.append((time.perf_counter() - began) * 1e6)
    return min(each)


def test_cost_for_a_program_without_cuda_is_within_its_gate(bench: Bench, sizes: dict, row) -> None:
    bare = bench.run("steps", BARE, "exec", "/bin/true")[0]
    found = {}
    for library in (LIBRARY, bench.naive):
        ours = bench.run("steps", library, "exec", "/bin/true")[0]
        found[library] = (ours[0] - bare[0], ours[3] - bare[3])
    rounds = 20 * sizes["calls"]
    more = spawn_us(LIBRARY, rounds) - spawn_us(BARE, rounds)
    row(
        "true",
        "at most 60 000 instructions and 16 system calls more than without the library",
        lambda one: one[0] <= 60_000 and one[1] <= 16,
        found[LIBRARY],
        f"{found[LIBRARY][0]} instructions and {found[LIBRARY][1]} system calls more; {more:.0f} µs",
        found[bench.naive],
        f"{found[bench.naive][0]} instructions and {found[bench.naive][1]} system calls more",
    )
