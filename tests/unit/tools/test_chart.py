# SPDX-License-Identifier: Apache-2.0
"""Tests the generator of the Helm chart and of the kustomize bases: its output, its values and their schema.
tests/chart tests what Helm makes of the chart.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "native" / "plugin" / "src")]

import chart.schema  # noqa: E402
import images  # noqa: E402
from chart import templates, values  # noqa: E402

from plugins.module_utils.config import kinds  # noqa: E402
from plugins.module_utils.config import variables as table  # noqa: E402
from plugins.module_utils.kube import device_plugin_manifests, scheduler_desired, scheduler_manifests  # noqa: E402

NAMES = values.Images(*images.names())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made")
    subprocess.run([sys.executable, str(ROOT / "tools/chart"), f"--out={out}"], check=True, capture_output=True)
    return out


def texts(folder: Path) -> dict[str, str]:
    return {str(one.relative_to(folder)): one.read_text() for one in folder.rglob("*") if one.is_file()}


def test_generation_is_reproducible(made: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/chart"), f"--out={tmp_path}"]
    (tmp_path / "vgpu-fleet" / "templates").mkdir(parents=True)
    (tmp_path / "vgpu-fleet" / "templates" / "stale.yaml").touch()
    subprocess.run(command, check=True, capture_output=True)
    assert texts(tmp_path) == texts(made)


def test_options_set_registry_and_namespace(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/chart"), f"--out={tmp_path}"]
    command += ["--registry=registry.example.com/gpu", "--namespace=gpus"]
    subprocess.run(command, check=True, capture_output=True)
    found = yaml.safe_load((tmp_path / "vgpu-fleet" / "values.yaml").read_text())
    assert found["image"].startswith("registry.example.com/gpu/vgpu-device-plugin:")
    objects = list(yaml.safe_load_all((tmp_path / "kustomize" / "node" / "objects.yaml").read_text()))
    assert {one["metadata"].get("namespace", "gpus") for one in objects} == {"gpus"}


def test_image_version_changes_with_every_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image contains the library too, so a change of the library must change the version of the image."""
    plugin, scheduler = images.names()
    assert plugin.startswith("localhost/vgpu-device-plugin:") and scheduler.startswith("localhost/vgpu-scheduler:")
    former = images.source_version
    monkeypatch.setattr(
        images, "source_version", lambda tree, names: "9.9-f" if names == images.VCUDA else former(tree, names)
    )
    assert images.names()[0] == plugin.rpartition("-")[0] + "-f" and images.names()[1] == scheduler


def test_kustomize_bases_equal_the_default_values_objects(made: Path) -> None:
    wanted = values.defaults(NAMES)
    wanted["scheduler"]["kubeSchedulerImage"] = "registry.k8s.io/kube-scheduler"
    node = list(yaml.safe_load_all((made / "kustomize/node/objects.yaml").read_text()))
    expected = values.node_objects(wanted, "kube-system")
    assert node == [one for one in expected if one["kind"] != "ConfigMap"]
    scheduler = list(yaml.safe_load_all((made / "kustomize/scheduler/objects.yaml").read_text()))
    assert scheduler == values.scheduler_objects(wanted, "kube-system")
    text = (made / "kustomize/node/kustomization.yaml").read_text()
    (generated,) = yaml.safe_load(text)["configMapGenerator"]
    (config_map,) = [one for one in expected if one["kind"] == "ConfigMap"]
    assert generated["name"] == config_map["metadata"]["name"]
    assert (made / "kustomize/node/variables.json").read_text().strip() == config_map["data"]["variables.json"]


def test_placeholder_without_an_expression_is_an_error() -> None:
    with pytest.raises(ValueError, match="@@odd@@"):
        templates.text_of([{"kind": "X", "value": "@@odd@@"}])
    with pytest.raises(ValueError, match=r"has \{\{"):
        templates.text_of([{"kind": "X", "value": "{{ a }}"}])


def test_default_resource_names_equal_the_schedulers() -> None:
    """The chart has its own table of default resource names, which must equal the table of the scheduler."""
    own = values.names({"variables": {}})
    full = {"resourceNames": own}
    assert scheduler_desired.resource_names(full) == scheduler_desired.resource_names({})
    assert scheduler_manifests.extender(full) == scheduler_manifests.extender({})


def test_every_variable_is_a_chart_value_or_listed_as_excluded() -> None:
    known = set(chart.schema.variables()["properties"])
    assert known | set(values.NOT_IN_A_CHART) == set(table.VARIABLES)
    assert not known & set(values.NOT_IN_A_CHART)


def test_defaults_are_valid_in_the_schema(made: Path) -> None:
    schema = json.loads((made / "vgpu-fleet/values.schema.json").read_text())
    found = yaml.safe_load((made / "vgpu-fleet/values.yaml").read_text())
    assert found == values.defaults(NAMES)
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(found, schema)
    assert set(schema["properties"]) == {*found, "global"}
    assert set(schema["properties"]["scheduler"]["properties"]) == set(found["scheduler"])


# Values, parsed from YAML. The table has no expected results: the chart's schema and the code that reads the variables
# must both accept or both refuse each value.
TRIED: dict[str, list[Any]] = {
    "vgpu_split_count": [1, 7, 1024, 0, 1025, -1, 1.5, True, None, [], {}],
    "vgpu_memory_scaling": [1, 1.5, "0.29", "1.0", 0, -1, "0", "0.0", "-1", "x", "1.", True, None],
    "vgpu_cores_scaling": [7, "7.5", 0, ""],
    "vgpu_slice_sizing": ["equal", "requested", "Equal", "", 1],
    "vgpu_devices": [
        [],
        [{"match": {"index": 0}, "split_count": 1}],
        [{"match": {"uuid": "GPU-5d1b"}}],
        [{"match": {"model": "A100-80GB"}, "memory_scaling": "1.5"}],
        [{"match": {}}],
        [{"split_count": 1}],
        [{"match": {"index": 256}}],
        [{"match": {"uuid": "5d1b"}}],
        [{"match": {"index": 0}, "split": 1}],
        {},
    ],
    "vgpu_resource_names": [
        {},
        {"count": "nvidia.com/gpu"},
        {"memory": "example.com/mem", "cores": "example.com/c"},
        {"count": "gpu"},
        {"other": "a.b/c"},
        [],
    ],
    "vgpu_log_level": [0, 5, 6, -1],
    "vgpu_oom_killer": [True, False, 1, 0, None],
    "vgpu_metrics_listen": ["", ":9410", "127.0.0.1:9410", "[::1]:9410", "9410", "host:port", ":65536", 9410],
    "vgpu_configs": [
        {},
        {"big": {"split_count": 2, "oom_killer": True}},
        {"Big": {}},
        {"big": {"split_count": 0}},
        {"big": {"vgpu_split_count": 2}},
        {"big": {"configs": {}}},
        {"-": {}},
    ],
    "vgpu_watch": ["report", "end", "kill"],
    "vgpu_mig_strategy": ["none", "single", "mixed", "both"],
}


@pytest.mark.parametrize("name", sorted(TRIED))
def test_schema_and_reader_agree(name: str) -> None:
    """The schema in the chart and the reader of the variables must accept the same values. Strings such as "7" for
    an integer are not in the table, because only the reader accepts them."""
    validator = jsonschema.Draft7Validator(chart.schema.variables())
    for value in TRIED[name]:
        if value is None:
            continue  # in Helm, null removes a value
        findings: list[kinds.Finding] = []
        table.read({name: value}, findings)
        assert validator.is_valid({name: value}) == (not kinds.errors(findings)), (name, value, findings)


HOST_ALONE = [
    {"vgpu_sharing": "mig"},
    {"vgpu_sharing": "mps"},
    {"vgpu_mig_geometry": {"1g.10gb": 7}},
    {"vgpu_time_slice": "long"},
    {"vgpu_configs": {"a": {"time_slice": "long"}}},
    {"vgpu_package_environment": {}},
    {"vgpu_verify": "always"},
]


@pytest.mark.parametrize("given", HOST_ALONE)
def test_variables_that_need_the_host_are_not_values(given: dict[str, Any]) -> None:
    assert not jsonschema.Draft7Validator(chart.schema.variables()).is_valid(given)


def test_unknown_kind_of_variable_is_an_error() -> None:
    class Odd(kinds.Kind):
        pass

    with pytest.raises(TypeError, match="Odd"):
        chart.schema.of(Odd())


def test_values_are_merged_as_in_helm() -> None:
    """User values are merged into the defaults as in Helm: mappings are merged, and all other values are replaced."""
    found = values.merged(NAMES, {"nodeSelector": {"zone": "a"}, "scheduler": {"replicas": 3, "tolerations": []}})
    assert found["nodeSelector"] == {device_plugin_manifests.NODE_LABEL: "daemonset", "zone": "a"}
    assert (found["scheduler"]["replicas"], found["scheduler"]["tolerations"]) == (3, [])
    assert values.defaults(NAMES)["scheduler"]["replicas"] == 2
