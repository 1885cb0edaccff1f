# SPDX-License-Identifier: Apache-2.0
"""Creates a CUDA context on a GPU, allocates memory, and keeps both until standard input ends. Arguments: the GPU, the
bytes to allocate. Prints `ready` after the allocation. The GPU stays idle."""

from __future__ import annotations

import ctypes
import sys


def main() -> None:
    """Allocates as the arguments say, prints `ready`, and waits for the end of standard input."""
    number, size = int(sys.argv[1]), int(sys.argv[2])
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()

    def call(name: str, *arguments) -> None:
        code = getattr(cuda, name)(*arguments)
        if code != 0:
            raise SystemExit(f"{name} on GPU {number}: CUDA error {code}")

    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), number)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
    if size:
        call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
