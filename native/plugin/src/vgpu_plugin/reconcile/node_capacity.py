# SPDX-License-Identifier: Apache-2.0
"""Computes the patch that adds to this node's capacity the resource names by which pods request parts of GPUs. It sends
nothing.

No device plugin registers these names, because only our scheduler counts them. But from Kubernetes 1.36 on, if any
DeviceClass maps a resource that a pod requests, the kube-scheduler expects all resource names of that pod in the node's
capacity. The kubelet refuses a pod if the sum of all pods' requests exceeds the capacity. So each amount must be at
least what our scheduler may place. A GPU has a number of slots, its maximum number of containers. For memory the amount
is the GPU's whole memory times its slots, because a container's limit may be as large as the GPU although less is
promised to it (pods/burst.py). Unhealthy GPUs are counted like healthy ones, because their pods are admitted again when
the kubelet restarts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .._shared.pods import quantity, resources
from .._shared.pods.annotations import NodeGpu

# Annotation that lists the resource names that this program added, so that it never removes a name that others added.
ADDED = "vgpu.fleet/capacity"
WHOLE = 100
GIB_MIB = 1024


def names_of(vcuda: Mapping[str, Any]) -> resources.Config:
    """Returns the resource names of the node's configuration."""
    names, said = resources.Config(), vcuda.get("resourceNames") or {}
    return names._replace(
        gpu=vcuda.get("resourceName", names.gpu),
        priority=vcuda.get("priorityResource", names.priority),
        memory=said.get("memory", names.memory),
        memory_percentage=said.get("memoryPercentage", names.memory_percentage),
        cores=said.get("cores", names.cores),
    )


def amounts(gpus: Iterable[NodeGpu], names: resources.Config, registered: Iterable[str]) -> dict[str, int]:
    """Returns resource name → amount: the sum over the GPUs, in the unit of that name. ``registered``: names that our
    device plugin registers; they are left out.
    """
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
    """Returns the strategic merge patch of nodes/status that sets these amounts and removes names that were added
    before; None if nothing changes. Names with an amount reported by another program stay unchanged.
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
        # One request sets the annotation and the amounts, so that the annotation always lists every added name.
        out["metadata"] = {"annotations": {ADDED: text}}
    return out or None
