# SPDX-License-Identifier: Apache-2.0
"""The names by which pods request parts of GPUs, in the capacity of this node. Pure.

No device plugin registers them, for our scheduler alone counts them. From Kubernetes 1.36 on the kube-scheduler wants
each of them on the node as soon as a DeviceClass of anybody maps one resource of the pod. The kubelet refuses a pod
whose sum is above the capacity, so no amount is below what our scheduler may place: of memory all of a GPU in each
slot, for a limit may be as large where less was promised (pods/burst.py). A GPU that is unhealthy counts, for its pods
are admitted again when the kubelet starts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .._shared.pods import quantity, resources
from .._shared.pods.annotations import NodeGpu

# The names that this program added, so that it takes away no name of others.
ADDED = "vgpu.fleet/capacity"
WHOLE = 100
GIB_MIB = 1024


def names_of(vcuda: Mapping[str, Any]) -> resources.Config:
    """The names of the node's configuration."""
    names, said = resources.Config(), vcuda.get("resourceNames") or {}
    return names._replace(
        gpu=vcuda.get("resourceName", names.gpu),
        priority=vcuda.get("priorityResource", names.priority),
        memory=said.get("memory", names.memory),
        memory_percentage=said.get("memoryPercentage", names.memory_percentage),
        cores=said.get("cores", names.cores),
    )


def amounts(gpus: Iterable[NodeGpu], names: resources.Config, registered: Iterable[str]) -> dict[str, int]:
    """Name → sum over the GPUs, in the unit of its dialect. ``registered``: names that the kubelet has of us."""
    out: dict[str, int] = {}
    for gpu in gpus:
        memory_mib = gpu.slots * gpu.capacity_mib
        for name, amount in {
            names.shared: gpu.slots,
            names.memory: memory_mib,
            names.memory_percentage: WHOLE,
            names.cores: WHOLE,
            names.cores_also: WHOLE,
            names.priority: gpu.slots,
            resources.GPU_MEM: -(-memory_mib // GIB_MIB),
            resources.GPU_CORE: WHOLE,
            resources.VCUDA_CORE: WHOLE,
            resources.VCUDA_MEMORY: -(-memory_mib // resources.VCUDA_UNIT_MIB),
            resources.QGPU_CORE: WHOLE,
            resources.QGPU_MEMORY: -(-memory_mib // GIB_MIB),
            resources.VOLCANO: gpu.slots,
            resources.VOLCANO_MEMORY: memory_mib,
            resources.VOLCANO_PERCENTAGE: WHOLE,
            resources.VOLCANO_CORES: WHOLE,
        }.items():
            out[name] = out.get(name, 0) + amount
    taken = {names.gpu, *registered}
    return {name: amount for name, amount in out.items() if name not in taken}


def patch(node: Mapping[str, Any], wanted: Mapping[str, int]) -> dict[str, Any] | None:
    """The strategic merge patch of nodes/status that gives the node these amounts and takes away names that were added
    before; None where nothing is to be done. A name whose amount somebody else reports is left to him.
    """
    annotation = ((node.get("metadata") or {}).get("annotations") or {}).get(ADDED)
    added = set(filter(None, (annotation or "").split(",")))
    status = node.get("status") or {}
    capacity, allocatable = status.get("capacity") or {}, status.get("allocatable") or {}
    ours = {name: n for name, n in wanted.items() if name in added or not quantity.exact(capacity.get(name))}
    gone = sorted(name for name in added if name not in ours)
    text = ",".join(sorted(ours)) or None
    out: dict[str, Any] = {}
    for key, found in (("capacity", capacity), ("allocatable", allocatable)):
        different = {name: str(n) for name, n in ours.items() if quantity.exact(found.get(name)) != n}
        different.update({name: None for name in gone if name in found})
        if different:
            out.setdefault("status", {})[key] = different
    if text != annotation:
        # In the same request, so that no name is ever on the node without being known as ours.
        out["metadata"] = {"annotations": {ADDED: text}}
    return out or None
