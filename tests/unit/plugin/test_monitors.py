# SPDX-License-Identifier: Apache-2.0
"""Tests the shipped PodMonitor and ScrapeConfig objects of the Prometheus operator: they must select the shipped pods
and use their labels. The operator itself does not run.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from vgpu_plugin._shared.kube import device_plugin_manifests, scheduler_desired, scheduler_manifests
from vgpu_plugin.reconcile import labels

from .conftest import PLUGIN

FOLDER = PLUGIN / "dashboards"
MONITORS = {
    one["metadata"]["name"]: one
    for one in (yaml.safe_load(path.read_text()) for path in FOLDER.glob("vgpu-podmonitor-*.yml"))
}
PODS = {
    "vgpu-device-plugin": device_plugin_manifests.manifests(
        device_plugin_manifests.Desired("image", options=["--metrics-listen=:9410"])
    ),
    "vgpu-scheduler": scheduler_manifests.manifests(
        scheduler_desired.Desired("image", "image", metrics_namespaces=["monitoring"])
    ),
}


def template(name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in PODS[name] if one["kind"] in ("DaemonSet", "Deployment"))
    assert found["metadata"]["namespace"] in MONITORS[name]["spec"]["namespaceSelector"]["matchNames"]
    made: dict[str, Any] = found["spec"]["template"]
    return made


def test_each_program_has_a_pod_monitor():
    assert set(MONITORS) == set(PODS)
    assert {(one["apiVersion"], one["kind"]) for one in MONITORS.values()} == {
        ("monitoring.coreos.com/v1", "PodMonitor")
    }


@pytest.mark.parametrize("name", PODS)
def test_pod_monitors_match_pod_labels_and_ports(name):
    wanted = MONITORS[name]["spec"]
    made = template(name)
    assert wanted["selector"]["matchLabels"].items() <= made["metadata"]["labels"].items()
    ports = {port["name"] for container in made["spec"]["containers"] for port in container.get("ports", [])}
    assert {one["port"] for one in wanted["podMetricsEndpoints"]} <= ports
    ours = [one for one in wanted["podMetricsEndpoints"] if one["port"] == "metrics"]
    assert [one["honorLabels"] for one in ours] == [True], (
        "expected honorLabels, so that Prometheus keeps the labels of tenants"
    )


def test_scrape_config_uses_the_plugins_node_label():
    (config,) = [one for one in yaml.safe_load_all((FOLDER / "vgpu-scrapeconfig.yml").read_text()) if one]
    keep, address, instance = config["spec"]["relabelings"]
    label = (labels.PREFIX + "gpu.present").replace(".", "_").replace("/", "_")
    assert keep == {
        "action": "keep",
        "sourceLabels": [f"__meta_kubernetes_node_label_{label}"],
        "regex": "true",
    }
    assert address["targetLabel"] == "__address__" and address["replacement"] == "$1:9410"
    assert instance["targetLabel"] == "instance" and config["spec"]["honorLabels"] is True
