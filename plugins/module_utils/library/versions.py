# SPDX-License-Identifier: Apache-2.0
"""The versions of libvgpu.so in the library's folder: which are whole, which one is current, which nothing uses."""

from __future__ import annotations

import json
import os
from typing import Any, Sequence

from ..host.host import Host
from . import users as library_users

MANIFEST = "manifest.json"


def library(host: Host, root: str) -> dict[str, Any]:
    """The versions of libvgpu on the host: which are whole, which one ``current`` names, which others nothing uses."""
    versions = folders(host, root)
    current = version_of(host.link(os.path.join(root, "current")))
    return {
        "current": current,
        # The kernel names programs by this one where the root is reached through a link.
        "real_root": host.real(root),
        "versions": versions,
        "whole": [version for version in versions if is_whole(host, os.path.join(root, version))],
        # Those that not every user of a container may look into.
        "closed": [version for version in versions if not is_open(host, os.path.join(root, version))],
        "unused": unused(host, root, [current or ""]),
    }


def unused(host: Host, root: str, keep: Sequence[str]) -> list[str]:
    """The versions that nothing uses, those in ``keep`` left out. With no other version no process is looked at."""
    others = [version for version in folders(host, root) if version not in keep]
    held = library_users.used(host, root, others) if others else []
    return [version for version in others if version not in held]


def is_open(host: Host, folder: str) -> bool:
    """Whether a version's folder has the mode that all do: containers mount it, and their users need not be root."""
    try:
        return os.stat(host.path(folder)).st_mode & 0o777 == 0o755
    except OSError:  # it has gone meanwhile
        return True


def is_whole(host: Host, folder: str) -> bool:
    """Whether every file that a version's manifest lists is there with its digest."""
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
    """The version folders below a root; names that begin with a dot are unfinished work of a run that was cut off."""
    return [
        name
        for name in host.names(root)
        if not name.startswith(".") and name != "current" and os.path.isdir(host.path(os.path.join(root, name)))
    ]


def version_of(link: str | None) -> str | None:
    return os.path.basename(link.rstrip("/")) if link else None
