# SPDX-License-Identifier: Apache-2.0
"""Fixtures of a node whose files are in a folder. Its programs and mounts are real: gpusim (the simulated NVIDIA
driver), libvgpu.so, vgpu-probe and the device plugin as a process. Only the kubelet is a double, in this process. The
tests need root (for mounts) and `make native`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = ROOT / "native" / "plugin"
BUILD = ROOT / "native" / "build"
SOURCES = [PLUGIN / "src", PLUGIN / "kubelet_double" / "src"]
for folder in SOURCES:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
subprocess.run(["make", "-s", "-C", str(PLUGIN), "proto", f"PYTHON={sys.executable}"], check=True)

from vgpu_kubelet_double.manager import Manager  # noqa: E402

# A V100 of 16160 MiB split by 3 gives slices (parts of the GPU) of 5386 MiB.
PROFILE = """\
driver_version = 535.261.03
cuda_version = 12.2
[gpu]
model = V100-16GB
"""
SPLIT, SLICE_MIB = 3, 5386
RESOURCE = "nvidia.com/gpu"


def until(what: Callable[[], Any], about: str) -> Any:
    """Calls a function until its result is true, and returns the result. Fails after a minute.

    ``about``: a noun phrase, because the message reads "waited 60 s for …".
    """
    limit = time.monotonic() + 60
    while True:
        found = what()
        if found:
            return found
        assert time.monotonic() < limit, f"waited 60 s for {about}"
        time.sleep(0.01)


@dataclass
class RealNode:
    folder: Path
    environment: dict[str, str]
    kubelet: Manager
    process: subprocess.Popen | None = None
    options: list[str] = field(default_factory=list)
    program: list[str] = field(default_factory=lambda: [sys.executable, "-m", "vgpu_plugin.main"])

    @property
    def socket(self) -> Path:
        return self.folder / "run" / "plugin.sock"

    @property
    def vgpuctl_program(self) -> Path:
        return self.folder / "vgpuctl"

    def command(self) -> list[str]:
        command = [*self.program, "--config", str(self.folder / "node.yaml")]
        for name in ("kubelet", "run", "state", "sys"):
            option = {"kubelet": "kubelet-dir", "run": "run-dir", "state": "state-dir", "sys": "sys-root"}[name]
            command += [f"--{option}", str(self.folder / name)]
        command += ["--host-root", str(self.folder / "host"), "--cdi-dir", str(self.folder / "cdi")]
        return command + self.options

    def start(self, wait: bool = True) -> None:
        with open(self.folder / "plugin.log", "ab") as log:
            self.process = subprocess.Popen(self.command(), env=self.environment, stderr=log)
        if wait:
            until(self.offered, "the slices at the kubelet")

    def offered(self) -> bool:
        assert self.process is None or self.process.poll() is None, (self.folder / "plugin.log").read_text()
        return self.connected() and self.kubelet.state()["resources"][RESOURCE]["allocatable"] > 0

    def connected(self) -> bool:
        return bool(self.kubelet.state()["resources"].get(RESOURCE, {}).get("connected", False))

    def end(self, kill: bool = False) -> None:
        if self.process is not None:
            (self.process.kill if kill else self.process.terminate)()
            self.process.wait(30)
            self.process = None
            # Wait, because the next start must not see the kubelet double still connected to the ended process.
            until(lambda: not self.connected(), "the kubelet to notice the program's exit")

    def vgpuctl(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [str(self.vgpuctl_program), "--socket", str(self.socket), *arguments, "--json"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    def isolation(self, **options: Any) -> tuple[int, dict[str, Any]]:
        """Runs the module vgpu_isolation as Ansible runs it on a host; returns (exit status, result)."""
        defaults = {
            "vgpuctl": str(self.vgpuctl_program),
            "socket": str(self.socket),
            "runtime": "namespace",
            "duration": 0,  # 0 means no time limit, because the machine that runs the tests may be busy.
            "environment": {
                name: self.environment[name] for name in ("LD_LIBRARY_PATH", "GPUSIM_PROFILE", "GPUSIM_STATE")
            },
        }
        arguments = json.dumps({"ANSIBLE_MODULE_ARGS": {**defaults, **options}})
        done = subprocess.run(
            [sys.executable, "-m", "ansible_collections.vgpu.fleet.plugins.modules.vgpu_isolation"],
            input=arguments,
            env={**self.environment, "PYTHONPATH": str(ROOT / ".build" / "collections")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def mounts(self) -> list[str]:
        with open("/proc/self/mounts") as stream:
            return [line.split()[1] for line in stream if str(self.folder) in line]

    def allocation_mounts(self) -> list[str]:
        """Returns the mounts of allocations, except those of slices for containers outside Kubernetes: these stay
        mounted while the device plugin runs."""
        return [one for one in self.mounts() if "/allocations/slice-" not in one]


@pytest.fixture
def node_at_rest(tmp_path: Path) -> Iterator[RealNode]:
    """Makes a node whose kubelet runs and whose device plugin was never started."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts a tmpfs for each allocation")
    library = tmp_path / "lib" / "0.1.0-aaaaaaaaaaaa"
    library.mkdir(parents=True)
    for name in ("libvgpu.so", "vgpu-probe"):
        shutil.copy(BUILD / name, library / name)
    (tmp_path / "lib" / "current").symlink_to(library.name)
    (tmp_path / "host.profile").write_text(PROFILE)
    vcuda = {"libraryRoot": str(tmp_path / "lib"), "splitCount": SPLIT, "coresScaling": "1"}
    (tmp_path / "node.yaml").write_text(json.dumps({"version": "v1", "sharing": {"vcuda": vcuda}}))
    state = Path("/dev/shm") / f"gpusim-{tmp_path.name}-{os.getpid()}.state"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "GPUSIM_", "NVIDIA_"))},
        "PYTHONPATH": os.pathsep.join(str(one) for one in SOURCES),
        "LD_LIBRARY_PATH": str(BUILD / "gpusim"),
        "GPUSIM_PROFILE": str(tmp_path / "host.profile"),
        "GPUSIM_STATE": str(state),
    }
    program = tmp_path / "vgpuctl"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:0] = {[str(one) for one in SOURCES]!r}\n"
        "from vgpu_plugin.ctl.main import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    kubelet = Manager(tmp_path / "kubelet")
    kubelet.start()
    out = RealNode(tmp_path, environment, kubelet)
    try:
        yield out
    finally:
        out.end()
        kubelet.stop()
        # A newer mount may cover older ones, so unmount in reverse order.
        for mount in reversed(out.mounts()):
            subprocess.run(["umount", "--lazy", mount], check=False)
        state.unlink(missing_ok=True)


@pytest.fixture
def node(node_at_rest: RealNode) -> RealNode:
    node_at_rest.start()
    return node_at_rest
