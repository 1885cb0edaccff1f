# SPDX-License-Identifier: Apache-2.0
"""The requested sizes and the result of a resize, and the rules that need only a record (the saved data of a container)
and its sizes. resizer.py makes the changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from .._shared.config.slices import MIB
from .._shared.pods.annotations import Device
from ..errors import BadRequest, Refused
from . import sizing
from .records import Record


class Wanted(NamedTuple):
    """The requested size on one GPU. None means unchanged, and 0 cores mean no limit. ``burst`` is true if the promised
    memory stays and only the current limit changes, within the pod's limit (burst.py).
    """

    memory_mib: int | None = None
    cores: int | None = None
    burst: bool = False


class Change(NamedTuple):
    """The size on one GPU before and after the resize, and the bytes that the container uses there; -1 means that the
    usage is unknown.
    """

    before: Device
    now: Device
    used: int


class Resized(NamedTuple):
    """The result of a resize. ``leaving`` is true if processes still use more than the new size. The former size is
    then counted until they end.
    """

    record: Record
    gpus: list[Change]
    leaving: bool = False

    @property
    def changed(self) -> bool:
        return any(one.before != one.now for one in self.gpus)


# Type of the function that reports a container's new sizes to the cluster. The arguments are the sizes in the order of
# the record, and whether the container's processes still use more than these sizes. The function raises PluginError.
Publish = Callable[[list[Device], bool], object]


def sized_as(device: Device, wanted: Mapping[str, Wanted]) -> Device:
    """Returns the size on a GPU after the resize. Raises BadRequest if no GPU can have this size."""
    size = wanted.get(device.uuid, Wanted())
    memory = device.memory_mib if size.memory_mib is None else size.memory_mib
    cores = device.cores if size.cores is None else size.cores
    if memory < 1 or not 0 <= cores <= sizing.WHOLE:
        raise BadRequest(f"{memory} MiB and {cores} % of GPU {device.uuid}; expected 1 MiB or more, and 0 to 100 %")
    return Device(device.uuid, memory, cores)


def refuse_bursting(record: Record, wanted: Mapping[str, Wanted]) -> None:
    """Raises Refused if new memory is requested on a GPU where the pod has burst memory (memory above its promised
    amount). The plugin changes the limit there automatically, so a requested limit would not last.
    """
    for uuid, size in wanted.items():
        bounds = sizing.bounds_of(record, uuid)
        if bounds is not None and size.memory_mib is not None and not size.burst:
            raise Refused(
                f"allocation {record.id}: its memory on GPU {uuid} changes from {bounds.promised} to "
                f"{bounds.limit} MiB with the free memory, by the vgpu.fleet/memory-request of its pod; change "
                "only the cores, or create the pod again"
            )


def shown_more(record: Record) -> str:
    return (
        f"allocation {record.id}: by its ledger its programs fit, but the driver reports more memory for them, so it "
        "keeps its size. See: vgpuctl watch, vgpuctl top"
    )


def lowered(before: list[Device], now: list[Device]) -> list[Device]:
    """Returns the devices whose memory shrinks, with their new size."""
    return [new for old, new in zip(before, now, strict=True) if new.memory_mib < old.memory_mib]


def greater(one: Device, other: Device) -> Device:
    return Device(one.uuid, max(one.memory_mib, other.memory_mib), max(one.cores, other.cores))


def lesser(one: Device, other: Device) -> Device:
    """Returns the smaller memory of the former size ``one`` and the new size ``other``, with the former percent of the
    SMs. That percent changes later, together with the record.
    """
    return Device(one.uuid, min(one.memory_mib, other.memory_mib), one.cores)


def refuse_in_use(record: Record, devices: list[Device], used: Mapping[str, int]) -> None:
    """Raises Refused if a container uses more memory than its new size."""
    for one in devices:
        had = next(each["memory_bytes"] for each in record.limits["devices"] if each["uuid"] == one.uuid)
        holds = used.get(one.uuid, 0)
        if one.memory_mib * MIB < had and holds > one.memory_mib * MIB:
            raise Refused(
                f"allocation {record.id}: GPU {one.uuid}: {one.memory_mib} MiB are requested, and its programs use "
                f"{-(-holds // MIB)} MiB; request at least that, free memory in the programs, or let the OOM killer "
                "end some of them (vgpuctl resize --oom-killer)"
            )
