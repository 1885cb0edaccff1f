# SPDX-License-Identifier: Apache-2.0
"""Control groups of version 2 for tests: where they are mounted, and groups of a test's own."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Where version 2 of control groups is mounted: here, else a mount of the tests' own."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if line.split()[2] == "cgroup2" and os.access(line.split()[1], os.W_OK):
            yield Path(line.split()[1])
            return
    folder = tmp_path_factory.mktemp("cgroup")
    subprocess.run(["mount", "-t", "cgroup2", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def group(root):
    """A maker of groups below one of the test's own; all are empty and gone at the end."""
    top = root / f"gpusim-{os.getpid()}-{time.monotonic_ns()}"

    def make(name=""):
        path = top / name if name else top
        path.mkdir(parents=True, exist_ok=True)
        return path

    make()
    yield make
    # Also groups that a program under test made below.
    for one, _folders, _files in os.walk(top, topdown=False):
        for _attempt in range(100):
            try:
                os.rmdir(one)
                break
            except OSError:
                time.sleep(0.02)


def enter(path: Path) -> list[str]:
    """Words before a command line: it runs in this group."""
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(path)]
