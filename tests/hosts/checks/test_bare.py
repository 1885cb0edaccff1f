# SPDX-License-Identifier: Apache-2.0
"""Runs site.yml on bare hosts, which no playbook has changed yet. Check mode must predict the changes and make none,
and mistakes in variables or files must be found before any host is changed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import INVENTORY, Node, changed, play, set_group
from simhosts import hardware

T4, V100 = "gpu-t4-1", "gpu-v100-1"

# A daemon.json that is often published as an example. It lacks the comma before default-shm-size.
BROKEN_DAEMON_JSON = """\
{
    "default-runtime": "nvidia",
    "runtimes": {
        "nvidia": {
            "path": "/usr/bin/nvidia-container-runtime",
            "runtimeArgs": []
        }
    }
    "default-shm-size": "1G"
}
"""
FAULT_LINE = 9


@dataclass(frozen=True)
class Prediction:
    """The output of a run in check mode, and the paths that changed on each host during the run; there must be none."""

    status: int
    output: str
    differences: dict[str, list[str]]


# columns: group of the inventory, a host of this group, variable with a wrong value, that value; expected words in the
# message
@pytest.mark.parametrize(
    ("group", "host", "variable", "value", "words"),
    [
        ("t4", T4, "vgpu_split_count", 0, ["0"]),
        ("t4", T4, "vgpu_split_count", "seven", ["seven"]),
        ("t4", T4, "vgpu_sharing", "vcudda", ["vcudda", "vcuda"]),
        ("t4", T4, "vgpu_splitcount", 7, ["vgpu_split_count"]),
        ("t4", T4, "vgpu_memory_scaling", 0, ["0"]),
        ("t4", T4, "vgpu_memory_scaling", -1.5, ["-1.5"]),
        ("v100", V100, "vgpu_cores_scaling", 0, ["0"]),
        ("v100", V100, "vgpu_devices", [{"match": {"index": 0}, "split_cuont": 1}], ["split_cuont", "split_count"]),
        ("v100", V100, "vgpu_devices", [{"match": {"index": 7}, "split_count": 1}], ["index", "7"]),
        ("v100", V100, "vgpu_devices", [{"match": {"model": "H200"}, "split_count": 1}], ["H200"]),
    ],
)
def test_mistake_is_found_before_any_host_is_changed(
    nodes: dict[str, Node], inventory: Path, group: str, host: str, variable: str, value: Any, words: list[str]
) -> None:
    before = {name: node.snapshot() for name, node in nodes.items()}
    set_group(inventory, group, **{variable: value})
    result = play(inventory=inventory)
    assert result.returncode != 0, result.stdout
    for word in (variable, f"group {group}", host, *words):
        assert word in result.stdout, f"expected {word!r} in the message, found:\n{result.stdout}"
    for name, node in nodes.items():
        assert changed(before[name], node.snapshot()) == [], f"expected unchanged files on {name}"


@pytest.fixture(scope="module")
def prediction(nodes: dict[str, Node], tmp_path_factory: pytest.TempPathFactory) -> Prediction:
    """Runs site.yml once with --check --diff, with more slices (parts of a GPU) than recommended for a T4."""
    inventory = tmp_path_factory.mktemp("advice") / "inventory"
    shutil.copytree(INVENTORY, inventory)
    set_group(inventory, "t4", vgpu_split_count=8)
    before = {name: node.snapshot() for name, node in nodes.items()}
    result = play("--check", "--diff", inventory=inventory)
    differences = {name: changed(before[name], node.snapshot()) for name, node in nodes.items()}
    return Prediction(result.returncode, result.stdout, differences)


def test_split_over_the_models_advice_is_a_warning(prediction: Prediction) -> None:
    assert prediction.status == 0, prediction.output
    flat = " ".join(prediction.output.split())
    for word in ("[WARNING]", "vgpu_split_count", "group t4", T4, "T4", "at most 7"):
        assert word in flat, f"expected {word!r} in the warning, found:\n{prediction.output}"


def test_broken_daemon_json_stops_its_host_untouched(nodes: dict[str, Node]) -> None:
    node = nodes[V100]
    original = node.read("/etc/docker/daemon.json")
    node.write("/etc/docker/daemon.json", BROKEN_DAEMON_JSON)
    try:
        before = node.snapshot()
        result = play("--limit", V100)
        assert result.returncode != 0, result.stdout
        for word in (V100, "/etc/docker/daemon.json", f"line {FAULT_LINE}", "column"):
            assert word in result.stdout, f"expected {word!r} in the message, found:\n{result.stdout}"
        assert changed(before, node.snapshot()) == []
        assert node.read("/etc/docker/daemon.json") == BROKEN_DAEMON_JSON
    finally:
        node.write("/etc/docker/daemon.json", original)


def test_check_and_diff_predict_the_first_run_and_change_nothing(prediction: Prediction) -> None:
    assert prediction.status == 0, prediction.output
    # The diff must show the predicted daemon.json.
    lines = [line.strip() for line in prediction.output.splitlines()]
    assert "+++ after: /etc/docker/daemon.json" in lines
    for key in ('+  "default-runtime": "nvidia",', '+  "default-shm-size": "2G"'):
        assert key in lines, f"expected the line {key} in the diff, found:\n{prediction.output}"
    for foreign in hardware.DAEMON_JSON:
        assert not any(line.startswith("-") and f'"{foreign}"' in line for line in lines), (
            f"expected the key {foreign} to stay in the predicted file"
        )
    assert not any(prediction.differences.values()), prediction.differences
