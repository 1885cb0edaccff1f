# SPDX-License-Identifier: Apache-2.0
"""Builds the devices of a limits file: one device for each GPU of a container's slices. This module does no I/O.

If two slices are on one GPU, they are added up or refused, depending on the node's settings. Two replicas of a GPU in
one of NVIDIA's sharing modes count as one, as with ``failRequestsGreaterThanOne: false``. The status shows a warning
about such replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .._shared.config.sharing import VCUDA, Piece
from .._shared.config.slices import MIB
from ..errors import BadRequest, Refused, counted
from ..offer.preference import gpu_of
from ..offer.settings import Settings
from .records import Record


@dataclass(frozen=True)
class AtMost:
    """Upper bound for the memory and SMs of each slice of a container. 0 means no bound, so the container gets all of
    the slice."""

    memory_bytes: int = 0
    sm_percent: int = 0

    def fits(self, piece: Piece) -> bool:
        return self.memory_bytes <= piece.memory_mib * MIB and self.sm_percent <= piece.sm_percent

    def of(self, device: dict[str, Any]) -> dict[str, Any]:
        """Returns the device of a limits file, with its limits reduced to this bound. Raises BadRequest for a device
        that has no limits.
        """
        if device.get("unlimited") and (self.memory_bytes or self.sm_percent):
            raise BadRequest(f"{device['uuid']} is not shared by libvgpu and has no limits; leave out the size")
        return {
            **device,
            "memory_bytes": min(device["memory_bytes"], self.memory_bytes or device["memory_bytes"]),
            "sm_percent": min(device["sm_percent"], self.sm_percent or device["sm_percent"]),
        }


def limit_devices(pieces: list[Piece], settings: Settings, gpus: int) -> list[dict[str, Any]]:
    """Returns the devices for these slices. ``gpus`` is the number of GPUs of the node, which is used only in an error
    message. Raises Refused.
    """
    devices: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        device = devices.get(piece.device)
        if device is None:
            device = {"uuid": piece.device, "memory_bytes": piece.memory_mib * MIB, "sm_percent": piece.sm_percent}
            if piece.mode != VCUDA:
                device.update(memory_bytes=0, unlimited=True)
            devices[piece.device] = device
        elif piece.mode == VCUDA and settings.merge:
            device["memory_bytes"] += piece.memory_mib * MIB
            device["sm_percent"] = min(100, device["sm_percent"] + piece.sm_percent)
        elif piece.mode == VCUDA:
            both = [one.id for one in pieces if one.uuid == piece.uuid]
            raise Refused(
                f"{len(both)} slices of one GPU for one container ({', '.join(both)}), and this node's policy is "
                f"distinct GPUs: the container requests {counted(len(pieces), 'slice')}, the node has "
                f"{counted(gpus, 'GPU')}; request at most one slice for each GPU with a free slice, or set "
                "vgpu_multi_slice: merge"
            )
    return list(devices.values())


def notes(records: Iterable[Record]) -> list[str]:
    """Returns warnings about containers that hold several replicas of one GPU on which nothing limits them."""
    found = []
    for record in records:
        replicas, gpus = len(record.slice_ids), len({gpu_of(one) for one in record.slice_ids})
        if not record.limits and replicas > gpus:
            found.append(
                f"allocation {record.id} holds {counted(replicas, 'replica')} of {counted(gpus, 'GPU')}: several "
                "replicas of a GPU give no more compute; request one for each GPU, or set failRequestsGreaterThanOne: "
                "true to refuse such pods"
            )
    return found
