# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests with control groups of version 2: the mount point, and groups that exist for one test."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Yields a writable mount point of control groups version 2. If the system has none, the fixture mounts one."""
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
    """Yields a function that creates groups below one group for this test. All groups are removed at the end."""
    top = root / f"gpusim-{os.getpid()}-{time.monotonic_ns()}"

    def make(name=""):
        path = top / name if name else top
        path.mkdir(parents=True, exist_ok=True)
        return path

    make()
    yield make
    # The program under test may have created groups, so remove all groups below this group.
    for one, _folders, _files in os.walk(top, topdown=False):
        for _attempt in range(100):
            try:
                os.rmdir(one)
                break
            except OSError:
                time.sleep(0.02)


def enter(path: Path) -> list[str]:
    """Returns words to put before a command line, so that the command runs in this group."""
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(path)]
