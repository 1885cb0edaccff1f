# SPDX-License-Identifier: Apache-2.0
"""Measures what one driver call costs more with the library than without it. Gates (required bounds) apply to
instructions and system calls; times are only reported, because they vary on a busy machine."""

from __future__ import annotations

import dataclasses
import subprocess
from statistics import median

import pytest
from conftest import BARE, LIBRARY, SIMULATOR, Bench

PAIR, INFO = 300, 500
ROUTES = ("link", "dlsym", "proc")


@dataclasses.dataclass
class Cost:
    """Cost of one call with the library. The cost of the same call without the library is subtracted from
    ``instructions`` (all), ``beside`` (instructions outside the driver), ``system_calls`` and ``clock`` (reads of the
    clock through the vDSO). ``locked`` (instructions with a lock prefix) and ``driver`` (calls into the driver) are
    those of the library."""

    instructions: int
    beside: int
    system_calls: int
    locked: int
    driver: int
    clock: int


def steps(bench: Bench, library: str, route: str, call: str, count: int, blocks: int = 0) -> list:
    """Returns one value for each column of steps.c. The value is the median of the calls, because sometimes a table of
    blocks grows. For a launch it is the minimum: the simulated engine works in real time and adds instructions to some
    launches, also by calls of libc."""
    lines = bench.run("steps", library, route, call, count, blocks)
    assert len(lines) == count
    pick = min if call == "launch" else median
    return [int(pick(column)) for column in zip(*lines)]


def cost(bench: Bench, library: str, route: str, call: str, count: int, blocks: int = 0) -> Cost:
    bare = steps(bench, BARE, route, call, count, blocks)
    ours = steps(bench, library, route, call, count, blocks)
    assert bare[4] == 0
    return Cost(ours[0] - bare[0], ours[1] - bare[1], ours[3] - bare[3], ours[2], ours[4], ours[5] - bare[5])


ROUNDS = 3  # Each round measures without and with the library, so both see a similar load of other programs.

# Call → number of calls in a measured block. For launches it is a quarter of the number of launches between two fences
# (timing events by which the library measures GPU time), so that most blocks contain no fence.
BLOCK = {"launch": 16, "pair": 50, "info": 50}


def times(bench: Bench, library: str, call: str, repeats: int, *how: object) -> float:
    """Returns by how many nanoseconds a call is slower than the same call without the library. The value is the median
    of rounds, each of which is the median of blocks."""
    found = []
    for _unused in range(ROUNDS):
        bare, ours = (
            bench.run("timing", call, BLOCK[call], repeats, *each, preload=preload)[0][0]
            for preload, each in ((BARE, () if how == ("clock",) else how), (library, how))
        )
        found.append(ours - bare)
    return median(found)


def offset(name: str) -> str:
    """Returns the offset of the driver's function in its file, as text."""
    done = subprocess.run(
        ["nm", "-D", "--defined-only", SIMULATOR / "libcuda.so.1"], stdout=subprocess.PIPE, text=True, check=True
    )
    return next("0x" + line.split()[0] for line in done.stdout.splitlines() if line.split()[2].split("@")[0] == name)


def beside(bench: Bench, call: str, repeats: int, *functions: str) -> str:
    """Returns as text how much more a call costs than the driver's own function in the same process. A turn is one
    comparison of the two; a round is a run of the program timing, with many turns. The text is that of the median
    round."""
    where = [offset(name) if name else "0" for name in functions]
    found = [
        bench.run("timing", call, BLOCK[call], repeats, "beside", *where, preload=LIBRARY)[0]
        for _unused in range(ROUNDS)
    ]
    middle, low, high, fence, launches = sorted(found)[ROUNDS // 2]
    said = f"{middle:.1f} ns ({low:.1f} to {high:.1f} in half of the turns) more than the driver's own function"
    return said + (f"; a fence costs {fence:.0f} ns, one in {launches} launches" if launches else "")


def test_allocation_and_free_take_few_instructions(bench: Bench, sizes: dict, row) -> None:
    costs = {route: cost(bench, LIBRARY, route, "pair", sizes["calls"]) for route in ROUTES}
    theirs = cost(bench, bench.naive, "link", "pair", sizes["calls"])
    worst = max(costs.values(), key=lambda one: one.instructions)
    time = beside(bench, "pair", sizes["timed"], "cuMemAlloc_v2", "cuMemFree_v2")
    row(
        "pair",
        f"at most {PAIR} instructions, no system call, no read of the clock through the vDSO",
        lambda one: one.instructions <= PAIR and one.system_calls == one.clock == 0,
        worst,
        f"{worst.instructions} instructions, {worst.system_calls} system calls, {worst.locked} locked; {time}",
        theirs,
        f"{theirs.instructions} instructions, {theirs.system_calls} system calls",
    )


def test_query_of_free_memory_takes_few_instructions(bench: Bench, sizes: dict, row) -> None:
    ours = cost(bench, LIBRARY, "link", "info", sizes["calls"])
    theirs = cost(bench, bench.naive, "link", "info", sizes["calls"])
    time = beside(bench, "info", sizes["timed"], "cuMemGetInfo_v2", "")
    row(
        "info",
        f"at most {INFO} instructions outside the driver, two calls into it, no system call,"
        " no read of the clock through the vDSO",
        lambda one: one.beside <= INFO and one.driver <= 2 and one.system_calls == one.clock == 0,
        ours,
        f"{ours.beside} instructions, {ours.driver} calls into the driver, {ours.system_calls} system calls; {time}",
        theirs,
        f"{theirs.beside} instructions, {theirs.system_calls} system calls",
    )


# Instructions of the simulated engine vary by thousands from launch to launch. So the gate counts instructions outside
# the driver and allows the library one call into the driver.
def launch_gate(instructions: int):
    return lambda one: (
        one.beside <= instructions and one.driver <= 1 and one.locked == one.system_calls == one.clock == 0
    )


LIMITERS = {"launch": (0, 12), "launch-limited": (90, 60)}


@pytest.mark.parametrize("name", LIMITERS)
def test_cost_of_a_kernel_launch(bench: Bench, sizes: dict, row, name: str) -> None:
    percent, most = LIMITERS[name]
    bench.write_limits(sm_percent=percent, core_policy="force" if percent else "default")
    for _unused in range(3):  # The engine only adds instructions, so repeat until the minimum is within the gate.
        costs = [cost(bench, LIBRARY, route, "launch", sizes["calls"]) for route in ROUTES]
        worst = max(costs, key=lambda one: one.beside)
        if worst.beside <= most:
            break
    assert worst.driver == 1, "each launch must pass through the library, which calls the driver once"
    theirs = cost(bench, bench.naive, "link", "launch", sizes["calls"])
    time = beside(bench, "launch", sizes["timed"], "cuLaunchKernel", "cuEventRecord")
    clock = times(bench, BARE, "launch", sizes["timed"], "clock")
    alone = times(bench, LIBRARY, "launch", sizes["timed"], offset("cuLaunchKernel"))
    row(
        name,
        f"at most {most} instructions outside the driver, one call into it, no locked instruction, no system call,"
        " no read of the clock through the vDSO" + (", between two fences" if percent else ""),
        launch_gate(most),
        worst,
        f"{worst.beside} instructions, {worst.locked} locked, {worst.driver} calls into the driver; {time}"
        + (f" (reading the clock once costs {clock:.1f} ns)" if percent else "")
        + f"; {alone:.1f} ns if the driver's function does nothing",
        theirs,
        f"{theirs.beside} instructions, {theirs.locked} of them locked",
    )


def test_alternate_launches_of_two_kernels_take_one_driver_call_each(bench: Bench, sizes: dict, row) -> None:
    """Two kernels with equal grids and adjacent handles have separate entries in the library's table of costs.
    Otherwise the library would measure every launch separately, with more calls into the driver. The gate applies to
    the cheapest launch."""
    bench.write_limits(sm_percent=90, core_policy="force")
    ours, theirs = (
        [int(min(column)) for column in zip(*bench.run("steps", library, "link", "turns", sizes["calls"], 0))]
        for library in (LIBRARY, bench.naive)
    )
    row(
        "turns",
        "one call into the driver, no locked instruction",
        lambda one: one[4] == 1 and one[2] == 0,
        ours,
        f"{ours[4]} calls into the driver, {ours[2]} locked instructions",
        theirs,
        f"{theirs[4]} calls into the driver, {theirs[2]} locked instructions",
    )


def test_cost_of_the_pair_does_not_grow_with_other_processes(bench: Bench, sizes: dict, row) -> None:
    counts = [0, 10, 100, *([1000] if sizes["others"] >= 1000 else [])]
    found, naive = {}, {}
    for others in counts:
        # Contexts do not count against the limit here. Otherwise each of a thousand processes would read the simulated
        # NVML and take two slots of the ledger (the file of charged memory).
        bench.write_limits(16000 << 20, count_context=False)
        with bench.crowd(LIBRARY, others):
            found[others] = cost(bench, LIBRARY, "link", "pair", sizes["calls"])
    # The cost of the negative control does not depend on other processes but on the length of its list of blocks. So it
    # gets as many blocks as the library's test has processes.
    for blocks in (0, counts[-1]):
        naive[blocks] = cost(bench, bench.naive, "link", "pair", sizes["calls"], blocks)
    row(
        "others",
        "at most 10 % more instructions than without other processes, no system call",
        lambda all_of: (
            max(o.instructions for o in all_of) <= 1.1 * all_of[0].instructions
            and all(o.system_calls == 0 for o in all_of)
        ),
        list(found.values()),
        ", ".join(f"{one.instructions} instructions with {others} others" for others, one in found.items()),
        list(naive.values()),
        f"{naive[counts[-1]].instructions} instructions with {counts[-1]} entries in its list",
    )


def test_free_among_many_blocks_takes_at_most_twice_the_instructions(bench: Bench, sizes: dict, row) -> None:
    few, many = 1000, sizes["blocks"]
    ours = [cost(bench, LIBRARY, "link", "free", sizes["calls"], blocks) for blocks in (few, many)]
    theirs = [cost(bench, bench.naive, "link", "free", sizes["calls"], blocks) for blocks in (few, 5 * few)]
    row(
        "blocks",
        "at most twice the instructions of a free among 1000 blocks",
        lambda pair: pair[1].instructions <= 2 * pair[0].instructions,
        ours,
        f"{ours[0].instructions} instructions among {few} blocks, {ours[1].instructions} among {many}",
        theirs,
        f"{theirs[0].instructions} instructions among {few} blocks, {theirs[1].instructions} among {5 * few}",
    )
