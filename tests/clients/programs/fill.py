# SPDX-License-Identifier: Apache-2.0
"""fill.py CLIENT WAY: allocate GPU memory by a client's call WAY until an allocation fails, then free all of it.

Prints a line of JSON at each step and waits for a line on standard input. The steps are ``ready`` (the context exists),
``full`` (number of granted allocations, the error, and the total memory that the client shows or null) and ``empty``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable

PIECE = 16 << 20
MOST = 200

Client = tuple[Callable, Callable, Callable]  # Three functions: allocate; free a list; return the shown total.


def bindings(way: str) -> Client:
    """Allocates with cuda.bindings.driver, which is generated from the driver's headers."""
    from cuda.bindings import driver

    def call(answer: tuple):
        if answer[0] != driver.CUresult.CUDA_SUCCESS:
            raise MemoryError(answer[0].name)
        return answer[1] if len(answer) > 1 else None

    call(driver.cuInit(0))
    call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(0))))
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    attach = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value
    take, free = {
        "cuMemAlloc": (lambda: driver.cuMemAlloc(PIECE), driver.cuMemFree),
        "cuMemAllocManaged": (lambda: driver.cuMemAllocManaged(PIECE, attach), driver.cuMemFree),
        "cuMemAllocAsync": (lambda: driver.cuMemAllocAsync(PIECE, 0), lambda at: driver.cuMemFreeAsync(at, 0)),
        "cuMemCreate": (lambda: driver.cuMemCreate(PIECE, properties, 0), driver.cuMemRelease),
    }[way]

    def give(held: list) -> None:
        for one in held:
            call(free(one))
        call(driver.cuCtxSynchronize())

    return lambda: call(take()), give, lambda: call(driver.cuDeviceTotalMem(0))


def core(way: str) -> Client:
    """Allocates with cuda.core. Device.sync needs the CUDA runtime, which does not run here, so this syncs a stream."""
    from cuda.bindings import driver
    from cuda.core import Device, DeviceMemoryResource, DeviceMemoryResourceOptions, VirtualMemoryResource

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    if way == "VirtualMemoryResource":
        resource = VirtualMemoryResource(device)
    else:
        shared = way == "pool for other processes"
        options = DeviceMemoryResourceOptions(ipc_enabled=shared, max_size=4 << 30 if shared else 0)
        resource = device.memory_resource if way == "device" else DeviceMemoryResource(device, options)

    def give(held: list) -> None:
        for one in held:
            one.close(stream)
        stream.sync()
        if way == "device":  # cuda.core configures the driver's pool to keep freed memory.
            driver.cuMemPoolTrimTo(resource.handle, 0)

    return lambda: resource.allocate(PIECE, stream=stream), give, lambda: None


def numba(way: str) -> Client:
    """Allocates arrays of numba.cuda."""
    import numpy
    from numba import cuda

    context = cuda.current_context()
    make = {"device_array": cuda.device_array, "managed_array": cuda.managed_array}[way]

    def give(held: list) -> None:
        held.clear()
        gc.collect()
        context.memory_manager.deallocations.clear()

    return lambda: make(PIECE, numpy.uint8), give, lambda: context.get_memory_info().total


def tinygrad(way: str) -> Client:
    """Allocates with tinygrad's CUDA allocator, which caches freed memory until free_cache()."""
    os.environ["DEV"] = "CUDA"
    from tinygrad import Device

    allocator = Device[way].allocator

    def give(held: list) -> None:
        for one in held:
            allocator.free(one, PIECE)
        allocator.free_cache()

    return lambda: allocator.alloc(PIECE), give, lambda: None


def taichi(way: str) -> Client:
    """Allocates arrays of taichi on arch=cuda. If taichi cannot open the driver, it falls back to the CPU."""
    import taichi as ti

    ti.init(arch=ti.cuda, log_level=ti.CRITICAL)
    assert ti.cfg.arch == ti.cuda, f"taichi must use CUDA, but uses {ti.cfg.arch}"

    @ti.kernel
    def nothing():
        for _unused in range(64):
            pass

    nothing()  # A first launch allocates the memory that launches need.

    def give(held: list) -> None:
        held.clear()
        gc.collect()
        ti.sync()

    return lambda: getattr(ti, way)(dtype=ti.u8, shape=(PIECE,)), give, lambda: None


def step(name: str, **figures: object) -> None:
    """Prints one step and waits for a line on standard input."""
    print(json.dumps({"step": name, **figures}), flush=True)
    sys.stdin.readline()


def main(client: str, way: str) -> None:
    """Runs the three steps."""
    take, give, total = globals()[client](way)
    held: list = []
    refusal = ""
    step("ready")
    while not refusal and len(held) < MOST:
        try:
            held.append(take())
        except Exception as fault:  # Each client raises a different exception.
            refusal = f"{type(fault).__name__}: {fault}"
    step("full", granted=len(held), refusal=refusal, total=total())
    give(held)
    step("empty")


main(*sys.argv[1:])
