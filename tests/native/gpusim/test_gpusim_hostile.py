# SPDX-License-Identifier: Apache-2.0
"""What a driver may do and a polite one does not: each behaviour of the profile's key `hostile`, on and off, and the
context that comes by the private table."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[2] / "native" / "build" / "gpusim"
MIB = 1 << 20
TWO = "[gpu]\nmodel = T4\ncontext_mib = 100\ncount = 2\n"
NOT_SUPPORTED, CAPTURED_EVENT, INVALIDATED, UNSUPPORTED = 801, 907, 901, 900


@pytest.fixture
def hostile(make_host):
    """A host whose driver does these, or none of them."""

    def make(what: str = ""):
        return make_host((f"hostile = {what}\n" if what else "") + TWO)

    return make


def test_all_and_lists_are_understood(hostile):
    """As the tests below show by `all`; a list may have blanks."""
    assert hostile("all").start().ask("cu.context() and cu.subscribe()") == 0
    assert hostile("rounding , callbacks").start().ask("cu.context() and cu.subscribe()") == 0


# ---- the private table ---------------------------------------------------------------------------------------------


def test_context_by_the_private_table(hostile):
    host = hostile()
    a = host.start()
    unseen = a.ask("cu.unseen()")
    assert host.usage()["used"] == 100 * MIB
    a.ask("cu.alloc(MIB)")
    a.ask("cu.launch(cu.kernel(10)) or cu.cuCtxSynchronize()")
    assert a.ask("cu.out(PTR, 'cuDevicePrimaryCtxRetain', 0)") == unseen
    a.ask("cu.cuDevicePrimaryCtxRelease_v2(0)")
    assert host.usage()["used"] >= 101 * MIB, "the private retain counts"
    assert a.ask("cu.private.primary_release(0)") == 0
    assert host.usage()["used"] == 0


@pytest.mark.parametrize("table", [b"gpusim-private-2", b"\x6b\xd5\xfb\x6c" * 4, bytes(16)])
def test_other_tables_stay_unanswered(hostile, table):
    """Also those of NVIDIA's runtime: every function answers NOT_SUPPORTED."""
    a = hostile("all").start()
    a.ask("cu.cuInit(0)")
    a.ask(f"t = PTR(); cu.cuGetExportTable(ctypes.byref(t), {table!r})")
    a.ask("slots = ctypes.cast(t, ctypes.POINTER(ctypes.CFUNCTYPE(ctypes.c_int)))")
    assert a.ask("{slots[i]() for i in range(1, 60)} == {801}") is True


# ---- context-lock --------------------------------------------------------------------------------------------------

SLOW = ".gpusim kernel k 1\\n.gpusim bytes 1000\\n.gpusim load 900\\n"
HOLDERS = {
    "load": f"cu.module('{SLOW}')",
    "drain": "cu.cuCtxSynchronize()",
    "stream": "cu.cuStreamSynchronize(stream)",
    "free": "cu.cuMemFree_v2(pointer)",
    "lazy": "cu.out(PTR, 'cuModuleGetFunction', slow, b'k')",
    "kernel": "cu.launch(kernel)",
}
OTHERS = {
    "cu.alloc(MIB)",
    "cu.launch(short)",
    "cu.raw('cuEventQuery', event)",
    "cu.raw('cuCtxGetDevice', ctypes.byref(U32()))",
    "cu.cuCtxPushCurrent_v2(first)",
}


def holding(host, holder: str):
    """A program with two contexts, whose second thread is inside the call for 0.9 s or a little less."""
    a = host.start(CUDA_MODULE_LOADING="LAZY" if holder in ("lazy", "kernel") else "EAGER")
    for line in (
        "first = cu.context(0); short = cu.kernel(1); event = cu.event()",
        "second = cu.context(1)",
        "cu.cuCtxSetCurrent(first)",
        "stream = cu.stream(1); pointer = cu.alloc(MIB); cu.cuEventSynchronize(event)",
        f"slow = cu.module('{SLOW}')" if holder == "lazy" else "pass",
        f"text = b'{SLOW}'; library = cu.out(PTR, 'cuLibraryLoadData', text, None, None, 0, None, None, 0)",
        "kernel = cu.out(PTR, 'cuLibraryGetKernel', library, b'k')",
        "cu.launch(cu.kernel(900000), stream)" if holder in ("drain", "stream", "free") else "pass",
        f"cu.background(lambda: {HOLDERS[holder]})",
    ):
        a.ask(line)
    return a


@pytest.mark.parametrize("other", sorted(OTHERS))
@pytest.mark.parametrize("holder", HOLDERS)
def test_others_wait_while_a_call_holds_the_context(hostile, holder, other):
    a = holding(hostile("context-lock"), holder)
    assert a.ask(f"cu.seconds(lambda: {other})") > 0.4


@pytest.mark.parametrize("holder", HOLDERS)
def test_another_context_does_not_wait(hostile, holder):
    a = holding(hostile("context-lock"), holder)
    assert a.ask("cu.seconds(lambda: cu.cuCtxSetCurrent(second) or cu.alloc(MIB))") < 0.4


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_polite_driver_lets_others_pass(hostile, holder):
    a = holding(hostile(), holder)
    assert a.ask(f"cu.seconds(lambda: [{', '.join(sorted(OTHERS))}])") < 0.4


# ---- callbacks -----------------------------------------------------------------------------------------------------

MODULE, LIBRARY, CONTEXT = 1, 2, 3
CALLS = {
    "cu.context()": CONTEXT,
    "cu.out(PTR, 'cuDevicePrimaryCtxRetain', 0)": CONTEXT,
    "cu.unseen()": CONTEXT,
    "cu.module('.gpusim kernel k 1\\n')": MODULE,
    "cu.out(PTR, 'cuModuleLoadDataEx', b'.gpusim kernel k 1', 0, None, None)": MODULE,
    "cu.out(PTR, 'cuLibraryLoadData', b'.gpusim kernel k 1', None, None, 0, None, None, 0)": LIBRARY,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_tool_is_called_back_inside(hostile, call):
    a = hostile("callbacks").start()
    a.ask("cu.cuInit(0)")
    if CALLS[call] != CONTEXT:
        a.ask("cu.context()")
    assert a.ask("cu.subscribe()") == 0
    handle = a.ask(call)
    assert a.ask("cu.moments") == [[CALLS[call], handle]]


@pytest.mark.parametrize("call", CALLS)
def test_a_polite_driver_calls_nobody_back(hostile, call):
    a = hostile().start()
    a.ask("cu.cuInit(0)")
    if CALLS[call] != CONTEXT:
        a.ask("cu.context()")
    assert a.ask("cu.subscribe()") == NOT_SUPPORTED
    a.ask(call)
    assert a.ask("cu.moments") == []


@pytest.mark.parametrize("call", CALLS)
def test_a_tool_may_use_the_driver_meanwhile(hostile, call):
    """It loads a module of its own, with every other behaviour on, and is not called back for that."""
    a = hostile("all").start()
    a.ask("cu.cuInit(0)")
    a.ask("cu.out(PTR, 'cuCtxCreate_v2', 0, 1)")
    a.ask("cu.subscribe()")
    a.ask("cu.__dict__.update(inside='cu.launch(cu.kernel(1))')")
    a.ask(call)
    assert len(a.ask("cu.moments")) == 1


# ---- teardown ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def late(tmp_path_factory) -> str:
    program = tmp_path_factory.mktemp("late") / "late"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread"]
    libraries = [str(BUILD / "libcuda.so.1"), f"-Wl,-rpath,{BUILD}"]
    subprocess.run(["cc", *flags, str(HERE / "programs" / "late.c"), "-o", str(program), *libraries], check=True)
    return str(program)


@pytest.mark.parametrize(
    "what, how, dies", [("teardown", "open", True), ("teardown", "parked", False), ("", "open", False)]
)
def test_calls_after_the_teardown_began_end_the_process(hostile, late, what, how, dies):
    host = hostile(what)
    done = host.run(late, how, check=False)
    assert (done.returncode, host.counter("late_calls")) == ((-6, 1) if dies else (0, 0))
    assert ("after its teardown had begun" in done.stderr) == dies


def test_a_forked_child_that_exits_tears_nothing_down(hostile):
    """It has no driver, so it is refused like before."""
    a = hostile("teardown").start()
    a.ask("cu.context()")
    a.ask("import subprocess; subprocess.run(['true'], check=True)")
    a.ask("pid = __import__('os').fork() or (cu.raw('cuCtxSynchronize') == 3 and __import__('sys').exit(0))")
    assert a.ask("__import__('os').waitpid(pid, 0)[1]") == 0
    a.end()
    assert a.process.returncode == 0
