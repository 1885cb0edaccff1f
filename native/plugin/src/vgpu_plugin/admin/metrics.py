# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of a node, in the text format 0.0.4: per GPU, slice and container, in bytes, seconds and ratios.

The number of label values is limited by the GPUs and slices of the node; a container's series end with its allocation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from ..allocation.records import KUBELET, LEASES
from ..node.gauges import UNKNOWN as NO_FIGURE
from ..watch import rule
from ..watch.finding import STATIC_KIND, UNKNOWN
from .exposition import Exposition

KINDS = (KUBELET, STATIC_KIND, *LEASES, UNKNOWN)
ECC_KINDS = ("corrected", "uncorrected")
NO_LIMIT = 2**63 - 1
TYPES = {
    "vgpu_gpu_memory_bytes": ("gauge", "Memory of the GPU."),
    "vgpu_gpu_memory_used_bytes": ("gauge", "Memory of the GPU that is used, by the driver, to a MiB."),
    "vgpu_gpu_utilization_ratio": ("gauge", "Part of the driver's last sample period in which a kernel ran."),
    "vgpu_gpu_temperature_celsius": ("gauge", "Temperature of the GPU."),
    "vgpu_gpu_power_watts": ("gauge", "Power that the GPU draws."),
    "vgpu_gpu_sm_clock_hertz": ("gauge", "Clock of the GPU's multiprocessors now."),
    "vgpu_gpu_memory_clock_hertz": ("gauge", "Clock of the GPU's memory now."),
    "vgpu_gpu_ecc_errors_total": ("counter", "ECC errors since the driver was loaded; kind: corrected, uncorrected."),
    "vgpu_gpu_xids_total": ("counter", "Xids that the driver reported of the GPU since the plugin began."),
    "vgpu_gpu_xids_by_number_total": ("counter", "The same by the Xid's number; absent before the first."),
    "vgpu_gpu_last_xid": ("gauge", "Number of the last Xid since the plugin began; absent before the first."),
    "vgpu_gpu_healthy": ("gauge", "1 where the GPU is healthy."),
    "vgpu_slice_memory_limit_bytes": ("gauge", "Memory that the slice may hold."),
    "vgpu_slice_share_limit_ratio": ("gauge", "Part of the GPU's time that the slice may use."),
    "vgpu_slice_healthy": ("gauge", "1 where the kubelet may give the slice out."),
    "vgpu_slice_in_use": ("gauge", "1 where a container or a check holds the slice."),
    "vgpu_container_memory_limit_bytes": ("gauge", "Memory that the container may hold on the GPU."),
    "vgpu_container_memory_promised_bytes": ("gauge", "Memory that the container was promised of it."),
    "vgpu_container_memory_burst_limit_bytes": ("gauge", "Up to what its limit may grow while nobody needs that."),
    "vgpu_container_memory_used_bytes": ("gauge", "Memory that the container says it holds, contexts included."),
    "vgpu_container_memory_driver_bytes": ("gauge", "Memory that the driver shows of it; absent where it shows none."),
    "vgpu_container_memory_context_bytes": ("gauge", "What contexts and modules take of it."),
    "vgpu_container_processes": ("gauge", "Processes of the container that hold memory on the GPU."),
    "vgpu_container_share_limit_ratio": ("gauge", "Part of the GPU's time that the container may use."),
    "vgpu_container_share_granted_ratio": ("gauge", "Part that the arbiter grants now; absent without an arbiter."),
    "vgpu_container_device_seconds_total": ("counter", "Time of the GPU charged to the container."),
    "vgpu_container_throttled_seconds_total": (
        "counter",
        "Time that launches waited for the share or the turn, summed over the container's threads.",
    ),
    "vgpu_container_active": ("gauge", "1 where the container launched, or waited to launch, within the last second."),
    "vgpu_container_throttled": ("gauge", "1 where it wants the GPU and is throttled to its share."),
    "vgpu_container_memory_violations_total": ("counter", "Times that it held more than it may, by driver or ledger."),
    "vgpu_container_watch_finding": ("gauge", "1 where the watcher names processes of the container, by reason."),
    "vgpu_container_old_mounts": ("gauge", "1 where the container has the mounts of a former version."),
    "vgpu_watch_findings_total": ("counter", "Findings of the watcher since the plugin began, by reason and kind."),
    "vgpu_watch_unplaced": ("gauge", "Processes on the GPU of no container with a slice, and not of the host."),
    "vgpu_watch_unaccounted_bytes": ("gauge", "Memory of the GPU that is held by processes of no allocation."),
    "vgpu_watch_host_bytes": ("gauge", "Memory of the GPU that is held by programs of the host itself."),
    "vgpu_watch_polls_total": ("counter", "Looks of the watcher at the GPUs since the plugin began."),
    "vgpu_watch_incomplete": ("gauge", "1 where the watcher's last look did not see all."),
    "vgpu_watch_signals_total": ("counter", "Signals that the watcher sent by its policy."),
    "vgpu_plugin_registered": ("gauge", "1 where the kubelet listens to every resource."),
    "vgpu_plugin_config_refused": ("gauge", "1 where the configuration that is wanted was not taken over."),
    "vgpu_plugin_warnings": ("gauge", "Lines of warning in vgpuctl status."),
    "vgpu_plugin_allocations": ("gauge", "Allocations that exist, by kind."),
    "vgpu_plugin_mounts_unchecked_total": ("counter", "Starts of containers whose pod could not be read at the API."),
    "vgpu_container_driver_limit_bytes": ("gauge", "Limit that the driver itself enforces; absent where it has none."),
    "vgpu_container_driver_used_bytes": ("gauge", "Memory that the driver charges the container's control group."),
    "vgpu_container_driver_limit_wrong": ("gauge", "1 where the driver's limit was not as promised at the last poll."),
    "vgpu_driver_limit_repairs_total": ("counter", "Limits of the driver that were lost and set again."),
    "vgpu_plugin_memory_enforcement": ("gauge", "1, with who enforces memory as a label."),
    "vgpu_plugin_info": ("gauge", "1, with version, configuration and library as labels."),
}


def text(
    status: Mapping[str, Any], usages: Iterable[Mapping[str, Any]], watched: Mapping[str, Any] | None = None
) -> str:
    return collected(status, usages, watched).text()


def collected(
    status: Mapping[str, Any], usages: Iterable[Mapping[str, Any]], watched: Mapping[str, Any] | None = None
) -> Exposition:
    """Returns the metrics. ``status``, ``usages`` and ``watched`` are the responses of Status, Usage and Watch as plain
    values.
    """
    found = Exposition(TYPES)
    add = found.add
    for gpu in status["gpus"]:
        _card(found, gpu)
    for one in status["slices"]:
        labels = {"slice": one["id"], "uuid": one["uuid"], "resource": one["resource"], "mode": one["mode"]}
        add("vgpu_slice_memory_limit_bytes", one["memory_mib"] << 20, **labels)
        add("vgpu_slice_share_limit_ratio", one["sm_percent"] / 100, **labels)
        add("vgpu_slice_healthy", one["health"] == "Healthy", **labels)
        add("vgpu_slice_in_use", one["in_use"], **labels)
    for use in usages:
        labels = {key: use[key] for key in ("allocation", "uuid", "namespace", "pod", "container")}
        add("vgpu_container_memory_limit_bytes", use["memory_limit"], **labels)
        add("vgpu_container_memory_promised_bytes", use["memory_promised"], **labels)
        add("vgpu_container_memory_burst_limit_bytes", use["memory_most"], **labels)
        add("vgpu_container_memory_used_bytes", use["memory_used"], **labels)
        if use["memory_driver"] >= 0:
            add("vgpu_container_memory_driver_bytes", use["memory_driver"], **labels)
        add("vgpu_container_memory_context_bytes", use["memory_context"], **labels)
        add("vgpu_container_processes", use["processes"], **labels)
        add("vgpu_container_share_limit_ratio", use["share_limit"], **labels)
        if use["share_granted"] >= 0:
            add("vgpu_container_share_granted_ratio", use["share_granted"], **labels)
        add("vgpu_container_device_seconds_total", use["device_seconds"], **labels)
        add("vgpu_container_throttled_seconds_total", use["throttled_seconds"], **labels)
        add("vgpu_container_active", use["active"], **labels)
        add("vgpu_container_throttled", use["throttled"], **labels)
        add("vgpu_container_memory_violations_total", use["violations"], **labels, kind=use["kind"])
    if watched is not None:
        _findings(found, watched)
        add("vgpu_watch_polls_total", watched["looks"])
        add("vgpu_watch_incomplete", bool(watched["fault"]))
        for name in ("sigterm", "sigkill"):
            add("vgpu_watch_signals_total", watched[name], signal=name.upper())
    _driver_limits(found, status)
    add("vgpu_plugin_registered", status["registered"])
    add("vgpu_plugin_config_refused", bool(status["config_fault"]))
    add("vgpu_plugin_warnings", len(status["warnings"]))
    for kind in (KUBELET, *LEASES):
        add("vgpu_plugin_allocations", sum(one["kind"] == kind for one in status["allocations"]), kind=kind)
    add("vgpu_plugin_mounts_unchecked_total", status["mounts_unchecked"])
    info = {key: status[key] for key in ("version", "config_name", "library")}
    add("vgpu_plugin_info", 1, **info, config_sha256=status["config_sha256"][:12])
    return found


def _driver_limits(found: Exposition, status: Mapping[str, Any]) -> None:
    if not status.get("memory_enforcement"):
        return
    found.add("vgpu_plugin_memory_enforcement", 1, by=status["memory_enforcement"])
    found.add("vgpu_driver_limit_repairs_total", status["driver_limits_repaired"])
    for one in status["driver_limits"]:
        labels = {"allocation": one["allocation"], "uuid": one["uuid"]}
        if one["found"] < NO_LIMIT:
            found.add("vgpu_container_driver_limit_bytes", one["found"], **labels)
        found.add("vgpu_container_driver_used_bytes", one["used"], **labels)
        found.add("vgpu_container_driver_limit_wrong", bool(one["fault"]), **labels)


# columns: field of a GPU, metric, factor from the field's unit to the metric's. A field that is missing or NO_FIGURE is
# not reported.
FIGURES = (
    ("memory_used_mib", "vgpu_gpu_memory_used_bytes", 1 << 20),
    ("utilisation", "vgpu_gpu_utilization_ratio", 0.01),
    ("temperature", "vgpu_gpu_temperature_celsius", 1),
    ("power_milliwatts", "vgpu_gpu_power_watts", 0.001),
    ("sm_clock_mhz", "vgpu_gpu_sm_clock_hertz", 10**6),
    ("memory_clock_mhz", "vgpu_gpu_memory_clock_hertz", 10**6),
)


def _card(found: Exposition, gpu: Mapping[str, Any]) -> None:
    add, labels = found.add, {"gpu": gpu["index"], "uuid": gpu["uuid"], "model": gpu["model"]}
    if gpu["memory_mib"]:
        add("vgpu_gpu_memory_bytes", gpu["memory_mib"] << 20, **labels)
    for field, name, unit in FIGURES:
        if gpu.get(field, NO_FIGURE) != NO_FIGURE:
            add(name, round(gpu[field] * unit, 6), **labels)
    for kind in ECC_KINDS:
        if f"ecc_{kind}" in gpu:
            add("vgpu_gpu_ecc_errors_total", gpu[f"ecc_{kind}"], **labels, kind=kind)
    # Reported as 0 from the first scrape on: Prometheus would not notice an increase if the series began with 1.
    add("vgpu_gpu_xids_total", sum(one["count"] for one in gpu.get("xids", ())), **labels)
    for one in gpu.get("xids", ()):
        add("vgpu_gpu_xids_by_number_total", one["count"], **labels, xid=one["xid"])
    if "last_xid" in gpu:
        add("vgpu_gpu_last_xid", gpu["last_xid"], **labels)
    add("vgpu_gpu_healthy", gpu["healthy"], **labels)


def _findings(found: Exposition, watched: Mapping[str, Any]) -> None:
    add = found.add
    for one in watched["findings"]:
        labels = {key: one[key] for key in ("allocation", "uuid", "namespace", "pod", "container", "reason")}
        add("vgpu_container_watch_finding", 1, **labels, kind=one["kind"])
    for one in watched["old_mounts"]:
        labels = {key: one[key] for key in ("allocation", "namespace", "pod", "container")}
        add("vgpu_container_old_mounts", 1, **labels)
    # Reported as 0 from the first scrape on: Prometheus would not notice an increase if a series began with 1.
    totals = dict.fromkeys(itertools.product(rule.REASONS, KINDS), 0)
    totals.update({(one["reason"], one["kind"]): one["count"] for one in watched["totals"]})
    for (reason, kind), count in totals.items():
        add("vgpu_watch_findings_total", count, reason=reason, kind=kind)
    for one in watched["unplaced"]:
        add("vgpu_watch_unplaced", one["processes"], uuid=one["uuid"])
        add("vgpu_watch_unaccounted_bytes", one["bytes"], uuid=one["uuid"])
        add("vgpu_watch_host_bytes", one["host_bytes"], uuid=one["uuid"])
