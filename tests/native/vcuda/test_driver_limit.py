# SPDX-License-Identifier: Apache-2.0
"""Tests the library on a driver that limits the GPU memory of the container's control group (driver branch 615).

A card is oversold if its slices (the containers' parts of it) are together larger than its memory. The tests require
that memory of these slices spills to host memory only if the card is full, and that memory that is shown as free can be
allocated. They compare the library's figures with those of the simulated driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import layouts
import pytest
from conftest import BUILD, MIB, ROOT, Host
from control_groups import enter

LIBRARY = BUILD / "gpusim-615"
PROGRAM = ROOT / "tests/native/gpusim/cuda_program.py"
CONTEXT = 4 * MIB
SMALL = 256 * MIB
PROFILE = """\
driver_version = 615.71.09
cuda_version = 13.5
memacct = {}
cgroup_root = {}
[gpu]
model = T4
memory_mib = 256
context_mib = 4
count = 2
"""
# A program that sets the driver's limit of a control group on all GPUs.
SET = """
import sys
from pynvml import *
nvmlInit()
for i in range(nvmlDeviceGetCount()):
    limits = c_nvmlSetMemoryLimits_v1_t(nameSpace=sys.argv[1].encode(), softLimit=0, hardLimit=int(sys.argv[2]))
    nvmlDeviceSetMemoryLimits_v1(nvmlDeviceGetHandleByIndex(i), limits)
"""
# A program that prints total, used and free memory, as two versions of nvmlDeviceGetMemoryInfo return them.
SHOWN = """
from pynvml import *
nvmlInit()
handle = nvmlDeviceGetHandleByIndex(0)
for one in (nvmlDeviceGetMemoryInfo(handle), nvmlDeviceGetMemoryInfo(handle, version=nvmlMemory_v2)):
    print(one.total, one.used, one.free)
"""


class Container:
    """A container: programs in one control group, with one limits file and one ledger (the file in which the library
    records the container's GPU memory)."""

    def __init__(self, host: Host, name: str, path: Path, slice_mib: int, **limits: object) -> None:
        self.host, self.path, self.size = host, path, slice_mib * MIB
        self.ledger, self.limits = host.folder / f"ledger.{name}", host.folder / f"limits.{name}"
        self.programs: list = []
        devices = [{"uuid": uuid, "memory_bytes": self.size, **limits.pop("device", {})} for uuid in host.uuids]  # type: ignore[dict-item]
        self.limits.write_bytes(layouts.pack_limits({"allocation": name, "devices": devices, **limits}))
        self.ledger.write_bytes(layouts.pack_ledger(host.uuids, name))

    def env(self) -> dict:
        files = {"CUDA_DEVICE_MEMORY_SHARED_CACHE": str(self.ledger), "VGPU_LIMITS_FILE": str(self.limits)}
        return {**self.host.env(), **files}

    def hold(self, hard: int) -> None:
        """Sets the driver's limit of the container's control group, as root of the host does."""
        command = [sys.executable, "-c", SET, str(self.path), str(hard)]
        subprocess.run(command, env=dict(self.host.driver_env), check=True)

    def start(self) -> Container:
        command = [*enter(self.path), sys.executable, str(PROGRAM), str(LIBRARY / "libcuda.so.1")]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=self.env(), stdin=pipe, stdout=pipe, text=True)
        self.programs.append(self.process)
        for line in ("p, held = U64(), []", "context = cu.context()", *WAYS_OF_THE_PROGRAM):
            self.ask(line)
        return self

    def ask(self, expression: str):
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer, f"{expression}: {answer}"
        return answer["value"]

    def fill(self, piece: int = 2 * MIB, way: str = "plain") -> int:
        """Allocates pieces until one is refused and returns their total bytes."""
        return self.ask(f"fill({way}, {piece})") * piece

    def shown_by_nvml(self) -> list:
        command = [*enter(self.path), sys.executable, "-c", SHOWN]
        done = subprocess.run(command, env=self.env(), check=True, stdout=subprocess.PIPE, text=True)
        rows = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
        assert rows[0] == rows[1], "both versions of nvmlDeviceGetMemoryInfo must return the same figures"
        return rows[0]

    def charged(self) -> int:
        totals = layouts.read_ledger(str(self.ledger))["totals"]
        return sum(one["used"] + one["context"] for one in totals)


# Functions that each program gets: four ways to allocate, and fill(), which allocates by one of them until a refusal.
WAYS_OF_THE_PROGRAM = [
    "class Prop(ctypes.Structure): _fields_ = [('type', U32), ('handles', U32), ('place', U32), ('id', U32), "
    "('win32', U64), ('flags', U64)]",
    "def plain(size): return cu.raw('cuMemAlloc_v2', ctypes.byref(p), SIZE(size))",
    "def pooled(size): return cu.raw('cuMemAllocAsync', ctypes.byref(p), SIZE(size), 0)",
    "def pitched(size): return cu.raw('cuMemAllocPitch_v2', ctypes.byref(p), ctypes.byref(U64()), 512, size // 512, 4)",
    "def created(size): return cu.raw('cuMemCreate', ctypes.byref(p), SIZE(size), ctypes.byref(Prop(1, 0, 1, 0)), "
    "U64(0))",
    "def taken(way, size): status = way(size); held.append(p.value); return status == 0",
    "def fill(way, size): return next(n for n in range(1 << 20) if not taken(way, size))",
]


@pytest.fixture(params=["misc", "dmem"])
def host(request, programs: Path, tmp_path: Path, root):
    host = Host(tmp_path, programs, PROFILE.format(request.param, root))
    host.driver_env["LD_LIBRARY_PATH"] = str(LIBRARY)
    yield host
    host.close()


@pytest.fixture
def container(host: Host, group):
    made: list = []

    def make(name: str, slice_mib: int, **limits: object) -> Container:
        made.append(Container(host, name, group(name), slice_mib, **limits))
        return made[-1]

    yield make
    for one in made:
        for process in one.programs:
            process.kill()
            process.wait()


def on_the_card(host: Host) -> int:
    return sum(host.physical().values()) + host.orphans()


@pytest.mark.parametrize("driver", [False, True])
def test_oversold_slice_stays_on_an_empty_card(host: Host, container, driver: bool) -> None:
    """The library must use the GPU's real size to decide when the card is full. A driver with a limit shows a smaller
    size."""
    slice_mib = 230
    device = {"card_bytes": SMALL} if driver else {}
    one = container("one", slice_mib, oversubscribe=True, device=device)
    if driver:
        one.hold(slice_mib * MIB)
    one.start()
    assert one.fill() == slice_mib * MIB - CONTEXT
    assert on_the_card(host) == one.charged() == slice_mib * MIB


def test_two_oversold_slices_reserve_memory_for_contexts(host: Host, container) -> None:
    """The library reserves space on the card for two contexts of each slice, so two slices reserve the size of four
    contexts."""
    pair = [container(name, 230, oversubscribe=True, device={"card_bytes": SMALL}) for name in ("a", "b")]
    for one in pair:
        one.hold(one.size)
        one.start()
    assert [one.fill() for one in pair] == [one.size - CONTEXT for one in pair]
    kept = 2 * 2 * CONTEXT
    assert SMALL - kept - 2 * MIB < on_the_card(host) <= SMALL - kept
    assert sum(one.charged() for one in pair) == 460 * MIB


def test_slice_larger_than_the_card_spills_at_its_end(host: Host, container) -> None:
    """The driver's limit can be at most the GPU's size, but the container must still get its larger slice: the part
    that does not fit on the GPU spills to host memory."""
    one = container("one", 300, oversubscribe=True, device={"card_bytes": SMALL})
    one.hold(SMALL)
    one.start()
    assert one.fill() == 300 * MIB - CONTEXT
    assert on_the_card(host) <= SMALL


WAYS = ["plain", "pooled", "pitched", "created"]


@pytest.mark.parametrize("way", WAYS)
def test_memory_shown_as_free_can_be_allocated(host: Host, container, way: str) -> None:
    """The driver's limit is 30 MiB smaller than the slice. The library learns this when the driver refuses an
    allocation, and from then on makes NVML show these 30 MiB as used."""
    one = container("one", 200, device={"card_bytes": SMALL})
    one.hold(170 * MIB)
    one.start()
    granted = one.fill(way=way)
    assert granted == 170 * MIB - CONTEXT, "the driver must refuse the next allocation, not the library"
    assert one.charged() == 170 * MIB
    assert one.shown_by_nvml() == [200 * MIB, 200 * MIB, 0]
    assert one.ask("cu.info()") == [0, 200 * MIB]
    # Exactly the freed bytes are shown as free.
    if way == "plain":
        one.ask("[cu.cuMemFree_v2(at) for at in held[:10]]")
        assert one.shown_by_nvml()[2] == 20 * MIB == one.ask("cu.info()[0]")
        assert one.fill() == 20 * MIB


def test_memory_info_updates_the_used_figure(host: Host, container) -> None:
    """If the driver's limit is below the slice's size, the library makes NVML show the difference as used. Each call of
    cuMemGetInfo updates the difference, even if no allocation was refused."""
    one = container("one", 200, device={"card_bytes": SMALL})
    one.hold(170 * MIB)
    one.start()
    assert one.shown_by_nvml() == [200 * MIB, CONTEXT, 196 * MIB], (
        "before the first cuMemGetInfo the driver's limit is unknown, so NVML must show the ledger's figure"
    )
    assert one.ask("cu.info()") == [166 * MIB, 200 * MIB]
    assert one.shown_by_nvml() == [200 * MIB, 34 * MIB, 166 * MIB]
    one.hold(200 * MIB)
    assert one.ask("cu.info()") == [196 * MIB, 200 * MIB]
    assert one.shown_by_nvml() == [200 * MIB, CONTEXT, 196 * MIB]


def test_driver_limit_above_the_slice_does_not_shrink_it(host: Host, container) -> None:
    """The driver's limit may be larger than the slice, to leave room for memory that only the driver counts. The
    container must still see the slice's size."""
    one = container("one", 200, device={"card_bytes": SMALL})
    one.hold(230 * MIB)
    one.start()
    assert one.fill() == 200 * MIB - CONTEXT
    assert one.shown_by_nvml() == [200 * MIB, 200 * MIB, 0]
    assert one.ask("fill(plain, MIB)") == 0


def test_without_a_driver_limit_nvml_shows_the_ledger(host: Host, container) -> None:
    """On a driver without a limit, the library makes NVML show only the memory that the slice itself uses, even if a
    neighbour has filled the card."""
    one, other = container("one", 200), container("other", 200)
    one.start()
    other.start()
    other.fill()
    assert one.fill() < 200 * MIB - CONTEXT
    assert one.ask("cu.info()[0]") < 2 * MIB
    assert one.shown_by_nvml() == [200 * MIB, one.charged(), 200 * MIB - one.charged()]
