# SPDX-License-Identifier: Apache-2.0
"""Read a file, and replace one in a single step, so that a killed run leaves the old or the new bytes."""

from __future__ import annotations

import contextlib
import os


def read_bytes(path: str) -> bytes | None:
    """The bytes of a file, None where it is missing."""
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def write_text(path: str, text: str, mode: int = 0o644) -> None:
    """``write_bytes`` of a text in UTF-8."""
    write_bytes(path, text.encode("utf-8"), mode)


def write_bytes(path: str, data: bytes, mode: int = 0o644) -> None:
    """Replace the file in one step. Owner and mode of a file that is there stay; ``mode`` is for a new one."""
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    # Always the same name: the next writer of this file removes what a killed run left.
    fresh = os.path.join(folder, f".{os.path.basename(path)}.vgpu-new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh)
    handle = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            try:
                old = os.stat(path)
                os.fchown(stream.fileno(), old.st_uid, old.st_gid)
                os.fchmod(stream.fileno(), old.st_mode & 0o7777)
            except FileNotFoundError:
                os.fchmod(stream.fileno(), mode)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        raise
