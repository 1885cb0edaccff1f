# SPDX-License-Identifier: Apache-2.0
"""Makes one allocation that bypasses libvgpu.so, as a video library may do, and then allocations by CUDA. Usage:
beside.py OTHER STEP TIMES

The first allocation, of OTHER bytes, calls the driver's own function. Its address comes from the symbol table of the
mapped driver, so no preloaded library sees this call. Then the program makes TIMES allocations of STEP bytes by CUDA,
and prints how many were granted."""

from __future__ import annotations

import ctypes
import subprocess
import sys


def driver_function(name: str) -> object:
    """Returns the driver's own function, so that a call of it bypasses preloaded libraries."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        line = next(line.split() for line in maps if line.rstrip().endswith("libcuda.so.1"))
    symbols = subprocess.run(
        ["nm", "-D", line[5]], env={"PATH": "/usr/bin"}, check=True, stdout=subprocess.PIPE, text=True
    )
    place = next(one.split()[0] for one in symbols.stdout.splitlines() if one.split()[-1] == name)
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    return prototype(int(line[0].split("-")[0], 16) + int(place, 16))


def main() -> None:
    """Allocates, prints the number of granted CUDA allocations, and waits until standard input closes."""
    other, step, times = (int(word) for word in sys.argv[1:4])
    cuda = ctypes.CDLL("libcuda.so.1")
    context, pointer = ctypes.c_void_p(), ctypes.c_void_p()
    if cuda.cuInit(0) or cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0):
        raise SystemExit("no context")
    if driver_function("cuMemAlloc_v2")(ctypes.byref(pointer), other):  # type: ignore[operator]
        raise SystemExit("the driver refused the first allocation")
    granted = 0
    while granted < times and cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(step)) == 0:
        granted += 1
    print(granted, flush=True)
    sys.stdin.read()


main()
