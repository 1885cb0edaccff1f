# SPDX-License-Identifier: Apache-2.0
"""What vgpu-arbiter, the node's service that gives GPU turns to containers, logs about allocations without files."""

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
    """The device plugin makes an allocation's folder first and its files within milliseconds. A line for each pod that
    starts would hide the lines that matter, and the arbiter logs only one line about each allocation.
    """
    until = time.monotonic() + PATIENCE_S
    seen: dict[str, Path] = {}
    while time.monotonic() < until and "late" not in (tmp_path / "log").read_text():
        # Creates and removes a folder, as for an allocation that ends at once.
        name = f"short-{len(seen)}"
        seen[name] = tmp_path / "allocations" / name
        seen[name].mkdir()
        (tmp_path / "allocations" / "late").mkdir(exist_ok=True)
        time.sleep(0.05)
        seen[name].rmdir()
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 1 and "late: limits: No such file" in lines[0], lines
    assert arbiter.poll() is None
