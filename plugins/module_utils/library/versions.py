# SPDX-License-Identifier: Apache-2.0
"""Reads the versions of libvgpu.so in the library's folder: which are whole (have every file of their manifest), which
is current, which are unused.
"""

from __future__ import annotations

import json
import os
from typing import Any, Sequence

from ..host.host import Host
from . import users as library_users

MANIFEST = "manifest.json"


def library(host: Host, root: str) -> dict[str, Any]:
    """Returns the versions of libvgpu on the host: which are whole, which one ``current`` names,
    which others are unused.
    """
    versions = folders(host, root)
    current = version_of(host.link(os.path.join(root, "current")))
    return {
        "current": current,
        # The root with its links resolved, because the kernel reports programs by their real path.
        "real_root": host.real(root),
        "versions": versions,
        "whole": [version for version in versions if is_whole(host, os.path.join(root, version))],
        # Versions whose folder is not readable by all users of a container.
        "closed": [version for version in versions if not is_open(host, os.path.join(root, version))],
        "unused": unused(host, root, [current or ""]),
    }


def unused(host: Host, root: str, keep: Sequence[str]) -> list[str]:
    """Returns the versions that nothing uses, except those in ``keep``. Reads no process if there
    is no other version.
    """
    others = [version for version in folders(host, root) if version not in keep]
    held = library_users.used(host, root, others) if others else []
    return [version for version in others if version not in held]


def is_open(host: Host, folder: str) -> bool:
    """Returns whether a version's folder is readable by all: containers mount it, and their users need not be root."""
    try:
        return os.stat(host.path(folder)).st_mode & 0o777 == 0o755
    except OSError:  # Another process has removed the folder meanwhile.
        return True


def is_whole(host: Host, folder: str) -> bool:
    """Returns whether every file that a version's manifest lists is present with its digest."""
    try:
        listed = json.loads(host.text(os.path.join(folder, MANIFEST)) or "")["files"]
        wanted = {str(name): str(digest) for name, digest in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    for name, digest in wanted.items():
        found = host.file(os.path.join(folder, name))
        if found is None or found["sha256"] != digest:
            return False
    return bool(wanted)


def folders(host: Host, root: str) -> list[str]:
    """Returns the version folders below a root. Ignores names that begin with a dot, which are unfinished work of a
    killed run.
    """
    return [
        name
        for name in host.names(root)
        if not name.startswith(".") and name != "current" and os.path.isdir(host.path(os.path.join(root, name)))
    ]


def version_of(link: str | None) -> str | None:
    return os.path.basename(link.rstrip("/")) if link else None
