# SPDX-License-Identifier: Apache-2.0
"""A simulated host for each test, and two clients that query it: nvidia-ml-py and NVIDIA's own nvidia-smi. Each query
runs in a new process, because a process can use only one simulated host. The tests take expected values from NVIDIA's
data and from what other processes really do, never from earlier results of the simulated NVML library."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
# The variable VGPU_GPUSIM can name another build of the simulated driver, such as native/build/gpusim-san.
LIBRARIES = Path(os.environ.get("VGPU_GPUSIM", ROOT / "native" / "build" / "gpusim"))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change a GPU")
PROFILES = ROOT / "native" / "gpusim" / "profiles"


class Host:
    """One simulated host with its own profile and state file."""

    def __init__(self, folder: Path, profile: str) -> None:
        """Writes the profile, the text that describes the driver and the GPUs. From it the first process on the host
        creates the host's state."""
        folder.mkdir(parents=True, exist_ok=True)
        self.profile = folder / "host.profile"
        self.profile.write_text(profile)
        self.state = folder / "state"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("GPUSIM_", "CUDA_"))},
            "GPUSIM_PROFILE": str(self.profile),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # With this variable CUDA numbers the GPUs as NVML does.
            "GPUSIM_STATE": str(self.state),
            "LD_LIBRARY_PATH": str(LIBRARIES),
        }

    def run(self, *command: str, check: bool = True, **options) -> subprocess.CompletedProcess:
        """Runs a program on this host."""
        result = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=120, check=False, **options
        )
        if check and result.returncode != 0:
            raise AssertionError(f"{command} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
        return result

    def nvml(self, *expressions: str, setup: str = "", prefix: tuple = ()) -> list:
        """Evaluates expressions with the names of pynvml in one new process, and returns their values. The value of an
        expression that raises an NVMLError is the error's name."""
        question = json.dumps({"setup": setup, "expressions": expressions})
        answer = self.run(*prefix, sys.executable, str(HERE / "ask_nvml.py"), question)
        return json.loads(answer.stdout)

    def ctl(self, *arguments: str) -> str:
        """Runs gpusimctl, the tool that shows the real state of the simulated host and causes faults."""
        return self.run(str(LIBRARIES / "gpusimctl"), *arguments).stdout

    @contextlib.contextmanager
    def worker(self, gpu: int, size: int = 0):
        """While the with block runs, another process has a CUDA context and memory on a GPU. Yields this process."""
        worker = subprocess.Popen(
            [sys.executable, str(HERE / "hold_gpu.py"), str(gpu), str(size)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            assert worker.stdout.readline() == "ready\n", f"the worker created no context on GPU {gpu}: see its stderr"
            yield worker
        finally:
            worker.stdin.close()
            worker.wait(timeout=30)
            worker.stdout.close()


class RealSmi:
    """NVIDIA's nvidia-smi from a Debian package, with the libnvidia-ml of the same version."""

    def __init__(self, folder: Path) -> None:
        """Stores the folder into which the script unpacked nvidia-smi."""
        self.folder = folder
        self.program = str(folder / "nvidia-smi")
        self.version = (folder / "version").read_text().strip()

    def driver(self, profile: str) -> str:
        """Returns the profile, changed to the driver version that this nvidia-smi requires."""
        text = profile if "\n" in profile else (PROFILES / f"{profile}.profile").read_text()
        lines = [line for line in text.splitlines() if not line.startswith("driver_version")]
        return "\n".join([f"driver_version = {self.version}", *lines, ""])
