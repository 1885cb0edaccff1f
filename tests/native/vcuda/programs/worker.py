# SPDX-License-Identifier: Apache-2.0
"""Keeps a context, memory and one kernel on a GPU until standard input closes. Usage: worker.py ORDINAL BYTES
KERNEL_US. ORDINAL is the GPU's number in CUDA's order, BYTES the size of the memory. KERNEL_US is the kernel's duration
in microseconds: a number, `inf`, or 0 for no kernel. Prints the pid after the launch."""

from __future__ import annotations

import ctypes
import os
import sys


def main() -> None:
    """Creates the context, allocates, launches, prints the pid, and waits."""
    ordinal, size, kernel = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    cuda = ctypes.CDLL("libcuda.so.1")
    context, module, function, pointer = (ctypes.c_void_p() for _unused in range(4))

    def call(name: str, *arguments: object) -> None:
        code = getattr(cuda, name)(*arguments)
        if code:
            raise SystemExit(f"{name}: CUDA error {code}")

    call("cuInit", 0)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, ordinal)
    if size:
        call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
    if kernel != "0":
        # The text is for the simulated driver: how long the kernel takes.
        call("cuModuleLoadData", ctypes.byref(module), f".gpusim kernel spin {kernel}\n".encode())
        call("cuModuleGetFunction", ctypes.byref(function), module, b"spin")
        call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)  # Exits at once, because a normal exit would wait for the end of an endless kernel.


main()
