# SPDX-License-Identifier: Apache-2.0
"""Tests node.py, which runs the programs of a node in a folder, on the simulated driver: the node starts, its slices
(parts of the GPU) can be used, and nothing of it remains afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Check

PROGRAM = ROOT / "tests/gpu/node.py"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a tmpfs for each allocation")


@pytest.fixture
def place() -> Iterator[Path]:
    """Returns a folder with a short path, because a socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="n-") as folder:
        yield Path(folder)


def run(check: Check, place: Path, *words: str) -> subprocess.CompletedProcess:
    subprocess.run(["make", "-s", "-C", ROOT / "native/plugin", "proto", f"PYTHON={sys.executable}"], check=True)
    env = dict(check.env, TMPDIR=str(place))
    return subprocess.run(
        [sys.executable, PROGRAM, *words], env=env, capture_output=True, text=True, timeout=300, check=False
    )


def test_program_in_a_slice_sees_its_part_of_the_memory(check: Check, place: Path) -> None:
    ask = "from gpucheck import nvml; print(nvml.Card().memory()['total'] >> 20)"
    inside = f'PYTHONPATH={ROOT}/tests/gpu "$VGPUCTL" exec -- {sys.executable} -c "{ask}"'
    done = run(check, place, "--split", "3", "--", "sh", "-c", inside)
    assert (done.returncode, done.stdout.strip()) == (0, str(143771 // 3)), done.stderr


def test_isolation_check(check: Check, place: Path) -> None:
    done = run(check, place, "--isolation", "--duration", "1")
    (result,) = json.loads(done.stdout)["results"]
    verdicts = {one["name"]: one["verdict"] for one in result["checks"]}
    assert done.returncode == 0 and verdicts["limit-exact"] == verdicts["outside-memory"] == "passed", verdicts


def test_nothing_of_the_node_stays(check: Check, place: Path) -> None:
    done = run(check, place, "--", "sh", "-c", "exit 5")
    assert done.returncode == 5 and not list(place.iterdir())
    assert str(place) not in Path("/proc/self/mounts").read_text()


@pytest.mark.parametrize("words", [[], ["--isolation", "--", "true"]])
def test_command_or_isolation_is_expected(check: Check, place: Path, words: list[str]) -> None:
    done = run(check, place, *words)
    assert done.returncode == 2 and "expected a command, or --isolation" in done.stderr


def test_node_without_a_gpu_does_not_start(check: Check, place: Path) -> None:
    (check.folder / "host.profile").write_text("driver_version = 580.1\nnonsense\n")
    done = run(check, place, "--patience", "3", "--", "true")
    assert done.returncode == 2 and "the device plugin offers no slices" in done.stderr
