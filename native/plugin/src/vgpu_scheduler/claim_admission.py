# SPDX-License-Identifier: Apache-2.0
"""What a pod is given that gets claims for what it asks for: each asking container a claim of its own, made from a
template that is named after what it says; the names by which it asked go. Pure.

Nothing is left by which it asks, so a second look finds a pod without GPUs.
"""

from __future__ import annotations

from typing import Any

from vgpu_plugin._shared.config.kinds import Finding
from vgpu_plugin._shared.pods import burst
from vgpu_plugin._shared.pods.claim_requests import (
    ALLOCATION,
    EXTENDER,
    Claims,
    claim_name,
    read_claims,
    template_name,
)
from vgpu_plugin._shared.pods.fractions import NAMES, OF_CONTAINER
from vgpu_plugin._shared.pods.resources import Config, resource_names

__all__ = ("changes", "read_claims", "unavailable")

DEFAULT_SCHEDULER = "default-scheduler"
VARIABLE = "scheduler_claims"


def unavailable(wanted: bool, first: bool) -> list[Finding]:
    """Why this pod gets no claims, whatever it asks for. ``first``: it may still be changed."""
    where = f'metadata.labels["{ALLOCATION}"]'
    if not wanted:
        text = f"this scheduler makes no claims; set {VARIABLE}: true, or label the pod {EXTENDER}"
        return [Finding("error", where, text)]
    if not first:
        text = "another webhook made the pod ask in names of the extender after it had its claims; keep it from that"
        return [Finding("error", where, text)]
    return []


def changes(
    pod: dict[str, Any], claims: Claims, config: Config, ours: str
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The JSON patch, and the claims' specs by the names of their templates. ``ours``: the name of our scheduler."""
    metadata, spec = pod.get("metadata") or {}, pod["spec"]
    patch: list[dict[str, Any]] = []
    if spec.get("schedulerName") == ours:
        patch.append({"op": "add", "path": "/spec/schedulerName", "value": DEFAULT_SCHEDULER})
    annotations = metadata.get("annotations") or {}
    kept = {name: value for name, value in annotations.items() if not _asks(name)}
    if kept != annotations:
        patch.append({"op": "add", "path": "/metadata/annotations", "value": kept})
    sources = list(spec.get("resourceClaims") or [])
    taken = {str(one.get("name")) for one in sources}
    templates: dict[str, dict[str, Any]] = {}
    names = resource_names(config)
    for kind in ("initContainers", "containers"):
        for n, container in enumerate(spec.get(kind) or []):
            wanted = claims.specs.get(container.get("name"))
            if wanted is None:
                continue
            name, template = claim_name(container["name"], taken), template_name(wanted)
            taken.add(name)
            templates[template] = wanted
            sources.append({"name": name, "resourceClaimTemplateName": template})
            resources = dict(container.get("resources") or {})
            for within in ("limits", "requests"):
                if within in resources:
                    resources[within] = {key: one for key, one in resources[within].items() if key not in names}
            resources["claims"] = [*(resources.get("claims") or []), {"name": name}]
            patch.append({"op": "add", "path": f"/spec/{kind}/{n}/resources", "value": resources})
    patch.append({"op": "add", "path": "/spec/resourceClaims", "value": sources})
    return patch, templates


def _asks(name: str) -> bool:
    return name in (*NAMES, burst.REQUEST) or name.startswith(OF_CONTAINER)
