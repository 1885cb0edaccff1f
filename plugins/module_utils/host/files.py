# SPDX-License-Identifier: Apache-2.0
"""Reads files and replaces them. A file is replaced in a single step, so that after a kill it holds either the old or
the new bytes.
"""

from __future__ import annotations

import contextlib
import os


def read_bytes(path: str) -> bytes | None:
    """Returns the bytes of a file, None if the file is missing."""
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def write_text(path: str, text: str, mode: int = 0o644) -> None:
    """Writes a text in UTF-8 with ``write_bytes``."""
    write_bytes(path, text.encode("utf-8"), mode)


def write_bytes(path: str, data: bytes, mode: int = 0o644) -> None:
    """Replaces the file in one step. An existing file keeps its owner and mode; ``mode`` applies to a new file."""
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    # The temporary file has a fixed name, so that the next write of this file removes one that a killed run left.
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
