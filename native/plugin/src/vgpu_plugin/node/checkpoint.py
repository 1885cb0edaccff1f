# SPDX-License-Identifier: Apache-2.0
"""Reads the kubelet's device checkpoint: the device ids that it offers, and the containers that hold them."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from google.protobuf.message import DecodeError

from .._proto import deviceplugin_pb2 as api
from .paths import CONTAINER_LIBRARY_FOLDER, CONTAINER_SHARE, OLD_GPU_PAGE, OLD_LIBRARY, OLD_LIMITS

# Annotation in an Allocate response: UUIDs of the container's GPUs, separated by commas.
DEVICES_ANNOTATION = "vgpu.fleet/devices"


@dataclass(frozen=True)
class Entry:
    """One container's devices of one resource in the kubelet's checkpoint."""

    pod_uid: str
    container: str
    slice_ids: frozenset[str]
    # From the mounts of the saved Allocate response, of this version or of an older one that mounted single files;
    # empty if it cannot be read.
    allocation: str
    # Folder of the library version that the container mounts, from the same response.
    library: str
    # UUIDs of the container's GPUs, from the same response.
    uuids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    # Entries of every resource: a running container keeps the resource name of its request, even if the node's resource
    # is renamed. Entries of other plugins have other ids and do no harm.
    entries: tuple[Entry, ...]
    # Resource → offered ids. A resource that the kubelet does not know is missing.
    registered: dict[str, frozenset[str]]

    def advertised(self, slice_id: str) -> bool:
        """Whether the kubelet offers the slice to pods now, under any resource."""
        return any(slice_id in ids for ids in self.registered.values())

    @property
    def ids_in_use(self) -> frozenset[str]:
        return frozenset(one for entry in self.entries for one in entry.slice_ids)

    def holds(self, allocation: str, slice_ids: frozenset[str]) -> bool:
        """Whether the kubelet still knows the allocation."""
        return any(
            entry.allocation == allocation or (not entry.allocation and entry.slice_ids == slice_ids)
            for entry in self.entries
        )


def read(path: Path) -> Checkpoint | None:
    """Returns the checkpoint; None if it cannot be read, for example while the kubelet writes it."""
    try:
        data = json.loads(path.read_text())["Data"]
        entries = tuple(_entry(one) for one in data.get("PodDeviceEntries") or [])
        known = data.get("RegisteredDevices") or {}
        return Checkpoint(entries, {str(name): frozenset(ids or []) for name, ids in known.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _entry(one: dict[str, Any]) -> Entry:
    answer = _answer(one.get("AllocResp") or "")
    mounts = {mount.container_path: PurePosixPath(mount.host_path) for mount in answer.mounts}
    share = mounts.get(CONTAINER_SHARE) or mounts.get(OLD_LIMITS)
    library = mounts.get(CONTAINER_LIBRARY_FOLDER) or (mounts[OLD_LIBRARY].parent if OLD_LIBRARY in mounts else "")
    devices = [path[len(OLD_GPU_PAGE) :] for path in mounts if path.startswith(OLD_GPU_PAGE)]
    if CONTAINER_SHARE in mounts:
        devices = [uuid for uuid in answer.annotations[DEVICES_ANNOTATION].split(",") if uuid]
    return Entry(
        pod_uid=str(one.get("PodUID", "")),
        container=str(one.get("ContainerName", "")),
        slice_ids=_ids(one.get("DeviceIDs")),
        allocation=share.parent.name if share is not None else "",
        library=str(library),
        uuids=tuple(devices),
    )


def _ids(value: Any) -> frozenset[str]:
    """Returns the ids: grouped by NUMA node since Kubernetes 1.20, a plain list before."""
    if isinstance(value, dict):
        return frozenset(one for ids in value.values() for one in ids or [])
    return frozenset(value or [])


def _answer(encoded: str) -> api.ContainerAllocateResponse:
    """Returns the saved Allocate response; an empty one if it cannot be read."""
    try:
        return api.ContainerAllocateResponse.FromString(base64.b64decode(encoded))
    except (binascii.Error, DecodeError, ValueError):
        return api.ContainerAllocateResponse()
