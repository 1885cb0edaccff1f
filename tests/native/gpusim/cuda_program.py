# SPDX-License-Identifier: Apache-2.0
"""A small CUDA program for the tests. It reads lines of Python (an expression or statements), in which `cu` is the
driver API. It executes each line and answers with one line of JSON. It ends when its input ends."""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time

U32, U64, SIZE, PTR = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
MIB = 1 << 20


class Private(ctypes.Structure):
    """A private function table of the driver: the C structure gpusim_private of native/gpusim/cuda/private.h."""

    CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    _fields_ = [
        ("bytes", ctypes.c_size_t),
        ("primary_retain", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(PTR), ctypes.c_int)),
        ("primary_release", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)),
        ("set_current", ctypes.CFUNCTYPE(ctypes.c_int, PTR)),
        ("subscribe", ctypes.CFUNCTYPE(ctypes.c_int, CALLBACK, PTR)),
        ("raw_take", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, SIZE)),
    ]


class Driver:
    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.modules: dict[str, object] = {}
        self.moments: list[list[object]] = []
        # This reference keeps the callback alive, because the driver stores only its address.
        self._callback = Private.CALLBACK(self.called_back)
        # The expression that the tool (a profiler or the like, which the driver calls back) evaluates in its callback.
        self.inside = ""

    def raw(self, name: str, *arguments) -> int:
        """Calls a function and returns its CUresult. Python integers are passed as 64-bit numbers."""
        converted = [ctypes.c_uint64(a & (2**64 - 1)) if isinstance(a, int) else a for a in arguments]
        return getattr(self.library, name)(*converted)

    def __getattr__(self, name: str):
        def call(*arguments):
            result = self.raw(name, *arguments)
            if result:
                raise RuntimeError(f"{name}: {result}")

        return call

    def out(self, kind, name: str, *arguments):
        """Calls a function whose first argument points to its result, and returns this result."""
        value = kind()
        getattr(self, name)(ctypes.byref(value), *arguments)
        return value.value

    @property
    def private(self) -> Private:
        table = PTR()
        self.cuGetExportTable(ctypes.byref(table), b"gpusim-private-1")
        return ctypes.cast(table, ctypes.POINTER(Private))[0]

    def called_back(self, _data: object, moment: int, handle: int) -> None:
        self.moments.append([moment, handle])
        if self.inside:
            eval(self.inside, {"cu": self})

    def subscribe(self) -> int:
        return self.private.subscribe(self._callback, None)

    def unseen(self, device: int = 0) -> int:
        """Retains the primary context through the private table, and returns the context. Such a call bypasses the
        hooks of a preloaded library."""
        self.cuInit(0)
        context = PTR()
        for result in (self.private.primary_retain(ctypes.byref(context), device), self.private.set_current(context)):
            assert result == 0, f"a function of the private table returned {result}"
        return context.value

    def background(self, call) -> None:
        """Runs ``call`` in a new thread with this thread's context, and returns when the call has begun."""
        context = self.out(PTR, "cuCtxGetCurrent")
        began = threading.Event()

        def work() -> None:
            self.cuCtxSetCurrent(context)
            began.set()
            call()

        self.thread = threading.Thread(target=work)
        self.thread.start()
        began.wait()
        time.sleep(0.1)

    def seconds(self, call) -> float:
        start = time.monotonic()
        call()
        return round(time.monotonic() - start, 3)

    # ---- shorthand -------------------------------------------------------------------------------------------------

    def context(self, device: int = 0) -> int:
        self.cuInit(0)
        return self.out(PTR, "cuCtxCreate_v2", 0, device)

    def alloc(self, size: int) -> int:
        return self.out(U64, "cuMemAlloc_v2", SIZE(size))

    def try_alloc(self, size: int) -> int:
        return self.raw("cuMemAlloc_v2", ctypes.byref(U64()), SIZE(size))

    def info(self) -> list[int]:
        free, total = SIZE(), SIZE()
        self.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        return [free.value, total.value]

    def write(self, pointer: int, data: bytes) -> None:
        self.cuMemcpyHtoD_v2(pointer, data, len(data))

    def read(self, pointer: int, size: int) -> str:
        buffer = ctypes.create_string_buffer(size)
        self.cuMemcpyDtoH_v2(buffer, pointer, size)
        return buffer.raw.hex()

    def module(self, text: str) -> int:
        return self.out(PTR, "cuModuleLoadData", text.encode())

    def kernel(self, microseconds: object, sms: int = 0) -> int:
        module = self.module(f".gpusim kernel k {microseconds} {sms}\n")
        return self.out(PTR, "cuModuleGetFunction", module, b"k")

    def launch(self, function: int, stream: int = 0, times: int = 1, name: str = "cuLaunchKernel") -> None:
        for _unused in range(times):
            getattr(self, name)(function, 40, 1, 1, 32, 1, 1, 0, stream, None, None)

    def stream(self, flags: int = 0) -> int:
        return self.out(PTR, "cuStreamCreate", flags)

    def event(self, stream: int = 0) -> int:
        event = self.out(PTR, "cuEventCreate", 0)
        self.cuEventRecord(event, stream)
        return event

    def elapsed(self, start: int, end: int) -> float:
        return self.out(ctypes.c_float, "cuEventElapsedTime", start, end)


def main() -> None:
    names = {"cu": Driver(sys.argv[1]), "ctypes": ctypes, "MIB": MIB, "U32": U32, "U64": U64, "SIZE": SIZE, "PTR": PTR}
    for line in sys.stdin:
        try:
            try:
                value = eval(line, names)
            except SyntaxError:
                exec(line, names)
                value = None
            print(json.dumps({"value": value}), flush=True)
        except Exception as error:  # The test gets the text of the error and checks it.
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)


if __name__ == "__main__":
    main()
