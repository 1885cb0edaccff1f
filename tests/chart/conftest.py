# SPDX-License-Identifier: Apache-2.0
"""Provides the program helm, built from its Go module, and the Helm chart that `make chart` writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "native" / "plugin" / "src")]


@pytest.fixture(scope="session")
def helm() -> str:
    return subprocess.run(
        [str(ROOT / "tests/chart/helm.sh")], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


@pytest.fixture(scope="session")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the generator of the chart and returns the folder of the chart."""
    out = tmp_path_factory.mktemp("chart")
    subprocess.run([sys.executable, str(ROOT / "tools/chart"), f"--out={out}"], check=True, stdout=subprocess.PIPE)
    return out / "vgpu-fleet"
