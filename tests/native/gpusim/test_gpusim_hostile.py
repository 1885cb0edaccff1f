# SPDX-License-Identifier: Apache-2.0
"""Tests behaviours of the simulated driver that are permitted but difficult for a library that hooks it. The key
`hostile` of the host's profile lists them; each is tested on and off. Other tests create a context through the driver's
private function table. Strings with ``cu`` are Python statements that cuda_program.py executes. The test gets the value
of an expression, mostly a CUresult."""

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
    """Returns a function that creates a host whose driver has the named hostile behaviours, or none."""

    def make(what: str = ""):
        return make_host((f"hostile = {what}\n" if what else "") + TWO)

    return make


def test_key_hostile_accepts_all_and_lists(hostile):
    """The key `hostile` accepts `all`, and a list of names with blanks around the commas."""
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
    assert host.usage()["used"] >= 101 * MIB, "the retain through the private table must keep the context"
    assert a.ask("cu.private.primary_release(0)") == 0
    assert host.usage()["used"] == 0


@pytest.mark.parametrize("table", [b"gpusim-private-2", b"\x6b\xd5\xfb\x6c" * 4, bytes(16)])
def test_other_private_tables_are_not_supported(hostile, table):
    """The driver has only one private table. If a program requests another table, for example one that NVIDIA's runtime
    uses, it gets a table in which each function returns NOT_SUPPORTED."""
    a = hostile("all").start()
    a.ask("cu.cuInit(0)")
    a.ask(f"t = PTR(); cu.cuGetExportTable(ctypes.byref(t), {table!r})")
    a.ask("slots = ctypes.cast(t, ctypes.POINTER(ctypes.CFUNCTYPE(ctypes.c_int)))")
    assert a.ask("{slots[i]() for i in range(1, 60)} == {801}") is True


# ---- context-lock --------------------------------------------------------------------------------------------------

# With the behaviour `context-lock`, a driver call that takes long holds the lock of its context, and all other calls on
# this context wait.

# A code image whose load takes 900 ms.
SLOW = ".gpusim kernel k 1\\n.gpusim bytes 1000\\n.gpusim load 900\\n"
# Keys: cases. Values: a driver call that holds the lock of the context `first` for up to 0.9 s.
HOLDERS = {
    "load": f"cu.module('{SLOW}')",
    "drain": "cu.cuCtxSynchronize()",
    "stream": "cu.cuStreamSynchronize(stream)",
    "free": "cu.cuMemFree_v2(pointer)",
    "lazy": "cu.out(PTR, 'cuModuleGetFunction', slow, b'k')",
    "kernel": "cu.launch(kernel)",
}
# Calls that another thread makes with the same context.
OTHERS = {
    "cu.alloc(MIB)",
    "cu.launch(short)",
    "cu.raw('cuEventQuery', event)",
    "cu.raw('cuCtxGetDevice', ctypes.byref(U32()))",
    "cu.cuCtxPushCurrent_v2(first)",
}


def holding(host, holder: str):
    """Starts a program with two contexts and two threads. The second thread makes the driver call of HOLDERS, which
    takes up to 0.9 s."""
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
def test_other_calls_wait_while_a_call_holds_the_context(hostile, holder, other):
    a = holding(hostile("context-lock"), holder)
    assert a.ask(f"cu.seconds(lambda: {other})") > 0.4


@pytest.mark.parametrize("holder", HOLDERS)
def test_another_context_does_not_wait(hostile, holder):
    a = holding(hostile("context-lock"), holder)
    assert a.ask("cu.seconds(lambda: cu.cuCtxSetCurrent(second) or cu.alloc(MIB))") < 0.4


@pytest.mark.parametrize("holder", HOLDERS)
def test_other_calls_do_not_wait_without_context_lock(hostile, holder):
    a = holding(hostile(), holder)
    assert a.ask(f"cu.seconds(lambda: [{', '.join(sorted(OTHERS))}])") < 0.4


# ---- callbacks -----------------------------------------------------------------------------------------------------

MODULE, LIBRARY, CONTEXT = 1, 2, 3
# Keys: driver calls. Values: the event that the driver reports during this call to a tool (a profiler or the like).
CALLS = {
    "cu.context()": CONTEXT,
    "cu.out(PTR, 'cuDevicePrimaryCtxRetain', 0)": CONTEXT,
    "cu.unseen()": CONTEXT,
    "cu.module('.gpusim kernel k 1\\n')": MODULE,
    "cu.out(PTR, 'cuModuleLoadDataEx', b'.gpusim kernel k 1', 0, None, None)": MODULE,
    "cu.out(PTR, 'cuLibraryLoadData', b'.gpusim kernel k 1', None, None, 0, None, None, 0)": LIBRARY,
}


@pytest.mark.parametrize("call", CALLS)
def test_tool_is_called_back_inside_a_driver_call(hostile, call):
    a = hostile("callbacks").start()
    a.ask("cu.cuInit(0)")
    if CALLS[call] != CONTEXT:
        a.ask("cu.context()")
    assert a.ask("cu.subscribe()") == 0
    handle = a.ask(call)
    assert a.ask("cu.moments") == [[CALLS[call], handle]]


@pytest.mark.parametrize("call", CALLS)
def test_tool_is_not_called_back_without_callbacks(hostile, call):
    a = hostile().start()
    a.ask("cu.cuInit(0)")
    if CALLS[call] != CONTEXT:
        a.ask("cu.context()")
    assert a.ask("cu.subscribe()") == NOT_SUPPORTED
    a.ask(call)
    assert a.ask("cu.moments") == []


@pytest.mark.parametrize("call", CALLS)
def test_tool_can_use_the_driver_in_its_callback(hostile, call):
    """All behaviours are on. A tool loads a module in its callback, and must not be called back for this load."""
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


# With the behaviour `teardown`, a driver call aborts the process if the driver's teardown at the exit has begun.
# Columns: the behaviour, or ""; the argument of programs/late.c, where "parked" means that no call is made after the
# teardown has begun; whether the process must be aborted.
@pytest.mark.parametrize(
    "what, how, dies", [("teardown", "open", True), ("teardown", "parked", False), ("", "open", False)]
)
def test_calls_after_the_teardown_began_end_the_process(hostile, late, what, how, dies):
    host = hostile(what)
    done = host.run(late, how, check=False)
    assert (done.returncode, host.counter("late_calls")) == ((-6, 1) if dies else (0, 0))
    assert ("after its teardown had begun" in done.stderr) == dies


def test_exit_of_a_forked_child_runs_no_teardown(hostile):
    """A forked child cannot use the driver. With the behaviour `teardown`, the driver must refuse the child's calls as
    it does without this behaviour, and no teardown must run when the child exits."""
    a = hostile("teardown").start()
    a.ask("cu.context()")
    a.ask("import subprocess; subprocess.run(['true'], check=True)")
    a.ask("pid = __import__('os').fork() or (cu.raw('cuCtxSynchronize') == 3 and __import__('sys').exit(0))")
    assert a.ask("__import__('os').waitpid(pid, 0)[1]") == 0
    a.end()
    assert a.process.returncode == 0


# ---- capture-query -------------------------------------------------------------------------------------------------

CAPTURE = ("cu.context()", "k = cu.kernel(1); stream = cu.stream(1); before = cu.event(); pointer = PTR()")
GLOBAL, RELAXED = 0, 2
# Keys: calls during a capture. Values: the capture mode; the expected result on a normal driver; the expected result
# with the behaviour `capture-query`, with which the call also makes the capture invalid.
MISUSE = {
    "cu.raw('cuEventQuery', inside)": (RELAXED, CAPTURED_EVENT, CAPTURED_EVENT),
    "cu.raw('cuEventSynchronize', inside)": (RELAXED, CAPTURED_EVENT, CAPTURED_EVENT),
    "cu.raw('cuEventRecord', foreign, stream)": (RELAXED, 400, 400),
    "cu.raw('cuModuleLoadData', ctypes.byref(pointer), b'.gpusim kernel k 1')": (GLOBAL, 0, UNSUPPORTED),
    "cu.raw('cuMemHostAlloc', ctypes.byref(pointer), 4096, 0)": (GLOBAL, 0, UNSUPPORTED),
}


@pytest.mark.parametrize("misuse", MISUSE)
@pytest.mark.parametrize("what", ["", "capture-query"])
def test_misuse_of_a_capture_invalidates_it(hostile, what, misuse):
    mode, polite, refused = MISUSE[misuse]
    a = hostile(what).start()
    for line in (*CAPTURE, "first = cu.out(PTR, 'cuCtxGetCurrent'); cu.context(1); foreign = cu.event()"):
        a.ask(line)
    a.ask("cu.cuCtxSetCurrent(first)")
    a.ask(f"cu.cuStreamBeginCapture_v2(stream, {mode})")
    a.ask("cu.launch(k, stream); inside = cu.event(stream); graph = PTR()")
    assert a.ask(misuse) == (refused if what else polite)
    assert a.ask("cu.raw('cuStreamEndCapture', stream, ctypes.byref(graph))") == (INVALIDATED if what else 0)


def test_event_of_an_ended_capture_invalidates_no_other_capture(hostile):
    a = hostile("capture-query").start()
    for line in CAPTURE:
        a.ask(line)
    for again in range(2):
        a.ask("graph = PTR(); cu.cuStreamBeginCapture_v2(stream, 2)")
        a.ask("cu.launch(k, stream)")
        if again:
            assert a.ask("cu.raw('cuEventQuery', inside)") == CAPTURED_EVENT
        else:
            a.ask("inside = cu.event(stream)")
        a.ask("cu.cuStreamEndCapture(stream, ctypes.byref(graph))")


# ---- waiting-frees, slow-nvml, rounding ----------------------------------------------------------------------------


@pytest.mark.parametrize("free", ["cu.cuMemFree_v2(pointer)", "cu.cuMemFreeHost(page)"])
@pytest.mark.parametrize("what, waits", [("waiting-frees", True), ("", False)])
def test_frees_wait_for_the_whole_device(hostile, what, waits, free):
    """The free waits for a kernel of another context on the same GPU."""
    a = hostile(what).start()
    a.ask("cu.context(); cu.launch(cu.kernel(900000), cu.stream(1))")
    a.ask("cu.context(); pointer = cu.alloc(MIB); page = cu.out(PTR, 'cuMemHostAlloc', MIB, 0)")
    assert (a.ask(f"cu.seconds(lambda: {free})") > 0.4) == waits


@pytest.mark.parametrize("what, slow", [("slow-nvml", True), ("", False)])
def test_slow_nvml_query_takes_five_milliseconds(hostile, what, slow):
    a = hostile(what).start()
    a.ask(f"nvml = ctypes.CDLL('{BUILD / 'libnvidia-ml.so.1'}'); nvml.nvmlInit_v2()")
    took = a.ask("cu.seconds(lambda: [nvml.nvmlDeviceGetCount_v2(ctypes.byref(U32())) for i in range(40)])")
    assert took >= 0.2 if slow else took < 0.2


@pytest.mark.parametrize("what, charged", [("rounding", 2 * MIB), ("", 1)])
def test_sizes_are_rounded_up(hostile, what, charged):
    host = hostile(what)
    a = host.start()
    a.ask("cu.context()")
    before = host.usage()["used"]
    a.ask("cu.alloc(1)")
    assert host.usage()["used"] - before == charged


# ---- new calls of CUDA 13.5 ------------------------------------------------------------------------------------------

NEWER = BUILD.parent / "gpusim-615" / "libcuda.so.1"
# Statements that look a function up by name and version, and that make the result callable.
LOOK_UP = "f = PTR(); cu.cuGetProcAddress(b'{0}', ctypes.byref(f), {1}, 0)"
CALL = "f = ctypes.CFUNCTYPE(ctypes.c_int, PTR, PTR, PTR, PTR, PTR)(f.value)"


def test_recaptured_graph_runs_the_new_kernels(hostile):
    a = hostile().start(library=NEWER)
    for line in (*CAPTURE, "long = cu.kernel(300000); graph = PTR(); cu.cuStreamBeginCapture_v2(stream, 2)"):
        a.ask(line)
    a.ask("cu.launch(k, stream); cu.cuStreamEndCapture(stream, ctypes.byref(graph)); first = graph.value")
    a.ask(LOOK_UP.format("cuStreamBeginRecaptureToGraph", 13030))
    a.ask(CALL)
    assert a.ask("f(stream, 2, graph, None, None)") == 0
    a.ask("cu.launch(long, stream); cu.cuStreamEndCapture(stream, ctypes.byref(graph))")
    assert a.ask("graph.value == first") is True
    a.ask("run = cu.out(PTR, 'cuGraphInstantiateWithFlags', graph, 0); cu.cuGraphLaunch(run, stream)")
    assert a.ask("cu.seconds(cu.cuCtxSynchronize)") > 0.2
    # The new capture has one node more than the graph, so it is invalid.
    a.ask("f(stream, 2, graph, None, None); cu.launch(k, stream, 2)")
    assert a.ask("cu.raw('cuStreamEndCapture', stream, ctypes.byref(graph))") == INVALIDATED


def test_capture_to_graphics_runs_no_kernel(hostile):
    a = hostile().start(library=NEWER)
    for line in (*CAPTURE, LOOK_UP.format("cuStreamBeginCaptureToCig", 13010), CALL):
        a.ask(line)
    a.ask("inner = PTR(1); outer = ctypes.cast(ctypes.pointer(inner), PTR)")
    assert a.ask("f(stream, ctypes.byref(outer), None, None, None)") == 0
    a.ask("cu.launch(cu.kernel(900000), stream)")
    assert a.ask("cu.raw('cuStreamEndCaptureToCig', stream)") == 0
    assert a.ask("cu.seconds(cu.cuCtxSynchronize)") < 0.4


@pytest.mark.parametrize(
    "name, version", [("cuGraphAddNode", 13040), ("cuMulticastBindMem", 13010), ("cuLaunchHostFunc", 13010)]
)
def test_new_versions_of_functions_are_found(hostile, name, version):
    a = hostile().start(library=NEWER)
    a.ask("cu.cuInit(0)")
    a.ask(LOOK_UP.format(name, version) + "; newer = f.value")
    a.ask(LOOK_UP.format(name, version - 10))
    assert a.ask("f.value not in (None, newer)") is True
