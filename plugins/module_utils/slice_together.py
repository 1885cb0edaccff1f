# SPDX-License-Identifier: Apache-2.0
"""Runs one program in two slices at once: neither begins before both are laid out, and one a little after the other,
so that both do not measure at the same moment what a kernel takes by itself.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Sequence

from .mount_namespace import Outcome
from .slice_runner import RunnerError

# Until the other is laid out; longer than an engine takes to start a container, which it ends with a word of its own.
WAIT_S = 90.0
AHEAD_S = 0.7


def run_both(ours: Any, theirs: Any, argv: Sequence[str], timeout: float) -> tuple[Outcome, Outcome]:
    """What became of each. Where one could not be laid out the program is started in neither, and that fault is raised,
    a RunnerError or another; one of them that is at work already is waited for.

    Theirs is laid out in a thread, and ours when theirs waits for its word: a runner may fork, and a fork beside a
    thread at work may copy a lock that nobody will ever open.
    """
    laid_out, go, given_up = threading.Event(), threading.Event(), threading.Event()
    found: list[Outcome] = []
    faults: list[Exception] = []

    def wait(_pid: int) -> None:
        laid_out.set()
        if not go.wait(WAIT_S) or given_up.is_set():
            raise RunnerError("the neighbour of this slice was not started")

    def run_theirs() -> None:
        try:
            found.append(theirs.run(argv, timeout, wait))
        except Exception as fault:
            faults.append(fault)  # told by the caller's thread
        finally:
            laid_out.set()

    thread = threading.Thread(target=run_theirs, daemon=True)
    thread.start()
    laid_out.wait()

    def follow(_pid: int) -> None:
        go.set()
        time.sleep(AHEAD_S)

    try:
        if faults:
            raise faults[0]
        mine = ours.run(argv, timeout, follow)
    finally:
        if not go.is_set():
            given_up.set()
            go.set()
        thread.join()
    if faults:
        raise faults[0]
    return mine, found[0]
