# SPDX-License-Identifier: Apache-2.0
"""Tests the five models of the workloads on the CPU: they have as many weights as in their papers and outputs of the
right shape, and every row of the table of workloads runs in a small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]

COUNT = """
import sys
sys.path.insert(0, sys.argv[1])
import json, models
print(json.dumps({name: sum(one.numel() for one in make().parameters()) for name, make in models.BUILD.items()}))
"""
# Published numbers of weights: VGG-16 exact; ResNet-V2 within half a percent, because some frameworks add biases.
WEIGHTS = {"vgg_16": (138357544, 0.0), "resnet_v2_50": (25.6e6, 0.005), "resnet_v2_152": (60.2e6, 0.005)}
SHAPES = {"resnet_v2_50": [2, 1000], "resnet_v2_152": [2, 1000], "vgg_16": [2, 1000], "deeplab": [2, 21, 64, 64]}


@pytest.fixture(scope="module")
def torch_env() -> dict[str, str]:
    """Returns the environment of a Python with torch: Debian's if torch_cpu.sh has unpacked it, else this Python's."""
    env = dict(os.environ, OMP_NUM_THREADS="2")
    if (ROOT / ".build/torch-cpu/.complete").exists():
        done = subprocess.run([HERE / "torch_cpu.sh"], stdout=subprocess.PIPE, text=True, check=True)
        env.update(one.split("=", 1) for one in done.stdout.split())
        env["TORCH_PYTHON"] = "/usr/bin/python3"
        return env
    if subprocess.run([sys.executable, "-c", "import torch"], stderr=subprocess.DEVNULL, check=False).returncode == 0:
        return {**env, "TORCH_PYTHON": sys.executable}
    pytest.skip("no PyTorch: tests/gpu/workloads/torch_cpu.sh unpacks one")


def test_weights_are_those_of_the_papers(torch_env: dict[str, str]) -> None:
    command = [torch_env["TORCH_PYTHON"], "-c", COUNT, str(HERE)]
    done = subprocess.run(command, env=torch_env, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    assert set(found) == {row.model for row in table.ROWS}
    for name, (weights, tolerance) in WEIGHTS.items():
        assert found[name] == pytest.approx(weights, rel=tolerance, abs=0), name


@pytest.mark.parametrize("row", table.ROWS, ids=[row.id for row in table.ROWS])
def test_row_runs_in_a_small_size(torch_env: dict[str, str], row: table.Row) -> None:
    command = [torch_env["TORCH_PYTHON"], str(HERE / "measure.py"), row.id, "--smoke", "--device=cpu", "--seconds=0"]
    done = subprocess.run(command, env=torch_env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["status"] == table.DONE
    assert found["items_per_s"] > 0
    assert found["shape"] == ([] if row.kind == table.TRAINING else SHAPES.get(row.model, [2, 2]))
