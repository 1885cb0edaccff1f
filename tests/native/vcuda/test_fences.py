# SPDX-License-Identifier: Apache-2.0
"""Fences on a driver that fails: none is waited for without end, no event is forgotten, none used after its context."""

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


WHAT = ["record", "sticky", "destroyed", "vanished", "launched", "refused", "times", "captured", "strict", "marks"]


@pytest.mark.parametrize("what", WHAT)
def test_a_driver_that_fails(fences: Path, what: str) -> None:
    done = subprocess.run(
        [fences, what],
        env={"ASAN_OPTIONS": "detect_leaks=0"},  # the program counts what is live itself
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
def test_no_mark_of_a_segment_that_ends_early_is_lost(flows: Path, what: str) -> None:
    """The launches' side of it: the marks are counted, and what a thread had is given back with it."""
    done = subprocess.run([flows, what], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-2000:]


# how often the thread wants to wake, in us → may it be late?
@pytest.mark.parametrize(("every", "late"), [(50, True), (250, True), (2000, True), (10000, True), (100000, False)])
def test_wake_ups_are_bounded(tmp_path_factory: pytest.TempPathFactory, every: int, late: bool) -> None:
    program = compile_program(tmp_path_factory.mktemp("wakes"), "wakes", "wakes.c", flags=SANITIZED)
    for seed in range(5):
        done = subprocess.run([program, str(seed), str(every)], stdout=subprocess.PIPE, text=True, check=True)
        most, latest, early = map(int, done.stdout.split())
        assert early == 0
        assert most <= 125, "of the 500 a second that the library may cost"
        assert latest <= (10000 if late else 0)


def test_no_fence_is_forgotten_where_the_thread_is_replaced(tmp_path: Path) -> None:
    controller = str(ROOT / "native/vcuda/src/compute/controller.c")
    program = compile_program(tmp_path, "replaced", "replaced.c", controller, flags=(*SANITIZED, "-lpthread"))
    done = subprocess.run([program, "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 20
