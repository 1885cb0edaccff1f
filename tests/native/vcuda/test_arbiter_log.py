# SPDX-License-Identifier: Apache-2.0
"""vgpu-arbiter is the node's service that gives containers turns on a GPU; it reads the files of each allocation
(container). The test checks what the arbiter logs about an allocation that has a folder but no files."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import BUILD

PATIENCE_S = 20


@pytest.fixture
def arbiter(tmp_path: Path) -> Iterator[subprocess.Popen]:
    (tmp_path / "allocations").mkdir()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([BUILD / "vgpu-arbiter", "--run", tmp_path], stderr=log)
    yield process
    process.terminate()
    assert process.wait(10) == 0


def test_young_allocation_is_not_reported_and_a_broken_one_is(arbiter: subprocess.Popen, tmp_path: Path) -> None:
    """The device plugin first makes an allocation's folder, and its files milliseconds later. The arbiter must not log
    this normal state, because a line for each new pod would hide the lines that matter. If the files stay missing, the
    arbiter logs a single line."""
    until = time.monotonic() + PATIENCE_S
    seen: dict[str, Path] = {}
    while time.monotonic() < until and "late" not in (tmp_path / "log").read_text():
        # Creates a folder and removes it again, as for an allocation that ends at once.
        name = f"short-{len(seen)}"
        seen[name] = tmp_path / "allocations" / name
        seen[name].mkdir()
        (tmp_path / "allocations" / "late").mkdir(exist_ok=True)
        time.sleep(0.05)
        seen[name].rmdir()
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 1 and "late: limits: No such file" in lines[0], lines
    assert arbiter.poll() is None
