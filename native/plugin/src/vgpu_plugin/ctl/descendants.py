# SPDX-License-Identifier: Apache-2.0
"""What a program left behind when it ended: processes that still use its slice, which is to go to another."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
# A process that the driver holds in the kernel ends only when that lets it go.
PATIENCE_S = 10.0


def adopt() -> None:
    """From now on, descendants of this process whose parent ends become its own children, wherever they went."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end(patience_s: float = PATIENCE_S) -> list[int]:
    """Kill every child of this process, and those that become its children by that; return those that would not end.

    Only for a process that has no children but such.
    """
    until = time.monotonic() + patience_s
    while (left := children()) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    return left


def children() -> list[int]:
    """The children of all threads of this process; those that have ended and wait for it too."""
    found: list[int] = []
    for one in Path("/proc/self/task").glob("*/children"):
        # A thread may have ended since it was listed.
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in one.read_text().split()]
    return found
