# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of a node: for each GPU, for each slice (part of a GPU), and for each container. The units are
bytes, seconds and ratios.

Terms in the help texts: an Xid is an error number of NVIDIA's driver, the watcher finds programs that bypass their
limits, and the arbiter divides the time of a GPU between containers.

The number of time series is limited by the node's GPUs and slices. The series of a container end when its allocation of
slices ends, so the number does not grow over time.
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
    "vgpu_gpu_memory_used_bytes": ("gauge", "GPU memory in use as the driver reports it, in whole MiB."),
    "vgpu_gpu_utilization_ratio": ("gauge", "Part of the driver's last sample period in which a kernel ran."),
    "vgpu_gpu_temperature_celsius": ("gauge", "Temperature of the GPU."),
    "vgpu_gpu_power_watts": ("gauge", "Power that the GPU draws."),
    "vgpu_gpu_sm_clock_hertz": ("gauge", "Current clock of the GPU's multiprocessors."),
    "vgpu_gpu_memory_clock_hertz": ("gauge", "Current clock of the GPU's memory."),
    "vgpu_gpu_ecc_errors_total": ("counter", "ECC errors since the driver was loaded; kind: corrected, uncorrected."),
    "vgpu_gpu_xids_total": ("counter", "Xid errors that the driver reported for the GPU since the plugin started."),
    "vgpu_gpu_xids_by_number_total": ("counter", "Xid errors of the GPU by Xid number; absent before the first."),
    "vgpu_gpu_last_xid": ("gauge", "Number of the last Xid since the plugin started; absent before the first."),
    "vgpu_gpu_healthy": ("gauge", "1 if the GPU is healthy, else 0."),
    "vgpu_slice_memory_limit_bytes": ("gauge", "Memory limit of the slice."),
    "vgpu_slice_share_limit_ratio": ("gauge", "Part of the GPU's time that the slice may use."),
    "vgpu_slice_healthy": ("gauge", "1 if the kubelet may assign the slice, else 0."),
    "vgpu_slice_in_use": ("gauge", "1 if a container or a check uses the slice, else 0."),
    "vgpu_container_memory_limit_bytes": ("gauge", "Current memory limit of the container on the GPU."),
    "vgpu_container_memory_promised_bytes": ("gauge", "Part of the limit that is guaranteed to the container."),
    "vgpu_container_memory_burst_limit_bytes": ("gauge", "Maximum to which the limit may grow."),
    "vgpu_container_memory_used_bytes": ("gauge", "Memory that the container reports as used, contexts included."),
    "vgpu_container_memory_driver_bytes": ("gauge", "Memory of the container by the driver; absent if none."),
    "vgpu_container_memory_context_bytes": ("gauge", "Part of the used memory that contexts and modules use."),
    "vgpu_container_processes": ("gauge", "Processes of the container that hold memory on the GPU."),
    "vgpu_container_share_limit_ratio": ("gauge", "Part of the GPU's time that the container may use."),
    "vgpu_container_share_granted_ratio": ("gauge", "Share that the arbiter grants now; absent if none."),
    "vgpu_container_device_seconds_total": ("counter", "GPU time charged to the container."),
    "vgpu_container_throttled_seconds_total": (
        "counter",
        "Time that kernel launches waited because of the share or the arbiter, summed over the container's threads.",
    ),
    "vgpu_container_active": ("gauge", "1 if the container launched or waited in the last second, else 0."),
    "vgpu_container_throttled": ("gauge", "1 if the container's launches are throttled to its share, else 0."),
    "vgpu_container_memory_violations_total": ("counter", "Times that the container exceeded its memory limit."),
    "vgpu_container_watch_finding": ("gauge", "1 if the watcher found a bypass by the container; label: reason."),
    "vgpu_container_old_mounts": ("gauge", "1 if the container has the mounts of an older version."),
    "vgpu_watch_findings_total": ("counter", "Findings of the watcher since the plugin started, by reason and kind."),
    "vgpu_watch_unplaced": ("gauge", "GPU processes that belong to no container with a slice and not to the host."),
    "vgpu_watch_unaccounted_bytes": ("gauge", "GPU memory used by processes without an allocation."),
    "vgpu_watch_host_bytes": ("gauge", "GPU memory used by the host's own programs."),
    "vgpu_watch_polls_total": ("counter", "Checks of the GPUs by the watcher since the plugin started."),
    "vgpu_watch_incomplete": ("gauge", "1 if the watcher's last check was incomplete, else 0."),
    "vgpu_watch_signals_total": ("counter", "Signals that the watcher sent to processes that bypass the library."),
    "vgpu_plugin_registered": ("gauge", "1 if the kubelet has registered every resource and listens."),
    "vgpu_plugin_config_refused": ("gauge", "1 if the plugin refused the new configuration, else 0."),
    "vgpu_plugin_warnings": ("gauge", "Number of warnings in vgpuctl status."),
    "vgpu_plugin_allocations": ("gauge", "Current allocations, by kind."),
    "vgpu_plugin_mounts_unchecked_total": ("counter", "Container starts without a check of the pod's mounts."),
    "vgpu_container_driver_limit_bytes": ("gauge", "Memory limit that the driver itself enforces; absent if none."),
    "vgpu_container_driver_used_bytes": ("gauge", "Memory that the driver charges to the container's control group."),
    "vgpu_container_driver_limit_wrong": ("gauge", "1 if the driver's limit was wrong at the last check, else 0."),
    "vgpu_driver_limit_repairs_total": ("counter", "Times that the plugin set a lost driver limit again."),
    "vgpu_plugin_memory_enforcement": ("gauge", "Always 1; label by: what enforces the memory limits."),
    "vgpu_plugin_info": ("gauge", "Always 1; labels: version, configuration and library."),
}


def text(
    status: Mapping[str, Any], usages: Iterable[Mapping[str, Any]], watched: Mapping[str, Any] | None = None
) -> str:
    return collected(status, usages, watched).text()


def collected(
    status: Mapping[str, Any], usages: Iterable[Mapping[str, Any]], watched: Mapping[str, Any] | None = None
) -> Exposition:
    """Returns the metrics. ``status``, ``usages`` and ``watched`` are the responses of the calls Status, Usage and
    Watch, converted to plain values.
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


# columns: field of a GPU in the Status response, name of the metric, factor from the field's unit to the metric's unit.
# If the field is missing or has the value NO_FIGURE, the metric is not reported.
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
    # The counter is reported as 0 from the first scrape on, because Prometheus would not notice an increase if the
    # series began with 1.
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
    # Each counter is reported as 0 from the first scrape on, because Prometheus would not notice an increase if the
    # series began with 1.
    totals = dict.fromkeys(itertools.product(rule.REASONS, KINDS), 0)
    totals.update({(one["reason"], one["kind"]): one["count"] for one in watched["totals"]})
    for (reason, kind), count in totals.items():
        add("vgpu_watch_findings_total", count, reason=reason, kind=kind)
    for one in watched["unplaced"]:
        add("vgpu_watch_unplaced", one["processes"], uuid=one["uuid"])
        add("vgpu_watch_unaccounted_bytes", one["bytes"], uuid=one["uuid"])
        add("vgpu_watch_host_bytes", one["host_bytes"], uuid=one["uuid"])
