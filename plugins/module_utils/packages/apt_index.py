# SPDX-License-Identifier: Apache-2.0
"""Makes an apt repository of package files that lie on a host, for hosts that reach no mirror. With the repository, apt
can resolve dependencies and pin versions of these packages.
"""

from __future__ import annotations

import hashlib
from typing import Callable, Sequence

FOLDER = "/var/lib/vgpu/apt"


def stanza(control: str, path: str) -> str:
    """Returns one entry of ``Packages``: the package's control file, and the path, size and digest of its file."""
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
            size += len(block)
    return f"{control.strip()}\nFilename: {path.lstrip('/')}\nSize: {size}\nSHA256: {digest.hexdigest()}\n"


def build(name: str, files: Sequence[str], control_of: Callable[[str], str]) -> tuple[str, str, str]:
    """Returns the repository of these files: its URI, its suite, and the text of its index.

    In a flat repository the index names files relative to the URI. So the URI is the root of the file system, and the
    package files need not move. ``control_of``: returns the control file of a package file. Raises OSError if a file
    cannot be read.
    """
    entries = [stanza(control_of(path), path) for path in sorted(files)]
    return "file:/", f"{FOLDER.lstrip('/')}/{name}/", "\n".join(entries)
