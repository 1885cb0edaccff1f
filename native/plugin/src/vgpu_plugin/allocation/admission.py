# SPDX-License-Identifier: Apache-2.0
"""Rules that decide whether a container may have the slices (parts of GPUs) that it requests. Each rule takes plain
values or a look-up function, and does no I/O of its own. If the container is refused, the rule raises an error, which
the kubelet shows on the pod.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .._shared.config import sharing
from .._shared.config.sharing import Piece
from .._shared.config.slices import MIB
from .._shared.pods.annotations import Device
from ..errors import NotNow, Refused, Taken
from ..node.gpus import Gpu, MigDevice
from . import sizing
from .records import Record


def refuse_leased(pieces: Iterable[Piece], lease_of: Callable[[str], str | None]) -> None:
    """Raises NotNow if one of the slices is leased, that is, reserved for a program on this host. ``lease_of`` returns
    the id of the lease that holds a slice, or None.
    """
    for piece in pieces:
        if lease := lease_of(piece.id):
            raise NotNow(
                f"slice {piece.id} is leased to a check on this host (allocation {lease}); start the pod again"
            )


def refuse_held(pieces: Iterable[Piece], records: Iterable[Record]) -> None:
    """Raises Taken if a slice chosen for a lease is already allocated. This can happen if the kubelet called Allocate
    after the slice was chosen and before the lock was taken.
    """
    holders = {one: record.id for record in records for one in record.slice_ids}
    for piece in pieces:
        if piece.id in holders:
            raise Taken(f"slice {piece.id} is held by allocation {holders[piece.id]}; see: vgpuctl status")


def refuse_outside(pieces: Iterable[Piece], used_outside: Callable[[str], bool]) -> None:
    """Raises NotNow if a container outside Kubernetes uses one of the slices. ``used_outside`` returns whether such a
    container uses a slice.
    """
    for piece in pieces:
        if used_outside(piece.id):
            raise NotNow(
                f"slice {piece.id} is used by a container outside Kubernetes on this host; stop it, or start the "
                "pod again so that it gets another slice"
            )


def refuse_several(pieces: list[Piece], config: dict[str, Any]) -> None:
    """Raises Refused if a container requests several slices of shared GPUs and NVIDIA's option
    failRequestsGreaterThanOne is set.
    """
    if len(pieces) < 2:
        return
    for piece in pieces:
        if piece.mode in sharing.SHARED_BY_NVIDIA and sharing.refuses_several(piece.mode, config):
            raise Refused(
                f"the container requests {len(pieces)} of {piece.resource}, whose GPUs are shared by {piece.mode}: "
                "several replicas give no larger share; request 1, or set failRequestsGreaterThanOne: false"
            )


def has_sized_neighbours(devices: Iterable[dict[str, Any]], records: Iterable[Record]) -> bool:
    """Returns whether any container on these GPUs has a size that differs from the size of its slice. This happens if
    the container was resized, or if it requested a size before the node's settings changed.
    """
    uuids = {one["uuid"] for one in devices}
    sized = (one.limits["devices"] for one in records if sizing.SIZED in one.limits)
    return any(device["uuid"] in uuids for held in sized for device in held)


def refuse_oversold(
    devices: Iterable[dict[str, Any]],
    gpu: Callable[[str], Gpu],
    config: dict[str, Any],
    before: Mapping[str, sizing.Held],
) -> None:
    """Raises Taken if a slice of the normal, equal size does not fit on its GPU, because containers with other sizes
    hold too much of the GPU. ``before`` maps GPU UUIDs to the memory and cores that containers hold.
    """
    for one in devices:
        requested = Device(one["uuid"], one["memory_bytes"] // MIB, 0)
        if fault := sizing.misfit(gpu(one["uuid"]), config, before.get(one["uuid"], sizing.Held()), requested):
            raise Taken(fault)


def refuse_unnamed(gpus: Iterable[Gpu], uuids: Iterable[str], nodes: Callable[[Gpu, MigDevice], object]) -> None:
    """Raises Refused for a MIG device that cannot be named in a CDI file. Without this check the container would fail
    to start, with a less helpful error. ``nodes`` returns the device nodes of a MIG device, or raises OSError.
    """
    for gpu in gpus:
        for mig in gpu.mig:
            try:
                if mig.uuid in uuids:
                    nodes(gpu, mig)
            except OSError as fault:
                raise Refused(f"{mig.uuid} cannot be given to a container by CDI: {fault}") from None
