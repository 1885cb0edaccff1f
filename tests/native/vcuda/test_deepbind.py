# SPDX-License-Identifier: Apache-2.0
"""Tests the GPU memory limit in a library that a program opens with RTLD_DEEPBIND, as taichi does. The opened library
finds libc's dlsym and the driver's functions before those of the preloaded libvgpu.so, but the limit must still apply.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import LIMIT, LINKED, MIB, OK, OOM, Host, compile_program

INNER = {"by dlsym": ("-ldl",), "linked": ("-DLINKED", *LINKED)}
# Columns: the bytes that the opened library requests; whether libvgpu.so is preloaded; the expected CUresult.
CASES = [(LIMIT, True, OOM), (LIMIT, False, OK), (64 * MIB, True, OK)]


@pytest.fixture(params=INNER)
def program(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    inner = tmp_path / "inside"
    inner.mkdir()
    compile_program(inner, "inner.so", "deep_inner.c", flags=("-shared", "-fPIC", *INNER[request.param]))
    return compile_program(tmp_path, "deep", "deep.c", flags=("-ldl", "-Wl,-rpath,$ORIGIN/inside"))


@pytest.mark.parametrize(("size", "preload", "answer"), CASES)
def test_deepbound_library_is_limited(host: Host, program: Path, size: int, preload: bool, answer: int) -> None:
    """The limit applies to the opened library. The loader finds this library only through the run path of the program
    that opens it."""
    command = [program, str(size)]
    done = subprocess.run(command, env=host.env(preload=preload), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{answer}\n", "")
