# SPDX-License-Identifier: Apache-2.0
"""Sizes that pods requested, on the GPUs that they got: which planned size goes to which GPU, and whether it fits
there. Pure.

The scheduler plans, the kubelet chooses, and what containers hold on this node is known here alone. So a size is given
only where memory and shares of all holders stay within the GPU, whatever was planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from .._shared.config import slices
from .._shared.config.sharing import Piece
from .._shared.config.slices import MIB
from .._shared.pods.annotations import Device, NodeGpu, Part
from ..errors import Refused
from ..node.gpus import NO_NUMA, Gpu
from ..offer.preference import gpu_of
from .records import Record

WHOLE = 100
# The key of limits that a container has whose size is its own, and not that of its slice.
SIZED = "priority"
# Keys of a device in the limits of a record, in MiB, where what is promised is less than the limit (burst.py).
PROMISED, LIMIT = "promised_mib", "limit_mib"


@dataclass(frozen=True)
class Held:
    """What containers hold of a GPU, in MiB and percent of the SMs; without a limit counts as 0 %."""

    memory_mib: int = 0
    cores: int = 0


def node_gpus(gpus: Iterable[Gpu], config: dict[str, Any], unhealthy: Mapping[str, str]) -> list[NodeGpu]:
    """The GPUs of a node as its scheduler needs to know them: those that are split by ``sharing.vcuda``. ``unhealthy``:
    UUID → reason, empty for a healthy GPU."""
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
    """M*S: what all containers of a GPU may hold together."""
    return int(gpu.memory_mib * Fraction(share.memory_scaling))


def room_mib(gpu: Gpu, config: dict[str, Any]) -> int:
    """The same by a configuration; of a GPU that it does not split the whole card."""
    share = slices.share_of(gpu.facts(), config)
    return capacity_mib(gpu, share) if share is not None else gpu.memory_mib


class Bounds(NamedTuple):
    """MiB of one GPU between which the limit of a container lies: what was promised, and its limit (burst.py)."""

    promised: int
    limit: int

    @property
    def above(self) -> int:
        return self.limit - self.promised


def bounds_of(record: Record, uuid: str) -> Bounds | None:
    """None where a container has one size."""
    rows = [one for one in record.limits.get("devices") or [] if one["uuid"] == uuid and PROMISED in one]
    return Bounds(rows[0][PROMISED], rows[0][LIMIT]) if rows else None


def held(records: Iterable[Record], limits: bool = False, promised: bool = False) -> dict[str, Held]:
    """What is held of each GPU. Containers that share a slice are of one pod and run one after the other (an init
    container may have more GPUs than those after it), so of these the largest counts; a container that has no size yet
    holds nothing. ``limits``: the cores are those that limits allow, and not those that were promised. ``promised``:
    the memory is what was promised, and not what limits allow now.
    """
    shares: dict[tuple[str, frozenset[str]], Held] = {}
    for record in records:
        if record.limits.get("deny"):
            continue
        for device in record.limits.get("devices") or []:
            key = device["uuid"], frozenset(one for one in record.slice_ids if gpu_of(one) == device["uuid"])
            before = shares.get(key, Held())
            mib = device[PROMISED] if promised and PROMISED in device else -(-device["memory_bytes"] // MIB)
            cores = device["sm_percent"] if limits else record.cores.get(device["uuid"], 0)
            shares[key] = Held(max(mib, before.memory_mib), max(cores, before.cores))
    out: dict[str, Held] = {}
    for (uuid, _ids), one in shares.items():
        sum_of = out.get(uuid, Held())
        out[uuid] = Held(sum_of.memory_mib + one.memory_mib, sum_of.cores + one.cores)
    return out


def misfit(gpu: Gpu, config: dict[str, Any], before: Held, requested: Device) -> str:
    """Why a size does not fit on a GPU in addition to what is held of it; empty where it does."""
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
    """Why a share does not fit next to those of others where all slices of a GPU are equal: all together get no more
    than all slices were offered, which may be more than one GPU; empty where it fits. ``pieces``: of one GPU.
    """
    shares = [one.sm_percent for one in pieces]
    most = max(WHOLE, sum(shares))
    if others.cores + sm_percent <= most:
        return ""
    return f"{sm_percent} % of the SMs are asked for, {others.cores} of {most} % are held by others"


def surplus(pieces: Iterable[Piece], records: Iterable[Record], capacity: int) -> set[str]:
    """The slices of one GPU that must not be offered, for their room went to containers that were made larger. Also
    some that are held, at less than their size: they come back at their whole size. ``capacity``: MiB of all
    containers together.
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
    """The planned sizes on the GPUs that the kubelet chose, in the order of ``given``: each where it was planned, the
    others, largest first, where most is free. Raises Refused where one fits nowhere.
    """
    if len(planned) != len(given):
        raise Refused(
            f"the container was planned on {len(planned)} GPUs and the kubelet gave it {len(given)}; delete the pod so "
            "that it is scheduled again"
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
    """A plan with other devices for one container."""
    return [part._replace(devices=tuple(devices)) if part.container == container else part for part in plan]


def limits_of(devices: Sequence[Device]) -> list[dict[str, Any]]:
    """The devices of a limits file. 0 and 100 % are no limit: an own GPU is nobody else's. One that may burst begins
    with what it was promised."""
    return [
        {
            "uuid": one.uuid,
            "memory_bytes": one.memory_mib * MIB,
            "sm_percent": one.cores or WHOLE,
            **({PROMISED: one.memory_mib, LIMIT: one.memory_mib + one.burst_mib} if one.burst_mib else {}),
        }
        for one in devices
    ]
