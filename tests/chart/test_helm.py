# SPDX-License-Identifier: Apache-2.0
"""Tests the Helm chart with Helm's own program: the chart passes `helm lint`, and the rendered objects are exactly
those that the roles' functions describe."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import images
import pytest
import yaml
from chart import values

KUBE = {"scheduler": {"enabled": True, "kubeSchedulerImage": "registry.k8s.io/kube-scheduler:v1.34.2"}}
NAMES = {"count": "example.com/gpu", "memory": "example.com/mem", "memory_percentage": "example.com/pct"}
# columns: case, values of the chart, namespace
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("defaults", {}, "kube-system"),
    ("another namespace than kube-system", {}, "gpus"),
    ("slices per GPU", {"variables": {"vgpu_split_count": 7, "vgpu_cores_scaling": 7}}, "kube-system"),
    (
        "scaling with fractions",
        {"variables": {"vgpu_memory_scaling": 1.5, "vgpu_cores_scaling": "0.29"}},
        "kube-system",
    ),
    (
        "exceptions and named configurations",
        {
            "variables": {
                "vgpu_devices": [{"match": {"model": "A100-80GB"}, "split_count": 7}],
                "vgpu_configs": {"big": {"split_count": 2, "oom_killer": True}},
            }
        },
        "kube-system",
    ),
    ("metrics on all addresses", {"variables": {"vgpu_metrics_listen": ":9410"}}, "kube-system"),
    ("metrics on one address", {"variables": {"vgpu_metrics_listen": "10.1.2.3:9500"}}, "kube-system"),
    ("metrics on a loopback of IPv6", {"variables": {"vgpu_metrics_listen": "[::1]:9410"}}, "kube-system"),
    ("no metrics, no labels", {"variables": {"vgpu_metrics_listen": "", "vgpu_labels": False}}, "kube-system"),
    ("a taint", {"variables": {"vgpu_unhealthy_taint": "any"}}, "kube-system"),
    ("no taint", {"variables": {"vgpu_unhealthy_taint": "none"}}, "kube-system"),
    ("metrics by an option", {"options": ["--metrics-listen=:9411", "--log-format=json"]}, "kube-system"),
    ("metrics by an option on the loopback", {"options": ["--metrics-listen=localhost:9411"]}, "kube-system"),
    (
        "paths, image, pull secrets, node selector, tolerations",
        {
            "image": "registry.example.com:5000/vgpu/plugin:1",
            "imagePullPolicy": "Never",
            "imagePullSecrets": ["one", "two"],
            "nodeSelector": {"nvidia.com/gpu.present": "true", "zone": "a"},
            "tolerations": [{"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoExecute"}],
            "kubeletDir": "/data/kubelet",
            "libraryRoot": "/var/opt/vgpu",
            "environment": {"B": "2", "A": "true", "C": 'it\'s "so"'},
        },
        "kube-system",
    ),
    ("the scheduler", KUBE, "kube-system"),
    (
        "the scheduler with other resource names",
        {**KUBE, "variables": {"vgpu_resource_names": NAMES, "vgpu_slice_sizing": "requested"}},
        "gpus",
    ),
    (
        "the scheduler's settings",
        {
            "imagePullSecrets": ["one"],
            "scheduler": {
                **KUBE["scheduler"],
                "image": "registry.example.com/vgpu/scheduler:1",
                "replicas": 3,
                "nodeSelector": {"node-role.kubernetes.io/control-plane": ""},
                "tolerations": [],
                "metricsNamespaces": ["prometheus", "monitoring"],
                "options": ["--log-format=json"],
                "config": {"defaultMemoryMiB": 0, "plain": "slice", "runtimeHandlers": ["kata-qemu"]},
            },
        },
        "kube-system",
    ),
]


def rendered(helm: str, chart: Path, folder: Path, given: dict[str, Any], namespace: str) -> list[dict[str, Any]]:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(given))
    words = [helm, "template", "vgpu", str(chart), f"--namespace={namespace}", f"--values={file}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    found = {(one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]): one for one in objects}
    assert len(found) == len(objects)
    return found


@pytest.mark.parametrize(("about", "given", "namespace"), ROWS, ids=[row[0] for row in ROWS])
def test_rendered_objects_are_those_of_the_manifests(helm, chart, tmp_path, about, given, namespace):
    wanted = values.merged(values.Images(*images.names()), given)
    expected = values.node_objects(wanted, namespace)
    expected += values.scheduler_objects(wanted, namespace) if wanted["scheduler"]["enabled"] else []
    found = by_name(rendered(helm, chart, tmp_path, given, namespace))
    assert set(found) == set(by_name(expected))
    for name, one in by_name(expected).items():
        assert found[name] == one, name


# columns: changed values of the chart; workloads whose pods must be replaced
CHANGES = [
    ({"variables": {"vgpu_split_count": 3}}, {"vgpu-device-plugin"}),
    ({"scheduler": {**KUBE["scheduler"], "config": {"plain": "slice"}}}, {"vgpu-scheduler"}),
    ({"variables": {"vgpu_resource_names": NAMES}}, {"vgpu-device-plugin", "vgpu-scheduler"}),
    ({"nodeSelector": {"vgpu.fleet/device-plugin": "daemonset"}}, set()),
]


@pytest.mark.parametrize(("given", "anew"), CHANGES)
def test_pods_follow_their_configuration(helm, chart, tmp_path, given, anew):
    """A pod template changes exactly if the configuration that its pods read changes."""
    before, after = (
        {
            one["metadata"]["name"]: one["spec"]["template"]["metadata"]
            for one in rendered(helm, chart, tmp_path, more, "kube-system")
            if one["kind"] in ("DaemonSet", "Deployment")
        }
        for more in (KUBE, {**KUBE, **given})
    )
    assert {name for name in before if before[name] != after[name]} == anew


@pytest.mark.parametrize(("about", "given", "namespace"), ROWS, ids=[row[0] for row in ROWS])
def test_lint_reports_no_warning_or_error(helm, chart, tmp_path, about, given, namespace):
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(given))
    words = [helm, "lint", "--strict", str(chart), f"--values={file}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "0 chart(s) failed" in done.stdout, done.stdout
    assert not [line for line in done.stdout.splitlines() if line.startswith(("[WARNING]", "[ERROR]"))], done.stdout


# columns: wrong values of the chart; expected text in Helm's message
WRONG = [
    ({"variables": {"vgpu_split_count": 0}}, "/variables/vgpu_split_count"),
    ({"variables": {"vgpu_splt_count": 3}}, "vgpu_splt_count"),
    ({"variables": {"vgpu_sharing": "mig"}}, "/variables/vgpu_sharing"),
    ({"variables": {"vgpu_mig_geometry": {"1g.10gb": 7}}}, "vgpu_mig_geometry"),
    ({"variables": {"vgpu_kubeconfig": "x"}}, "vgpu_kubeconfig"),
    ({"variables": {"vgpu_configs": {"a": {"time_slice": "long"}}}}, "time_slice"),
    ({"kubeletDir": "var/lib"}, "/kubeletDir"),
    ({"image": "a b"}, "/image"),
    ({"scheduler": {"enabled": True}}, "/scheduler/kubeSchedulerImage"),
    ({"scheduler": {"config": {"plain": "no"}}}, "/scheduler/config/plain"),
    ({"nodeSelector": None}, "nodeSelector"),
    ({"scheduler": {"metricsNamespaces": []}}, "/scheduler/metricsNamespaces"),
]


@pytest.mark.parametrize(("given", "named"), WRONG)
def test_wrong_values_are_refused_by_name(helm, chart, tmp_path, given, named):
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps(given))
    words = [helm, "template", "vgpu", str(chart), f"--values={file}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and named in done.stderr, (done.stdout[:300], done.stderr)


def test_older_kubernetes_is_refused(helm, chart):
    words = [helm, "template", "vgpu", str(chart), "--kube-version=1.29.9"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "1.30.0" in done.stderr
    words[-1] = "--kube-version=1.30.0"
    subprocess.run(words, capture_output=True, check=True)


def test_packed_chart_is_complete(helm, chart, tmp_path):
    """The packed chart renders the same objects as the folder."""
    subprocess.run([helm, "package", str(chart), f"--destination={tmp_path}"], check=True, capture_output=True)
    (packed,) = tmp_path.glob("vgpu-fleet-*.tgz")
    folder, packed_one = tmp_path / "a", tmp_path / "b"
    folder.mkdir()
    packed_one.mkdir()
    assert rendered(helm, chart, folder, KUBE, "x") == rendered(helm, packed, packed_one, KUBE, "x")
