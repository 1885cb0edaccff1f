# SPDX-License-Identifier: Apache-2.0
"""Finds lost GPUs. A GPU is lost if the driver counts it but cannot read it, or if the device plugin advertised it and
the driver no longer has it. No I/O.
"""

from __future__ import annotations

from typing import Any, Sequence

NOT_LISTED = "the driver does not list it"
ADVICE = "check the kernel log of this GPU for Xid; reset or replace it, and it is used again automatically"


def find(
    readable: Sequence[dict[str, Any]], unreadable: Sequence[dict[str, Any]], status: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Returns ``{index, uuid, reason, counted}`` of each lost GPU, by index. ``uuid`` is empty if it was never read;
    ``counted``: whether the driver still counts the GPU.

    ``readable``, ``unreadable``: NVML's present lists (``gpus`` and ``lost`` of nvml.read). ``status``: status of the
    device plugin, which remembers the GPUs that it advertised.
    """
    here = {gpu["uuid"] for gpu in readable}
    faults = {one["index"]: str(one["error"]) for one in unreadable}
    found = []
    for gpu in (status or {}).get("gpus") or []:
        if gpu["uuid"] and gpu["uuid"] not in here:
            counted = gpu["index"] in faults
            reason = faults.pop(gpu["index"], NOT_LISTED)
            found.append({"index": gpu["index"], "uuid": gpu["uuid"], "reason": reason, "counted": counted})
    found += [{"index": index, "uuid": "", "reason": fault, "counted": True} for index, fault in faults.items()]
    return sorted(found, key=lambda one: int(one["index"]))


def name(gpu: dict[str, Any]) -> str:
    """Returns the index and, if known, the UUID."""
    return "{index} ({uuid})".format(**gpu) if gpu["uuid"] else str(gpu["index"])


def remedy(gpu: dict[str, Any]) -> str:
    """Returns the steps that a person can take."""
    return ADVICE if gpu["counted"] else f"{ADVICE}; if it was removed for good: vgpuctl forget {gpu['uuid']}"
