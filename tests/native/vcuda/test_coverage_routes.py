# SPDX-License-Identifier: Apache-2.0
"""Every function of the coverage table that allocates memory is charged and limited.

Each function is called by its link-time symbol and by the address from cuGetProcAddress.

Strings such as ``alloc 10 4096`` (allocate 4096 bytes, keep the address in register 10) and ``call cuMemFree_v2 $10``
are commands to programs/puppet.c: $10 is the value of register 10, @10 its address."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from conftest import LIMIT, MIB, OK, OOM, Host, Puppet
from test_coverage import ROWS
from test_coverage_code import step
from test_coverage_graphs import say
from test_coverage_passed import answers_nothing

pytestmark = pytest.mark.slow

SIZE = 8 * MIB
# FLOAT: an array format. DEVICE: CU_MEM_LOCATION_TYPE_DEVICE; the allocation type "pinned" has the same number.
FLOAT, DEVICE = 0x20, 1
LAZY = {"CUDA_MODULE_LOADING": "LAZY"}


class Way(NamedTuple):
    """Describes how to call a function that allocates at least ``least`` bytes.

    ``before`` and ``after`` are puppet commands around the call; the memory exists once ``after`` has run. Register 10
    gets the result; registers from 50 on contain structures.
    """

    arguments: str
    before: tuple = ()
    after: tuple = ()
    environment: dict = {}
    least: int = SIZE


def words(first: int, *values: int) -> tuple:
    return tuple(f"put {first + i} {value}" for i, value in enumerate(values))


def pair(low: int, high: int) -> int:
    """Packs two 4-byte structure members into one 8-byte register."""
    return low | high << 32


FLAT = words(50, 1024, 2048, pair(FLOAT, 1))
FLAT_V1 = words(50, pair(1024, 2048), pair(FLOAT, 1))
DEEP = words(50, 256, 128, 64, pair(FLOAT, 1), 0)
DEEP_V1 = words(50, pair(256, 128), pair(64, FLOAT), pair(1, 0))
TILED = words(50, 2048, 1024, 0, pair(FLOAT, 1), 0)
# CUDA_MEM_ALLOC_NODE_PARAMS: eleven words of pool properties, access descriptors, their count, bytes.
NODE = words(50, DEVICE, DEVICE, *[0] * 11, SIZE, 0)
GENERAL = words(50, 10, 0, DEVICE, DEVICE, *[0] * 11, SIZE, 0)
GRAPH = ("graph 30", f"graph-alloc 40 30 {SIZE} 0")
RUN = ("instantiate 31 30 0", "launch-graph 31 0", "sync")
# If a graph allocates and frees memory, the driver keeps this memory for the next launch. After a trim the launch must
# allocate it again.
TRIMMED = (*GRAPH, "graph-free 30 40", "instantiate 31 30 0", "launch-graph 31 0", "sync", "trim 0")
LIBRARY = (f"library 20 {SIZE}",)
# The driver loads this code at the launch, without a call that the library hooks.
LATER = ("kernel 21 20", "launch 21")

ALLOCATES = {
    "cuMemAlloc": Way(f"@10 {SIZE}"),
    "cuMemAlloc_v2": Way(f"@10 {SIZE}"),
    "cuMemAllocPitch": Way("@10 @11 4096 2048 4"),
    "cuMemAllocPitch_v2": Way("@10 @11 4096 2048 4"),
    "cuMemAllocManaged": Way(f"@10 {SIZE} 1"),
    "cuMemAllocAsync": Way(f"@10 {SIZE} 0"),
    "cuMemAllocAsync_ptsz": Way(f"@10 {SIZE} 0"),
    "cuMemAllocFromPoolAsync": Way(f"@10 {SIZE} $20 0", ("pool 20 0",)),
    "cuMemAllocFromPoolAsync_ptsz": Way(f"@10 {SIZE} $20 0", ("pool 20 0",)),
    "cuMemCreate": Way(f"@10 {SIZE} @50 0", words(50, DEVICE, DEVICE, 0, 0)),
    "cuArrayCreate": Way("@10 @50", FLAT_V1),
    "cuArrayCreate_v2": Way("@10 @50", FLAT),
    "cuArray3DCreate": Way("@10 @50", DEEP_V1),
    "cuArray3DCreate_v2": Way("@10 @50", DEEP),
    "cuMipmappedArrayCreate": Way("@10 @50 4", TILED),
    "cuGraphAddMemAllocNode": Way("@10 $30 0 0 @50", ("graph 30", *NODE), RUN),
    "cuGraphAddNode": Way("@10 $30 0 0 @50", ("graph 30", *GENERAL), RUN),
    "cuGraphInstantiate": Way("@31 $30 0 0 0", GRAPH, RUN[1:]),
    "cuGraphInstantiate_v2": Way("@31 $30 0 0 0", GRAPH, RUN[1:]),
    "cuGraphInstantiateWithFlags": Way("@31 $30 0", GRAPH, RUN[1:]),
    "cuGraphInstantiateWithParams": Way("@31 $30 @50", GRAPH, RUN[1:]),
    "cuGraphInstantiateWithParams_ptsz": Way("@31 $30 @50", GRAPH, RUN[1:]),
    "cuGraphUpload": Way("$31 0", TRIMMED, ("sync",)),
    "cuGraphUpload_ptsz": Way("$31 0", TRIMMED, ("sync",)),
    "cuGraphLaunch": Way("$31 0", TRIMMED, ("sync",)),
    "cuGraphLaunch_ptsz": Way("$31 0", TRIMMED, ("sync",)),
    "cuCtxCreate": Way("@10 0 0"),
    "cuCtxCreate_v2": Way("@10 0 0"),
    "cuCtxCreate_v3": Way("@10 0 0 0 0"),
    "cuGLCtxCreate": Way("@10 0 0", ("gl",)),
    "cuGLCtxCreate_v2": Way("@10 0 0", ("gl",)),
    "cuVDPAUCtxCreate": Way("@10 0 0 1 &puts"),
    "cuVDPAUCtxCreate_v2": Way("@10 0 0 1 &puts"),
    "cuDevicePrimaryCtxRetain": Way("@10 0"),
    "cuCtxSetLimit": Way("0 16384"),
    "cuModuleLoad": Way(f"@10 #{SIZE}"),
    "cuModuleLoadData": Way(f"@10 %{SIZE}"),
    "cuModuleLoadDataEx": Way(f"@10 %{SIZE} 0 0 0"),
    "cuModuleLoadFatBinary": Way(f"@10 %{SIZE}"),
    "cuModuleGetFunction": Way("@10 $20 'k", (f"image 20 {SIZE}",), environment=LAZY),
    "cuLibraryLoadData": Way(f"@20 %{SIZE} 0 0 0 0 0 0", (), LATER),
    "cuLibraryLoadFromFile": Way(f"@20 #{SIZE} 0 0 0 0 0 0", (), LATER),
    "cuKernelGetFunction": Way("@10 $21", (*LIBRARY, "kernel 21 20")),
    "cuLibraryGetModule": Way("@10 $20", LIBRARY),
    "cuLibraryGetGlobal": Way("@10 @11 $20 'g", LIBRARY),
    "cuLibraryGetManaged": Way("@10 @11 $20 'm", LIBRARY),
}
# Keys: hooked functions that have no row in ALLOCATES. Values: the reason, and the file with the function's test.
OTHERWISE = {
    "cuCtxAttach": "counts a reference; test_frees.py",
    "cuModuleGetGlobal_v2": "the simulated driver loads a module's data with the module; test_coverage_code.py",
    "cuMemMap": "the mapped handle is charged already; test_memory.py",
    "cuMemRetainAllocationHandle": "the handle is charged already; test_memory.py",
    "cuMemPoolCreate": "a pool takes no memory before its first allocation; test_memory.py",
    "cuMemMapArrayAsync": "binds memory that is charged already; test_coverage_bound.py",
    "cuMemMapArrayAsync_ptsz": "binds memory that is charged already; test_coverage_bound.py",
    "cuMulticastBindAddr": "binds memory that is charged already; test_coverage_bound.py",
    "cuMulticastBindMem": "binds memory that is charged already; test_coverage_bound.py",
    "cuIpcGetMemHandle": "the exporting process is charged once; test_coverage_ipc.py",
    "cuIpcOpenMemHandle": "the exporting process is charged once; test_coverage_ipc.py",
    "cuIpcOpenMemHandle_v2": "the exporting process is charged once; test_coverage_ipc.py",
    "cuMemExportToShareableHandle": "the exporting process is charged once; test_shareable.py",
    "cuMemImportFromShareableHandle": "the exporting process is charged once; test_shareable.py",
    "cuMemPoolExportToShareableHandle": "the exporting process is charged once; test_shareable.py",
    "cuMemPoolImportFromShareableHandle": "the exporting process is charged once; test_shareable.py",
}
GIVES_BACK = ("Free", "Destroy", "Unload", "Unmap", "Release", "Reset", "Detach", "Trim", "CloseMemHandle")
TAKES = {"context", "code", "memory", "shared", "kept", "graph-memory", "heaps"}
# Code that the driver loads late cannot be refused. It is charged at the next allocation (native/vcuda/README.md).
LATE = {"cuModuleGetFunction", "cuKernelGetFunction", *(name for name in ALLOCATES if name.startswith("cuLibrary"))}


def test_every_allocating_hook_has_a_row() -> None:
    """Each hooked function that allocates memory must have a row in ALLOCATES or OTHERWISE, so that no new hook is left
    untested."""
    silent = answers_nothing()
    wanted = {
        row.name
        for row in ROWS
        if row.verdict == "hooked" and row.reason in TAKES and "535" in row.where and row.name not in silent
        if not any(word in row.name for word in GIVES_BACK)
    }
    assert len(wanted) > 50
    assert wanted - ALLOCATES.keys() - OTHERWISE.keys() == set()
    assert ALLOCATES.keys() - wanted == {"cuGraphLaunch", "cuGraphLaunch_ptsz"}, (
        "ALLOCATES must have two more functions, which coverage.txt lists as launches"
    )
    assert ALLOCATES.keys() & OTHERWISE.keys() == set()


def result(puppet: Puppet, how: str, name: str) -> int:
    """Returns the first error of the call and the commands after it, or OK."""
    way = ALLOCATES[name]
    return next((s for s in map(puppet.result, (f"{how} {name} {way.arguments}", *way.after)) if s != OK), OK)


@pytest.mark.parametrize("how", ["linked", "proc"])
@pytest.mark.parametrize("name", ALLOCATES)
def test_allocating_function_is_charged(host: Host, name: str, how: str) -> None:
    way = ALLOCATES[name]
    puppet = host.puppet(**way.environment).start()
    say(puppet, *way.before)
    before = host.on_card()
    assert host.charged() == before
    assert result(puppet, how, name) == OK
    assert host.on_card() >= before + way.least, "the driver took no memory, so the test proves nothing"
    if name in LATE:
        step(puppet)
    assert host.charged() == host.on_card()


@pytest.mark.parametrize("how", ["linked", "proc"])
@pytest.mark.parametrize("name", ALLOCATES)
def test_allocating_function_over_the_limit_is_refused(host: Host, name: str, how: str) -> None:
    way = ALLOCATES[name]
    puppet = host.puppet(**way.environment).start()
    say(puppet, *way.before)
    say(puppet, f"alloc 60 {LIMIT - host.on_card() - way.least // 2}")
    assert result(puppet, how, name) == (OK if name in LATE else OOM)
    assert host.charged() <= LIMIT
    assert host.on_card() == host.charged() or (name in LATE and host.on_card() <= LIMIT + SIZE)
    assert puppet.refused("alloc", SIZE) == OOM


@pytest.mark.parametrize("name", ALLOCATES)
def test_without_the_library_the_function_exceeds_the_limit(host: Host, name: str) -> None:
    """The negative control of the two tests above: without the library the function exceeds the limit."""
    way = ALLOCATES[name]
    puppet = host.puppet(preload=False, **way.environment).start()
    say(puppet, *way.before)
    say(puppet, f"alloc 60 {LIMIT - host.on_card() - way.least // 2}")
    assert result(puppet, "linked", name) == OK
    assert host.on_card() > LIMIT and host.charged() == 0
