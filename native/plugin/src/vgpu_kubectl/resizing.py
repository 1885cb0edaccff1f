# SPDX-License-Identifier: Apache-2.0
"""``kubectl vgpu resize``: what is to be written on a pod, so that its scheduler grants another size. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods import resizes
from vgpu_plugin._shared.pods.annotations import PlanError
from vgpu_plugin._shared.pods.quantity import exact

MIB = 1 << 20


def mib_of(text: str) -> int:
    """Of a quantity of Kubernetes with its unit, such as 8Gi. Raises PlanError."""
    found = exact(text)
    if found is None or text[-1:].isdigit() or found < MIB:
        raise PlanError(f"memory of {text}; expected a number with its unit, such as 8Gi or 512Mi, and 1Mi at least")
    return int(found // MIB)


def request(pod: Mapping[str, Any], container: str, size: resizes.Size) -> str:
    """The text of the annotation, with what is asked for the pod's other containers and was not granted yet.
    ``container``: empty where the pod has one with a GPU alone. Raises PlanError.
    """
    if size == resizes.Size():
        raise PlanError("no size is asked for; expected --memory, --cores, or both")
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    plan = pod_annotations.read_annotations(annotations)
    if plan is None:
        raise PlanError("it has no GPUs that vgpu-scheduler planned; on its node root may try: vgpuctl resize")
    having = [part.container for part in plan if part.devices]
    if not container and len(having) != 1:
        raise PlanError(f"several containers have GPUs ({', '.join(having)}); name one with --container")
    try:
        standing = resizes.pending(annotations) or {}
    except PlanError:
        standing = {}  # what cannot be read is replaced
    wanted = {**standing, container or having[0]: size}
    resizes.applied(plan, wanted)
    return resizes.write_request(resizes.read_request(resizes.write_request(wanted)))
