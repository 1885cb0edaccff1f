# SPDX-License-Identifier: Apache-2.0
"""Tests the shipped Grafana dashboards: they are generated from one table, use existing metrics and labels, have
queries that Prometheus accepts, and have the format that Grafana imports. Grafana itself does not run.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess

import pytest
import yaml
from vgpu_plugin.admin import metrics

from .conftest import PLUGIN, ROOT

spec = importlib.util.spec_from_file_location("vgpu_dashboards_tool", ROOT / "tools" / "dashboards.py")
assert spec is not None and spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

SOURCES = {
    "node": (PLUGIN / "src" / "vgpu_plugin" / "admin" / "metrics.py").read_text(),
    # The scheduler's packages are installed in another environment, so the test reads its table of metrics as text.
    "scheduler": (PLUGIN / "src" / "vgpu_scheduler" / "metrics.py").read_text(),
}
OF_SCHEDULER = set(re.findall(r'^    "(vgpu_scheduler_\w+)"', SOURCES["scheduler"], re.MULTILINE))
# Labels that Prometheus adds to every metric of a scrape target.
SCRAPED = {"instance", "job"}
CARD = {"gpu", "uuid", "model"}
TENANT = {"allocation", "uuid", "namespace", "pod", "container"}
LABELS = {
    "vgpu_gpu_": CARD,
    "vgpu_gpu_ecc_errors_total": {*CARD, "kind"},
    "vgpu_gpu_xids_by_number_total": {*CARD, "xid"},
    "vgpu_slice_": {"slice", "uuid", "resource", "mode"},
    "vgpu_container_": TENANT,
    "vgpu_container_watch_finding": {*TENANT, "reason", "kind"},
    "vgpu_watch_unplaced": {"uuid"},
    "vgpu_watch_findings_total": {"reason", "kind"},
    "vgpu_plugin_": set(),
    "vgpu_scheduler_": set(),
    "vgpu_scheduler_binds_total": {"outcome"},
    "vgpu_scheduler_drift_total": {"kind"},
    "vgpu_scheduler_resizes_total": {"outcome"},
    "vgpu_scheduler_quota_": {"namespace", "quota", "resource"},
    "vgpu_scheduler_api_requests_total": {"method", "kind"},
    "vgpu_scheduler_node_": {"node"},
    "vgpu_scheduler_request_duration_seconds_bucket": {"verb", "le"},
}
QUERIES = [
    (made.file, panel.title, expr, legend)
    for made in tool.DASHBOARDS
    for panel in made.panels
    for expr, legend in panel.queries
]


def labels_of(name: str) -> set[str]:
    """Returns the labels of a metric. The table has labels by prefix of the name; the longest match counts."""
    return LABELS[max((one for one in LABELS if name.startswith(one)), key=len)] | SCRAPED


@pytest.mark.parametrize("made", tool.DASHBOARDS, ids=lambda one: one.file)
def test_files_are_made_of_the_table(made):
    text = json.dumps(tool.document(made), indent=1) + "\n"
    assert (tool.FOLDER / made.file).read_text() == text, "run `.build/venv/bin/python tools/dashboards.py`"


def test_folder_has_no_other_file():
    assert {one.name for one in tool.FOLDER.glob("*.json")} == {made.file for made in tool.DASHBOARDS}


@pytest.mark.parametrize(("file", "title", "expr", "legend"), QUERIES, ids=[f"{one[0]} {one[3]}" for one in QUERIES])
def test_query_is_of_metrics_and_labels_that_exist(file, title, expr, legend):
    names = set(re.findall(r"vgpu_[a-z_]+", re.sub(r"\$\w+", "", expr)))
    assert names and {name.removesuffix("_bucket") for name in names} <= {*metrics.TYPES, *OF_SCHEDULER}
    have = set.intersection(*(labels_of(name) for name in names))
    used = set(re.findall(r"(\w+)[!=]~?\"", expr))
    if by := re.search(r"by \(([\w, ]+)\)", expr):
        kept = set(re.split(r", ?", by.group(1)))
        assert kept <= have, expr
        have = kept
    assert used <= set.union(*(labels_of(name) for name in names)), expr
    assert set(re.findall(r"{{(\w+)}}", legend)) <= have, legend
    assert title


def test_labels_of_the_table_are_written_by_the_programs():
    """Each label of the table must occur in the source file that writes the metric."""
    for name, labels in LABELS.items():
        source = SOURCES["scheduler" if name.startswith("vgpu_scheduler") else "node"]
        for label in labels:
            assert re.search(rf'\b{label}=|"{label}"', source), (name, label)


def test_prometheus_accepts_every_query(tmp_path):
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool is not installed: package prometheus")
    rules = [
        {"record": f"test:query:{number}", "expr": re.sub(r"\$__rate_interval", "5m", one[2]).replace("$", "")}
        for number, one in enumerate(QUERIES)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{len(rules)} rules found" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("made", tool.DASHBOARDS, ids=lambda one: one.file)
def test_panels_have_the_fields_that_grafana_needs(made):
    found = tool.document(made)
    assert found["title"].startswith("vgpu.fleet: ") and found["uid"] == made.file[:-5] and found["schemaVersion"] == 39
    places = [tuple(one["gridPos"][key] for key in "xy") for one in found["panels"]]
    assert len(set(places)) == len(places) and all(x in (0, 12) for x, _y in places)
    assert [one["id"] for one in found["panels"]] == list(range(1, len(places) + 1))
    variables = {one["name"] for one in found["templating"]["list"]}
    for one in found["panels"]:
        assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in one["targets"]]
        assert refs == sorted(set(refs))
        for target in one["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"} <= variables
