# SPDX-License-Identifier: Apache-2.0
"""Publishes on this node's object at the API server: the outcome of its configuration, the health of its GPUs, and the
GPUs of which pods may request parts, with the resource names by which pods request them.
"""

from __future__ import annotations

from .._shared.pods import annotations as pod_annotations
from ..allocation import sizing
from ..node.kubelet_topology import KubeletTopology
from ..offer.pool import Pool
from . import node_capacity, node_health
from .labels import PREFIX
from .node_label import NodeLabel
from .reconfigure import Reconfiguration


class NodeReport:
    def __init__(
        self, label: NodeLabel, changes: Reconfiguration, pool: Pool, topology: KubeletTopology, taint: str
    ) -> None:
        """``taint`` is one of the policies in node_health. It says when unhealthy GPUs cause a taint of the node."""
        self._label = label
        self._changes = changes
        self._pool = pool
        self._topology = topology
        self._taint = taint

    def publish(self) -> None:
        self._label.tell(self._changes.outcome())
        reasons = [(f"GPU {gpu.index} {gpu.uuid}", self._pool.unhealthy_reason(gpu.uuid)) for gpu in self._pool.gpus]
        self._label.tell_health(node_health.health(reasons, self._taint))
        settings = self._changes.settings
        # If pods get GPUs by claims (Dynamic Resource Allocation), the kube-scheduler itself counts what is allocated.
        # So nothing is published for our scheduler.
        by_extender = settings.requested and not settings.claims
        gpus: list[pod_annotations.NodeGpu] = []
        if by_extender:
            unhealthy = {gpu.uuid: self._pool.unavailable_reason(gpu.uuid) for gpu in self._pool.gpus}
            gpus = sizing.node_gpus(self._pool.gpus, settings.config, unhealthy)
        # If there are no such GPUs, an empty list is published. If the annotation were missing, the scheduler would
        # assume that it was deleted by mistake, and would continue with the GPUs that it knows.
        topology = self._topology.read() if by_extender else pod_annotations.NO_POLICY
        self._label.annotate(pod_annotations.GPUS, pod_annotations.write_gpus(gpus, topology), add=by_extender)
        # kubectl vgpu knows all names below nvidia.com/ as names of GPUs. For other names it needs this annotation.
        others = [name for name in self._pool.resources if not name.startswith(PREFIX)]
        self._label.annotate(pod_annotations.RESOURCES, ",".join(sorted(others)), add=bool(others))
        names = node_capacity.names_of(settings.vcuda)
        self._label.list_resources(node_capacity.amounts(gpus, names, self._pool.resources))
