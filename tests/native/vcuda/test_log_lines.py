# SPDX-License-Identifier: Apache-2.0
"""The library logs only to the file that was the program's standard error at its first GPU call. If the program later
uses descriptor 2 for another file, this file gets no log lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Host

# The program logs to standard error: with the variable LIBCUDA_LOG_LEVEL=3 the library logs each hooked call.
PROGRAM = """
import ctypes, os, sys
cuda = ctypes.CDLL("libcuda.so.1")
size = ctypes.c_size_t()
def call():
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), 0)  # an error in a child
assert cuda.cuInit(0) == 0
{before}
call()
{then}
call()
"""
TAKES_2 = "assert os.open(sys.argv[1], os.O_RDWR | os.O_CREAT) == 2"

# Keys: cases. Values: code before the first call, code after the first call, expected number of lines on standard
# error, expected number of lines in a file that reuses descriptor 2.
WAYS = {
    "standard error stays open": ("", "", 2, 0),
    "standard error is moved and restored": ("", "os.dup2(2, 9); os.close(2); os.dup2(9, 2)", 2, 0),
    "standard error is closed after the first call": ("", "os.close(2)", 1, 0),
    "a file reuses descriptor 2": ("", f"os.close(2); {TAKES_2}", 1, 0),
    "standard error was closed before the first call": ("os.close(2)", TAKES_2, 0, 0),
    "a file reuses descriptor 2 in a forked child": (
        "",
        f"os.fork() and os._exit(os.wait()[1] >> 8); os.close(2); {TAKES_2}",
        1,
        0,
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", ["pipe", "file"])
def test_lines_go_only_to_the_first_standard_error(host: Host, stream: str, way: str) -> None:
    before, then, lines, taken = WAYS[way]
    errors, database = host.folder / "errors", host.folder / "database"
    command = [sys.executable, "-c", PROGRAM.format(before=before, then=then), database]
    target = subprocess.PIPE if stream == "pipe" else os.open(errors, os.O_WRONLY | os.O_CREAT)
    done = subprocess.run(command, env=host.env(LIBCUDA_LOG_LEVEL="3"), stderr=target, text=True, check=False)
    said = done.stderr if stream == "pipe" else Path(errors).read_text()
    assert done.returncode == 0, said
    assert said.count("cuDeviceTotalMem_v2") == lines
    assert database.read_text().count("libvgpu") == taken if database.exists() else taken == 0
