# SPDX-License-Identifier: Apache-2.0
"""Describes the host that gpu-check measures: its driver, its GPU, and the programs built on it. Also makes test slices
(parts of the GPU), which have the files and the environment of a container."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Sequence

from . import nvml, symbols
from .report import Skip

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
MIB = 1 << 20
GIB = 1 << 30
# Folders of driver libraries that the loader of some hosts does not search.
DRIVER_FOLDERS = [
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
]
SOURCES = {
    "hand": ["hand.c"],
    "race": ["race.c"],
    "spin": ["spin.c"],
    "cost": ["cost.c", "bare.c"],
    "loader": ["loader.c"],
    "plugin.so": ["loader.c"],
    "capture": ["capture.c"],
    "leave": ["leave.c"],
}
OK, OUT_OF_MEMORY = 0, 2


def _load_layouts() -> Any:
    """Imports plugins/module_utils/abi/files.py, which needs no Ansible."""
    sys.path.insert(0, str(ROOT / "plugins"))
    try:
        return importlib.import_module("module_utils.abi.files")
    finally:
        sys.path.pop(0)


layouts = _load_layouts()


def driver_folder() -> str | None:
    """Returns the folder of libcuda.so.1 for LD_LIBRARY_PATH, "" if the loader finds it, None if it is not found."""
    probe = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"]
    for folder in ["", *DRIVER_FOLDERS]:
        if folder and not Path(folder, "libcuda.so.1").exists():
            continue
        env = dict(os.environ)
        env.pop("LD_PRELOAD", None)
        if folder:
            env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [folder, env.get("LD_LIBRARY_PATH")]))
        if subprocess.run(probe, env=env, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return folder
    return None


def compiler() -> str | None:
    """Returns the C compiler: $CC, or the first installed one."""
    wanted = os.environ.get("CC")
    return next((name for name in ([wanted] if wanted else ["cc", "gcc", "clang"]) if shutil.which(name)), None)


def build(folder: Path, library: Path | None) -> Path:
    """Compiles the library, the probe, the arbiter and the programs of these checks. Returns the library's path. Raises
    CalledProcessError with the compiler's output if a compilation fails."""
    folder.mkdir(parents=True, exist_ok=True)
    command = compiler()
    env = {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "LD_LIBRARY_PATH")}

    def run(*words: Any) -> None:
        subprocess.run(
            [str(word) for word in words],
            check=True,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    if library is None:
        # Without -Werror: a newer compiler may have new warnings, which must not prevent the measurement.
        run("make", "-s", "-C", ROOT / "native/vcuda", f"CC={command}", "STRICT=-std=c11 -D_GNU_SOURCE")
        library = ROOT / "native/build/libvgpu.so"
    flags = ["-O2", "-std=c11", "-D_GNU_SOURCE"]
    flags += ["-I", ROOT / "native/vcuda/src", "-I", ROOT / "native/vcuda/include"]
    for name, sources in SOURCES.items():
        paths = [PROGRAMS / source for source in sources]
        if name == "cost":
            paths.append(ROOT / "native/vcuda/src/driver/elf.c")
        shared = ["-DPLUGIN", "-shared", "-fPIC"] if name.endswith(".so") else []
        run(command, *flags, *shared, *paths, "-o", folder / name, "-ldl", "-lpthread")
    return library


class Host:
    """The host that every stage gets. ``quick`` means short measurements, for tests on the simulated driver."""

    def __init__(self, folder: Path, library: Path, gpu: int = 0, quick: bool = False) -> None:
        self.folder, self.library, self.quick = folder, library, quick
        self.probe = library.parent / "vgpu-probe"
        self.arbiter = library.parent / "vgpu-arbiter"
        try:
            self.card = nvml.Card(gpu)
            self.uuid = self.card.uuid()
        except (OSError, nvml.NvmlError) as error:
            raise Skip(f"NVML shows no such GPU: {error}") from error
        import ctypes

        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Skip(f"no CUDA driver: {error}") from error
        self.libcuda = symbols.loaded_path("libcuda.so.1")
        control = self.libcuda.parent / "gpusimctl" if self.libcuda else Path("/nonexistent")
        # On the simulated driver kernels store no stamps, so its accounting (gpusimctl) is used instead.
        self.simulator = control if control.exists() else None
        if self.simulator and not os.environ.get("GPUSIM_STATE"):
            self.simulator = None
        self.base_env = {
            key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES")
        }
        for key in list(self.base_env):
            if key.startswith(("CUDA_DEVICE_", "VGPU_LIMITS", "LIBCUDA_", "GPU_CORE_", "CUDA_TASK_")):
                del self.base_env[key]
        # Makes this GPU device 0 of every program, whatever the order in which CUDA lists GPUs.
        self.base_env.update(CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES=self.uuid)
        self.base_env["PYTHONPATH"] = str(PROGRAMS.parent)
        self._slices = 0

    @property
    def simulated(self) -> bool:
        return self.simulator is not None

    def slice(self, memory: int, **options: Any) -> Slice:
        self._slices += 1
        return Slice(self, self.folder / f"slice{os.getpid()}-{self._slices}", memory, **options)

    def limit(self) -> int:
        """Returns the bytes of a test slice: 4 GiB, or a quarter of the free memory if that is less, plus 12345, so
        that the size is no multiple of a unit of the driver."""
        return min(4 * GIB, self.card.memory()["free"] // 4 // MIB * MIB) + 12345

    def run(
        self, *command: Any, env: dict[str, str] | None = None, seconds: float = 60, check: bool = True, feed: str = ""
    ) -> str:
        """Runs a program and returns its standard output. Raises RuntimeError with the output if the program fails."""
        done = subprocess.run(
            [str(word) for word in command],
            env=env or self.base_env,
            input=feed,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=seconds,
            check=False,
        )
        if check and done.returncode:
            words = (done.stdout.strip()[-300:] + " " + done.stderr.strip()[-300:]).strip()
            raise RuntimeError(f"{Path(str(command[0])).name} ended with {done.returncode}: {words}")
        return done.stdout

    def program(
        self, name: str, *arguments: Any, env: dict[str, str] | None = None, seconds: float = 60, feed: str = ""
    ) -> Any:
        """Runs a program of programs/ and returns the JSON of the last line that it prints."""
        text = self.run(self.folder / name, *arguments, env=env, seconds=seconds, feed=feed)
        return json.loads(text.strip().splitlines()[-1])

    def inside(self, module: str, env: dict[str, str], *arguments: Any, feed: str = "", seconds: float = 60) -> Any:
        """Runs a module of gpucheck as a separate program and returns the JSON that it prints."""
        return json.loads(
            self.run(sys.executable, "-m", "gpucheck." + module, *arguments, env=env, feed=feed, seconds=seconds)
        )

    def held(self, pids: Sequence[int], before: int) -> tuple[int, str]:
        """Returns the used bytes of these processes and the source of the number. The source "process" is NVML's list
        of processes. If NVML does not list them, the source is "card": the growth of the GPU's usage since ``before``,
        which includes other processes."""
        shown = self.card.processes()
        own = [shown[pid] for pid in pids if pid in shown]
        if len(own) == len(pids):
            return sum(own), "process"
        return self.card.memory()["used"] - before, "card"


class Slice:
    """A slice: files as in a container, and the environment that puts a program into the slice."""

    def __init__(
        self, host: Host, folder: Path, memory: int, sm: int = 100, policy: str = "force", **options: Any
    ) -> None:
        self.host, self.memory, self.folder = host, memory, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.limits, self.ledger = folder / "limits", folder / "ledger"
        device = {"uuid": host.uuid, "memory_bytes": memory, "sm_percent": sm}
        self._desired = dict({"allocation": folder.name, "devices": [device], "core_policy": policy}, **options)
        self.limits.write_bytes(layouts.pack_limits(self._desired))
        self.ledger.write_bytes(layouts.pack_ledger([host.uuid], folder.name))

    def env(self, **more: str) -> dict[str, str]:
        return dict(
            self.host.base_env,
            LD_PRELOAD=str(self.host.library),
            VGPU_LIMITS_FILE=str(self.limits),
            CUDA_DEVICE_MEMORY_SHARED_CACHE=str(self.ledger),
            **more,
        )

    def charged(self) -> dict[str, int]:
        """Returns the totals of living processes in the ledger, the file of charged memory.

        used: bytes of allocations; context: bytes of contexts."""
        for row in layouts.read_ledger(str(self.ledger))["totals"]:
            if row["uuid"] == self.host.uuid:
                return {"used": row["used"], "context": row["context"]}
        return {"used": 0, "context": 0}

    def total(self) -> int:
        return sum(self.charged().values())


class Hand:
    """A running process of the program hand.c, which executes commands; say() sends a command and returns the numbers
    of the answer."""

    def __init__(self, host: Host, env: dict[str, str] | None = None, wrapper: Sequence[str] = ()) -> None:
        self.host = host
        self._errors = host.folder / f"hand-{os.getpid()}-{time.monotonic_ns()}.stderr"
        self.process = subprocess.Popen(
            [*wrapper, str(host.folder / "hand")],
            env=env or host.base_env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors.open("wb"),
            text=True,
            bufsize=1,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def say(self, line: str) -> list[int]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"hand ended with {self.process.wait()} at command '{line}': {self.errors()[-300:]}")
        return [int(word) for word in answer.split()]

    def must(self, line: str) -> list[int]:
        answer = self.say(line)
        if answer[0] != OK:
            raise RuntimeError(f"hand: '{line}' failed with status {answer[0]}: {self.errors()[-300:]}")
        return answer

    def start(self) -> Hand:
        self.must("init")
        self.must("ctx")
        return self

    def errors(self) -> str:
        return self._errors.read_text(errors="replace").strip()

    def end(self) -> None:
        if self.process.poll() is None and self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Hand:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.end()
