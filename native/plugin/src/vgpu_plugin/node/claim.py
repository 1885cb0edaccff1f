# SPDX-License-Identifier: Apache-2.0
"""Creates this program's folders, and takes a lock file, so that no second device plugin runs on the node."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from ..errors import Fatal
from .paths import Paths


@contextlib.contextmanager
def claimed(paths: Paths) -> Iterator[None]:
    """Creates the folders, and holds the lock while the program runs. Without the lock, two plugins on one node would
    repeatedly replace each other's socket. Raises Fatal.
    """
    make_folders(paths)
    try:
        # The with statement below closes the file.
        lock = open(paths.lock, "a+")  # noqa: SIM115
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
        # The pid is written into the lock file only for people who read it. The lock needs no disk space, so a full
        # disk is no error.
        with contextlib.suppress(OSError):
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        yield


def make_folders(paths: Paths) -> None:
    """Creates the folders of this program. Raises Fatal."""
    for folder in (paths.run_dir, paths.state_dir):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if folder.stat().st_mode & 0o7777 != 0o755:
                os.chmod(folder, 0o755)
        except OSError as fault:
            raise Fatal(f"{folder} cannot be prepared for this program's files: {fault}") from None
