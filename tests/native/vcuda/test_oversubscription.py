# SPDX-License-Identifier: Apache-2.0
"""A card is oversold if the memory limits of its slices (the containers' parts of it) are together larger than its
memory. Each slice still gets its whole limit and keeps its data intact, even if the card is full. The tests check the
simulated driver's figures of the card and the bytes in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import layouts
import pytest
from conftest import MIB, OOM, ROOT, SIMULATOR, Host

PROGRAM = ROOT / "tests" / "native" / "gpusim" / "cuda_program.py"
CARD, CONTEXT = 256 * MIB, 4 * MIB
SOLD = 230 * MIB  # Size of each of the two slices, which are together 1.8 times as large as the card.
SMALL = """\
driver_version = 535.261.03
cuda_version = 12.2
[gpu]
model = V100-16GB
memory_mib = 256
context_mib = 4
[gpu]
model = V100-16GB
memory_mib = 256
context_mib = 4
"""


class Tenant:
    """A program in a separate container. ask() evaluates a Python expression that can call the driver API."""

    def __init__(
        self, host: Host, name: str, oversubscribe: bool = True, gpus: int = 2, wrapper: tuple = (), **options: object
    ) -> None:
        self.ledger, limits = host.folder / f"ledger.{name}", host.folder / f"limits.{name}"
        devices = [{"uuid": uuid, "memory_bytes": SOLD} for uuid in host.uuids[:gpus]]
        limits.write_bytes(
            layouts.pack_limits({"allocation": name, "devices": devices, "oversubscribe": oversubscribe})
        )
        self.ledger.write_bytes(layouts.pack_ledger(host.uuids, name))
        files = {"CUDA_DEVICE_MEMORY_SHARED_CACHE": str(self.ledger), "VGPU_LIMITS_FILE": str(limits)}
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, PROGRAM, SIMULATOR / "libcuda.so.1"],
            env=dict(host.env(**dict(files, **options)), **files),  # type: ignore[arg-type]
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, expression: str):
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer, f"{expression}: {answer}"
        return answer["value"]

    def charged(self) -> int:
        return sum(one["used"] + one["context"] for one in layouts.read_ledger(str(self.ledger))["totals"])

    def fill(self, way: str, piece: int, total: int) -> int:
        """Allocates pieces of `piece` bytes and writes a pattern into each, until `total` bytes are allocated or an
        allocation is refused. Returns the number of pieces."""
        self.ask(f"way = {way}")
        return self.ask(f"fill(way, {piece}, {total})")


# Functions for each tenant's program. They allocate memory by different CUDA calls, write a pattern, and check that all
# patterns are intact.
HELPERS = [
    "import hashlib",
    "held = []",
    "def pattern(n, size): return (hashlib.sha256(b'%d' % n).digest() * (size // 32 + 1))[:size]",
    "def plain(size): return cu.raw('cuMemAlloc_v2', ctypes.byref(p), SIZE(size)), p.value",
    "def later(size): return cu.raw('cuMemAllocAsync', ctypes.byref(p), SIZE(size), 0), p.value",
    "def pitched(size): return cu.raw('cuMemAllocPitch_v2', ctypes.byref(p), ctypes.byref(s), 512, size // 512, 4), "
    "p.value",
    "class Prop(ctypes.Structure): _fields_ = [('type', U32), ('handles', U32), ('place', U32), ('id', U32), "
    "('win32', U64), ('flags', U64)]",
    "class Access(ctypes.Structure): _fields_ = [('place', U32), ('id', U32), ('flags', U32)]",
    "def create(size, handles=0, place=1, node=0): return cu.raw('cuMemCreate', ctypes.byref(p), SIZE(size), "
    "ctypes.byref(Prop(1, handles, place, node)), U64(0))",
    "def mapped(size): status = create(size); handle = p.value; return (status, 0) if status else "
    "(map_at(handle, size), p.value)",
    "def map_at(handle, size): return [cu.cuMemAddressReserve(ctypes.byref(p), SIZE(size), SIZE(0), U64(0), U64(0)), "
    "cu.cuMemMap(p, SIZE(size), SIZE(0), U64(handle), U64(0)), "
    "cu.cuMemSetAccess(p, SIZE(size), ctypes.byref(Access(1, 0, 3)), SIZE(1)), cu.cuMemRelease(U64(handle)), 0][-1]",
    "def unmap(at, size): cu.cuMemUnmap(U64(at), SIZE(size)); cu.cuMemAddressFree(U64(at), SIZE(size))",
    "p, s = U64(), SIZE()",
    "def one(way, size): status, at = way(size); status or (held.append((at, size)), cu.write(at, pattern(at, size))); "
    "return status",
    "def fill(way, size, total): return [one(way, size) for n in range(total // size)].count(0)",
    "def copy(at, size): b = (ctypes.c_char * size)(); cu.cuMemcpyDtoH_v2(b, at, SIZE(size)); return b.raw",
    "def whole(): return all(copy(at, size) == pattern(at, size) for at, size in held)",
]
WAYS = ["plain", "later", "pitched"]
MAPPED = [*WAYS, "mapped"]
# A driver of CUDA 12.1, in which cuMemCreate cannot create host memory.
FORMER = "driver_version = 530.41.03\ncuda_version = 12.1\n" + SMALL.split("\n", 2)[2]


@pytest.fixture
def host(programs: Path, tmp_path: Path):
    host = Host(tmp_path, programs, SMALL)
    yield host
    host.close()


@pytest.fixture
def tenant(host: Host):
    started: list = []

    def start(name: str, **options: object) -> Tenant:
        one = Tenant(host, name, **options)  # type: ignore[arg-type]
        started.append(one)
        for line in HELPERS:
            one.ask(line)
        one.ask("context = cu.context()")
        return one

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.mark.parametrize("way", MAPPED)
def test_slice_gets_its_whole_limit_on_a_full_card(host: Host, tenant, way: str) -> None:
    first = tenant("first")
    assert first.fill("plain", 2 * MIB, SOLD) == (SOLD - CONTEXT) // (2 * MIB)
    assert first.charged() == SOLD, "the tenant must be charged up to its limit"
    second = tenant("second")
    granted = second.fill(way, 2 * MIB, SOLD)
    assert granted == (SOLD - CONTEXT) // (2 * MIB)
    assert second.charged() == SOLD
    assert host.on_card() <= CARD < first.charged() + second.charged()
    assert second.ask("cu.info()") == [0, SOLD]
    assert second.ask(f"one({way}, 2 * MIB)") == OOM
    # The data of both tenants is intact even after kernels have run.
    for one in (first, second):
        one.ask("cu.launch(cu.kernel(1000), times=3)")
        one.ask("cu.cuCtxSynchronize()")
        assert one.ask("whole()") is True


def test_without_oversubscription_a_slice_gets_only_the_rest_of_the_card(host: Host, tenant) -> None:
    """The negative control: without oversubscription the second slice gets only the rest of the card."""
    first = tenant("first", oversubscribe=False)
    first.fill("plain", 2 * MIB, SOLD)
    second = tenant("second", oversubscribe=False)
    assert second.fill("plain", 2 * MIB, SOLD) < (CARD - SOLD) // (2 * MIB)
    assert second.ask("whole()") is True
    # Memory shown as free can be allocated. So the figure is the rest of the limit or of the GPU, whichever is smaller.
    assert second.ask("cu.info()[0]") == CARD - host.on_card() < SOLD - second.charged()


def test_variable_disables_oversubscription(host: Host, tenant) -> None:
    tenant("first").fill("plain", 2 * MIB, SOLD)
    second = tenant("second", CUDA_OVERSUBSCRIBE="false")
    assert second.fill("plain", 2 * MIB, SOLD) < SOLD // (2 * MIB) // 2
    assert second.fill("plain", 2 * MIB, SOLD) == 0


def test_slice_gets_its_whole_limit_next_to_an_unlimited_neighbour(host: Host, tenant) -> None:
    second = tenant("second")
    stranger = host.puppet(preload=False).start()
    stranger.get("alloc", CARD - host.on_card())
    assert second.fill("plain", 2 * MIB, SOLD) == (SOLD - CONTEXT) // (2 * MIB)
    assert host.physical()[second.process.pid] == CONTEXT
    assert second.ask("whole()") is True


FREES = {
    "plain": "[cu.cuMemFree_v2(at) for at, size in held]",
    "freed in stream order": "[cu.cuMemFreeAsync(at, 0) for at, size in held]; cu.cuCtxSynchronize()",
    "freed with the context": "cu.cuCtxDestroy_v2(context); context = cu.context()",
}


@pytest.mark.parametrize("free", FREES)
@pytest.mark.parametrize("way", WAYS)
def test_every_legal_free_uncharges_host_memory(host: Host, tenant, way: str, free: str) -> None:
    stranger = host.puppet(preload=False).start()
    one = tenant("one")
    stranger.get("alloc", CARD - host.on_card())
    for _unused in range(2):
        assert one.fill(way, 2 * MIB, SOLD) == (SOLD - CONTEXT) // (2 * MIB)
        if free != "freed with the context":
            one.ask(FREES[free])
        else:
            stranger.result("free 2")
            one.ask(FREES[free])
            stranger.get("alloc", CARD - host.on_card())
        one.ask("held.clear()")
        assert one.charged() == CONTEXT
    assert host.physical()[one.process.pid] == CONTEXT


def test_unmapped_host_memory_is_uncharged(host: Host, tenant) -> None:
    stranger = host.puppet(preload=False).start()
    one = tenant("one")
    stranger.get("alloc", CARD - host.on_card())
    for _unused in range(2):
        assert one.fill("mapped", 2 * MIB, SOLD) == (SOLD - CONTEXT) // (2 * MIB)
        assert one.charged() == SOLD and host.physical()[one.process.pid] == CONTEXT
        assert one.ask("create(2 * MIB)") == OOM, "the tenant must get no memory beyond its limit"
        one.ask("[unmap(at, size) for at, size in held]")
        one.ask("held.clear()")
        assert one.charged() == CONTEXT


def test_shareable_memory_is_always_on_the_card(host: Host, tenant) -> None:
    """Memory that other processes can import is never placed in host memory. Here the type of its shareable handle is
    1, a descriptor."""
    one = tenant("one")
    host.puppet(preload=False).start().get("alloc", CARD - host.on_card() - 8 * CONTEXT)
    assert one.fill("mapped", 2 * MIB, 100 * MIB) == 50
    assert [one.ask("create(2 * MIB, 1)") for _unused in range(40)][-1] == OOM
    assert one.fill("mapped", 2 * MIB, 20 * MIB) == 10


@pytest.mark.parametrize(("profile", "shown"), [(SMALL, SOLD - CONTEXT), (FORMER, None)])
def test_shown_free_memory_can_be_allocated_by_every_call(host: Host, tenant, profile: str, shown: int | None) -> None:
    """If the driver cannot create host memory by cuMemCreate, only the GPU's free memory is shown as free."""
    host.become(profile)
    stranger = host.puppet(preload=False).start()
    one = tenant("one")
    stranger.get("alloc", CARD - host.on_card() - 20 * MIB)
    assert one.ask("cu.info()[0]") == (shown or 20 * MIB)
    granted = one.fill("mapped", 2 * MIB, SOLD)
    assert granted * 2 * MIB == (shown or 20 * MIB)


def test_pointer_to_host_memory_is_a_device_pointer(host: Host, tenant) -> None:
    one = tenant("one")
    host.puppet(preload=False).start().get("alloc", CARD - host.on_card() - CONTEXT)
    one.ask("at = cu.alloc(3 * MIB)")
    ask = "cu.out({}, 'cuPointerGetAttribute', {}, at)"
    assert [one.ask(ask.format("U32", number)) for number in (2, 8, 9)] == [2, 1, 0], (
        "the pointer must count as managed device memory of device 0"
    )
    assert one.ask(ask.format("U64", 12)) == 3 * MIB
    assert one.ask("cu.out(U64, 'cuMemGetAddressRange_v2', ctypes.byref(s), at + 5) == at and s.value") == 3 * MIB


def test_array_on_a_full_card_gets_the_drivers_error(host: Host, tenant) -> None:
    one = tenant("one")
    host.puppet(preload=False).start().get("alloc", CARD - host.on_card() - CONTEXT)
    before = one.charged()
    one.ask("class Array(ctypes.Structure): _fields_ = [('w', SIZE), ('h', SIZE), ('f', U32), ('n', U32)]")
    array = "cu.raw('cuArrayCreate_v2', ctypes.byref(p), ctypes.byref(Array(4096, 4096, 0x20, 1)))"
    assert one.ask(array) == OOM
    assert one.charged() == before


def test_context_is_measured_correctly_next_to_host_memory(host: Host, tenant) -> None:
    one = tenant("one")
    host.puppet(preload=False).start().get("alloc", CARD - host.on_card() - 3 * CONTEXT)
    assert one.fill("plain", 2 * MIB, 20 * MIB) == 10
    one.ask("second = cu.context()")
    assert one.fill("plain", 2 * MIB, 20 * MIB) == 10
    one.ask("cu.module('.gpusim bytes 1000000')")
    assert one.charged() == 40 * MIB + 2 * CONTEXT + 1000000
    assert host.physical()[one.process.pid] == 2 * CONTEXT + 1000000
