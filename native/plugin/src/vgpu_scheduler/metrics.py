# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the scheduler; bytes, seconds and ratios, and no label that grows with pods."""

from __future__ import annotations

from collections.abc import Iterable

from .cluster import Cluster
from .extender import Extender
from .leadership import Leadership

MIB = 1 << 20
# Upper bounds, seconds.
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


class Durations:
    """A histogram for each verb."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def add(self, verb: str, seconds: float) -> None:
        counts = self._counts.setdefault(verb, [0] * (len(BUCKETS) + 1))
        counts[next((n for n, bound in enumerate(BUCKETS) if seconds <= bound), len(BUCKETS))] += 1
        self._sums[verb] = self._sums.get(verb, 0.0) + seconds

    def lines(self, name: str) -> Iterable[str]:
        yield f"# TYPE {name} histogram"
        for verb, counts in self._counts.items():
            total = 0
            for bound, count in zip([*BUCKETS, "+Inf"], counts, strict=True):
                total += count
                yield f'{name}_bucket{{verb="{verb}",le="{bound}"}} {total}'
            yield f'{name}_sum{{verb="{verb}"}} {self._sums[verb]:.6f}'
            yield f'{name}_count{{verb="{verb}"}} {total}'


def render(
    extender: Extender,
    cluster: Cluster,
    leadership: Leadership,
    durations: Durations,
    calls: dict[tuple[str, str], int],
) -> str:
    ledger = extender.ledger
    rows: list[str] = []

    def metric(name: str, kind: str, values: Iterable[tuple[str, float]]) -> None:
        rows.append(f"# TYPE vgpu_scheduler_{name} {kind}")
        rows.extend(f"vgpu_scheduler_{name}{labels} {value}" for labels, value in values)

    metric("leader", "gauge", [("", int(leadership.leads))])
    metric("synced", "gauge", [("", int(cluster.synced))])
    metric("binds_total", "counter", ((f'{{outcome="{name}"}}', value) for name, value in extender.counts.items()))
    metric("drift_total", "counter", ((f'{{kind="{name}"}}', value) for name, value in cluster.drift.items()))
    metric("waiting_events_total", "counter", [("", extender.waiting.events)])
    metric("unplanned_pods", "gauge", [("", len(cluster.unplanned))])
    metric("uncertain_binds", "gauge", [("", len(extender.uncertain))])
    metric("oversold_gpus", "gauge", [("", len(ledger.oversold()))])
    quotas = [
        (f'{{namespace="{space}",quota="{limit.quota}",resource="{limit.name}"}}', limit.hard, used)
        for space, limit, used in extender.quotas.rows()
    ]
    # In the unit of the quota, as its owner wrote it.
    metric("quota_hard", "gauge", ((labels, hard) for labels, hard, _used in quotas))
    metric("quota_used", "gauge", ((labels, used) for labels, _hard, used in quotas))
    metric("nodes", "gauge", [("", len(ledger.nodes))])
    names = ((f'{{method="{method}",kind="{kind}"}}', value) for (method, kind), value in sorted(calls.items()))
    metric("api_requests_total", "counter", names)
    totals: list[tuple[str, int, int, int]] = []
    for name, gpus in ledger.nodes.items():
        use = ledger.use(name)
        held = sum(use[gpu.uuid].memory_mib for gpu in gpus)
        totals.append((name, sum(gpu.capacity_mib for gpu in gpus), held, sum(one.slots for one in use.values())))
    metric("node_memory_capacity_bytes", "gauge", ((f'{{node="{one[0]}"}}', one[1] * MIB) for one in totals))
    metric("node_memory_held_bytes", "gauge", ((f'{{node="{one[0]}"}}', one[2] * MIB) for one in totals))
    metric("node_slots_held", "gauge", ((f'{{node="{one[0]}"}}', one[3]) for one in totals))
    rows.extend(durations.lines("vgpu_scheduler_request_seconds"))
    return "\n".join(rows) + "\n"
