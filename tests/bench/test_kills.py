# SPDX-License-Identifier: Apache-2.0
"""Kills processes of a container at random moments. Afterwards all memory of the killed process must be free again, and
the container's other processes must make progress."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import figures
import pytest
from conftest import LIBRARY, LIMIT, ROOT, Bench, world

# A survivor that waits for a lock checks after 500 us of naps whether the lock's holder lives. A nap takes 20 us or
# more, so these are at most 25 naps. A busy machine makes each nap longer, but never adds naps.
NAPS = 30


@dataclasses.dataclass
class Outcome:
    trials: int
    stalled: int
    leaked: int
    over: int
    slow: int
    own: int
    stall_us: int
    wait_us: int
    holders: int
    naps: int

    def whole(self, wanted: int) -> bool:
        fine = self.trials == wanted and not (self.stalled or self.leaked or self.over)
        return fine and self.naps <= NAPS

    def __str__(self) -> str:
        return (
            f"{self.trials} kills: {self.stalled} survivors stalled for 4 s, {self.leaked} slices missed bytes; "
            f"{self.holders} victims died with the lock, taken over after at most {self.naps} naps of a survivor; "
            f"{self.slow} survivors made no progress for 100 ms, {self.own} without counting waits for a processor; "
            f"longest stall {self.stall_us / 1000:.1f} ms, longest wait for the quota {self.wait_us / 1000:.1f} ms"
        )


def kill(bench: Bench, library: str, mode: str, trials: int, seed: int) -> Outcome:
    return Outcome(*bench.run("killer", library, trials, mode, LIMIT, seed, timeout=3600)[0])


MODES = {"kills": "alone", "replaced": "replaced", "early": "early"}


@pytest.mark.parametrize("name", MODES)
def test_random_kills_lose_no_memory(bench: Bench, sizes: dict, row, name: str) -> None:
    ours = kill(bench, LIBRARY, MODES[name], sizes[name], 1)
    assert bench.charged() == bench.on_card() == 0
    theirs = kill(bench, bench.naive, MODES[name], sizes[name], 1)
    row(
        name,
        f"no survivor stalls, no byte is lost, a dead holder's lock is taken over within {NAPS} naps",
        lambda one: one.whole(sizes[name]),
        ours,
        str(ours),
        theirs,
        f"ended after {theirs.trials} kills, {theirs.stalled} survivors stalled, {theirs.leaked} slices missed bytes",
    )


def test_count_of_naps_detects_a_late_takeover(bench: Bench, tmp_path: Path) -> None:
    """The negative control of the count of naps is a library that checks only once a second whether a lock's holder
    lives."""
    native = ROOT / "native/vcuda"
    source = (native / "src/account/ledger_lock.c").read_text()
    assert source.count("#define PROBE_NS 500000ull") == 1
    late = tmp_path / "ledger_lock.c"
    late.write_text(source.replace("#define PROBE_NS 500000ull", "#define PROBE_NS 1000000000ull"))
    objects = [world.object_of(source) for source in world.sources_of() if source.name != "ledger_lock.c"]
    command = ["cc", "-O2", "-std=c11", "-D_GNU_SOURCE", "-fPIC", "-fvisibility=hidden", "-ftls-model=initial-exec"]
    command += [f"-I{native}/include", f"-I{native}/src", f"-I{native}/src/account"]
    command += ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,nodelete"]
    command += [f"-Wl,--version-script={native}/src/libvgpu.map", "-o", str(tmp_path / "libvgpu.so")]
    subprocess.run([*command, str(late), *map(str, objects)], check=True)
    for seed in range(1, 21):  # Repeat until a killed process held the lock, which is rare.
        found = kill(bench, str(tmp_path / "libvgpu.so"), "alone", 60, seed)
        assert (found.stalled, found.leaked, found.over) == (0, 0, 0)
        if found.holders:
            break
    assert found.holders > 0
    assert found.naps > NAPS


def test_kill_at_each_instruction_loses_no_memory(bench: Bench, sizes: dict, row) -> None:
    if not sizes["each"]:
        figures.FIGURES[
            "each"
        ].why = "a kill at each instruction is part of make bench-long; make test kills at every 13th"
        return
    kills, instructions = bench.run("stepper", LIBRARY, sizes["each"], LIMIT, timeout=3600)[0]
    assert bench.charged() == bench.on_card() == 0
    argv, env = bench.command("stepper", bench.naive, 97, LIMIT)
    control = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600, check=False)
    row(
        "each",
        "after each kill the survivor can allocate the whole slice",
        lambda whole: whole,
        kills >= instructions > 100,
        f"killed at each of {kills} instructions; no byte was lost",
        control.returncode == 0,
        control.stderr.strip()[-120:],
    )
