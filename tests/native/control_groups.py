# SPDX-License-Identifier: Apache-2.0
"""Fixtures for control groups of version 2: their mount point, and groups for a single test."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Yields a writable mount point of control groups version 2; mounts them itself if the system has none."""
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
    """Yields a function that creates groups below a group for this test; removes all of them at the end."""
    top = root / f"gpusim-{os.getpid()}-{time.monotonic_ns()}"

    def make(name=""):
        path = top / name if name else top
        path.mkdir(parents=True, exist_ok=True)
        return path

    make()
    yield make
    # Remove also groups that a program under test created.
    for one, _folders, _files in os.walk(top, topdown=False):
        for _attempt in range(100):
            try:
                os.rmdir(one)
                break
            except OSError:
                time.sleep(0.02)


def enter(path: Path) -> list[str]:
    """Returns the words to put before a command line, so that the command runs in this group."""
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(path)]
