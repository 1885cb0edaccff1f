# SPDX-License-Identifier: Apache-2.0
"""Lets processes of a container allocate the same free bytes at the same moment: together they must not exceed the
limit. The simulated driver's accounting gives the real usage."""

from __future__ import annotations

from conftest import CONTEXT, LIBRARY, LIMIT, MIB, Bench


def race(bench: Bench, library: str, processes: int, rounds: int, piece: int) -> dict:
    limit = bench.limit
    ran, over, most, grants = bench.run("racers", library, processes, rounds, piece, limit)[0]
    return {"rounds": ran, "over": over, "most": most, "grants": grants}


def none_over(found: dict) -> bool:
    return found["over"] == 0 and found["grants"] == found["rounds"]


def test_two_processes_never_exceed_the_limit(bench: Bench, sizes: dict, row) -> None:
    piece = (LIMIT - 2 * CONTEXT) * 2 // 3
    ours = race(bench, LIBRARY, 2, sizes["race"], piece)
    theirs = race(bench, bench.naive, 2, 300, piece)
    row(
        "race",
        "over the limit in no round, one request granted in each",
        none_over,
        ours,
        f"over the limit in {ours['over']} of {ours['rounds']} rounds; {ours['grants']} requests granted",
        theirs,
        f"over in {theirs['over']} of {theirs['rounds']} rounds",
    )


def test_only_one_of_64_processes_gets_the_last_mib(bench: Bench, sizes: dict, row) -> None:
    bench.write_limits(64 * CONTEXT + MIB)
    ours = race(bench, LIBRARY, 64, sizes["last"], MIB)
    theirs = race(bench, bench.naive, 64, 20, MIB)
    row(
        "last",
        "over the limit in no round, one request granted in each",
        none_over,
        ours,
        f"over the limit in {ours['over']} of {ours['rounds']} rounds; {ours['grants']} requests granted",
        theirs,
        f"over in {theirs['over']} of {theirs['rounds']} rounds",
    )
