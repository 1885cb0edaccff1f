# SPDX-License-Identifier: Apache-2.0
"""The folders of this program, and the lock that keeps a second one off the node."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from ..errors import Fatal
from .paths import Paths


@contextlib.contextmanager
def claimed(paths: Paths) -> Iterator[None]:
    """Makes the folders and holds the lock meanwhile: two plugins on one node would take the socket from each other
    again and again. Raises Fatal.
    """
    make_folders(paths)
    try:
        lock = open(paths.lock, "a+")  # noqa: SIM115 - closed below, with the lock
    except OSError as fault:
        raise Fatal(f"{paths.lock} cannot be opened: {fault}; is {paths.state_dir} writable?") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise Fatal(
                f"{paths.lock}: another vgpu-device-plugin runs already (pid {holder}); stop it first"
            ) from None
        # The pid is for people; the lock is what counts, and it needs no room on a full disk.
        with contextlib.suppress(OSError):
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        yield


def make_folders(paths: Paths) -> None:
    """Raises Fatal."""
    for folder in (paths.run_dir, paths.state_dir):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if folder.stat().st_mode & 0o7777 != 0o755:
                os.chmod(folder, 0o755)
        except OSError as fault:
            raise Fatal(f"{folder} cannot be made ready: {fault}; this program keeps its files there") from None
