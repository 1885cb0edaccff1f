# SPDX-License-Identifier: Apache-2.0
"""Assigns the sizes that pods requested to the GPUs that the kubelet chose, and checks whether they fit. This module
does no I/O.

The scheduler plans the sizes and the kubelet chooses the slices (parts of GPUs), but only this node knows what its
containers hold. So a size is applied only if the memory and cores of all containers stay within the GPU, whatever the
plan says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from .._shared.config import slices
from .._shared.config.sharing import Piece
from .._shared.config.slices import MIB
from .._shared.pods.annotations import INIT, SIDECAR, Device, NodeGpu, Part, Plan, use_of
from ..errors import Refused, counted
from ..node.gpus import NO_NUMA, Gpu
from ..offer.preference import gpu_of
from .records import Record

WHOLE = 100
# This key is in a container's limits only if the container has a size of its own instead of the size of its slice.
SIZED = "priority"
# Two keys of a device in a record's limits, both in MiB: the promised memory and the maximum limit. They exist only if
# the container is promised less memory than its limit (burst.py).
PROMISED, LIMIT = "promised_mib", "limit_mib"
# This key of a device in a record's limits holds the values of Place. It exists only if a plan named the container. It
# is no field of the record, because an older program would refuse all records after a rollback.
PLACE = "place"


@dataclass(frozen=True)
class Held:
    """Memory (MiB) and percent of the SMs that containers hold on a GPU. A container without a limit of its SMs counts
    as 0 %.
    """

    memory_mib: int = 0
    cores: int = 0


def node_gpus(gpus: Iterable[Gpu], config: dict[str, Any], unhealthy: Mapping[str, str]) -> list[NodeGpu]:
    """Returns the GPUs of a node that are split by ``sharing.vcuda``, in the form that the scheduler needs.
    ``unhealthy`` maps GPU UUIDs to the reason, which is empty for a healthy GPU.
    """
    found = []
    for gpu in gpus:
        share = slices.share_of(gpu.facts(), config)
        if share is None or gpu.mig_enabled:
            continue
        memory_mib, sm_percent = slices.size_of(gpu.facts(), share)
        found.append(
            NodeGpu(
                gpu.uuid,
                gpu.model,
                gpu.memory_mib,
                capacity_mib(gpu, share),
                share.split_count,
                memory_mib,
                sm_percent,
                not unhealthy.get(gpu.uuid),
                -1 if gpu.numa_node == NO_NUMA else gpu.numa_node,
                gpu.links,
            )
        )
    return found


def capacity_mib(gpu: Gpu, share: slices.Share) -> int:
    """Returns the MiB that all containers of a GPU may hold together: its memory times the configured memory
    scaling.
    """
    return int(gpu.memory_mib * Fraction(share.memory_scaling))


def room_mib(gpu: Gpu, config: dict[str, Any]) -> int:
    """Returns the MiB that all containers of a GPU may hold together under a configuration. For a GPU that is not
    split, this is its memory.
    """
    share = slices.share_of(gpu.facts(), config)
    return capacity_mib(gpu, share) if share is not None else gpu.memory_mib


class Bounds(NamedTuple):
    """The promised memory and the maximum limit of a container on one GPU, in MiB. Its current limit lies between the
    two (burst.py).
    """

    promised: int
    limit: int

    @property
    def above(self) -> int:
        return self.limit - self.promised


def bounds_of(record: Record, uuid: str) -> Bounds | None:
    """Returns the promised memory and the maximum limit of a container on a GPU, or None if its size there is fixed."""
    rows = [one for one in record.limits.get("devices") or [] if one["uuid"] == uuid and PROMISED in one]
    return Bounds(rows[0][PROMISED], rows[0][LIMIT]) if rows else None


class Place(NamedTuple):
    """The place of a container in its pod: the pod's uid, the kind of the container (init, sidecar or app) and its
    position in the pod's plan. ``alone`` is true if no other container of the pod runs at the same time.
    """

    pod: str
    kind: str
    position: int
    alone: bool


def place_in(plan: Plan, container: str, pod: str) -> Place:
    """Returns the place of a container that the plan of the pod with this uid names."""
    places = [Place(pod, part.kind, n, False) for n, part in enumerate(plan)]
    mine = next(places[n] for n, part in enumerate(plan) if part.container == container)
    return mine._replace(alone=not any(_overlap(mine, one) for one in places))


def place_of(record: Record) -> Place | None:
    rows = record.limits.get("devices") or []
    return Place(*rows[0][PLACE]) if rows and PLACE in rows[0] else None


def placed(record: Record, place: Place) -> Record:
    """Returns a copy of a record with the place of its container."""
    rows = [{**one, PLACE: list(place)} for one in record.limits["devices"]]
    return replace(record, limits={**record.limits, "devices": rows})


def with_memory(record: Record, wanted: Mapping[str, Bounds]) -> Record:
    """Returns a copy of a record with the promised memory of ``wanted``, by GPU UUID, as its size."""
    rows = {one["uuid"]: one for one in record.limits.get("devices") or []}
    for row in limits_of([Device(uuid, bounds.promised, 0) for uuid, bounds in wanted.items()]):
        rows[row["uuid"]] = {**rows.get(row["uuid"], row), "memory_bytes": row["memory_bytes"]}
    limits = {key: value for key, value in record.limits.items() if key != "deny"}
    return replace(record, limits={**limits, "devices": list(rows.values())})


def _overlap(one: Place, other: Place) -> bool:
    early, late = sorted((one, other), key=lambda place: place.position)
    if INIT in (early.kind, late.kind):
        # Init containers have ended before the containers after them start; sidecars go on running.
        return early.kind == SIDECAR
    return early.position != late.position


def together(one: Record, other: Record) -> bool:
    """Returns whether the containers of two records may run at the same time."""
    mine, its = place_of(one), place_of(other)
    if mine is not None and its is not None and mine.pod == its.pod:
        return _overlap(mine, its)
    # Only containers of one pod that run one after the other share a slice.
    return frozenset(one.kubelet_ids).isdisjoint(other.kubelet_ids)


def pod_of(record: Record, uuid: str, pods: Mapping[object, str]) -> object:
    """Returns a key that is equal for the records of one pod on a GPU. If a record has no place, only the records on
    the same slices are known to be of its pod. ``pods``: see ``pods_on_slices``.
    """
    place, at = place_of(record), _slices_on(uuid, record)
    return place.pod if place else pods.get(at, at)


def pods_on_slices(records: Iterable[Record]) -> dict[object, str]:
    """Maps the slices of the records that have a place to the uid of their pod. With it, an init container that ran
    before an upgrade, when the records had no places, counts in the pod whose container has its slices now.
    """
    return {
        _slices_on(row["uuid"], record): place.pod
        for record in records
        if (place := place_of(record))
        for row in record.limits["devices"]
    }


def _slices_on(uuid: str, record: Record) -> tuple[str, frozenset[str]]:
    return uuid, frozenset(one for one in record.slice_ids if gpu_of(one) == uuid)


def held(records: Iterable[Record], limits: bool = False, promised: bool = False) -> dict[str, Held]:
    """Returns GPU UUID → memory and cores (percent of the SMs) that the containers of these records hold.

    A pod counts with the most that its containers hold at any time, as in the scheduler. If a container's pod is not
    known, only containers on the same slices count as one pod; these run one after the other. A container that has no
    size yet counts as 0. Each container counts with its promised cores, or with the limit of its cores if ``limits`` is
    true. Likewise it counts with its current limit of memory, or with its promised memory if ``promised`` is true.
    """
    pods: dict[object, list[tuple[int, Part]]] = {}
    records = list(records)
    known = pods_on_slices(records)
    for record in records:
        if record.limits.get("deny"):
            continue
        place = place_of(record) or Place("", INIT, 0, True)
        for device in record.limits.get("devices") or []:
            mib = device[PROMISED] if promised and PROMISED in device else -(-device["memory_bytes"] // MIB)
            cores = device["sm_percent"] if limits else record.cores.get(device["uuid"], 0)
            part = Part(record.id, place.kind, (Device(device["uuid"], mib, cores),))
            pods.setdefault(pod_of(record, device["uuid"], known), []).append((place.position, part))
    out: dict[str, Held] = {}
    for parts in pods.values():
        for uuid, use in use_of([part for _position, part in sorted(parts, key=lambda one: one[0])]).items():
            sum_of = out.get(uuid, Held())
            out[uuid] = Held(sum_of.memory_mib + use.memory_mib, sum_of.cores + use.cores)
    return out


def misfit(gpu: Gpu, config: dict[str, Any], before: Held, requested: Device) -> str:
    """Returns why a size does not fit on a GPU next to the sizes of other containers. The text is empty if the size
    fits."""
    capacity = room_mib(gpu, config)
    if before.memory_mib + requested.memory_mib > capacity:
        return (
            f"GPU {gpu.uuid}: {requested.memory_mib} MiB are asked for, {before.memory_mib} of {capacity} are held by "
            "others"
        )
    if before.cores + requested.cores > WHOLE:
        return f"GPU {gpu.uuid}: {requested.cores} % of the SMs are asked for, {before.cores} % are held by others"
    return ""


def crowded(pieces: Iterable[Piece], others: Held, sm_percent: int) -> str:
    """Returns why a percent of the SMs does not fit on a GPU with equal slices. The text is empty if it fits.
    ``pieces`` are the slices of the GPU. All containers together may get as many percent as these slices have together,
    which may be more than 100 %, and in any case 100 %.
    """
    shares = [one.sm_percent for one in pieces]
    most = max(WHOLE, sum(shares))
    if others.cores + sm_percent <= most:
        return ""
    return f"{sm_percent} % of the SMs are asked for, {others.cores} of {most} % are held by others"


def surplus(pieces: Iterable[Piece], records: Iterable[Record], capacity: int) -> set[str]:
    """Returns the slices of one GPU that must not be offered, because containers that are larger than their slice use
    the memory of these slices. ``capacity`` is the MiB that all containers may hold together.

    The result may include an allocated slice whose container is smaller than the slice: when the container ends, the
    slice would be offered with its full size, for which the GPU has not enough free memory.
    """
    at, holds = list(pieces), list(records)
    sized = [one for one in holds if SIZED in one.limits]
    uuids = {one.uuid for one in at}
    if not any(device["uuid"] in uuids for one in sized for device in one.limits["devices"]):
        return set()
    room = capacity - sum(one.memory_mib for uuid, one in held(holds).items() if uuid in uuids)
    out = set()
    for piece in at:
        mine = held(one for one in holds if piece.id in one.slice_ids).get(piece.uuid, Held())
        more = max(0, piece.memory_mib - mine.memory_mib)
        if more > room:
            out.add(piece.id)
        else:
            room -= more
    return out


def assign(
    planned: Sequence[Device], given: Sequence[Gpu], config: dict[str, Any], before: Mapping[str, Held]
) -> list[Device]:
    """Assigns the planned sizes to the GPUs that the kubelet chose, and returns them in the order of ``given``. A size
    stays on its planned GPU if the kubelet chose that GPU. The other sizes, largest first, go to the GPU with the most
    free memory. Raises Refused if a size does not fit.
    """
    if len(planned) != len(given):
        raise Refused(
            f"the container was planned on {counted(len(planned), 'GPU')} and the kubelet gave it {len(given)}; "
            "delete the pod so that it is scheduled again"
        )
    open_gpus = {gpu.uuid: gpu for gpu in given}
    chosen: dict[str, Device] = {}
    moved = []
    for device in planned:
        if device.uuid in open_gpus:
            chosen[device.uuid] = device
            del open_gpus[device.uuid]
        else:
            moved.append(device)
    for device in sorted(moved, key=lambda one: (-one.memory_mib, -one.cores)):
        by_room = sorted(open_gpus.values(), key=lambda gpu: before.get(gpu.uuid, Held()).memory_mib - gpu.memory_mib)
        fits = [gpu for gpu in by_room if not misfit(gpu, config, before.get(gpu.uuid, Held()), device)]
        gpu = (fits or by_room)[0]
        chosen[gpu.uuid] = device._replace(uuid=gpu.uuid)
        del open_gpus[gpu.uuid]
    out = [chosen[gpu.uuid] for gpu in given]
    faults = [misfit(gpu, config, before.get(gpu.uuid, Held()), one) for gpu, one in zip(given, out, strict=True)]
    if any(faults):
        raise Refused("; ".join(one for one in faults if one) + "; delete the pod so that it is scheduled again")
    return out


def with_part(plan: Sequence[Part], container: str, devices: Sequence[Device]) -> list[Part]:
    """Returns a copy of the plan in which one container has these devices."""
    return [part._replace(devices=tuple(devices)) if part.container == container else part for part in plan]


def limits_of(devices: Sequence[Device]) -> list[dict[str, Any]]:
    """Returns the devices of a limits file. A request of 0 % (no percent was requested) or of 100 % (all SMs) sets no
    limit of the SMs. A device with burst memory starts with the promised memory as its limit.
    """
    return [
        {
            "uuid": one.uuid,
            "memory_bytes": one.memory_mib * MIB,
            "sm_percent": one.cores or WHOLE,
            **({PROMISED: one.memory_mib, LIMIT: one.memory_mib + one.burst_mib} if one.burst_mib else {}),
        }
        for one in devices
    ]
