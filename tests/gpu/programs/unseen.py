# SPDX-License-Identifier: Apache-2.0
"""Retains the primary context as NVIDIA's runtime does, past every hook, then allocates by the public function up to
the first refusal. With the argument "public" it also retains the context by the public function before the
allocations. Prints "full" and waits for a line. NVIDIA's runtime does not work on the simulated driver, so there the
simulated driver's private table replaces the runtime."""

import ctypes
import importlib.util
import json
import pathlib
import sys

MIB = 1 << 20


def by_table(cuda):
    """Retains the primary context by the private table of native/gpusim/cuda/private.h and makes it current."""
    table = ctypes.POINTER(ctypes.c_void_p)()
    cuda.cuInit(0)
    assert cuda.cuGetExportTable(ctypes.byref(table), b"gpusim-private-1") == 0
    context = ctypes.c_void_p()
    retain = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(table[1])
    enter = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(table[3])
    assert retain(ctypes.byref(context), 0) == 0
    assert enter(context) == 0
    return "gpusim's table"


def runtime():
    """Returns NVIDIA's libcudart: PyTorch's, or one that the loader finds."""
    folders = []
    for name in ("nvidia", "torch"):
        found = importlib.util.find_spec(name)
        folders += [pathlib.Path(one) for one in (found.submodule_search_locations or [] if found else [])]
    for path in sorted(path for folder in folders for path in folder.glob("**/libcudart.so.*")):
        return ctypes.CDLL(str(path))
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def main():
    cuda = ctypes.CDLL("libcuda.so.1")
    if "simulated" in sys.argv:
        how = by_table(cuda)
    else:
        library = runtime()
        if library is None:
            print(json.dumps({"skipped": "no libcudart, neither PyTorch's nor the loader's"}))
            return
        status = library.cudaFree(None)
        assert status == 0, f"cudaFree(0): {status}"
        how = "libcudart"
    if "public" in sys.argv:
        context = ctypes.c_void_p()
        assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    pointer = ctypes.c_uint64()
    granted, status = 0, 0
    while not status:
        status = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(16 * MIB))
        granted += 0 if status else 16 * MIB
    print("full", flush=True)
    sys.stdin.readline()
    print(json.dumps({"granted": granted, "refusal": status, "how": how}))


main()
