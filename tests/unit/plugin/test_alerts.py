# SPDX-License-Identifier: Apache-2.0
"""Tests the shipped Prometheus alerts: they are generated from one table, use only existing metrics and labels, fire on
their fault, and stay quiet without it. Prometheus' own program promtool evaluates them.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from vgpu_plugin.admin import metrics
from vgpu_plugin.watch import rule as watch_rule

from .conftest import PLUGIN, ROOT

spec = importlib.util.spec_from_file_location("vgpu_alerts_tool", ROOT / "tools" / "alerts.py")
assert spec is not None and spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

# The scheduler's packages are installed in another environment, so the test reads its table of metrics as text.
OF_SCHEDULER = set(
    re.findall(
        r'^    "(vgpu_scheduler_\w+)"', (PLUGIN / "src" / "vgpu_scheduler" / "metrics.py").read_text(), re.MULTILINE
    )
)


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(tool.RULES.read_text())["groups"]
    return [one for group in groups for one in group["rules"]]


@pytest.mark.parametrize("path", tool.files(), ids=lambda one: one.name)
def test_files_are_made_of_the_table(path):
    assert path.read_text() == tool.files()[path], "run `.build/venv/bin/python tools/alerts.py`"


def test_object_of_the_operator_has_the_same_rules():
    made = yaml.safe_load(tool.OBJECT.read_text())
    assert (made["apiVersion"], made["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert made["spec"]["groups"] == yaml.safe_load(tool.RULES.read_text())["groups"] == tool.groups()


@pytest.mark.parametrize("one", tool.ALERTS, ids=lambda one: one.name or one.expr[:40])
def test_every_row_uses_existing_metrics(one):
    """Every row of the table, also a row that records a value instead of an alert, uses only existing metrics."""
    names = set(re.findall(r"vgpu_[a-z_]+", one.expr))
    assert names and names <= {*metrics.TYPES, *OF_SCHEDULER}
    assert one.summary and bool(one.name) == bool(one.severity) == bool(one.description)


@pytest.mark.parametrize("rule", rules(), ids=lambda one: one["alert"])
def test_alert_uses_existing_labels(rule):
    assert set(rule["labels"]) == {"severity"}
    name = re.findall(r"vgpu_[a-z_]+", rule["expr"])[0]
    have = {"instance", *(() if name in OF_SCHEDULER else metrics_labels(name))}
    texts = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= have
    wanted = {*watch_rule.REASONS, *metrics.KINDS, *metrics.ECC_KINDS}
    for inside in re.findall(r"{([^}]*)}", rule["expr"]):
        for label, values in re.findall(r'(\w+)[!=]~?="?([^"]*)"', inside):
            assert label in have
            assert set(values.split("|")) <= wanted


def test_alerts_on_bypasses_are_critical():
    paging = [one["expr"] for one in rules() if one["labels"]["severity"] == "page"]
    for name in ("memory_violations_total", "watch_findings_total", "watch_finding"):
        assert any(re.search(rf"{name}\b", one) for one in paging)


@pytest.mark.parametrize("rule", rules(), ids=lambda one: one["alert"])
def test_isolation_check_causes_no_alert(rule):
    """The isolation check of this project tries on each node to bypass the limits, in a lease (a temporary allocation).
    These attempts must not cause alerts.
    """
    if re.search("violations|watch_finding", rule["expr"]):
        assert 'kind!="lease"' in rule["expr"]


def metrics_labels(name: str) -> set[str]:
    """Returns the labels of a metric as a node writes them."""
    status = dict.fromkeys(("version", "config_name", "library", "config_sha256", "config_fault"), "")
    gpu = {"index": 0, "uuid": "GPU-a", "model": "T4", "memory_mib": 1, "healthy": True}
    status |= {"gpus": [gpu], "slices": [], "registered": True, "warnings": [], "allocations": []}
    one = {"allocation": "a", "namespace": "n", "pod": "p", "container": "c", "uuid": "GPU-a"}
    gpu |= {"ecc_corrected": 0, "ecc_uncorrected": 0}
    figures = ("memory_limit", "memory_used", "memory_driver", "memory_context", "processes", "share_limit")
    more = ("share_granted", "device_seconds", "throttled_seconds", "active", "throttled", "violations")
    more += ("memory_promised", "memory_most")
    one["kind"] = "kubelet"
    seen = {"findings": [{**one, "reason": "no-slot"}], "totals": [], "old_mounts": [one], "looks": 1, "fault": ""}
    status["mounts_unchecked"] = 0
    seen |= {"unplaced": [{"uuid": "GPU-a", "processes": 1, "bytes": 1, "host_bytes": 1}], "sigterm": 0, "sigkill": 0}
    text = metrics.text(status, [{**one, **dict.fromkeys((*figures, *more), 1)}], seen)
    found = [one for family in text_string_to_metric_families(text) for one in family.samples if one.name == name]
    return set(found[0].labels)


# ---- each alert fires on its fault and stays quiet without it: promtool test rules

NODE = {"instance": "gpu-1:9410", "job": "vgpu"}
POD = {**NODE, "allocation": "a1", "uuid": "GPU-a", "namespace": "ml", "pod": "train", "container": "main"}
CARD = {**NODE, "gpu": "0", "uuid": "GPU-a", "model": "T4"}
INFO = {**NODE, "version": "1", "config_name": "", "library": "0.1", "config_sha256": "abc"}
FINDING = "vgpu_container_watch_finding"
TOTAL = "vgpu_watch_findings_total"
VIOLATIONS = "vgpu_container_memory_violations_total"
ECC = "vgpu_gpu_ecc_errors_total"

# Alert → four inputs of its test: 1. the minute at which promtool evaluates the alert; 2. series with which it must
# fire; 3. the value that it must have then; 4. several lists of series, with each of which it must stay quiet. A series
# is (metric, labels, values in promtool's notation, one per minute).
Series = tuple[str, dict[str, str], str]
FAULTS: dict[str, tuple[int, list[Series], float, list[list[Series]]]] = {
    "VgpuMemoryViolation": (
        8,
        [(VIOLATIONS, {**POD, "kind": "kubelet"}, "0x5 1x30")],
        1,
        [
            [(VIOLATIONS, {**POD, "kind": "kubelet"}, "7x40")],
            [(VIOLATIONS, {**POD, "kind": "lease"}, "0x5 9x30")],
        ],
    ),
    "VgpuBypass": (
        8,
        # The container that caused the finding has ended, but the counter of the node remains.
        [(TOTAL, {**NODE, "reason": "no-slot", "kind": "kubelet"}, "0x5 1x30")],
        1,
        [
            [(TOTAL, {**NODE, "reason": "no-slot", "kind": "kubelet"}, "3x40")],
            [(TOTAL, {**NODE, "reason": "no-slot", "kind": "lease"}, "0x5 9x30")],
            [(TOTAL, {**NODE, "reason": "more-time", "kind": "kubelet"}, "0x5 9x30")],
        ],
    ),
    "VgpuBypassLasts": (
        5,
        [(FINDING, {**POD, "reason": "foreign-mount", "kind": "kubelet"}, "1x30")],
        1,
        [
            [(FINDING, {**POD, "reason": "foreign-mount", "kind": "lease"}, "1x30")],
            [(FINDING, {**POD, "reason": "more-time", "kind": "kubelet"}, "1x30")],
            [(FINDING, {**POD, "reason": "no-slot", "kind": "kubelet"}, "_x5 1x30")],
        ],
    ),
    "VgpuMoreTime": (
        7,
        [(FINDING, {**POD, "reason": "more-time", "kind": "kubelet"}, "1x30")],
        1,
        [
            [(FINDING, {**POD, "reason": "more-time", "kind": "kubelet"}, "_x3 1x30")],
            [(FINDING, {**POD, "reason": "more-time", "kind": "lease"}, "1x30")],
        ],
    ),
    "VgpuUnplaced": (
        5,
        [("vgpu_watch_unplaced", {**NODE, "uuid": "GPU-a"}, "2x30")],
        2,
        [
            [("vgpu_watch_unplaced", {**NODE, "uuid": "GPU-a"}, "0x30")],
            [("vgpu_watch_unaccounted_bytes", {**NODE, "uuid": "GPU-a"}, "0 0 5 0 0 0x30")],
        ],
    ),
    "VgpuWatchIncomplete": (
        15,
        [("vgpu_watch_incomplete", NODE, "1x30")],
        1,
        [[("vgpu_watch_incomplete", NODE, "0x30")], [("vgpu_watch_incomplete", NODE, "1x8 0 1x30")]],
    ),
    "VgpuPluginSilent": (
        25,
        [("vgpu_plugin_info", INFO, "1x5 _x40")],
        1,
        [
            [("vgpu_plugin_info", INFO, "1x60")],
            # An upgrade changes the version label, so a new series replaces the old one.
            [("vgpu_plugin_info", INFO, "1x5 _x40"), ("vgpu_plugin_info", {**INFO, "version": "2"}, "_x5 1x60")],
            # The plugin writes no value for two minutes because it restarts.
            [("vgpu_plugin_info", INFO, "1x20 _ _ 1x40")],
        ],
    ),
    "VgpuNotRegistered": (
        5,
        [("vgpu_plugin_registered", NODE, "0x30")],
        0,
        [[("vgpu_plugin_registered", NODE, "1x30")], [("vgpu_plugin_registered", NODE, "1x3 0x30")]],
    ),
    "VgpuGpuUnhealthy": (1, [("vgpu_gpu_healthy", CARD, "0x30")], 0, [[("vgpu_gpu_healthy", CARD, "1x30")]]),
    "VgpuGpuEccErrors": (
        8,
        [(ECC, {**CARD, "kind": "uncorrected"}, "0x5 1x30")],
        1,
        [
            [(ECC, {**CARD, "kind": "uncorrected"}, "4x40")],
            [(ECC, {**CARD, "kind": "corrected"}, "0x5 9x30")],
            # The counter returns to 0 because the driver was loaded again.
            [(ECC, {**CARD, "kind": "uncorrected"}, "4x5 0x30")],
        ],
    ),
    "VgpuConfigRefused": (
        8,
        [("vgpu_plugin_config_refused", NODE, "1x30")],
        1,
        [[("vgpu_plugin_config_refused", NODE, "0x30")], [("vgpu_plugin_config_refused", NODE, "0x5 1x30")]],
    ),
    "VgpuSchedulerNoLeader": (
        20,
        [
            ("vgpu_scheduler_leader", {"instance": "a"}, "1x5 0x40"),
            ("vgpu_scheduler_leader", {"instance": "b"}, "0x40"),
        ],
        1,
        [
            [
                ("vgpu_scheduler_leader", {"instance": "a"}, "1x5 0x40"),
                ("vgpu_scheduler_leader", {"instance": "b"}, "0x6 1x40"),
            ],
            [],  # A fleet without this project's scheduler has no such series.
        ],
    ),
    "VgpuOversold": (
        8,
        [("vgpu_scheduler_oversold_gpus", NODE, "3x30")],
        3,
        [[("vgpu_scheduler_oversold_gpus", NODE, "0x30")], [("vgpu_scheduler_oversold_gpus", NODE, "0x5 3x30")]],
    ),
    "VgpuUnplannedPods": (
        8,
        [("vgpu_scheduler_unplanned_pods", NODE, "1x30")],
        1,
        [[("vgpu_scheduler_unplanned_pods", NODE, "0x30")], [("vgpu_scheduler_unplanned_pods", NODE, "0x5 1x30")]],
    ),
}
# Alert → labels that its series have and the fired alert does not, because the alert's expression sums over them.
DROPPED = {"VgpuPluginSilent": {*INFO} - {"instance"}, "VgpuSchedulerNoLeader": {"instance"}}
RULES = {one["alert"]: one for one in rules()}


def test_every_alert_has_test_series():
    assert set(FAULTS) == set(RULES)


def series(found: list[Series]) -> list[dict[str, str]]:
    out = []
    for name, labels, values in found:
        inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
        out.append({"series": f"{name}{{{inside}}}", "values": values})
    return out


def fired(alert: str, found: list[Series], value: float) -> dict[str, Any]:
    """Returns the fired alert in the form that Prometheus sends."""
    rule = RULES[alert]
    labels = {key: text for key, text in found[0][1].items() if key not in DROPPED.get(alert, ())}

    def filled(text: str) -> str:
        text = re.sub(r"{{ \$labels\.(\w+) }}", lambda one: labels[one[1]], text)
        return text.replace("{{ $value }}", f"{value:g}")

    annotations = {key: filled(text) for key, text in rule["annotations"].items()}
    return {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": annotations}


def tried(tmp_path, alert: str, minute: int, found: list[Series], expected: list[dict[str, Any]]) -> str:
    """Returns promtool's errors, or "" if the alerts fire as expected."""
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool is not installed: package prometheus")
    case = {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": expected}
    tests = [{"interval": "1m", "input_series": series(found), "alert_rule_test": [case]}]
    path = tmp_path / "case.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(tool.RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(
        [promtool, "test", "rules", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("alert", FAULTS)
def test_alert_fires_on_its_fault(tmp_path, alert):
    minute, found, value, _quiet = FAULTS[alert]
    assert tried(tmp_path, alert, minute, found, [fired(alert, found, value)]) == ""


QUIET = [(alert, number) for alert, row in FAULTS.items() for number in range(len(row[3]))]


@pytest.mark.parametrize(("alert", "number"), QUIET)
def test_alert_is_quiet_without_its_fault(tmp_path, alert, number):
    minute, _found, _value, quiet = FAULTS[alert]
    assert tried(tmp_path, alert, minute, quiet[number], []) == ""


def test_missing_alert_fails_promtool(tmp_path):
    """Checks the test itself: promtool must fail if the expected alert is missing."""
    minute, found, _value, _quiet = FAULTS["VgpuNotRegistered"]
    assert "FAILED" in tried(tmp_path, "VgpuNotRegistered", minute, found, [])
