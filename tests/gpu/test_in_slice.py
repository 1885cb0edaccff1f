# SPDX-License-Identifier: Apache-2.0
"""Tests in_slice.py, which runs a command in a slice (part of a GPU), on the simulated driver: the command must see the
slice's memory, and its exit status is passed on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Check

PROGRAM = ROOT / "tests/gpu/in_slice.py"
SEES = [sys.executable, "-m", "gpucheck.nvml", "0"]


def run(check: Check, folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, PROGRAM, "--folder", folder / "slice", *words]
    return subprocess.run(command, env=check.env, capture_output=True, text=True, timeout=300, check=False)


# options of in_slice.py in addition to the memory
@pytest.mark.parametrize("more", [[], ["--sm", "25", "--arbiter"], ["--oversold", "2048"]])
def test_command_sees_the_memory_of_the_slice(check: Check, tmp_path: Path, more: list[str]) -> None:
    done = run(check, tmp_path, "--memory-mib", "2048", *more, "--", *SEES)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["memory"]["total"] == 2048 << 20


def test_oversold_slice_has_neighbours_that_fill_the_gpu(check: Check, tmp_path: Path) -> None:
    ask = f"{ROOT}/native/build/gpusim/gpusimctl usage --json"
    done = run(check, tmp_path, "--memory-mib", "2048", "--oversold", "4096", "--", "sh", "-c", ask)
    assert done.returncode == 0, done.stderr
    (gpu,) = json.loads(done.stdout)["gpus"]
    assert 4000 <= gpu["free"] >> 20 <= 4096


def test_exit_status_is_that_of_the_command(check: Check, tmp_path: Path) -> None:
    assert run(check, tmp_path, "--memory-mib", "64", "--", "sh", "-c", "exit 7").returncode == 7


# columns: options that are refused; expected word of the message
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--memory-mib", "0", "--", "true"], "--memory-mib"),
        (["--memory-mib", "64", "--sm", "101", "--", "true"], "--sm"),
        (["--memory-mib", "64", "--oversold", "63", "--", "true"], "--oversold 63"),
        (["--memory-mib", "64"], "command"),
        (["--memory-mib", "64", "--gpu", "7", "--", "true"], "no such GPU"),
    ],
)
def test_invalid_options_are_refused(check: Check, tmp_path: Path, words: list[str], named: str) -> None:
    done = run(check, tmp_path, *words)
    assert done.returncode == 2 and named in done.stderr
