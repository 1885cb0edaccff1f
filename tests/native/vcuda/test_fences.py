# SPDX-License-Identifier: Apache-2.0
"""The library measures launches by timing events. It records an event before and after a series of launches, a segment;
the pair is called a fence, which is open until its events are read. These tests check fences on a driver that fails. No
fence stays open forever, no event leaks, and no event is used after its context has ended."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, compile_program

pytestmark = pytest.mark.own_build

SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def fences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = [
        str(ROOT / "native/vcuda/src" / name) for name in ("compute/fence.c", "compute/settle.c", "compute/cost.c")
    ]
    flags = (*SANITIZED, "-Wl,--wrap=free")
    return compile_program(tmp_path_factory.mktemp("fences"), "fences", "fences.c", *sources, flags=flags)


WHAT = [
    "record",
    "sticky",
    "destroyed",
    "vanished",
    "many",
    "launched",
    "refused",
    "times",
    "captured",
    "strict",
    "marks",
    "shared",
    "gaps",
    "streams",
    "left",
    "late",
    "renewed",
]


@pytest.mark.parametrize("what", WHAT)
def test_fences_survive_a_failing_driver(fences: Path, what: str) -> None:
    done = subprocess.run(
        [fences, what],
        env={"ASAN_OPTIONS": "detect_leaks=0"},  # The program itself counts its live events.
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-2000:]


@pytest.fixture(scope="module")
def flows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = [str(ROOT / f"native/vcuda/src/compute/{name}.c") for name in ("limiter", "pace", "cost")]
    flags = (*SANITIZED, "-lpthread")
    return compile_program(tmp_path_factory.mktemp("flows"), "flows", "flows.c", *sources, flags=flags)


@pytest.mark.parametrize("what", ["context", "capture", "streams", "failed", "threads"])
def test_event_of_a_segment_that_ends_early_does_not_leak(flows: Path, what: str) -> None:
    """A segment may end before its second event is recorded, for example because its thread ends. Then the library must
    release the segment's first event."""
    done = subprocess.run([flows, what], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-2000:]


# Columns: the case of programs/flows.c; the least and the greatest expected number of recorded events. In the cases
# whose name begins with "mid" the program makes 64 launches of 100 us, in the case "long" 64 launches of 500 us, and in
# the case "crowded" 65 such launches. In all other cases it makes 640 launches of 10 us with pauses of 40 us.
EVENTS = [("alone", 1, 80), ("share", 600, 800), ("waits", 1200, 1440), ("low", 12, 80), ("spread", 80, 320)]
EVENTS += [("mid", 2, 8), ("midlow", 12, 20), ("midtiny", 28, 40), ("long", 120, 130), ("crowded", 17, 22)]


def events(flows: Path, what: str) -> int:
    done = subprocess.run([flows, what], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@pytest.mark.parametrize(("what", "least", "most"), EVENTS)
def test_program_records_few_events_unless_accuracy_needs_them(flows: Path, what: str, least: int, most: int) -> None:
    """Each event costs time on the host and on the GPU: on an H200 two events for each launch halved a program's speed.
    So the library records few events, with these exceptions. After a wait the stream may have been idle, so the next
    segment needs a first event of its own. If the arbiter, the node's service that gives turns, limits the queued work,
    a segment contains at most half of this work. A thread that alternates between more than 16 streams ends half of its
    segments after one launch, and of these only one in eight is measured. While many fences are open, no event is
    recorded. Around a long kernel events cost little, so each long kernel is measured alone. On a busy machine the
    program's pauses are longer than intended, and a long pause ends a segment. So the test counts the run with the
    fewest events of three."""
    counts = [events(flows, what) for turn in range(3)]
    assert least <= min(counts) <= most, counts


# Columns: the case of programs/flows.c; the least and the greatest expected throttled time in us. In both cases the
# arbiter throttles nothing, and a launch waits only until the program's own queued work has run.
@pytest.mark.parametrize(("what", "least", "most"), [("full", 0, 0), ("fulllow", 0, 0)])
def test_wait_for_own_queued_work_is_not_reported_as_throttled(flows: Path, what: str, least: int, most: int) -> None:
    done = subprocess.run([flows, what], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert least <= int(done.stdout) <= most


# The library's controller thread reads the events. Columns: the interval in us at which it requests wake-ups; whether a
# wake-up may be late.
@pytest.mark.parametrize(("every", "late"), [(50, True), (250, True), (2000, True), (10000, True), (100000, False)])
def test_wake_ups_are_bounded(tmp_path_factory: pytest.TempPathFactory, every: int, late: bool) -> None:
    program = compile_program(tmp_path_factory.mktemp("wakes"), "wakes", "wakes.c", flags=SANITIZED)
    for seed in range(5):
        done = subprocess.run([program, str(seed), str(every)], stdout=subprocess.PIPE, text=True, check=True)
        most, latest, early = map(int, done.stdout.split())
        assert early == 0
        assert most <= 125, "the library allows 100 wake-ups a second on average, and a short burst"
        assert latest <= (10000 if late else 0)


def test_replaced_controller_thread_settles_every_fence(tmp_path: Path) -> None:
    controller = str(ROOT / "native/vcuda/src/compute/controller.c")
    program = compile_program(tmp_path, "replaced", "replaced.c", controller, flags=(*SANITIZED, "-lpthread"))
    done = subprocess.run([program, "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 20
