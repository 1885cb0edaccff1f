# SPDX-License-Identifier: Apache-2.0
"""Removes what this program wrote on the Node object of the Kubernetes API.

If the annotation with the node's GPUs stayed, the scheduler would continue to place pods on GPUs that are no longer
shared.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol
from urllib.parse import quote

from .._shared.pods import annotations as pod_annotations
from ..errors import Fatal
from ..node.kube_api import ApiError
from . import node_capacity, node_features, node_health
from .node_label import CONDITION

ANNOTATIONS = (pod_annotations.GPUS, pod_annotations.DRAINED)
CONDITIONS = (CONDITION, node_health.CONDITION)
NO_SUCH_NODE = 404

log = logging.getLogger(__name__)


class Client(Protocol):
    """The methods of kube_api.Api that this module calls."""

    def get(self, path: str) -> dict[str, Any]: ...

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...


def leave(api: Client, node: str) -> bool:
    """Removes annotations, conditions, taint and labels. Returns whether there were any; there are none if the API
    server does not know the node.

    Raises Fatal if the API server cannot be reached, with a list of what may be left and two ways to continue.
    """
    path = f"/api/v1/nodes/{quote(node, safe='')}"
    try:
        found = api.get(path)
        annotations = [name for name in ANNOTATIONS if name in ((found.get("metadata") or {}).get("annotations") or {})]
        conditions = (found.get("status") or {}).get("conditions") or []
        if annotations:
            api.patch(path, {"metadata": {"annotations": dict.fromkeys(annotations)}})
        ours = [one["type"] for one in conditions if one.get("type") in CONDITIONS]
        if ours:
            # The API server merges conditions by their type, so this patch does not remove the kubelet's conditions.
            gone = [{"$patch": "delete", "type": one} for one in ours]
            api.patch(f"{path}/status", {"status": {"conditions": gone}})
        # This patch has no resource version, because the patches above have changed the version that was read.
        taint = node_health.taint_patch({**found, "metadata": {}}, False)
        if taint:
            api.patch(path, taint)
        features = node_features.patch(found.get("metadata") or {}, {})
        if features:
            api.patch(path, features)
        resources = node_capacity.patch(found, {})
        if resources:
            api.patch(f"{path}/status", resources)
    except ApiError as fault:
        if fault.status == NO_SUCH_NODE:
            log.info("the cluster has no node %s, so there is nothing to remove from it", node)
            return False
        raise Fatal(
            f"node {node} may still have the annotations {' and '.join(ANNOTATIONS)}, the conditions "
            f"{' and '.join(CONDITIONS)}, the taint {node_health.TAINT}, the resources listed in "
            f"{node_capacity.ADDED} and the labels listed in {node_features.NAMES}: {fault}. "
            "Run this again when the API server responds, or without --kubeconfig to leave them"
        ) from None
    if annotations or ours or taint:
        removed = [*annotations, *ours, *([node_health.TAINT] if taint else [])]
        log.info("node %s: removed: %s", node, ", ".join(removed))
    if resources:
        log.info("node %s: removed the resources that %s lists", node, node_capacity.ADDED)
    if features:
        log.info("node %s: removed the labels that %s lists", node, node_features.NAMES)
    return bool(annotations or ours or taint or resources or features)
