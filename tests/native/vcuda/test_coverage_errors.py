# SPDX-License-Identifier: Apache-2.0
"""If a program makes an invalid call, it must get the driver's own error, in every state of the process. The library
must not change the state of the process. Strings such as ``call cuMemFree_v2 $10`` are commands to programs/puppet.c:
$10 is the value of register 10, @10 its address."""

from __future__ import annotations

import re
import subprocess

import pytest
from conftest import LIMIT, MIB, OK, Host
from test_coverage import ROWS

# Driver functions with an invalid argument. &puts is the address of puts(), 'm the string "m".
WRONG = [
    "cuMemAlloc_v2 @10 0",
    "cuMemAlloc_v2 0 4096",
    "cuMemAlloc @10 0",
    "cuMemFree_v2 0x123456789000",
    "cuMemFree_v2 0",
    "cuMemFreeAsync 0x123456789000 0",
    "cuMemFreeAsync 0x123456789000 0 0",
    "cuMemAllocManaged @10 4096 77",
    "cuMemAllocManaged @10 0 1",
    "cuMemAllocPitch_v2 @10 @11 0 5 4",
    "cuMemAllocPitch_v2 @10 @11 100 5 3",
    "cuMemAllocAsync @10 0 0",
    "cuMemAllocAsync 0 4096 0",
    "cuMemCreate @10 4096 0 0",
    "cuMemCreate @10 2097152 @900 0",
    "cuMemRelease 0",
    "cuMemMap 0x123456000 2097152 0 0 0",
    "cuMemUnmap 0x123456000 2097152",
    "cuMemRetainAllocationHandle @10 0x123456000",
    "cuArrayCreate_v2 @10 0",
    "cuArrayCreate_v2 @10 @900",
    "cuArray3DCreate_v2 @10 @900",
    "cuArrayDestroy 0",
    "cuMipmappedArrayCreate @10 @900 3",
    "cuModuleLoadData @10 0",
    "cuModuleLoadData @10 @900",
    "cuModuleLoad @10 0",
    "cuModuleGetFunction @10 0 0",
    "cuLibraryLoadData @10 0",
    "cuLibraryGetKernel @10 0 0",
    "cuKernelGetFunction @10 0",
    "cuCtxCreate_v2 @10 0 99",
    "cuCtxCreate_v2 @10 0xffff0000 0",
    "cuCtxCreate_v2 0 0 0",
    "cuGLCtxCreate @10 0 0",
    "cuGLCtxCreate_v2 @10 0 99",
    "cuVDPAUCtxCreate @10 0 0 0 0",
    "cuVDPAUCtxCreate_v2 @10 0 99 0 &puts",
    "cuVDPAUCtxCreate_v2 0 0 0 0 &puts",
    "cuLibraryGetManaged @10 @11 0 'm",
    "cuDevicePrimaryCtxRetain @10 99",
    "cuDevicePrimaryCtxRelease_v2 99",
    "cuDevicePrimaryCtxRelease_v2 1",
    "cuCtxSetLimit 99 4096",
    "cuCtxSetLimit 0 0x10000000000",
    "cuMemPoolCreate @10 0",
    "cuMemPoolTrimTo 0 0",
    "cuGraphInstantiateWithFlags @10 0 0",
    "cuGraphLaunch 0 0",
    "cuGraphExecDestroy 0",
    "cuDeviceGraphMemTrim 99",
    "cuDeviceTotalMem_v2 @10 99",
    "cuDeviceTotalMem_v2 0 0",
    "cuMemGetInfo_v2 0 @10",
]
# Keys: states of the process. Values: the puppet commands that lead to the state; the error that every call returns in
# this state, or None. In which order the driver checks is unknown, so a call with invalid arguments may return the
# error of the state or that of the argument.
STATES = {
    "not initialised": ((), 3),
    "no context": (("init",), 201),
    "a context": (("init", "ctx 1 0"), None),
    "a destroyed context": (("init", "ctx 1 0", "ctx-destroy 1"), 201),
}


def hooked() -> list[str]:
    """Returns those hooked functions of this driver that the test calls without arguments. The test leaves out
    functions that read a name or change the current context."""
    other = re.compile("ProcAddress|Ctx(Set|Pop|Push)")
    return [r.name for r in ROWS if r.verdict != "passed" and "535" in r.where and not other.search(r.name)]


@pytest.mark.parametrize("state", STATES)
def test_invalid_calls_get_the_drivers_errors(host: Host, state: str) -> None:
    lines = [f"call {name}" for name in hooked()] + [f"call {line}" for line in WRONG]
    words, own = STATES[state]
    answers = []
    for preload in (False, True):
        puppet = host.puppet(preload=preload)
        for line in words:
            assert puppet.result(line) == OK
        answers.append([puppet.result(line) for line in lines])
        if preload:
            assert host.charged() == host.on_card()
        puppet.end()
    different = [
        (line, bare, ours)
        for line, bare, ours in zip(lines, *answers, strict=True)
        if bare != ours and (bare == OK or ours != own)
    ]
    assert different == []
    errors = sum(answer != OK for answer in answers[0])
    print(f"{state}: {len(lines)} calls made, {errors} of them refused by the driver")
    assert errors > 60


STATE = """
import ctypes, os, signal, sys
def state():
    mask = os.umask(0); os.umask(mask)
    handlers = {s: str(signal.getsignal(s)) for s in signal.Signals if s not in (signal.SIGKILL, signal.SIGSTOP)}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return mask, handlers, sorted(blocked), os.getcwd(), sorted(os.listdir('/proc/self/fd')), dict(os.environ)
before = state()
"""


def test_first_calls_change_no_process_state(host: Host) -> None:
    """With the library the first calls change the state of the process no more than without it. The driver itself opens
    descriptors."""
    code = STATE + (
        "cuda = ctypes.CDLL('libcuda.so.1'); context, pointer = ctypes.c_void_p(), ctypes.c_uint64()\n"
        "assert cuda.cuInit(0) == 0 and cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0\n"
        "assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 20)) == 0\n"
        "assert cuda.cuMemFree_v2(pointer) == 0\n"
        "after = state(); print([a == b for a, b in zip(before, after)])\n"
        "sys.exit(7)\n"
    )
    found = []
    for preload in (False, True):
        command = ["python3", "-c", code]
        done = subprocess.run(command, env=host.env(preload=preload), capture_output=True, text=True, check=False)
        assert done.returncode == 7 and done.stderr == "", done.stderr
        found.append(done.stdout)
    assert found[0] == found[1]
    assert found[1].startswith("[True, True, True, True, ")


# Columns: the puppet command that allocates; its arguments; a legal command that frees the memory.
PAIRS = [
    ("alloc", f"{3 * MIB}", "free"),
    ("alloc", f"{3 * MIB}", "free-async"),
    ("alloc1", f"{3 * MIB}", "free"),
    ("alloc1", f"{3 * MIB}", "free1"),
    ("managed", f"{3 * MIB}", "free"),
    ("pitch", "1000 100", "free"),
    ("async", f"{3 * MIB}", "free"),
    ("async", f"{3 * MIB}", "free-async"),
    ("async-ptsz", f"{3 * MIB}", "free"),
]


@pytest.mark.parametrize("route", ["link", "proc"])
@pytest.mark.parametrize("allocate, arguments, free", PAIRS)
def test_every_legal_free_uncharges_the_memory(
    host: Host, route: str, allocate: str, arguments: str, free: str
) -> None:
    puppet = host.puppet(route).start()
    before = host.on_card()
    for _unused in range(3):
        register = puppet.get(allocate, *arguments.split())
        assert host.charged() == host.on_card() > before
        assert puppet.result(f"{free} {register}") == OK
        assert puppet.result("sync") == OK
        assert puppet.say("info")[1] == LIMIT - host.on_card()
    assert host.charged() == host.on_card() == before
