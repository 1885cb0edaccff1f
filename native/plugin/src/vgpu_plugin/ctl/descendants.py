# SPDX-License-Identifier: Apache-2.0
"""Kills the background processes that a program left running in its slice, before the slice is freed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
# Maximum wait for killed processes. A process inside a driver call ends only when that call returns.
PATIENCE_S = 10.0


def adopt() -> None:
    """Makes this process the parent of all its descendants whose own parent ends, so that ``end`` finds them."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end(patience_s: float = PATIENCE_S) -> list[int]:
    """Kills every child of this process, including processes that become its children meanwhile. Returns the processes
    that did not end. Call this only in a process whose children must all end.
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
    """Returns the children of all threads of this process, including zombies."""
    found: list[int] = []
    for one in Path("/proc/self/task").glob("*/children"):
        # The thread has ended since it was listed.
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in one.read_text().split()]
    return found
