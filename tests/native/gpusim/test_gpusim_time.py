# SPDX-License-Identifier: Apache-2.0
"""Tests how long kernels take on the simulated GPU and in which order they run. Time is a virtual clock, so figures are
exact and no test waits in real time. A kernel takes the time that its code declares. Strings with ``cu`` are lines of
Python that cuda_program.py executes. If a line is an expression, the test gets its value, mostly a CUresult."""

from __future__ import annotations

import pytest

PROFILE = """
clock = auto
jitter_percent = 0
slice_us = 1000
switch_us = 50
copy_gib_per_s = 10
[gpu]
model = T4
"""
MS = 1_000_000


@pytest.fixture
def host(make_host):
    return make_host(PROFILE)


def test_kernels_take_their_declared_time(host):
    a = host.start()
    a.ask("cu.context(); k = cu.kernel(250); s = cu.event(); cu.launch(k, times=8); e = cu.event()")
    assert a.ask("cu.raw('cuEventQuery', e)") == 600, (
        "the kernels must not run yet, because the clock stops while no process waits"
    )
    a.ask("cu.cuEventSynchronize(e)")
    assert a.ask("cu.elapsed(s, e)") == pytest.approx(2.0, abs=0.001)
    log = host.log()
    assert (log["busy_ns"], log["switches"]) == (2 * MS, 0)
    assert [(p["kernels"], p["share"]) for p in log["processes"]] == [(8, 1.0)]


# Keys: cases. Values: the kernels as (number of SMs, stream); the expected time in ms until all have ended. Each kernel
# takes 1 ms; the GPU has 40 SMs.
ORDER = {
    "one stream": ([(10, "a"), (10, "a")], 2.0),
    "two streams that fit": ([(20, "a"), (20, "b")], 1.0),
    "the second kernel gets a third of its SMs, then all": ([(30, "a"), (30, "b")], 1 + 2 / 3),
    "all SMs": ([(0, "a"), (0, "b")], 2.0),
    "the legacy stream waits for other streams, and they wait for it": ([(1, "a"), (1, 0), (1, "b")], 3.0),
    "a non-blocking stream does not wait for the legacy stream": ([(1, 0), (1, "n")], 1.0),
    "the legacy stream waits for the per-thread default stream": ([(1, 2), (1, 1)], 2.0),
}


@pytest.mark.parametrize("case", ORDER)
def test_kernels_in_several_streams_end_at_the_expected_time(host, case):
    kernels, expected = ORDER[case]
    a = host.start()
    a.ask("cu.context(); streams = {'a': cu.stream(), 'b': cu.stream(), 'n': cu.stream(1), 0: 0, 1: 1, 2: 2}")
    a.ask("n = cu.stream(1); start = cu.event(n)")
    for sms, stream in kernels:
        a.ask(f"cu.launch(cu.kernel(1000, {sms}), streams[{stream!r}])")
    a.ask("cu.cuCtxSynchronize(); end = cu.event(n); cu.cuEventSynchronize(end)")
    assert a.ask("cu.elapsed(start, end)") == pytest.approx(expected, abs=0.001)


def test_stream_waits_for_event(host):
    a = host.start()
    a.ask("cu.context(); s, t = cu.stream(1), cu.stream(1); k = cu.kernel(1000, 1); begin = cu.event(s)")
    a.ask("cu.launch(k, s, 3); e = cu.event(s); cu.cuStreamWaitEvent(t, e, 0); cu.launch(k, t); f = cu.event(t)")
    a.ask("cu.cuEventSynchronize(f)")
    assert a.ask("cu.elapsed(begin, f)") == pytest.approx(4.0, abs=0.001)


def test_copies_run_concurrently_with_kernels(host):
    a = host.start()
    a.ask("cu.context(); p = cu.alloc(10 * MIB); b = bytes(10 * MIB); s, t = cu.stream(1), cu.stream(1)")
    a.ask("k = cu.kernel(5000); begin = cu.event(s); cu.launch(k, s); cu.cuMemcpyHtoDAsync_v2(p, b, 10 * MIB, t)")
    a.ask("e, f = cu.event(s), cu.event(t); cu.cuCtxSynchronize()")
    assert a.ask("cu.elapsed(begin, e)") == pytest.approx(5.0, abs=0.001)
    assert a.ask("cu.elapsed(begin, f)") == pytest.approx(10 / 1024 / 10 * 1000 + 0.002, abs=0.001)


def test_event_keeps_its_time_when_the_queue_has_moved_on(host):
    a = host.start()
    a.ask("cu.context(); k = cu.kernel(10); s = cu.event(); cu.launch(k); e = cu.event(); cu.launch(k, times=5000)")
    a.ask("cu.cuCtxSynchronize()")
    assert a.ask("cu.elapsed(s, e)") == pytest.approx(0.01, abs=0.0006)


def test_full_queue_blocks_the_launcher(host):
    a = host.start()
    a.ask("cu.context(); k = cu.kernel(1000); cu.launch(k, times=1024)")
    assert host.log()["busy_ns"] == 0
    a.ask("cu.launch(k, times=10)")
    assert host.log()["busy_ns"] >= 9 * MS


def pair(host, first: str, second: str):
    a, b = host.start(), host.start()
    for program, cost in ((a, first), (b, second)):
        program.ask(f"c = cu.context(); k = cu.kernel({cost})")
    return a, b


def run_both(a, b, times_a: int, times_b: int) -> None:
    """Runs kernels in two processes at once.

    Virtual time passes only while every process that has a context waits. So each process destroys its context after
    its last kernel."""
    for program, times in ((a, times_a), (b, times_b)):
        program.send(f"cu.launch(k, times={times}); cu.cuCtxSynchronize(); cu.cuCtxDestroy_v2(c)")
    a.receive()
    b.receive()


@pytest.mark.parametrize("first, second", [("50", "50"), ("1000", "100"), ("10000", "300"), ("333", "7777")])
def test_two_processes_share_by_time_slices(host, first, second):
    a, b = pair(host, first, second)
    run_both(a, b, 200_000 // int(first), 200_000 // int(second))
    log = host.log("--intervals", "--window", "100")
    serial = {p["pid"]: str(p["serial"]) for p in log["processes"]}
    # A kernel is preempted at the end of a time slice, so both processes get equal shares whatever the length of their
    # kernels. A time slice takes 1050 us, of which kernels run for 1000 us.
    for window in log["windows"][:3]:
        for program in (a, b):
            assert window["shares"][serial[program.pid]] == pytest.approx(0.5 / 1.05, abs=0.006)
    kernels = [i for i in log["intervals"] if i["kind"] == "kernel"]
    both = [i for i in kernels if i["end"] <= log["intervals"][0]["start"] + 380 * MS]
    assert max(i["end"] - i["start"] for i in both) <= MS
    switches = [i for i in log["intervals"] if i["kind"] == "switch"]
    assert {i["end"] - i["start"] for i in switches} == {50_000}
    assert log["switch_ns"] == 50_000 * log["switches"]
    # For each process, the run time in the log equals the declared time to the nanosecond.
    for program, cost, times in ((a, int(first), 200_000 // int(first)), (b, int(second), 200_000 // int(second))):
        mine = [i for i in kernels if i["pid"] == program.pid]
        assert sum(i["end"] - i["start"] for i in mine) == cost * 1000 * times
    for one, two in zip(log["intervals"], log["intervals"][1:], strict=False):
        assert one["end"] <= two["start"], "the log must not have two intervals at the same time"


def test_idle_process_costs_its_neighbour_nothing(make_host):
    host = make_host(PROFILE.replace("clock = auto", "clock = manual"))
    a, _unused = pair(host, "100", "100")
    a.ask("cu.launch(k, times=100)")
    host.ctl("clock", "advance", "20")
    log = host.log()
    assert (log["busy_ns"], log["switches"]) == (10 * MS, 0)


def test_two_contexts_of_one_process_are_time_sliced_too(host):
    a = host.start()
    a.ask("c = cu.context(); k = cu.kernel(100); d = cu.context(); m = cu.kernel(100); cu.launch(m, times=100)")
    a.ask("cu.cuCtxSetCurrent(c); cu.launch(k, times=100); cu.cuCtxSynchronize(); cu.cuCtxSetCurrent(d)")
    a.ask("cu.cuCtxSynchronize()")
    assert host.log()["switches"] >= 18


def test_killed_process_stops_running(host):
    a, b = pair(host, "'inf'", "1000")
    a.ask("cu.launch(k)")
    a.kill()
    b.ask("s = cu.event(); cu.launch(k, times=5); e = cu.event(); cu.cuEventSynchronize(e)")
    assert b.ask("cu.elapsed(s, e)") < 17, "the killed process's kernel must end at the next check for dead processes"


def test_jitter_spreads_evenly_around_the_declared_cost(make_host):
    host = make_host(PROFILE.replace("jitter_percent = 0", "jitter_percent = 20\nseed = 5"))
    a = host.start()
    a.ask("cu.context(); k = cu.kernel(1000); costs = []; ev = [cu.event()]")
    a.ask("for _ in range(200): cu.launch(k); ev.append(cu.event())")
    a.ask("cu.cuCtxSynchronize()")
    costs = a.ask("[cu.elapsed(x, y) for x, y in zip(ev, ev[1:])]")
    assert 0.8 <= min(costs) < 0.85 and 1.15 < max(costs) <= 1.2
    assert sum(costs) / len(costs) == pytest.approx(1.0, abs=0.03)
    again = make_host(PROFILE.replace("jitter_percent = 0", "jitter_percent = 20\nseed = 5")).start()
    again.ask("cu.context(); k = cu.kernel(1000); ev = [cu.event()]")
    again.ask("for _ in range(200): cu.launch(k); ev.append(cu.event())")
    again.ask("cu.cuCtxSynchronize()")
    assert again.ask("[cu.elapsed(x, y) for x, y in zip(ev, ev[1:])]") == costs, (
        "the same seed must give the same durations"
    )


def test_kernel_draws_its_duration_from_a_range(make_host):
    """A kernel may declare a range LOW..HIGH. The distribution is logarithmic: equally many launches take 20 to 40 us,
    40 to 80 us, and so on."""
    a = make_host("clock = auto\njitter_percent = 0\n[gpu]\nmodel = T4\n").start()
    a.ask("cu.context(); k = cu.kernel('20..5000'); marks = [cu.event()]")
    for _unused in range(4):
        a.ask("[(cu.launch(k), marks.append(cu.event())) for i in range(100)] and None")
    took = a.ask("cu.cuCtxSynchronize() or [cu.elapsed(x, y) * 1000 for x, y in zip(marks, marks[1:])]")
    assert min(took) > 19.999  # microseconds of a float of milliseconds
    assert max(took) <= 5001
    assert [sum(low <= one < 2 * low for one in took) > 20 for low in (20, 80, 320, 1280)] == [True] * 4


def test_host_function_blocks_its_stream(host):
    a = host.start()
    a.ask("cu.context(); s = cu.stream(1); k = cu.kernel(10); seen = []; recorded = __import__('threading').Event()")
    # The function waits until the event behind it in the stream is recorded.
    query = "seen.append(recorded.wait(60) and cu.raw('cuEventQuery', after))"
    a.ask(f"call = ctypes.CFUNCTYPE(None, PTR)(lambda data: {query})")
    a.ask("cu.launch(k, s); cu.cuLaunchHostFunc(s, call, None); after = cu.event(s); recorded.set()")
    a.ask("cu.cuStreamSynchronize(s)")
    assert a.ask("seen") == [600]


def test_graphs_and_captures_run_their_kernels(host):
    a = host.start()
    a.ask("cu.context(); s, t = cu.stream(1), cu.stream(1); k = cu.kernel(100)")
    a.ask("cu.cuStreamBeginCapture_v2(s, 0); cu.launch(k, s); e = cu.event(s); cu.cuStreamWaitEvent(t, e, 0)")
    a.ask("cu.launch(k, t, 2); f = cu.event(t); cu.cuStreamWaitEvent(s, f, 0); cu.launch(k, s)")
    a.ask("g = cu.out(PTR, 'cuStreamEndCapture') if 0 else PTR()")
    a.ask("cu.cuStreamEndCapture(s, ctypes.byref(g)); x = cu.out(PTR, 'cuGraphInstantiateWithFlags', g, 0)")
    assert host.log()["busy_ns"] == 0
    a.ask("n = SIZE(); cu.cuGraphGetNodes(g, None, ctypes.byref(n))")
    assert a.ask("n.value") == 4
    a.ask("cu.cuGraphLaunch(x, s); cu.cuGraphLaunch(x, s); cu.cuStreamSynchronize(s)")
    assert host.log()["processes"][0]["kernels"] == 8
    # A call that is forbidden during a capture invalidates the capture.
    a.ask("cu.cuStreamBeginCapture_v2(s, 0); cu.launch(k, s)")
    assert a.ask("cu.raw('cuStreamSynchronize', s)") == 900
    assert a.ask("cu.raw('cuStreamEndCapture', s, ctypes.byref(g))") == 901
    a.ask("cu.cuStreamBeginCapture_v2(s, 0); e = cu.event(s); cu.cuStreamWaitEvent(t, e, 0); cu.launch(k, t)")
    assert a.ask("cu.raw('cuStreamEndCapture', s, ctypes.byref(g))") == 904


def test_manual_clock_moves_only_by_command(make_host):
    host = make_host(PROFILE.replace("clock = auto", "clock = manual"))
    a = host.start()
    a.ask("cu.context(); k = cu.kernel(1000); cu.launch(k, times=5); e = cu.event()")
    host.ctl("clock", "advance", "3")
    assert host.log()["busy_ns"] == 3 * MS
    assert a.ask("cu.raw('cuEventQuery', e)") == 600
    host.ctl("clock", "advance", "2")
    assert a.ask("cu.raw('cuEventQuery', e)") == 0
