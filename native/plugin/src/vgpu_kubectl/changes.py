# SPDX-License-Identifier: Apache-2.0
"""Builds the annotations by which ``kubectl vgpu`` requests a new size for a running pod, and drains a GPU so that it
gets no more pods. This module sends nothing.

The annotation of a pod requests its new size, which the scheduler grants. The annotation of a node lists its drained
GPUs, which the node's device plugin reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods import resizes
from vgpu_plugin._shared.pods.annotations import PlanError

from . import rows

DRAINED = pod_annotations.DRAINED
MEMORY = re.compile(r"^([0-9]+)(Mi|Gi|Ti|)$")
UNITS_MIB = {"": 1, "Mi": 1, "Gi": 1024, "Ti": 1024 * 1024}

Object = Mapping[str, Any]


class Refused(Exception):
    """Raised if a request is impossible. The text names the request, what was expected, and the next step."""


def memory_mib(text: str) -> int:
    """Returns the MiB of a size such as 8Gi; a plain number is MiB. Raises ValueError."""
    found = MEMORY.match(text)
    value = int(found[1]) * UNITS_MIB[found[2]] if found else 0
    if not 1 <= value <= pod_annotations.MAX_MIB:
        raise ValueError(f"expected a size such as 8Gi or 3000 (MiB), at most {pod_annotations.MAX_MIB} MiB")
    return value


def request(pod: Object, container: str, memory: int | None, cores: int | None) -> str:
    """Returns the text of the pod's annotation: this container's new size, and earlier requests for other containers.
    Raises Refused.
    """
    notes = (pod.get("metadata") or {}).get("annotations") or {}
    name = rows.key_of(pod)
    try:
        plan = pod_annotations.read_annotations(notes) or ()
    except PlanError as fault:
        raise Refused(f"pod {name}: {fault}") from None
    having = [part.container for part in plan if part.devices and part.kind != pod_annotations.INIT]
    if not having:
        raise Refused(
            f"pod {name} has no part of a GPU that can be resized; expected one that the scheduler placed, see kubectl "
            "vgpu why. A slice of equal size is resized on its node: vgpuctl resize"
        )
    if not container and len(having) > 1:
        raise Refused(f"pod {name} has several containers with GPUs; name one with --container: {', '.join(having)}")
    chosen = container or having[0]
    if chosen not in having:
        raise Refused(f"pod {name}: container {chosen} has no GPU; expected {' or '.join(having)}")
    if memory is None and cores is None:
        raise Refused("nothing to change; give --memory, --cores or both")
    try:
        before = json.loads(notes.get(resizes.RESIZE) or "{}")
    except ValueError:
        before = {}
    before = before if isinstance(before, dict) else {}
    size = {key: value for key, value in (("memory_mib", memory), ("cores", cores)) if value is not None}
    former = before.get(chosen)
    merged = {**before, chosen: {**(former if isinstance(former, dict) else {}), **size}}
    return json.dumps(merged, sort_keys=True, separators=(",", ":"))


def outcome(pod: Object, asked: str) -> str:
    """Returns the state of a resize request: granted, or granted but not applied by the node yet. Returns an empty text
    if the request is not granted.
    """
    notes = (pod.get("metadata") or {}).get("annotations") or {}
    if notes.get(resizes.RESIZED) != asked:
        return ""
    return "granted, but its node has not applied it yet" if resizes.FORMER in notes else "granted"


# ---- draining: a GPU that gets no more pods


def the_gpu(node: Object, named: str, exported: Mapping[str, int]) -> str:
    """Returns the UUID of a GPU given by index, UUID, or the beginning of a UUID. ``exported``: UUID → index as
    reported by the node's exporter of metrics, empty if the exporter was not read. Raises Refused.
    """
    listed = {gpu.uuid: number for number, gpu in enumerate(rows.gpus_of(node))}
    known = listed or dict(exported)
    if named.isdigit():
        found = [uuid for uuid, number in known.items() if number == int(named)]
    else:
        found = [uuid for uuid in known if uuid.startswith(named)] if known else [named]
    where = f"node {rows.name_of(node)}"
    if not known and not re.fullmatch(r"GPU-[0-9A-Za-z-]+", named):
        raise Refused(f"{where}: its GPUs are unknown here; give the whole UUID of the GPU, as vgpuctl status shows it")
    if len(found) != 1:
        names = ", ".join(f"{number}: {uuid}" for uuid, number in sorted(known.items(), key=lambda one: one[1]))
        raise Refused(f"{where}: expected one GPU, found {len(found)} by the name {named}; it has {names}")
    return found[0]


def drained(node: Object, uuid: str, away: bool) -> str | None:
    """Returns the text of the node's annotation of drained GPUs, with this GPU added or removed. Returns None if no GPU
    is drained any more; then the annotation must be removed.
    """
    notes = (node.get("metadata") or {}).get("annotations") or {}
    before = pod_annotations.read_drained(notes.get(DRAINED) or "")
    return ",".join(sorted(before | {uuid} if away else before - {uuid})) or None


def pods_on(node: str, uuid: str, pods: Iterable[Object], used: Sequence[Mapping[str, Any]]) -> list[Object]:
    """Returns the pods that hold a part of the GPU, according to their plans (annotations with the GPUs that the
    scheduler chose) and to the node's exporter. ``used``: rows of exporters.containers.
    """
    named = {(one["namespace"], one["pod"]) for one in used if one["node"] == node and one["uuid"] == uuid}
    found = []
    for pod in pods:
        namespace, _slash, name = rows.key_of(pod).partition("/")
        if rows.node_of(pod) == node and (uuid in rows.held_or_none(pod) or (namespace, name) in named):
            found.append(pod)
    return found


def unmanaged(pods: Iterable[Object]) -> list[str]:
    """Returns the names of the pods that no controller would create again after an eviction."""
    return [rows.key_of(one) for one in pods if not (one.get("metadata") or {}).get("ownerReferences")]


def eviction(pod: Object) -> dict[str, Any]:
    metadata = pod.get("metadata") or {}
    named = {key: metadata.get(key) for key in ("name", "namespace")}
    # The uid is part of the eviction, so that a newer pod of the same name is not evicted.
    options = {"preconditions": {"uid": metadata.get("uid")}}
    return {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": named, "deleteOptions": options}
