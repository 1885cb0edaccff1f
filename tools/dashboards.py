# SPDX-License-Identifier: Apache-2.0
"""Write Grafana's dashboards from the tables of this file into ``native/plugin/dashboards``.

There are three dashboards: for operators of nodes, for users of slices, and for operators of the scheduler.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent.parent / "native" / "plugin" / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 12, 8
# Version of Grafana's dashboard schema; Grafana 10.4 and 11 use 39.
SCHEMA = 39

CARD = "{{instance}} GPU {{gpu}}"
TENANT = "{{namespace}}/{{pod}} {{container}}"
NODES, SPACE = 'instance=~"$instance"', 'namespace=~"$namespace"'
RATE = "[$__rate_interval]"
XIDS = f"vgpu_gpu_xids_by_number_total{{{NODES}}}"


class Panel(NamedTuple):
    """A panel. ``unit``: Grafana's name of the unit. ``queries``: (expression, legend) of each query."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


class Dashboard(NamedTuple):
    """A dashboard. ``variables`` maps the name of a dashboard variable to the query for its values."""

    file: str
    title: str
    variables: dict[str, str]
    panels: tuple[Panel, ...]


def one(title: str, unit: str, expr: str, legend: str) -> Panel:
    return Panel(title, unit, ((expr, legend),))


DASHBOARDS = (
    Dashboard(
        "vgpu-nodes.json",
        "vgpu.fleet: nodes",
        {"instance": "label_values(vgpu_plugin_info, instance)"},
        (
            one("Unhealthy GPUs", "short", f"vgpu_gpu_healthy{{{NODES}}} == 0", CARD),
            one(
                "Device plugins not registered with the kubelet",
                "short",
                f"vgpu_plugin_registered{{{NODES}}} == 0",
                "{{instance}}",
            ),
            one(
                "Used part of each GPU's memory",
                "percentunit",
                f"vgpu_gpu_memory_used_bytes{{{NODES}}} / vgpu_gpu_memory_bytes{{{NODES}}}",
                CARD,
            ),
            one("Utilization of GPUs", "percentunit", f"vgpu_gpu_utilization_ratio{{{NODES}}}", CARD),
            one("Temperature", "celsius", f"vgpu_gpu_temperature_celsius{{{NODES}}}", CARD),
            one("Power", "watt", f"vgpu_gpu_power_watts{{{NODES}}}", CARD),
            Panel(
                "Clocks",
                "hertz",
                (
                    (f"vgpu_gpu_sm_clock_hertz{{{NODES}}}", f"{CARD} SM"),
                    (f"vgpu_gpu_memory_clock_hertz{{{NODES}}}", f"{CARD} memory"),
                ),
            ),
            Panel(
                "Xids and ECC errors in the last hour",
                "short",
                (
                    # An Xid is an error number of NVIDIA's driver. The time series of a number begins with its first
                    # Xid, so increase() would miss that first Xid.
                    (f"{XIDS} - ({XIDS} offset 1h or 0 * {XIDS}) > 0", f"{CARD} Xid {{{{xid}}}}"),
                    (f"increase(vgpu_gpu_ecc_errors_total{{{NODES}}}[1h]) > 0", f"{CARD} ECC {{{{kind}}}}"),
                ),
            ),
            Panel(
                "Slices in use, and all slices",
                "short",
                (
                    (f"sum by (instance) (vgpu_slice_in_use{{{NODES}}})", "{{instance}} in use"),
                    (f"count by (instance) (vgpu_slice_in_use{{{NODES}}})", "{{instance}} all"),
                ),
            ),
            Panel(
                "Processes without a slice, findings of the watcher",
                "short",
                (
                    (f"vgpu_watch_unplaced{{{NODES}}} > 0", "{{instance}} {{uuid}} without a slice"),
                    (
                        f'increase(vgpu_watch_findings_total{{{NODES}, kind!="lease"}}[1h]) > 0',
                        "{{instance}} {{reason}}",
                    ),
                ),
            ),
            one("Warnings of vgpuctl status", "short", f"vgpu_plugin_warnings{{{NODES}}} > 0", "{{instance}}"),
        ),
    ),
    Dashboard(
        "vgpu-tenants.json",
        "vgpu.fleet: tenants",
        {"namespace": "label_values(vgpu_container_memory_limit_bytes, namespace)"},
        (
            one("Memory used by containers", "bytes", f"vgpu_container_memory_used_bytes{{{SPACE}}}", TENANT),
            one(
                "Used part of the memory limit",
                "percentunit",
                f"vgpu_container_memory_used_bytes{{{SPACE}}} / vgpu_container_memory_limit_bytes{{{SPACE}}}",
                TENANT,
            ),
            one(
                "Used part of the GPU's time",
                "percentunit",
                f"rate(vgpu_container_device_seconds_total{{{SPACE}}}{RATE})",
                TENANT,
            ),
            Panel(
                "Part of the GPU's time: limit and current grant",
                "percentunit",
                (
                    (f"vgpu_container_share_limit_ratio{{{SPACE}}}", f"{TENANT} limit"),
                    (f"vgpu_container_share_granted_ratio{{{SPACE}}}", f"{TENANT} granted"),
                ),
            ),
            one(
                "Seconds per second that launches are throttled",
                "short",
                f"rate(vgpu_container_throttled_seconds_total{{{SPACE}}}{RATE})",
                TENANT,
            ),
            one("Processes of containers on GPUs", "short", f"vgpu_container_processes{{{SPACE}}}", TENANT),
            one(
                "Violations of the memory limit in the last hour",
                "short",
                f"increase(vgpu_container_memory_violations_total{{{SPACE}}}[1h]) > 0",
                TENANT,
            ),
            one(
                "Current findings of the watcher",
                "short",
                f"vgpu_container_watch_finding{{{SPACE}}} == 1",
                f"{TENANT} {{{{reason}}}}",
            ),
        ),
    ),
    Dashboard(
        "vgpu-scheduler.json",
        "vgpu.fleet: scheduler",
        {},
        (
            one("Leader of the scheduler's replicas", "short", "vgpu_scheduler_leader", "{{instance}}"),
            one(
                "Binds per second by outcome",
                "short",
                f"sum by (outcome) (rate(vgpu_scheduler_binds_total{RATE}))",
                "{{outcome}}",
            ),
            one(
                "Response time, 99th percentile",
                "s",
                "histogram_quantile(0.99, sum by (le, verb) "
                f"(rate(vgpu_scheduler_request_duration_seconds_bucket{RATE})))",
                "{{verb}}",
            ),
            one(
                "Part of each node's GPU memory assigned to pods",
                "percentunit",
                # Takes the maximum, because each replica exports these metrics.
                "max by (node) (vgpu_scheduler_node_memory_held_bytes / vgpu_scheduler_node_memory_capacity_bytes)",
                "{{node}}",
            ),
            one(
                "Slices of each node assigned to pods",
                "short",
                "max by (node) (vgpu_scheduler_node_slots_held)",
                "{{node}}",
            ),
            one(
                "Used part of each quota",
                "percentunit",
                "max by (namespace, quota, resource) (vgpu_scheduler_quota_used / vgpu_scheduler_quota_hard)",
                "{{namespace}} {{quota}} {{resource}}",
            ),
            Panel(
                "Values that should be 0",
                "short",
                (
                    ("max(vgpu_scheduler_oversold_gpus)", "oversold GPUs"),
                    ("max(vgpu_scheduler_unplanned_pods)", "pods without a plan"),
                    ("sum(vgpu_scheduler_uncertain_binds)", "binds of unknown outcome"),
                    (f"sum by (kind) (rate(vgpu_scheduler_drift_total{RATE}))", "differences, {{kind}}"),
                ),
            ),
            one(
                "Requests to the API server per second",
                "short",
                f"sum by (method, kind) (rate(vgpu_scheduler_api_requests_total{RATE}))",
                "{{method}} {{kind}}",
            ),
        ),
    ),
)


def document(made: Dashboard) -> dict[str, Any]:
    """Returns a dashboard in the JSON format that Grafana imports."""
    variables: list[dict[str, Any]] = [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
    for name, query in made.variables.items():
        everything = {
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        variables.append(
            {"name": name, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2, **everything}
        )
    return {
        "title": made.title,
        "uid": made.file.removesuffix(".json"),
        "tags": ["vgpu.fleet"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": [panel(number, each) for number, each in enumerate(made.panels)],
    }


def panel(number: int, made: Panel) -> dict[str, Any]:
    """Returns the JSON of one panel; a row has two panels."""
    place = {"h": HEIGHT, "w": WIDTH, "x": WIDTH * (number % 2), "y": HEIGHT * (number // 2)}
    return {
        "id": number + 1,
        "title": made.title,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": made.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for at, (expr, legend) in enumerate(made.queries)
        ],
    }


def main() -> None:
    for made in DASHBOARDS:
        (FOLDER / made.file).write_text(json.dumps(document(made), indent=1) + "\n")


if __name__ == "__main__":
    main()
