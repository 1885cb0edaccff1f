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
    """What became of each. Raises RunnerError where one could not be started; the other is ended then.

    The second is started while the first waits: a runner may fork, and a fork beside a thread at work may copy a lock
    that nobody will ever open.
    """
    laid_out, go = threading.Event(), threading.Event()
    found: list[Outcome] = []
    faults: list[RunnerError] = []

    def wait(_pid: int) -> None:
        laid_out.set()
        if not go.wait(WAIT_S):
            raise RunnerError("the neighbour of this slice was not started in time")

    def run_theirs() -> None:
        try:
            found.append(theirs.run(argv, timeout, wait))
        except RunnerError as fault:
            faults.append(fault)
        finally:
            laid_out.set()

    thread = threading.Thread(target=run_theirs, daemon=True)
    thread.start()
    laid_out.wait()
    try:
        if faults:
            raise faults[0]

        def follow(_pid: int) -> None:
            go.set()
            time.sleep(AHEAD_S)

        mine = ours.run(argv, timeout, follow)
    finally:
        go.set()  # where ours did not start either, else it would wait for nobody
        thread.join()
    if faults:
        raise faults[0]
    return mine, found[0]
