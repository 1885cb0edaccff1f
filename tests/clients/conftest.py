# SPDX-License-Identifier: Apache-2.0
"""Provides a simulated A100 with a slice (part of the GPU) for tests of real Python clients of CUDA, and the clients'
Python environments, one for each major version of CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"
SIMULATOR = ROOT / "native/build/gpusim"
LIBRARY = ROOT / "native/build/libvgpu.so"
sys.path.insert(0, str(ROOT / "plugins"))

from module_utils.abi import files as abi_files  # noqa: E402

MIB = 1 << 20
# CUDA's major version → Python environment. `make clients` creates both environments (tools/gate_table.py).
ENVIRONMENTS = {13: ROOT / ".build/clients", 12: ROOT / ".build/clients12"}
PROFILE = "driver_version = 535.261.03\ncuda_version = 12.2\n[gpu]\nmodel = A100-40GB\n"


def python_of(cuda: int) -> Path:
    """Returns the interpreter of the environment for this major version of CUDA."""
    python = ENVIRONMENTS[cuda] / "bin/python"
    assert python.exists(), f"{python} is missing: run `make clients`, which creates it"
    return python


class Machine:
    """One simulated host with one A100 and one container, with a memory limit or without."""

    def __init__(self, folder: Path, memory: int | None) -> None:
        self.folder = folder
        driver = folder / "driver"
        driver.mkdir(parents=True)
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            (driver / name).symlink_to(SIMULATOR / name)
        # A driver's package also installs the name libcuda.so, and taichi opens only that name.
        (driver / "libcuda.so").symlink_to("libcuda.so.1")
        (folder / "host.profile").write_text(PROFILE)
        self.driver_env = {
            "HOME": str(folder),
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(driver),
            "GPUSIM_STATE": str(folder / "gpusim.state"),
            "GPUSIM_PROFILE": str(folder / "host.profile"),
            "CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING": "1",
        }
        self.env = dict(self.driver_env)
        if memory is not None:
            self._make_slice(memory)

    def _make_slice(self, memory: int) -> None:
        limits, ledger, uuid = self.folder / "limits", self.folder / "ledger", self.usage()["uuid"]
        device = {"uuid": uuid, "memory_bytes": memory}
        limits.write_bytes(abi_files.pack_limits({"allocation": "clients", "devices": [device]}))
        ledger.write_bytes(abi_files.pack_ledger([uuid], "clients"))
        self.env |= {
            "LD_PRELOAD": str(LIBRARY),
            "VGPU_LIMITS_FILE": str(limits),
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(ledger),
        }

    def usage(self) -> dict:
        """Returns the simulated driver's accounting of its GPU."""
        command = [SIMULATOR / "gpusimctl", "usage", "--json"]
        done = subprocess.run(command, env=self.driver_env, check=True, stdout=subprocess.PIPE)
        [gpu] = json.loads(done.stdout)["gpus"]
        return gpu

    def on_card(self) -> int:
        """Returns the used bytes of all processes, contexts and code included."""
        return self.usage()["used"]

    def command(self, cuda: int, program: str, *words: str) -> list[str]:
        """Returns the command line of a program in programs/ under the clients' interpreter."""
        return [str(python_of(cuda)), str(PROGRAMS / program), *words]


class Filler:
    """A running process of fill.py, which waits after each step. `step` lets the program continue and returns
    the figures that the next step prints."""

    def __init__(self, machine: Machine, cuda: int, client: str, way: str) -> None:
        self.errors = machine.folder / "stderr"
        self.process = subprocess.Popen(
            machine.command(cuda, "fill.py", client, way),
            env=machine.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("wb"),
            text=True,
        )
        self._started = False

    def step(self, name: str) -> dict:
        assert self.process.stdin and self.process.stdout
        if self._started:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        self._started = True
        # Skip the client's own output, which is not JSON.
        line = next((line for line in self.process.stdout if line.startswith("{")), "")
        assert line, f"the program {name} ended with {self.process.wait()}: {self.errors.read_text()[-2000:]}"
        figures = json.loads(line)
        assert figures["step"] == name
        return figures

    def end(self) -> int:
        """Waits until fill.py ends and returns its exit status."""
        assert self.process.stdin
        self.process.stdin.close()
        return self.process.wait(60)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Returns a machine with a slice of 1 GiB."""
    return Machine(tmp_path, 1024 * MIB)
