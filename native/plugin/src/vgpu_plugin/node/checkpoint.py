# SPDX-License-Identifier: Apache-2.0
"""Reads the kubelet's device checkpoint. In this file the kubelet saves the device ids that it offers, and the
containers that hold them.
"""

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

# Annotation in an Allocate response with the UUIDs of the container's GPUs, separated by commas.
DEVICES_ANNOTATION = "vgpu.fleet/devices"


@dataclass(frozen=True)
class Entry:
    """The devices of one resource that one container holds, according to the kubelet's checkpoint."""

    pod_uid: str
    container: str
    slice_ids: frozenset[str]
    # Id of the allocation (the slices of GPUs that the container has). It is taken from the mounts in the saved
    # Allocate response. The response may be from an older version, which mounted single files. The id is empty if the
    # response cannot be read.
    allocation: str
    # Folder of the library version that the container mounts. It is also taken from the saved response.
    library: str
    # UUIDs of the container's GPUs. They are also taken from the saved response.
    uuids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    # The entries of all resources. They are not limited to the node's current resource, because a running container
    # keeps the resource name of its request even if the node's resource is renamed. Entries of other plugins do no
    # harm, because they have other ids.
    entries: tuple[Entry, ...]
    # Resource → ids that the kubelet offers. If the kubelet does not know a resource, the resource is missing.
    registered: dict[str, frozenset[str]]

    def advertised(self, slice_id: str) -> bool:
        """Returns whether the kubelet offers the slice to pods now, under any resource."""
        return any(slice_id in ids for ids in self.registered.values())

    @property
    def ids_in_use(self) -> frozenset[str]:
        return frozenset(one for entry in self.entries for one in entry.slice_ids)

    def holds(self, allocation: str, slice_ids: frozenset[str]) -> bool:
        """Returns whether the kubelet still knows the allocation. If the id of an entry cannot be read, its slices are
        compared instead."""
        return any(
            entry.allocation == allocation or (not entry.allocation and entry.slice_ids == slice_ids)
            for entry in self.entries
        )


def read(path: Path) -> Checkpoint | None:
    """Returns the checkpoint, or None if it cannot be read, for example while the kubelet writes it."""
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
    """Returns the device ids. Since Kubernetes 1.20 the file groups them by NUMA node. Before, it had a plain list."""
    if isinstance(value, dict):
        return frozenset(one for ids in value.values() for one in ids or [])
    return frozenset(value or [])


def _answer(encoded: str) -> api.ContainerAllocateResponse:
    """Returns the saved Allocate response, or an empty response if it cannot be read."""
    try:
        return api.ContainerAllocateResponse.FromString(base64.b64decode(encoded))
    except (binascii.Error, DecodeError, ValueError):
        return api.ContainerAllocateResponse()
