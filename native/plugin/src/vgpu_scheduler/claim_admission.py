# SPDX-License-Identifier: Apache-2.0
"""Computes the changes by which a pod gets GPUs by claims (Dynamic Resource Allocation) instead of by resource names.
Each requesting container gets the name of its own claim, which ``pod_claims`` creates once the pod is stored. The
requested resource names are removed, so a second review of the pod finds no GPU request.
"""

from __future__ import annotations

from typing import Any

from vgpu_plugin._shared.config.kinds import Finding
from vgpu_plugin._shared.pods import burst
from vgpu_plugin._shared.pods.claim_requests import (
    ALLOCATION,
    ANNOTATION,
    EXTENDER,
    LABEL,
    WANTED,
    Claims,
    claim_name,
    object_name,
    read_claims,
    write_claims,
)
from vgpu_plugin._shared.pods.fractions import NAMES, OF_CONTAINER
from vgpu_plugin._shared.pods.resources import Config, resource_names

__all__ = ("changes", "read_claims", "unavailable")

DEFAULT_SCHEDULER = "default-scheduler"
VARIABLE = "scheduler_claims"


def unavailable(wanted: bool, first: bool) -> list[Finding]:
    """Returns an error if no pod can get claims in this review, else an empty list. ``wanted``: whether this scheduler
    is configured to create claims; ``first``: whether this is the mutating review, which may change the pod.
    """
    where = f'metadata.labels["{ALLOCATION}"]'
    if not wanted:
        text = f"this scheduler creates no claims; set {VARIABLE}: true, or label the pod {EXTENDER}"
        return [Finding("error", where, text)]
    if not first:
        text = "another webhook added a GPU request after the pod got its claims; exclude such pods from that webhook"
        return [Finding("error", where, text)]
    return []


def changes(review: str, pod: dict[str, Any], claims: Claims, config: Config, ours: str) -> list[dict[str, Any]]:
    """Returns the JSON patch that gives the pod its claims. ``review``: the uid of the admission review; ``ours``: the
    name of our scheduler.
    """
    metadata, spec = pod.get("metadata") or {}, pod["spec"]
    patch: list[dict[str, Any]] = []
    if spec.get("schedulerName") == ours:
        patch.append({"op": "add", "path": "/spec/schedulerName", "value": DEFAULT_SCHEDULER})
    sources = list(spec.get("resourceClaims") or [])
    taken = {str(one.get("name")) for one in sources}
    names = resource_names(config)
    wanted = {}
    for kind in ("initContainers", "containers"):
        for n, container in enumerate(spec.get(kind) or []):
            share = claims.shares.get(container.get("name"))
            if share is None:
                continue
            name, made = claim_name(container["name"], taken), object_name(review, container["name"])
            taken.add(name)
            wanted[made] = share
            sources.append({"name": name, "resourceClaimName": made})
            resources = dict(container.get("resources") or {})
            for within in ("limits", "requests"):
                if within in resources:
                    resources[within] = {key: one for key, one in resources[within].items() if key not in names}
            resources["claims"] = [*(resources.get("claims") or []), {"name": name}]
            patch.append({"op": "add", "path": f"/spec/{kind}/{n}/resources", "value": resources})
    patch.append({"op": "add", "path": "/spec/resourceClaims", "value": sources})
    kept = {name: value for name, value in (metadata.get("annotations") or {}).items() if not _asks(name)}
    annotations = {**kept, ANNOTATION: write_claims(claims._replace(shares=wanted))}
    patch.append({"op": "add", "path": "/metadata/annotations", "value": annotations})
    labels = {**(metadata.get("labels") or {}), LABEL: WANTED}
    patch.append({"op": "add", "path": "/metadata/labels", "value": labels})
    return patch


def _asks(name: str) -> bool:
    return name in (*NAMES, burst.REQUEST) or name.startswith(OF_CONTAINER)
