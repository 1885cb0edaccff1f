# SPDX-License-Identifier: Apache-2.0
"""The devices that a node publishes for claims (Dynamic Resource Allocation): its GPUs, in the form of ResourceSlice
specifications. This module does no I/O.

A GPU that libvgpu shares is one device, which many claims may have at once. Each claim consumes memory, cores and one
slot of the device's capacity; the slots limit the number of claims. With equal slices, a claim gets exactly the size of
one slice. With requested sizes, it may have any size.

A time-sliced GPU has only slots. A whole GPU or a MIG device belongs to one claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .._shared.config import slices
from .._shared.config.sharing import MIG, MPS, NONE, TIME_SLICING, VCUDA, Piece
from .._shared.pods.quantity import mebibytes
from ..node.gpus import NO_NUMA, Driver, Gpu, MigDevice
from .names import CORES, DRIVER, MEMORY, SLOTS, device_names

# Maximum number of devices in one ResourceSlice if its devices have taints.
MOST_DEVICES = 64
UNHEALTHY, MOVING, DRAINED = (f"{DRIVER}/{word}" for word in ("unhealthy", "moving", "drained"))
WHOLE = 100
LONGEST_STRING = 64


@dataclass(frozen=True)
class NodeView:
    """The state of a node. ``unhealthy`` maps GPU UUIDs to reasons. ``moving`` are GPUs that pods of the device plugin
    still use, so claims must wait for them. ``drained`` are GPUs that an administrator drains.
    """

    name: str
    gpus: tuple[Gpu, ...]
    pieces: tuple[Piece, ...]
    config: Mapping[str, Any]
    driver: Driver
    unhealthy: Mapping[str, str] = field(default_factory=dict)
    moving: frozenset[str] = frozenset()
    drained: frozenset[str] = frozenset()


def slices_of(node: NodeView) -> list[dict[str, Any]]:
    """Returns the specification of each ResourceSlice, in order. If the node offers no device, returns one
    specification without devices. The generation of the pool is always 0 here; publish.py sets the real one.
    """
    devices = [one for gpu in node.gpus for one in _devices(node, gpu)]
    parts = [devices[at : at + MOST_DEVICES] for at in range(0, len(devices), MOST_DEVICES)] or [[]]
    pool = {"name": node.name, "generation": 0, "resourceSliceCount": len(parts)}
    return [{"driver": DRIVER, "nodeName": node.name, "pool": dict(pool), "devices": part} for part in parts]


def _requested(config: Mapping[str, Any]) -> bool:
    return (slices.vcuda_of(dict(config)) or {}).get("sliceSizing") == "requested"


def _devices(node: NodeView, gpu: Gpu) -> list[dict[str, Any]]:
    names = device_names(node.gpus)
    by_device: dict[str, list[Piece]] = {}
    for piece in node.pieces:
        if piece.uuid == gpu.uuid:
            by_device.setdefault(piece.device, []).append(piece)
    out = []
    for device, pieces in by_device.items():
        mig = next((one for one in gpu.mig if one.uuid == device), None)
        made = _shared(node, gpu, mig, pieces)
        if made is None:
            continue
        taints = _taints(node, gpu)
        out.append({"name": names[device], **made, **({"taints": taints} if taints else {})})
    return out


def _shared(node: NodeView, gpu: Gpu, mig: MigDevice | None, pieces: list[Piece]) -> dict[str, Any] | None:
    mode = pieces[0].mode
    attributes = _attributes(node, gpu, mig, mode)
    if mode == VCUDA:
        share = slices.share_of(gpu.facts(), dict(node.config))
        if share is None:
            # Containers still use slices of a former split. Claims wait until the pool has the slices of the new split.
            return None
        capacity = _capacity(gpu, node.config, share, pieces)
        return {"attributes": attributes, "allowMultipleAllocations": True, "capacity": capacity}
    if mode == TIME_SLICING:
        return {"attributes": attributes, "allowMultipleAllocations": True, "capacity": _slots(len(pieces))}
    if mode in (NONE, MIG):
        return {"attributes": attributes, "capacity": {MEMORY: {"value": mebibytes(pieces[0].memory_mib)}}}
    # GPUs shared by MPS are not published. A client of MPS needs the pipes of the MPS daemon, which only the device
    # plugin mounts into containers.
    return None if mode == MPS else {}


def _capacity(gpu: Gpu, config: Mapping[str, Any], share: slices.Share, pieces: list[Piece]) -> dict[str, Any]:
    slice_mib, percent = slices.size_of(gpu.facts(), share)
    total = slices.claimable_mib(gpu.facts(), share, _requested(config))
    if not _requested(config):
        # The cores of all slices may add up to more than 100 %. So the capacity is this sum.
        size = mebibytes(slice_mib)
        memory = {"value": mebibytes(total), "requestPolicy": {"default": size, "validValues": [size]}}
        cores = {
            "value": str(percent * share.split_count),
            "requestPolicy": {"default": str(percent), "validValues": [str(percent)]},
        }
        return {MEMORY: memory, CORES: cores, **_slots(len(pieces))}
    memory = {
        "value": mebibytes(total),
        "requestPolicy": {
            "default": mebibytes(min(slice_mib, total)),
            "validRange": {"min": mebibytes(1), "step": mebibytes(1)},
        },
    }
    default = str(max(1, WHOLE // share.split_count))
    cores = {"value": str(WHOLE), "requestPolicy": {"default": default, "validRange": {"min": "1", "step": "1"}}}
    return {MEMORY: memory, CORES: cores, **_slots(len(pieces))}


def _slots(count: int) -> dict[str, Any]:
    policy = {"default": "1", "validRange": {"min": "1", "max": "1"}}
    return {SLOTS: {"value": str(count), "requestPolicy": policy}}


def _attributes(node: NodeView, gpu: Gpu, mig: MigDevice | None, mode: str) -> dict[str, Any]:
    major, minor = node.driver.compute.get(gpu.uuid, (0, 0))
    cuda = node.driver.cuda
    out: dict[str, Any] = {
        "type": {"string": "mig" if mig else "gpu"},
        "uuid": {"string": mig.uuid if mig else gpu.uuid},
        "index": {"int": gpu.index},
        "model": {"string": gpu.model[:LONGEST_STRING]},
        "sharing": {"string": mode},
        "driverVersion": {"version": version(node.driver.version)},
        "cudaVersion": {"version": f"{cuda[0]}.{cuda[1]}.0"},
    }
    if (major, minor) != (0, 0):
        out["computeCapability"] = {"version": f"{major}.{minor}.0"}
    if gpu.numa_node != NO_NUMA:
        out["numa"] = {"int": gpu.numa_node}
    if mig:
        out.update(profile={"string": mig.profile}, parentUUID={"string": gpu.uuid})
    return out


def version(text: str) -> str:
    """Returns three numbers without leading zeros, which is the API's format of a version."""
    numbers = [int(one) if one.isdigit() else 0 for one in text.split(".")]
    return ".".join(str(one) for one in [*numbers, 0, 0, 0][:3])


def _taints(node: NodeView, gpu: Gpu) -> list[dict[str, Any]]:
    out = []
    if reason := node.unhealthy.get(gpu.uuid):
        out.append({"key": UNHEALTHY, "value": label_value(reason), "effect": "NoSchedule"})
    if gpu.uuid in node.moving:
        out.append({"key": MOVING, "value": "device-plugin", "effect": "NoSchedule"})
    if gpu.uuid in node.drained:
        out.append({"key": DRAINED, "value": "administrator", "effect": "NoSchedule"})
    return out


def label_value(text: str) -> str:
    """Returns a valid label value for a text: "Xid 79" becomes "xid-79"."""
    words = "".join(char if char.isalnum() and char.isascii() else "-" for char in text.lower())
    return "-".join(one for one in words.split("-") if one)[:63].strip("-") or "unhealthy"
