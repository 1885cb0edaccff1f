# SPDX-License-Identifier: Apache-2.0
"""Fixtures: simulated hosts made from profiles (texts that describe driver and GPUs), and NVIDIA's own nvidia-smi."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from simulated_host import LIBRARIES, PROFILES, ROOT, Host, RealSmi


@pytest.fixture(scope="session", autouse=True)
def libraries() -> Path:
    """Stops all tests with one message if the simulated driver is not built."""
    if not (LIBRARIES / "libnvidia-ml.so.1").exists():
        pytest.exit(f"{LIBRARIES} has no libnvidia-ml.so.1: run `make native` first", returncode=4)
    return LIBRARIES


@pytest.fixture()
def make_host(tmp_path):
    """Returns a function that creates a host from a profile's text or from the name of an example profile."""

    def make(profile: str, device_nodes: str = "ignore") -> Host:
        text = profile if "\n" in profile else (PROFILES / f"{profile}.profile").read_text()
        return Host(tmp_path, text.replace("device_nodes = require", f"device_nodes = {device_nodes}"))

    return make


@pytest.fixture()
def mixed(make_host) -> Host:
    """Returns a host of the profile `mixed`: a T4, a V100, an A100-80GB and a GTX 1080 Ti, with fixed UUIDs."""
    return make_host("mixed")


@pytest.fixture(scope="session")
def real_smi():
    """Returns a function that returns the nvidia-smi of a Debian suite. This function skips the test if the package is
    not available."""
    found: dict = {}

    def get(suite: str) -> RealSmi:
        if suite not in found:
            script = ROOT / "tests" / "native" / "fetch_nvidia_smi.sh"
            result = subprocess.run([str(script), suite], capture_output=True, text=True, check=False)
            found[suite] = result
        result = found[suite]
        if result.returncode == 3:
            pytest.skip(result.stderr.strip().splitlines()[-1])
        assert result.returncode == 0, result.stderr
        return RealSmi(Path(result.stdout.strip().splitlines()[-1]))

    return get
