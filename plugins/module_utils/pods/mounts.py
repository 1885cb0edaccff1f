# SPDX-License-Identifier: Apache-2.0
"""Finds the mounts of a pod that conflict with the files that its container gets with a slice (share of a GPU).

A mount at or below one of our paths hides our file. A mount above our paths holds our mount points, so another
container that shares the volume can rename them. The other container itself needs no rule: the container with the slice
must mount the shared volume above our paths, and this mount is already a conflict. A symbolic link in an image can lead
a mount to our paths under another name. A rule that reads only the pod's spec cannot see that, so the device plugin's
watcher checks the actual mounts on the node.

kube/mount_policy.py has the same rule in CEL; one table tests both (tests/doubles/mount_cases.py).
"""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple, Sequence

# Paths at which the library, the limits and the preload file of an allocation are mounted. The last three are those of
# former versions, which did not use /dev/vgpu. The kubelet mounts them again when it restarts a container of that time.
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
    """Returns the conflicts of one container. The resources that it requests do not matter."""
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
    """Returns every path at which the kubelet mounts something or creates a device for a container, by the pod's spec.
    One of them is the file for the termination message.
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
