# SPDX-License-Identifier: Apache-2.0
"""Provides a host with a simulated H200, on which gpu-check, the measurement of libvgpu.so on a GPU, runs as on a real
GPU. Its report names the driver "simulated"."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIMULATOR = ROOT / "native/build/gpusim"
PROFILE = """\
driver_version = 550.163.01
cuda_version = 12.4
{more}[gpu]
model = H200
"""


class Check:
    """Runs gpu-check on the simulated host and stores its output."""

    def __init__(self, folder: Path, more: str = "", driver: Path = SIMULATOR) -> None:
        self.folder = folder
        (folder / "host.profile").write_text(PROFILE.format(more=more))
        self.env = dict(
            os.environ,
            LD_LIBRARY_PATH=str(driver),
            GPUSIM_STATE=str(folder / "gpusim.state"),
            GPUSIM_PROFILE=str(folder / "host.profile"),
        )
        self.env.pop("OUT", None)
        self.result: dict[str, Any] = {}
        self.text = ""

    def run(self, *words: str) -> int:
        """Runs gpu-check and returns its exit status; ``result`` is its result.json, ``text`` its output."""
        out = self.folder / "out"
        command = [
            sys.executable,
            ROOT / "tests/gpu/check.py",
            "--quick",
            "--out",
            out,
            "--folder",
            self.folder / "work",
        ]
        done = subprocess.run(
            [str(word) for word in [*command, *words]],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
            check=False,
        )
        self.text = done.stdout
        path = out / "result.json"
        self.result = json.loads(path.read_text()) if path.exists() else {}
        return done.returncode

    def stages(self, *names: str, library: Path | None = None) -> int:
        words = [word for name in names for word in ("--stage", name)]
        return self.run(*words, *(("--library", str(library)) if library else ()))

    def status(self) -> dict[str, str]:
        return {stage["name"]: stage["status"] for stage in self.result["stages"]}

    def stage(self, name: str) -> dict[str, Any]:
        return next(stage for stage in self.result["stages"] if stage["name"] == name)


@pytest.fixture
def check(tmp_path: Path) -> Check:
    assert (SIMULATOR / "libcuda.so.1").exists(), (
        "libcuda.so.1 of the simulated driver is missing: run make native first"
    )
    return Check(tmp_path)


@pytest.fixture(scope="session")
def no_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the path of a libvgpu.so that does nothing."""
    path = tmp_path_factory.mktemp("nothing") / "libvgpu.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", path], check=True)
    return path
