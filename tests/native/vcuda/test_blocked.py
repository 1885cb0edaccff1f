# SPDX-License-Identifier: Apache-2.0
"""Tests that the library causes no deadlock and no error while a driver call waits for the GPU's work or calls back a
tool, such as a profiler."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import LINKED, OK, OOM, Host, compile_program


@pytest.fixture(scope="module")
def blocked(programs: Path) -> Path:
    return compile_program(programs, "blocked", "blocked.c", flags=(*LINKED, "-rdynamic", "-fno-builtin"))


# Time limit in seconds. The library's gate, which delays allocations during a measurement, had a timeout of 10 s in the
# past; this limit is shorter, so that such a wait fails the test.
PATIENCE_S = 8


def said(host: Host, program: Path, what: str, settled: bool = True, **options: bool) -> str:
    """Returns the first line that the program prints. If `settled`, asserts that the ledger (the container's record of
    its GPU memory) charges exactly the memory on the GPU.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["timeout", str(PATIENCE_S), program, what], env=host.env(**options), **pipes) as process:  # type: ignore[call-overload]
        line = process.stdout.readline()
        if line and settled and options.get("preload", True):
            assert host.charged() == host.on_card()
        process.stdin.close()
    return line.strip()


@pytest.mark.parametrize("preload", [True, False], ids=["limited", "without the library"])
@pytest.mark.parametrize("what", ["load", "library", "create", "second"])
def test_tool_callback_inside_a_driver_call_succeeds(host: Host, blocked: Path, what: str, preload: bool) -> None:
    assert said(host, blocked, what, preload=preload) == "0 0 0"


@pytest.mark.parametrize("preload", [True, False], ids=["limited", "without the library"])
def test_slow_load_delays_no_other_context(host: Host, blocked: Path, preload: bool) -> None:
    assert said(host, blocked, "slow", preload=preload) == "0 0 0"


@pytest.mark.parametrize("preload", [True, False], ids=["limited", "without the library"])
def test_blocked_free_delays_no_load_or_allocation(host: Host, blocked: Path, preload: bool) -> None:
    assert said(host, blocked, "free", preload=preload) == "0 0 0"


@pytest.mark.parametrize("preload", [True, False], ids=["limited", "without the library"])
def test_blocked_allocation_hides_no_loaded_code(host: Host, blocked: Path, preload: bool) -> None:
    """The blocked thread's memory is charged before the driver's call, so code can be charged meanwhile. The program
    loads more code than the limit permits."""
    assert said(host, blocked, "held", preload=preload) == f"{OOM if preload else OK} 0 0"
