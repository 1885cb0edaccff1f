# SPDX-License-Identifier: Apache-2.0
"""Finds which versions of the vGPU library (libvgpu.so) are in use on a node: mapped, mounted, or promised to a
container.

A version may be removed only if none of three cases applies. Mapped: a process of a container, or the arbiter (the
service that divides GPU time), has mapped files of the version. Mounted: files of the version are mounted in a mount
namespace, even if no process there has loaded them yet. Promised: the device plugin's records name the version. The
last case counts because the kubelet restarts an ended container with the mounts of the plugin's first reply, so the
version's folder must still exist.
"""

from __future__ import annotations

import json
import os
from typing import Sequence

from ..host.host import Host

RECORDS = "/var/lib/vgpu/allocations.json"


def used(host: Host, root: str, versions: Sequence[str]) -> list[str]:
    """Returns those of ``versions`` (folders below ``root``) that are in use. Reads the maps of every process, so call
    it rarely.

    If the device plugin's records exist and cannot be read, every version counts as in use.
    """
    # Resolve links of the root, because the kernel reports files by their real path.
    roots = sorted({root.rstrip("/"), host.real(root)})
    promised = _promised(host, roots)
    if promised is None:
        return list(versions)
    files = {version: host.names(os.path.join(root, version)) for version in versions}
    inodes = {
        f" {os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino} ": version
        for version, names in files.items()
        for status in (_status(host, os.path.join(root, version, name)) for name in names)
        if status is not None
    }
    # A mount table lists a bind mount by its path inside its file system, so only the end of the path is known.
    ends = {f"/{version}/{name}": version for version, names in files.items() for name in names}
    ends.update((f"/{version}", version) for version in versions)
    found = set(promised)
    for maps, mounts in _processes(host):
        found |= {version for mark, version in inodes.items() if mark in maps}
        # If the root is on an overlay, /proc/<pid>/maps may show the device of a lower layer, so compare the path.
        found |= {version for version in versions if any(f"{one}/{version}/" in maps for one in roots)}
        found |= {version for end, version in ends.items() if f"{end} " in mounts}
    return [version for version in versions if version in found]


def _status(host: Host, path: str) -> os.stat_result | None:
    try:
        return os.stat(host.path(path))
    except OSError:
        return None


def _processes(host: Host) -> list[tuple[str, str]]:
    """Reads the maps of every process, and the mount table of each mount namespace only once."""
    seen: set[str] = set()
    found = []
    for pid in host.names("/proc"):
        if not pid.isdigit():
            continue
        namespace = host.link(f"/proc/{pid}/ns/mnt") or f"of {pid}"
        mounts = "" if namespace in seen else host.text(f"/proc/{pid}/mountinfo") or ""
        seen.add(namespace)
        found.append((host.text(f"/proc/{pid}/maps") or "", mounts))
    return found


def _promised(host: Host, roots: Sequence[str]) -> list[str] | None:
    """Returns the versions that the device plugin's records name, None if the records exist and cannot be read."""
    if not os.path.lexists(host.path(RECORDS)):
        return []
    try:
        folders = [str(one.get("library") or "") for one in json.loads(host.text(RECORDS) or "")["allocations"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return [os.path.basename(folder) for folder in folders if os.path.dirname(folder) in roots]
