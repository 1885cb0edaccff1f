# SPDX-License-Identifier: Apache-2.0
"""Computes the devices that a host's ResourceSlices should have if pods get GPUs by claims (Dynamic Resource
Allocation). No I/O.
"""

from __future__ import annotations

from typing import Any, Iterable, Sequence

from ..config import sharing, slices


def expected(
    gpus: Iterable[dict[str, Any]], pieces: Sequence[sharing.Piece], config: dict[str, Any]
) -> list[dict[str, Any]]:
    """Returns ``{uuid, shared, memory_mib, slots}`` of each device, which is a GPU or a MIG device. A value is None if
    it does not apply to the device. Like the device plugin, leaves out a GPU while it keeps slices (shares) of a former
    split whose settings are gone.
    """
    requested = (slices.vcuda_of(config) or {}).get("sliceSizing") == "requested"
    out = []
    for gpu in gpus:
        devices = dict.fromkeys(one.device for one in pieces if one.uuid == gpu["uuid"])
        for device in devices:
            mine = [one for one in pieces if one.device == device]
            mode, memory = mine[0].mode, mine[0].memory_mib
            if mode == sharing.MPS:
                continue
            shared = mode in (sharing.VCUDA, sharing.TIME_SLICING)
            claimable = None if mode == sharing.TIME_SLICING else memory
            if mode == sharing.VCUDA:
                share = slices.share_of(gpu, config)
                if share is None:
                    continue
                claimable = slices.claimable_mib(gpu, share, requested)
            row = {"uuid": device, "shared": shared, "slots": len(mine) if shared else None}
            out.append({**row, "memory_mib": claimable})
    return out
