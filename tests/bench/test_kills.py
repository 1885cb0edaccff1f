# SPDX-License-Identifier: Apache-2.0
"""Processes killed at any moment: nothing is lost, nobody waits."""

from __future__ import annotations

import dataclasses
import subprocess

import figures
import pytest
from conftest import LIBRARY, LIMIT, Bench


@dataclasses.dataclass
class Outcome:
    trials: int
    stalled: int
    leaked: int
    over: int
    slow: int
    stall_us: int
    wait_us: int

    def whole(self, wanted: int) -> bool:
        return self.trials == wanted and not (self.stalled or self.leaked or self.over)

    def __str__(self) -> str:
        return (
            f"{self.trials} kills: {self.stalled} stalled for 4 s, {self.slow} for 100 ms, "
            f"{self.leaked} slices not whole, longest stall {self.stall_us / 1000:.1f} ms, "
            f"longest wait for the quota {self.wait_us / 1000:.1f} ms"
        )


def kill(bench: Bench, library: str, mode: str, trials: int, seed: int) -> Outcome:
    return Outcome(*bench.run("killer", library, trials, mode, LIMIT, seed, timeout=3600)[0])


MODES = {"kills": "alone", "replaced": "replaced", "early": "early"}


@pytest.mark.parametrize("name", MODES)
def test_random_kills(bench: Bench, sizes: dict, row, name: str) -> None:
    ours = kill(bench, LIBRARY, MODES[name], sizes[name], 1)
    assert bench.charged() == bench.on_card() == 0
    theirs = kill(bench, bench.naive, MODES[name], sizes[name], 1)
    row(
        name,
        "nobody stalls for 4 s, every slice is whole to the byte",
        lambda one: one.whole(sizes[name]),
        ours,
        str(ours),
        theirs,
        f"ended after {theirs.trials} kills, {theirs.stalled} survivors stalled, {theirs.leaked} slices not whole",
    )


def test_a_kill_at_each_instruction(bench: Bench, sizes: dict, row) -> None:
    if not sizes["each"]:
        figures.FIGURES[
            "each"
        ].why = "single-stepping each instruction is in make bench-long; every 13th is in make test"
        return
    kills, instructions = bench.run("stepper", LIBRARY, sizes["each"], LIMIT, timeout=3600)[0]
    assert bench.charged() == bench.on_card() == 0
    argv, env = bench.command("stepper", bench.naive, 97, LIMIT)
    control = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600, check=False)
    row(
        "each",
        "the survivor takes the whole slice each time",
        lambda whole: whole,
        kills >= instructions > 100,
        f"killed at each of {kills} instructions, the slice whole each time",
        control.returncode == 0,
        control.stderr.strip()[-120:],
    )
