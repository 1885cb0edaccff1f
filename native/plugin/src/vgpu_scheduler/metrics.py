# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the scheduler, in bytes, seconds and ratios. No metric has a label with one value for each pod,
because there may be a hundred thousand pods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vgpu_plugin.admin import process
from vgpu_plugin.admin.exposition import Exposition

if TYPE_CHECKING:  # Only annotations need these classes, and their modules import more packages.
    from .cluster import Cluster
    from .extender import Extender
    from .leadership import Leadership
    from .pod_claims import PodClaims

MIB = 1 << 20
# Upper bounds of the histogram, in seconds. The last bound is the time that a kube-scheduler waits for an extender.
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0)
TYPES = {
    "vgpu_scheduler_leader": ("gauge", "1 if this replica is the leader and binds pods, else 0."),
    "vgpu_scheduler_synced": ("gauge", "1 after nodes and pods have been listed, else 0."),
    "vgpu_scheduler_binds_total": ("counter", "Attempts to bind a pod, by outcome."),
    "vgpu_scheduler_drift_total": ("counter", "Differences found to the objects of the API server, by kind."),
    "vgpu_scheduler_waiting_events_total": ("counter", "Events that report why a pod waits."),
    "vgpu_scheduler_late_watch_total": ("counter", "Filter calls that found room only after a wait for the watch."),
    "vgpu_scheduler_evicted_pods_total": ("counter", "Pods evicted because only memory or compute was short."),
    "vgpu_scheduler_unplanned_pods": ("gauge", "Pods that use GPUs of a node without a plan of the scheduler."),
    "vgpu_scheduler_uncertain_binds": ("gauge", "Binds whose outcome is not known yet."),
    "vgpu_scheduler_oversold_gpus": ("gauge", "GPUs whose planned pods exceed the GPU's capacity."),
    "vgpu_scheduler_quota_hard": ("gauge", "Limit of a quota, in the quota's unit."),
    "vgpu_scheduler_quota_used": ("gauge", "Amount of a quota that pods use, in the quota's unit."),
    "vgpu_scheduler_nodes": ("gauge", "Nodes with GPUs."),
    "vgpu_scheduler_api_requests_total": ("counter", "Requests to the API server, by method and kind."),
    "vgpu_scheduler_node_memory_capacity_bytes": ("gauge", "Total GPU memory that a node's slices may use."),
    "vgpu_scheduler_node_memory_held_bytes": ("gauge", "GPU memory of a node that is assigned to pods."),
    "vgpu_scheduler_node_slots_held": ("gauge", "Slices of a node that are assigned to pods."),
    "vgpu_scheduler_request_duration_seconds": ("histogram", "Time to respond to a request, by verb."),
    "vgpu_scheduler_resizes_total": ("counter", "Requests to resize a running pod, by outcome."),
    "vgpu_scheduler_resizes_pending": ("gauge", "Pods with a resize request that is not granted yet."),
    "vgpu_scheduler_claims_total": (
        "counter",
        "ResourceClaims created for pods that request GPUs by resource names, and failures, by outcome.",
    ),
}


class Durations:
    """Histograms of how long calls took, one for each verb of the extender and webhook."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def add(self, verb: str, seconds: float) -> None:
        counts = self._counts.setdefault(verb, [0] * (len(BUCKETS) + 1))
        counts[next((n for n, bound in enumerate(BUCKETS) if seconds <= bound), len(BUCKETS))] += 1
        self._sums[verb] = self._sums.get(verb, 0.0) + seconds

    def write(self, name: str, out: Exposition) -> None:
        for verb, counts in self._counts.items():
            total = 0
            for bound, count in zip([*BUCKETS, "+Inf"], counts, strict=True):
                total += count
                out.add(name, total, suffix="_bucket", verb=verb, le=bound)
            out.add(name, self._sums[verb], suffix="_sum", verb=verb)
            out.add(name, total, suffix="_count", verb=verb)


def render(
    extender: Extender,
    cluster: Cluster,
    leadership: Leadership,
    claims: PodClaims,
    durations: Durations,
    calls: dict[tuple[str, str], int],
) -> str:
    ledger = extender.ledger
    found = Exposition(TYPES)
    add = found.add
    add("vgpu_scheduler_leader", leadership.leads)
    add("vgpu_scheduler_synced", cluster.synced)
    for outcome, count in extender.counts.items():
        add("vgpu_scheduler_binds_total", count, outcome=outcome)
    for kind, count in cluster.drift.items():
        add("vgpu_scheduler_drift_total", count, kind=kind)
    add("vgpu_scheduler_waiting_events_total", extender.waiting.events)
    add("vgpu_scheduler_late_watch_total", extender.late_watch.helped)
    add("vgpu_scheduler_evicted_pods_total", extender.shortages.evicted)
    for outcome, count in cluster.resizing.counts.items():
        add("vgpu_scheduler_resizes_total", count, outcome=outcome)
    add("vgpu_scheduler_resizes_pending", cluster.resizing.pending)
    for outcome, count in claims.counts.items():
        add("vgpu_scheduler_claims_total", count, outcome=outcome)
    add("vgpu_scheduler_unplanned_pods", len(cluster.unplanned))
    add("vgpu_scheduler_uncertain_binds", len(extender.uncertain))
    add("vgpu_scheduler_oversold_gpus", len(ledger.oversold()))
    for space, limit, used in extender.quotas.rows():
        add("vgpu_scheduler_quota_hard", limit.hard, namespace=space, quota=limit.quota, resource=limit.name)
        add("vgpu_scheduler_quota_used", used, namespace=space, quota=limit.quota, resource=limit.name)
    add("vgpu_scheduler_nodes", len(ledger.nodes))
    for (method, kind), count in sorted(calls.items()):
        add("vgpu_scheduler_api_requests_total", count, method=method, kind=kind)
    for node, gpus in ledger.nodes.items():
        use = ledger.use(node)
        add("vgpu_scheduler_node_memory_capacity_bytes", sum(gpu.capacity_mib for gpu in gpus) * MIB, node=node)
        add("vgpu_scheduler_node_memory_held_bytes", sum(use[gpu.uuid].memory_mib for gpu in gpus) * MIB, node=node)
        add("vgpu_scheduler_node_slots_held", sum(one.slots for one in use.values()), node=node)
    durations.write("vgpu_scheduler_request_duration_seconds", found)
    return found.text() + process.text()
