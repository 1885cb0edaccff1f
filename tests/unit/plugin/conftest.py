# SPDX-License-Identifier: Apache-2.0
"""Fixtures that build a node in a folder for tests of the device plugin. GPUs, mounts and time are doubles (test
replacements); files, sockets and gRPC are real.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = ROOT / "native" / "plugin"
for folder in (PLUGIN / "src", PLUGIN / "kubelet_double" / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
subprocess.run(["make", "-s", "-C", str(PLUGIN), "proto", f"PYTHON={sys.executable}"], check=True)

from doubles.kube_rights import grants  # noqa: E402
from vgpu_kubelet_double.manager import Manager  # noqa: E402
from vgpu_plugin._shared.gpu.memory_limits import UNLIMITED, Limits  # noqa: E402
from vgpu_plugin._shared.kube.device_plugin_manifests import NAME, Desired, manifests  # noqa: E402
from vgpu_plugin.allocation.allocation_files import AllocationFiles  # noqa: E402
from vgpu_plugin.allocation.allocator import Allocator  # noqa: E402
from vgpu_plugin.allocation.records import RecordStore  # noqa: E402
from vgpu_plugin.allocation.sizer import Sizer  # noqa: E402
from vgpu_plugin.assembly import Extras, Setup  # noqa: E402
from vgpu_plugin.node.gauges import Gauges  # noqa: E402
from vgpu_plugin.node.gpus import Driver, Gpu, GpuError  # noqa: E402
from vgpu_plugin.node.paths import Paths  # noqa: E402
from vgpu_plugin.offer.health import CLEAN_S  # noqa: E402
from vgpu_plugin.offer.pool import Pool  # noqa: E402
from vgpu_plugin.offer.settings import Settings, load, make_slices  # noqa: E402
from vgpu_plugin.reconcile.config_choice import ConfigChoice  # noqa: E402

from . import samples  # noqa: E402
from .node_api import NodeApi  # noqa: E402


class FakeMounter:
    """Records mounts without mounting anything; a plain folder replaces each tmpfs."""

    def __init__(self) -> None:
        self.mounted: dict[Path, int] = {}
        self.fail_with: OSError | None = None

    def mount_tmpfs(self, target: Path, size: int) -> None:
        if self.fail_with is not None:
            raise self.fail_with
        assert target.is_dir()
        assert target not in self.mounted, f"{target} is mounted twice"
        self.mounted[target] = size

    def unmount(self, target: Path) -> None:
        if self.mounted.pop(target, None) is not None:
            for entry in target.iterdir():
                entry.unlink()

    def is_mount(self, target: Path) -> bool:
        return target in self.mounted


class FakeGpus:
    """A double of the NVIDIA driver. It reports the Xids (its error numbers) that a test puts into ``xids``."""

    def __init__(self, gpus: list[Gpu]) -> None:
        self.listed = gpus
        self.xids: Queue[tuple[str, int] | Exception] = Queue()
        self.closed = False
        # UUID of a faulty GPU → the error that the driver returns. To make a GPU disappear, remove it from ``listed``.
        self.faults: dict[str, str] = {}
        self.opened = 1
        # UUID → the measurements (gauges) that the GPU reports.
        self.shown: dict[str, Gauges] = {}
        # Index of a GPU that the driver counts but cannot read → the driver's error.
        self.lost: dict[int, str] = {}
        # Memory limits of control groups, by (UUID, folder of the group). An empty ``backend`` simulates a driver
        # before version 615, which has no such limits.
        self.limits: dict[tuple[str, str], Limits] = {}
        self.backend = ""
        self.drops = False
        self.probes = 0

    def unreadable(self) -> dict[int, str]:
        return dict(self.lost)

    def gpus(self) -> list[Gpu]:
        return list(self.listed)

    def next_xid(self, timeout_ms: int) -> tuple[str, int] | None:
        try:
            event = self.xids.get(timeout=0.05)
        except Empty:
            return None
        if isinstance(event, Exception):
            raise event
        return event

    def fault_of(self, uuid: str) -> str:
        return self.faults.get(uuid, "")

    def processes(self, uuid: str) -> dict[int, int | None]:
        return {}

    def utilisation(self, uuid: str, since_us: int) -> dict[int, float] | None:
        return None

    def gauges(self, uuid: str) -> Gauges:
        return self.shown.get(uuid, Gauges())

    def group_limits(self, uuid: str, group: str) -> Limits:
        found = self.limits.get((uuid, group))
        if self.backend == "misc" and found is None:
            raise GpuError("nvmlDeviceGetMemoryLimits_v1 failed with 3")
        return found or Limits(0, UNLIMITED, 0)

    def limit_group(self, uuid: str, group: str, hard: int) -> None:
        used = self.limits.get((uuid, group), Limits(0, 0, 0)).used
        if not self.drops:
            self.limits[uuid, group] = Limits(0, hard, used)

    def probe_limits(self, cgroup_root: str) -> tuple[str, str]:
        self.probes += 1
        return (self.backend, "") if self.backend else ("", "the driver does not enforce limits here")

    def driver(self) -> Driver:
        return Driver("615.71.09" if self.backend else "535.261.03", (12, 2), {gpu.uuid: (7, 5) for gpu in self.listed})

    def reopen(self) -> None:
        self.opened += 1

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeClock:
    seconds: float = 1000.0
    boot: str = "boot-a"

    def now(self) -> float:
        return self.seconds

    def boot_id(self) -> str:
        return self.boot


@dataclass
class Node:
    """A node with a configuration, an installed library and GPUs."""

    paths: Paths
    library_root: Path
    gpus: list[Gpu]
    mounter: FakeMounter = field(default_factory=FakeMounter)
    clock: FakeClock = field(default_factory=FakeClock)

    # The whole text of node.yaml, for tests that change more than its section sharing.vcuda.
    config_text: str = ""

    def configure(self, **vcuda: Any) -> Settings:
        self.paths.config.write_text(self.config_text or samples.node_yaml(self.library_root, **vcuda))
        return load(self.paths.config, has_api=True)

    def install_library(self, version: str) -> Path:
        folder = self.library_root / version
        folder.mkdir(parents=True)
        (folder / "libvgpu.so").write_bytes(version.encode())
        current = self.library_root / "current"
        current.unlink(missing_ok=True)
        current.symlink_to(version)
        return folder

    def setup(self, extras: Extras | None = None, clean_s: float = CLEAN_S) -> Setup:
        """Returns the setup that main.py makes from the command line."""
        extras = extras or Extras()
        choice = ConfigChoice(self.paths, follows=bool(extras.kubeconfig))
        return Setup(self.paths, choice, self.mounter, clean_s, extras)

    def parts(self, **vcuda: Any) -> tuple[Pool, Allocator, AllocationFiles]:
        """Assembles the program's parts below gRPC, as the daemon does. A second call simulates a restart of the
        program.
        """
        settings = self.configure(**vcuda)
        pool = Pool(self.gpus, make_slices(self.gpus, settings))
        records = RecordStore(self.paths.records)
        records.load()
        files = AllocationFiles(self.paths.allocations, self.mounter)
        sizer = Sizer(records, pool, self.paths.checkpoint, settings)
        return pool, Allocator(self.paths, settings, pool, records, files, sizer), files


@pytest.fixture
def node(tmp_path: Path) -> Node:
    paths = Paths(
        config=tmp_path / "node.yaml",
        kubelet_dir=tmp_path / "k" / "d",
        run_dir=tmp_path / "run",
        state_dir=tmp_path / "state",
        sys_root=tmp_path / "sys",
        host_root=tmp_path / "host",
        cdi_dir=tmp_path / "cdi",
        cdi_dirs_of_others=(tmp_path / "etc-cdi",),
    )
    for folder in (paths.kubelet_dir, paths.run_dir, paths.state_dir):
        folder.mkdir(parents=True)
    out = Node(paths, tmp_path / "lib", samples.gpus("T4", "T4"))
    out.install_library("0.1.0-aaaaaaaaaaaa")
    return out


@pytest.fixture
def running() -> Iterator[Callable[[Any], threading.Thread]]:
    """Runs objects that have the methods ``run`` and ``stop``, each in its own thread, and stops them after the
    test."""
    started: list[tuple[Any, threading.Thread]] = []

    def run(one: Any) -> threading.Thread:
        thread = threading.Thread(target=one.run, daemon=True)
        started.append((one, thread))
        thread.start()
        return thread

    yield run
    for one, thread in started:
        one.stop()
        thread.join(20)
        assert not thread.is_alive(), f"{one} did not stop"


@pytest.fixture
def kubelet(node: Any) -> Iterator[Manager]:
    """Starts the kubelet double in the node's folder."""
    manager = Manager(node.paths.kubelet_dir)
    manager.start()
    yield manager
    manager.stop()


@pytest.fixture(autouse=True, scope="session")
def rights() -> Iterator[None]:
    """Makes the API server of the tests refuse every request that the shipped service account may not make."""
    granted = {one[:3] for one in grants(manifests(Desired("x/plugin:1")), NAME)}
    NodeApi.may = staticmethod(lambda access: access[:3] in granted)
    yield
    NodeApi.may = None
