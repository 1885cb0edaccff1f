# SPDX-License-Identifier: Apache-2.0
"""Finds the mounts of a pod that conflict with the files that its container gets with a slice.

A mount at or below one of our paths hides our file. A mount above our paths holds our mount points, so another
container that shares the volume can rename them. That other container needs no rule: it reaches our mount points only
through a volume that the container with the slice mounts there too, and this mount is a conflict. A symbolic link in an
image can lead a mount to our paths under another name; no rule over a pod's text sees that, so the watcher checks
independently.

kube/mount_policy.py has the same rule in CEL; one table tests both (tests/doubles/mount_cases.py).
"""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple, Sequence

# Paths where the library, limits and preload file of an allocation are mounted. Allocations made before /dev/vgpu
# existed use the last three paths; a kubelet mounts them again when it restarts such a container.
GUARDED = ("/dev/vgpu", "/etc/ld.so.preload", "/etc/vgpu", "/run/vgpu", "/usr/local/lib/vgpu")
KINDS = ("initContainers", "containers", "ephemeralContainers")
ADVICE = 'where vgpu.fleet mounts its own files; mount it elsewhere, by a path without ".."'


class Conflict(NamedTuple):
    """Describes a conflict: ``path`` is the pod's path, ``guarded`` the first path of GUARDED that it equals or lies
    above or below.
    """

    container: str
    path: str
    guarded: str

    @property
    def reason(self) -> str:
        return f'"{self.path}" lies at, above or below {self.guarded}, {ADVICE}'


def conflicting_mounts(spec: dict[str, Any], resources: Iterable[str]) -> list[Conflict]:
    """Returns the conflicts of all containers of a pod's spec that request one of these resources,
    in limits or requests.
    """
    names = frozenset(resources)
    found: list[Conflict] = []
    for kind in KINDS:
        for container in _list(spec.get(kind)):
            if names & _asked(container):
                found += container_conflicts(container)
    return found


def container_conflicts(container: dict[str, Any]) -> list[Conflict]:
    """Returns the conflicts of one container, whatever resources it requests."""
    name = str(container.get("name") or "")
    found = []
    for path in _paths(container):
        guarded = guarded_by(path)
        if guarded:
            found.append(Conflict(name, path, guarded))
    return found


def guarded_by(path: str) -> str:
    """Returns the first path of GUARDED that a container's path equals or lies above or below; "" for none.

    A path with ``..`` conflicts with every guarded path: its target depends on the links of the image. A relative path
    begins at the root, as in the kubelet.
    """
    parts = path.split("/")
    if ".." in parts:
        return GUARDED[0]
    place = "/" + "".join(part + "/" for part in parts if part not in ("", "."))
    for guarded in GUARDED:
        if place.startswith(guarded + "/") or (guarded + "/").startswith(place):
            return guarded
    return ""


def _paths(container: dict[str, Any]) -> list[str]:
    """Returns every path that a pod's text makes a mount point or a device.

    The kubelet mounts a file for the termination message as well.
    """
    paths = [one.get("mountPath") for one in _list(container.get("volumeMounts"))]
    paths += [one.get("devicePath") for one in _list(container.get("volumeDevices"))]
    paths.append(container.get("terminationMessagePath"))
    return [path for path in paths if isinstance(path, str) and path]


def _asked(container: dict[str, Any]) -> set[str]:
    resources = container.get("resources")
    if not isinstance(resources, dict):
        return set()
    return {str(name) for kind in ("limits", "requests") for name in resources.get(kind) or ()}


def _list(value: Any) -> Sequence[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
