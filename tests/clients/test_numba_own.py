# SPDX-License-Identifier: Apache-2.0
"""Runs numba-cuda's own driver tests in a slice (part of a GPU) and without the library: each must have the same
result.

Simulated kernels compute nothing, so tests that need a computed result fail in both places. The comparison shows that
no test detects the slice.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

from conftest import MIB, Machine

SLICE = 8 * 1024 * MIB


def test_each_test_has_the_same_verdict_inside_and_outside(tmp_path: Path) -> None:
    machines = {"outside": Machine(tmp_path / "outside", None), "inside": Machine(tmp_path / "inside", SLICE)}
    running = {
        where: subprocess.Popen(
            machine.command(13, "numba_own.py", str(machine.folder / "report")),
            env=machine.env,
            cwd=machine.folder,
            stdout=(machine.folder / "log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        for where, machine in machines.items()
    }
    for where, process in running.items():
        log = machines[where].folder / "log"
        assert process.wait(900) == 0, f"{where}: {log.read_text(errors='replace')[-2000:]}"
    outside, inside = (json.loads((one.folder / "report").read_text()) for one in machines.values())
    assert {test: verdict for test, verdict in inside.items() if outside.get(test) != verdict} == {}
    assert set(outside) == set(inside)
    counts = Counter(inside.values())
    assert counts["ok"] >= 195, f"expected 195 passed tests or more (203 with numba-cuda 0.30.4), found {dict(counts)}"
    assert [machine.on_card() for machine in machines.values()] == [0, 0]
