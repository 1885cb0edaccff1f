# SPDX-License-Identifier: Apache-2.0
"""Builds rows about nodes, GPUs and pods from API objects that the caller has read.

Memory is in MiB, cores in percent of a GPU. A node gives containers either the sizes that pods request, or equal
slices. For requested sizes, the device plugin publishes its GPUs on the node and the scheduler writes a plan (which
GPUs, how much of each) on each pod, so the use of each GPU is known. For equal slices, the kubelet chooses the GPU, so
only the sums of a node are known here; ``vgpuctl`` on the node shows more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vgpu_plugin._shared.capacity import cluster
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods import resizes
from vgpu_plugin._shared.pods.annotations import NodeGpu, PlanError, Use
from vgpu_plugin._shared.pods.requests import DialectError, asked, read_pod

from .claims import NONE, Claims

# Annotation that lists the resource names that the device plugin itself adds to the node's capacity. The kubelet
# allocates no devices of these resources.
ADDED = "vgpu.fleet/capacity"
CONDITION, HEALTH = "VgpuConfiguration", "VgpuGpusHealthy"
PREFIX = "nvidia.com/"

Object = Mapping[str, Any]


def name_of(thing: Object) -> str:
    return str((thing.get("metadata") or {}).get("name") or "")


def key_of(pod: Object) -> str:
    return f"{(pod.get('metadata') or {}).get('namespace') or 'default'}/{name_of(pod)}"


def resources_of(node: Object) -> list[str]:
    """Returns the names of the resources whose slices the kubelet allocates on this node."""
    capacity = (node.get("status") or {}).get("capacity") or {}
    added, others = (
        set(str(_annotations(node).get(key) or "").split(",")) for key in (ADDED, pod_annotations.RESOURCES)
    )
    return sorted(name for name in capacity if (name.startswith(PREFIX) or name in others) and name not in added)


def gpus_of(node: Object) -> tuple[NodeGpu, ...]:
    """Returns the GPUs of which pods may request parts of any size; empty if slices are equal or the annotation is
    unreadable.
    """
    text = _annotations(node).get(pod_annotations.GPUS)
    try:
        return pod_annotations.read_gpus(text) if text is not None else ()
    except PlanError:
        return ()


def drained_of(node: Object) -> frozenset[str]:
    """Returns the UUIDs of the GPUs that an administrator drains, so that they get no more pods."""
    return pod_annotations.read_drained(str(_annotations(node).get(pod_annotations.DRAINED) or ""))


def held(pod: Object) -> dict[str, Use]:
    """Returns UUID → what a pod holds of the GPU; empty if the pod has no node or has ended. Raises PlanError."""
    if not node_of(pod) or _phase(pod) in cluster.ENDED:
        return {}
    plan = resizes.counted(_annotations(pod))
    return pod_annotations.use_of(plan) if plan is not None else {}


def limits_of(pod: Object) -> dict[str, int]:
    """Returns UUID → the most MiB that a pod may use on each GPU, including burst memory (memory beyond the promised
    size). Raises PlanError.
    """
    plan = resizes.counted(_annotations(pod))
    return pod_annotations.limit_of(plan) if plan is not None else {}


def nodes(found: Iterable[Object], pods: Iterable[Object], claims: Claims = NONE) -> list[dict[str, Any]]:
    """Returns a row for each node with GPUs, sorted by name."""
    by_node: dict[str, list[dict[str, Any]]] = {}
    for pod in pods:
        by_node.setdefault(node_of(pod), []).append(dict(pod))
    rows = []
    for one in sorted(found, key=name_of):
        resources, gpus = resources_of(one), gpus_of(one) or claims.gpus.get(name_of(one), ())
        shares = claims.of_node(name_of(one))
        labels = (one.get("metadata") or {}).get("labels") or {}
        if not resources and not gpus and labels.get(PREFIX + "gpu.present") != "true":
            continue
        mine = by_node.get(name_of(one), [])
        facts = cluster.facts(dict(one), mine, resources)
        count = str(labels.get(PREFIX + "gpu.count") or "")
        rows.append(
            {
                "node": name_of(one),
                "ready": facts["ready"],
                "schedulable": not (one.get("spec") or {}).get("unschedulable"),
                "model": (gpus[0].model if gpus else str(labels.get(PREFIX + "gpu.product") or "")).strip(),
                "gpus": len(gpus) or (int(count) if count.isdigit() else None),
                "unhealthy": sum(not gpu.healthy and gpu.uuid not in drained_of(one) for gpu in gpus),
                "sharing": str(labels.get(PREFIX + "gpu.sharing-strategy") or "") or None,
                "resources": facts["resources"],
                "capacity_mib": sum(gpu.capacity_mib for gpu in gpus) if gpus else None,
                "planned_mib": _planned(mine) + sum(share.use.memory_mib for share in shares) if gpus else None,
                "pods": len(
                    {row["pod"] for row in facts["pods"]}
                    | {key_of(pod) for pod in mine if _has_gpu(pod)}
                    | {pod for share in shares for pod in share.pods}
                ),
                "trouble": _trouble(one, gpus),
            }
        )
    return rows


def cards(found: Iterable[Object], pods: Iterable[Object], claims: Claims = NONE) -> list[dict[str, Any]]:
    """Returns a row for each GPU of which pods may request parts: its size, the planned amounts, and the pods."""
    uses: dict[str, list[tuple[str, Use]]] = {}
    for pod in pods:
        for uuid, use in held_or_none(pod).items():
            uses.setdefault(uuid, []).append((key_of(pod), use))
    for share in claims.shares:
        uses.setdefault(share.uuid, []).append((", ".join(share.pods) or f"claim {share.claim}", share.use))
    rows = []
    for one in sorted(found, key=name_of):
        for number, gpu in enumerate(gpus_of(one) or claims.gpus.get(name_of(one), ())):
            mine = sorted(uses.get(gpu.uuid, []))
            rows.append(
                {
                    "node": name_of(one),
                    "gpu": number,
                    "uuid": gpu.uuid,
                    "model": gpu.model,
                    "healthy": gpu.healthy,
                    "drained": gpu.uuid in drained_of(one),
                    "memory_mib": gpu.memory_mib,
                    "capacity_mib": gpu.capacity_mib,
                    "planned_mib": sum(use.memory_mib for _pod, use in mine),
                    "planned_cores": sum(use.cores for _pod, use in mine),
                    "slots": gpu.slots,
                    "planned_slots": sum(use.slots for _pod, use in mine),
                    "pods": [
                        {"pod": pod, "memory_mib": use.memory_mib, "cores": use.cores, "slots": use.slots}
                        for pod, use in mine
                    ],
                }
            )
    return rows


def pods(found: Iterable[Object], resources: Iterable[str] = (), claims: Claims = NONE) -> list[dict[str, Any]]:
    """Returns a row for each pod that has a GPU or waits for one, sorted by namespace and name. ``resources``: resource
    names of all nodes.
    """
    names = sorted({*resources, PREFIX + "gpu"})
    rows = []
    for pod in sorted(found, key=key_of):
        if _phase(pod) in cluster.ENDED:
            continue
        counts = {name: count for name in names if (count := cluster.asked(dict(pod), name))}
        shares = claims.of_pod(key_of(pod))
        if not counts and not shares and not claims.waits(pod) and not _has_gpu(pod) and not _wants_gpu(pod):
            continue
        fault = ""
        limits: Mapping[str, int] = {}
        try:
            uses, limits = held(pod), limits_of(pod)
        except PlanError as unreadable:
            uses, fault = {}, str(unreadable)
        namespace, _slash, name = key_of(pod).partition("/")
        rows.append(
            {
                "namespace": namespace,
                "pod": name,
                "node": node_of(pod) or None,
                "phase": _phase(pod),
                "chosen_by": "kube-scheduler, for a claim" if shares else _chosen_by(pod),
                "resources": counts,
                "gpus": [
                    {
                        "uuid": uuid,
                        "memory_mib": use.memory_mib,
                        "limit_mib": max(use.memory_mib, limits.get(uuid, 0)),
                        "cores": use.cores,
                        "slots": use.slots,
                    }
                    for uuid, use in sorted([*uses.items(), *((share.uuid, share.use) for share in shares)])
                ],
                "waits_for": fault or _waits_for(pod),
            }
        )
    return rows


def why(pod: Object, events: Iterable[Object], most: int = 5) -> list[str]:
    """Returns lines for a person: what the pod requests, holds or waits for, and its last events, the newest first."""
    where = f" on {node_of(pod)}" if node_of(pod) else ", without a node"
    lines = [f"{key_of(pod)}: {_phase(pod) or 'unknown'}{where}"]
    try:
        ask = read_pod(dict(pod))
        lines += (
            [f"  {line}" for line in asked(ask)] if ask.wants_gpus else ["  requests none of the default GPU resources"]
        )
    except DialectError as fault:
        lines += ["  its GPU request is invalid:", *(f"    {one}" for one in fault.findings)]
    try:
        uses, limits = held(pod), limits_of(pod)
        if uses:
            lines.append(f"  has GPUs, chosen by {_chosen_by(pod)}:")
        for uuid, use in sorted(uses.items()):
            more = f" promised, up to {limits[uuid]} MiB" if limits.get(uuid, 0) > use.memory_mib else ""
            lines.append(f"    {uuid}: {use.memory_mib} MiB{more}, {use.cores or 'any'} %")
    except PlanError as fault:
        lines.append(f"  {fault}")
    lines += [f"  {one}" for one in resizes.under_way(_annotations(pod))]
    waits = _waits_for(pod)
    lines += [f"  waits: {waits}"] if waits else []
    newest = sorted(events, key=_when, reverse=True)
    if newest:
        lines.append("  events, the newest first:")
    for one in newest[:most]:
        lines.append(
            f"    {_when(one) or 'unknown time'} {one.get('reason') or ''}: {one.get('message') or ''}".rstrip()
        )
    return lines


def _annotations(thing: Object) -> Mapping[str, str]:
    return (thing.get("metadata") or {}).get("annotations") or {}


def node_of(pod: Object) -> str:
    return str((pod.get("spec") or {}).get("nodeName") or "")


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "")


def held_or_none(pod: Object) -> dict[str, Use]:
    try:
        return held(pod)
    except PlanError:
        return {}


def _planned(pods: Iterable[Object]) -> int:
    return sum(use.memory_mib for pod in pods for use in held_or_none(pod).values())


def _has_gpu(pod: Object) -> bool:
    known = {pod_annotations.PLAN, pod_annotations.GIVEN} & set(_annotations(pod))
    return bool(known) and bool(node_of(pod)) and _phase(pod) not in cluster.ENDED


def _wants_gpu(pod: Object) -> bool:
    try:
        return read_pod(dict(pod)).wants_gpus
    except DialectError:
        return True


def _chosen_by(pod: Object) -> str | None:
    """Returns who chose the GPUs of a pod; None if they are not chosen yet."""
    if resizes.RESIZED in _annotations(pod):
        return "scheduler, resized"
    if pod_annotations.GIVEN in _annotations(pod):
        return "kubelet, not as planned"
    if pod_annotations.PLAN in _annotations(pod):
        return "scheduler"
    return "kubelet" if node_of(pod) else None


def _waits_for(pod: Object) -> str:
    """Returns why a pod waits: without a node the message of its condition PodScheduled, else the message of the pod's
    status.
    """
    if node_of(pod):
        return str((pod.get("status") or {}).get("message") or "")
    for one in (pod.get("status") or {}).get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return str(one.get("message") or one.get("reason") or "")
    return "no scheduler has tried to find a node yet"


def _trouble(node: Object, gpus: tuple[NodeGpu, ...]) -> list[str]:
    """Returns problems of a node: unhealthy GPUs, an unreadable annotation, a refused configuration."""
    away = drained_of(node)
    found = [
        f"GPU {number} {gpu.uuid} is {'drained' if gpu.uuid in away else 'unhealthy'}"
        for number, gpu in enumerate(gpus)
        if not gpu.healthy
    ]
    if not gpus:
        found += [f"{uuid} is drained" for uuid in sorted(away)]
    text = _annotations(node).get(pod_annotations.GPUS)
    if text is not None and not gpus:
        try:
            pod_annotations.read_gpus(text)
        except PlanError as fault:
            found.append(f"{pod_annotations.GPUS} cannot be read: {fault}")
    for one in (node.get("status") or {}).get("conditions") or []:
        if one.get("type") == HEALTH and one.get("status") == "False" and not gpus:
            # With equal slices, no annotation names the unhealthy GPUs, but this condition's message does.
            found.append(str(one.get("message")))
        if one.get("type") == CONDITION and one.get("status") == "False":
            found.append(f"{CONDITION} {one.get('reason')}: {one.get('message')}")
    return found


def _when(event: Object) -> str:
    series = event.get("series") or {}
    times = (event.get("eventTime"), event.get("lastTimestamp"), series.get("lastObservedTime"))
    return max((str(one) for one in times if one), default="")
