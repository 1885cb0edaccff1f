# SPDX-License-Identifier: Apache-2.0
"""The health of this node's GPUs on the Node object: a condition that names each unhealthy GPU, and by policy a taint.
The functions only compute patches and send nothing.

The condition is for people and for programs that repair nodes. Slices (parts) of an unhealthy GPU are withdrawn in any
case; the taint also keeps new pods away from the node's other GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

CONDITION, TAINT = "VgpuGpusHealthy", "vgpu.fleet/gpu-unhealthy"
HEALTHY, UNHEALTHY = "AllHealthy", "GpuUnhealthy"
# The node gets the taint never, while any GPU is unhealthy, or while all GPUs are unhealthy.
NONE, ANY, ALL = "none", "any", "all"
EFFECT = "NoSchedule"


class Health(NamedTuple):
    """The health of the node. ``unhealthy``: (name, reason) of each unhealthy GPU; ``tainted``: whether the node should
    have the taint.
    """

    unhealthy: tuple[tuple[str, str], ...] = ()
    tainted: bool = False


def health(reasons: Sequence[tuple[str, str]], policy: str) -> Health:
    """Returns the health of the node. ``reasons``: (name, reason) of every GPU; the reason is empty if the GPU is
    healthy.
    """
    unhealthy = tuple((name, why) for name, why in reasons if why)
    wanted = {NONE: False, ANY: bool(unhealthy), ALL: bool(reasons) and len(unhealthy) == len(reasons)}
    return Health(unhealthy, wanted[policy])


def condition_patch(node: Mapping[str, Any], wanted: Health, now: str, longest: int) -> dict[str, Any] | None:
    """Returns the strategic merge patch of nodes/status that sets the condition; None if the condition is up to date.
    ``now``: current time in the API's format.
    """
    conditions = (node.get("status") or {}).get("conditions") or []
    found: Mapping[str, Any] = next((one for one in conditions if one.get("type") == CONDITION), {})
    text = "; ".join(f"{name}: {why}" for name, why in wanted.unhealthy) or "every GPU of this node is healthy"
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    says = {
        "type": CONDITION,
        "status": "False" if wanted.unhealthy else "True",
        "reason": UNHEALTHY if wanted.unhealthy else HEALTHY,
        "message": text,
    }
    if all(found.get(key) == value for key, value in says.items()):
        return None
    since = found.get("lastTransitionTime") if found.get("status") == says["status"] else None
    return {"status": {"conditions": [{**says, "lastHeartbeatTime": now, "lastTransitionTime": since or now}]}}


def taint_patch(node: Mapping[str, Any], wanted: bool) -> dict[str, Any] | None:
    """Returns the patch that adds or removes the taint; None if nothing changes. A patch replaces the whole list of
    taints, so it contains the resource version that was read, and the API server refuses it if the node has changed
    since.
    """
    taints = (node.get("spec") or {}).get("taints") or []
    others = [one for one in taints if one.get("key") != TAINT]
    if wanted == (len(others) < len(taints)):
        return None
    made = [*others, {"key": TAINT, "effect": EFFECT}] if wanted else others
    version = (node.get("metadata") or {}).get("resourceVersion")
    metadata = {"metadata": {"resourceVersion": version}} if version else {}
    return {**metadata, "spec": {"taints": made or None}}
