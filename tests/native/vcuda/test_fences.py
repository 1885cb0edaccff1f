# SPDX-License-Identifier: Apache-2.0
"""Fences on a driver that fails: none is waited for without end, no event is forgotten, none used after its context."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, compile_program

pytestmark = pytest.mark.own_build

SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def fences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = [str(ROOT / "native/vcuda/src" / name) for name in ("compute/fence.c", "compute/cost.c")]
    return compile_program(tmp_path_factory.mktemp("fences"), "fences", "fences.c", *sources, flags=SANITIZED)


WHAT = ["record", "sticky", "destroyed", "vanished", "refused", "times", "captured", "strict", "marks"]


@pytest.mark.parametrize("what", WHAT)
def test_a_driver_that_fails(fences: Path, what: str) -> None:
    done = subprocess.run(
        [fences, what],
        env={"ASAN_OPTIONS": "detect_leaks=0"},  # the program counts what is live itself
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-2000:]
