# SPDX-License-Identifier: Apache-2.0
"""The alerts that are shipped: of metrics and labels that a node has, and those of a bypass page somebody."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from vgpu_plugin.admin import metrics
from vgpu_plugin.watch import rule as watch_rule

from .conftest import PLUGIN


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PLUGIN / "dashboards" / "vgpu-alerts.yml").read_text())["groups"]
    return [one for group in groups for one in group["rules"]]


@pytest.mark.parametrize("rule", rules(), ids=lambda one: one["alert"])
def test_alert_is_of_metrics_and_labels_that_exist(rule):
    names = set(re.findall(r"vgpu_[a-z_]+", rule["expr"]))
    assert names and names <= set(metrics.TYPES)
    assert set(rule["labels"]) == {"severity"}
    have = {"instance", *metrics_labels(names.pop())}
    texts = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= have
    for label, wanted in re.findall(r'(\w+)[!=]~?="?([^"]*)"', rule["expr"].partition("{")[2]):
        assert label in have
        assert set(wanted.split("|")) <= {*watch_rule.REASONS, *metrics.KINDS}


def test_what_bypasses_pages():
    paging = [one["expr"] for one in rules() if one["labels"]["severity"] == "page"]
    for name in ("memory_violations_total", "watch_findings_total", "watch_finding"):
        assert any(re.search(rf"{name}\b", one) for one in paging)


@pytest.mark.parametrize("rule", rules(), ids=lambda one: one["alert"])
def test_isolation_check_rouses_nobody(rule):
    """It tries every bypass with a lease, on each node."""
    if re.search("violations|watch_finding", rule["expr"]):
        assert 'kind!="lease"' in rule["expr"]


def metrics_labels(name: str) -> set[str]:
    """Of a metric, as a node writes it."""
    status = dict.fromkeys(("version", "config_name", "library", "config_sha256", "config_fault"), "")
    gpu = {"index": 0, "uuid": "GPU-a", "model": "T4", "memory_mib": 1, "healthy": True}
    status |= {"gpus": [gpu], "slices": [], "registered": True, "warnings": [], "allocations": []}
    one = {"allocation": "a", "namespace": "n", "pod": "p", "container": "c", "uuid": "GPU-a"}
    figures = ("memory_limit", "memory_used", "memory_driver", "memory_context", "processes", "share_limit")
    more = ("share_granted", "device_seconds", "throttled_seconds", "active", "throttled", "violations")
    one["kind"] = "kubelet"
    seen = {"findings": [{**one, "reason": "no-slot"}], "totals": [], "old_mounts": [one], "looks": 1, "fault": ""}
    status["mounts_unchecked"] = 0
    seen |= {"unplaced": [{"uuid": "GPU-a", "processes": 1, "bytes": 1}], "sigterm": 0, "sigkill": 0}
    text = metrics.text(status, [{**one, **dict.fromkeys((*figures, *more), 1)}], seen)
    found = [one for family in text_string_to_metric_families(text) for one in family.samples if one.name == name]
    return set(found[0].labels)
