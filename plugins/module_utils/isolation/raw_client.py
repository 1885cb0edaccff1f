# SPDX-License-Identifier: Apache-2.0
"""Runs a tenant (test process) without libvgpu.so, in a container's control group. The tenant calls the driver
directly.

driver_checks.py passes the text of this program to Python (option -c). The program enters the group before it loads a
library of the driver. It then writes one line of JSON for each line of JSON that it reads, and ends at the end of its
input. All sizes are in bytes. ``code`` is the driver's return value; 0 means granted.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"
OUT_OF_MEMORY = 2
# The driver's allocation granularity in bytes. Even a smaller request uses this much memory.
LEAST = 2 << 20
GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL
CAPABILITY_VERSION = 0x20080522
ORPHAN_S = 20.0


class Refused(Exception):
    """A call that must succeed failed. ``code``: its return value."""

    def __init__(self, call: str, code: int) -> None:
        self.call, self.code = call, code
        super().__init__(f"{call} answered {code}")


class Client:
    """Calls the CUDA driver in one process."""

    def __init__(self) -> None:
        self.cuda: Any = None
        self.device = ctypes.c_int()
        self.blocks: list[ctypes.c_uint64] = []

    def _must(self, call: str, *arguments: Any) -> None:
        code = int(getattr(self.cuda, call)(*arguments))
        if code:
            raise Refused(call, code)

    def open(self, uuid: str) -> dict[str, Any]:
        """Creates a context on the GPU. A context uses memory, so the driver may refuse it."""
        self.cuda = ctypes.CDLL(CUDA)
        self._must("cuInit", 0)
        count = ctypes.c_int()
        self._must("cuDeviceGetCount", ctypes.byref(count))
        for index in range(count.value):
            found = (ctypes.c_ubyte * 16)()
            self._must("cuDeviceGet", ctypes.byref(self.device), index)
            self._must("cuDeviceGetUuid", ctypes.byref(found), self.device)
            if bytes(found).hex() == uuid.replace("GPU-", "").replace("-", "").lower():
                self._must("cuCtxCreate_v2", ctypes.byref(ctypes.c_void_p()), 0, self.device)
                return {"code": 0}
        return {"code": -1, "call": f"the driver lists no {uuid} in the control group"}

    def take(self, size: int) -> dict[str, Any]:
        block = ctypes.c_uint64()
        code = int(self.cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(size)))
        if code == 0:
            self.blocks.append(block)
        return {"code": code}

    def fill(self, most: int) -> dict[str, Any]:
        """Allocates until the driver refuses even a block of LEAST bytes. Stops at ``most`` bytes, so that it does not
        use the memory of neighbours. ``refused`` in the result says whether the last call failed for lack of memory.
        """
        taken, piece, code = 0, most, 0
        while piece >= LEAST and taken < most:
            piece = min(piece, most - taken)
            code = self.take(piece)["code"]
            if code == 0:
                taken += piece
            else:
                piece //= 2
        return {"code": 0, "taken": taken, "refused": code == OUT_OF_MEMORY, "last": code}

    def managed(self, size: int) -> dict[str, Any]:
        """Allocates managed memory and writes to it on the card with a kernel that the driver contains."""
        block = ctypes.c_uint64()
        self._must("cuMemAllocManaged", ctypes.byref(block), ctypes.c_size_t(size), GLOBAL)
        self.blocks.append(block)
        # The return value is ignored: some cards do not support this call.
        self.cuda.cuMemPrefetchAsync(block, ctypes.c_size_t(size), self.device, None)
        self._must("cuMemsetD8_v2", block, ctypes.c_ubyte(1), ctypes.c_size_t(size))
        self._must("cuCtxSynchronize")
        return {"code": 0}

    def free(self) -> dict[str, Any]:
        for block in self.blocks:
            self.cuda.cuMemFree_v2(block)
        self.blocks = []
        return {"code": 0}

    @staticmethod
    def orphan() -> dict[str, Any]:
        """Forks and ends the parent process. The child continues and keeps the driver state that the parent opened."""
        creator = os.getpid()
        if os.fork():
            os._exit(0)
        until = time.monotonic() + ORPHAN_S
        while os.getppid() == creator and time.monotonic() < until:
            time.sleep(0.01)
        gone = os.getppid() != creator
        return {"code": 0} if gone else {"code": -1, "call": "the process that opened the driver did not end"}

    def become(self, pid: int) -> dict[str, Any]:
        """Enters the user namespace of another process, and reduces this process's capabilities to those of the other
        process.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        there = f"/proc/{pid}/ns/user"
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as stream:
            words = dict(line.rstrip("\n").split(":\t", 1) for line in stream if ":\t" in line)
        if os.readlink(there) != os.readlink("/proc/self/ns/user"):
            descriptor = os.open(there, os.O_RDONLY | os.O_CLOEXEC)
            if libc.setns(descriptor, 0) != 0:
                return {"code": -1, "call": f"setns to the user namespace: {os.strerror(ctypes.get_errno())}"}
        has = int(words["CapEff"], 16)
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
        sets = (ctypes.c_uint32 * 6)()
        for half in range(2):
            bits = has >> 32 * half & 0xFFFFFFFF
            sets[3 * half], sets[3 * half + 1] = bits, bits  # Set effective and permitted; leave inheritable 0.
        if libc.capset(header, sets) != 0:
            return {"code": -1, "call": f"capset: {os.strerror(ctypes.get_errno())}"}
        return {"code": 0, "capabilities": has}

    @staticmethod
    def limit(uuid: str, group: str, hard: int) -> dict[str, Any]:
        """Sets the driver's hard memory limit of a control group through NVML, with a soft limit of 0."""
        nvml, device = ctypes.CDLL(NVML), ctypes.c_void_p()
        words = (ctypes.c_uint64 * 3)()
        name = ctypes.create_string_buffer(os.fsencode(group))
        words[0], words[2] = ctypes.addressof(name), hard
        for call, arguments in (
            ("nvmlInit_v2", ()),
            ("nvmlDeviceGetHandleByUUID", (uuid.encode(), ctypes.byref(device))),
            ("nvmlDeviceSetMemoryLimits_v1", (device, ctypes.byref(words))),
        ):
            code = int(getattr(nvml, call)(*arguments))
            if code:
                return {"code": code, "call": call}
        return {"code": 0}


def main(group: str) -> None:
    with open(f"{group}/cgroup.procs", "w", encoding="ascii") as stream:
        stream.write("0")
    client = Client()
    for line in sys.stdin:
        words = json.loads(line)
        try:
            answer = getattr(client, words.pop("do"))(**words)
        except Refused as fault:
            answer = {"code": fault.code, "call": fault.call}
        except (OSError, AttributeError) as fault:
            answer = {"code": -1, "call": str(fault)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
