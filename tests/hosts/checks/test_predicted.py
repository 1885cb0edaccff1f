# SPDX-License-Identifier: Apache-2.0
"""Compares predicted with actual changes on a finished node. The predictions are the plan (list of steps) that site.yml
prints before its first change, and a run in check mode; the actual changes are those of the real run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import INVENTORY, ROOT, Node, environment, play_command, set_group

HOST = "gpu-t4-1"
# These roles only check the result and change nothing on the host.
PROOF = {"verify", "preflight"}


def run(inventory: Path, report: Path, *options: str) -> dict[str, Any]:
    """Runs site.yml on one host and returns its planned and actual changes."""
    done = subprocess.run(
        [*play_command("site.yml", inventory), "--limit", HOST, "--diff", *options],
        cwd=ROOT,
        env={
            **environment(),
            "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "tests" / "callback_plugins"),
            "ANSIBLE_CALLBACKS_ENABLED": "changes",
            "VGPU_CHANGES": str(report),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found: dict[str, Any] = json.loads(report.read_text())[HOST]
    return found


def roles(found: dict[str, Any]) -> set[str]:
    return set(found["changed"]) - PROOF


def diffs(found: dict[str, Any]) -> dict[str, Any]:
    return {task: shown for task, shown in found["diffs"].items() if task.split(":")[0] not in PROOF and shown != [{}]}


# columns: variables of the group t4 that are changed; roles that must change the host
@pytest.mark.parametrize(
    ("variables", "expected"),
    [({"vgpu_split_count": 5, "container_runtime_shm_size": "1G"}, {"container_runtime", "device_plugin"})],
)
def test_the_run_makes_the_predicted_changes(
    nodes: dict[str, Node], inventory: Path, tmp_path: Path, variables: dict[str, Any], expected: set[str]
) -> None:
    assert HOST in nodes
    set_group(inventory, "t4", **variables)
    try:
        predicted = run(inventory, tmp_path / "predicted.json", "--check")
        real = run(inventory, tmp_path / "real.json")
    finally:
        back = run(INVENTORY, tmp_path / "back.json")
    assert set(predicted["plan"]) - PROOF == expected
    assert roles(predicted) == expected
    assert set(real["plan"]) - PROOF == expected
    assert roles(real) == expected
    assert diffs(predicted), "expected at least one predicted change, because an empty prediction would fit every run"
    assert diffs(predicted) == {task: shown for task, shown in diffs(real).items() if task in diffs(predicted)}
    assert roles(back) == expected
