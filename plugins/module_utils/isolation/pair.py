# SPDX-License-Identifier: Apache-2.0
"""Runs programs in two slices at once: neither begins before both are laid out, and one a little after the other, so
that both do not measure an undisturbed kernel at the same moment. Makes a folder that both slices see.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import threading
import time
from typing import Any, Iterator, Sequence

from ..host import run_id
from ..host.mount_namespace import Mount, Outcome
from .runner import RunnerError

# Seconds to wait until the other slice is ready; longer than an engine's own time-out for starting a container.
WAIT_S = 90.0
AHEAD_S = 0.7
# The folder's path in both slices, and its name on the host, next to the device plugin's socket, before the run's mark.
MEETING = "/dev/vgpu-beside"
FOLDER = "beside-"


@contextlib.contextmanager
def meeting(run_folder: str) -> Iterator[Mount]:
    """Creates a folder that two slices see, as two pods share a volume. It is removed at the end; if the run is killed,
    the next run or ``clean_up`` removes it. Raises RunnerError.
    """
    clean_up(run_folder)
    path = os.path.join(run_folder, FOLDER + run_id.own())
    try:
        os.mkdir(path, 0o700)
        os.chmod(path, 0o777)  # the containers' users may be others than the host's
    except OSError as fault:
        raise RunnerError(f"no folder for two slices to meet in: {path}: {fault.strerror}") from None
    try:
        yield Mount(MEETING, path, False)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def left_behind(run_folder: str) -> list[str]:
    """Returns the folders of runs that have ended."""
    start = os.path.join(run_folder, FOLDER)
    return [one for one in sorted(glob.glob(f"{glob.escape(start)}*")) if run_id.has_ended(one[len(start) :])]


def clean_up(run_folder: str) -> list[str]:
    """Removes the folders of ended runs; returns the removed folders."""
    left = left_behind(run_folder)
    for one in left:
        shutil.rmtree(one, ignore_errors=True)
    return [one for one in left if not os.path.lexists(one)]


def run_both(
    ours: Any, theirs: Any, argv: Sequence[str], timeout: float, their_argv: Sequence[str] = ()
) -> tuple[Outcome, Outcome]:
    """Runs a program in both slices and returns both outcomes. Both run ``argv`` if ``their_argv`` is empty; else the
    two programs wait for each other themselves. If one slice cannot be prepared, the program starts in neither, and
    the fault is raised, a RunnerError or another. A slice that already works is waited for.

    Theirs is laid out in a thread, and ours when theirs waits for its start: a runner may fork, and a fork during the
    thread's work may copy a lock that nothing will ever open.
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
            found.append(theirs.run(their_argv or argv, timeout, wait))
        except Exception as fault:
            faults.append(fault)  # The caller's thread raises this exception.
        finally:
            laid_out.set()

    thread = threading.Thread(target=run_theirs, daemon=True)
    thread.start()
    laid_out.wait()

    def follow(_pid: int) -> None:
        go.set()
        if not their_argv:
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
