# SPDX-License-Identifier: Apache-2.0
"""Runs programs in two slices (shares of a GPU) at once and creates a folder that both slices see. No program starts
before both slices are prepared. Two runs of the same program start AHEAD_S seconds apart, because each run first
measures how long a GPU kernel takes undisturbed.
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
# Seconds between the starts of two runs of the same program.
AHEAD_S = 0.7
# Path of the shared folder in both slices.
MEETING = "/dev/vgpu-beside"
# Prefix of the shared folder's name on the host, next to the device plugin's socket. The run id follows.
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
        os.chmod(path, 0o777)  # Give all users access, because the containers may run as other users.
    except OSError as fault:
        raise RunnerError(f"cannot create a folder that two slices share: {path}: {fault.strerror}") from None
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
    """Runs a program in both slices and returns both outcomes. If ``their_argv`` is empty, both run ``argv``, AHEAD_S
    seconds apart. Else the two programs differ and wait for each other themselves. If one slice cannot be prepared, no
    program starts and the fault is raised. If one slice fails later, the function waits for the other slice first.

    A thread prepares ``theirs``. ``ours`` is prepared only when ``theirs`` waits for its start. The reason is that a
    runner may fork: a fork while the thread works may copy a locked lock, which nothing releases in the child.
    """
    laid_out, go, given_up = threading.Event(), threading.Event(), threading.Event()
    found: list[Outcome] = []
    faults: list[Exception] = []

    def wait(_pid: int) -> None:
        laid_out.set()
        if not go.wait(WAIT_S) or given_up.is_set():
            raise RunnerError("the program in the other slice was not started")

    def run_theirs() -> None:
        try:
            found.append(theirs.run(their_argv or argv, timeout, wait))
        except Exception as fault:
            faults.append(fault)  # Store the exception. The caller's thread raises it.
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
