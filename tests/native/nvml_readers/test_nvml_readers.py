# SPDX-License-Identifier: Apache-2.0
"""Tests how plugins/module_utils/gpu/nvml.py, which the Ansible modules use, reads the GPUs of a host through NVML. The
host is simulated according to its profile, a text that describes the driver and the GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
GPUSIM = ROOT / "native" / "build" / "gpusim"

PROFILE = """\
driver_version = 535.261.03
cuda_version = 12.2
[gpu]
model = V100-16GB
uuid = GPU-11111111-2222-3333-4444-555555555555
[gpu]
model = T4
count = 2
[gpu]
model = A100-80GB
"""

READ = """\
import json, sys
sys.path.insert(0, sys.argv[1])
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import nvml
json.dump(nvml.read(), sys.stdout)
"""


@pytest.fixture
def host(tmp_path: Path) -> dict[str, str]:
    if not (GPUSIM / "libnvidia-ml.so.1").exists():
        pytest.fail(f"{GPUSIM} has no libnvidia-ml.so.1; run `make native` first")
    profile = tmp_path / "host.profile"
    profile.write_text(PROFILE)
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(GPUSIM),
        "GPUSIM_PROFILE": str(profile),
        "GPUSIM_STATE": str(tmp_path / "state"),
    }


def read(environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-c", READ, str(ROOT / ".build" / "collections")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def gpusimctl(environment: dict[str, str], *arguments: str) -> None:
    subprocess.run([str(GPUSIM / "gpusimctl"), *arguments], env=environment, check=True, capture_output=True)


def test_the_reader_reports_what_the_profile_says(host: dict[str, str]) -> None:
    found = read(host)
    assert (found["ok"], found["driver_version"], found["cuda_version"]) == (True, "535.261.03", "12.2")
    gpus = found["gpus"]
    assert [gpu["index"] for gpu in gpus] == [0, 1, 2, 3]
    assert [gpu["memory_mib"] for gpu in gpus] == [16160, 15360, 15360, 81920]
    assert gpus[0]["uuid"] == "GPU-11111111-2222-3333-4444-555555555555"
    assert len({gpu["uuid"] for gpu in gpus}) == 4
    assert [gpu["minor"] for gpu in gpus] == [0, 1, 2, 3]
    assert [gpu["compute_capability"] for gpu in gpus] == ["7.0", "7.5", "7.5", "8.0"]
    assert "V100" in gpus[0]["model"]
    assert "T4" in gpus[1]["model"]


def test_a_gpu_that_fell_off_the_bus_does_not_hide_the_others(host: dict[str, str]) -> None:
    read(host)
    gpusimctl(host, "fall-off", "1")
    found = read(host)
    assert found["ok"] is True
    assert [gpu["index"] for gpu in found["gpus"]] == [0, 2, 3]
    assert [gpu["index"] for gpu in found["lost"]] == [1]
    gpusimctl(host, "recover", "1")
    assert len(read(host)["gpus"]) == 4


def test_a_driver_that_fails_to_start_is_reported(host: dict[str, str]) -> None:
    gpusimctl(host, "nvml-fail", "on")
    found = read(host)
    assert (found["ok"], found["gpus"]) == (False, [])
    assert found["error"]
    gpusimctl(host, "nvml-fail", "off")
    assert read(host)["ok"] is True
