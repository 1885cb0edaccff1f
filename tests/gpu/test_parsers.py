# SPDX-License-Identifier: Apache-2.0
"""Tests gpu-check's computations on data with a known result: shares from kernels' stamps (times of start and end),
exported names from symbol tables, and changed addresses of functions."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpucheck import processes, report, stamps, symbols

ROOT = Path(__file__).resolve().parents[2]
MS = 1_000_000


def write(path: Path, starts: list, ends: list) -> Path:
    path.write_bytes(struct.pack(f"<Q{len(starts) + len(ends)}Q", len(starts), *starts, *ends))
    return path


def test_stamps_are_read_and_launches_without_stamps_left_out(tmp_path: Path) -> None:
    unwritten = 2**64 - 1
    path = write(tmp_path / "stamps", [30, 10, unwritten, 50], [40, 20, 0, 45])
    assert stamps.read(path) == [(10, 20), (30, 40)]


def test_truncated_stamps_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "stamps", [1, 2], [3, 4])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not the stamps of 2 launches"):
        stamps.read(path)


# columns: intervals in which kernels run; expected share in each of two windows of 1000 ns
@pytest.mark.parametrize(
    ("intervals", "shares"),
    [
        ([], [0.0, 0.0]),
        ([(0, 2000)], [1.0, 1.0]),
        ([(0, 250), (100, 500)], [0.5, 0.0]),
        ([(900, 1100)], [0.1, 0.1]),
        ([(start, start + 25) for start in range(0, 2000, 100)], [0.25, 0.25]),
    ],
)
def test_share_in_each_window_is_computed(intervals: list, shares: list) -> None:
    assert stamps.windows(intervals, 0, 2000, 1000) == pytest.approx(shares)


def test_two_tenants_in_time_slices_each_get_half() -> None:
    """A kernel takes 100 alone and 200 next to another tenant. The stamps of each tenant cover the whole time, but each
    tenant gets half."""
    left = [(start, start + 200) for start in range(0, 2000, 200)]
    right = [(start + 7, start + 207) for start in range(0, 2000, 200)]
    for tenant in (left, right):
        assert stamps.windows(tenant, 200, 1800, 800) == pytest.approx([1.0, 1.0])
        assert stamps.work(tenant, 100, 200, 1800, 800) == pytest.approx([0.5, 0.5])


def test_period_includes_the_gap_between_kernels() -> None:
    assert stamps.period([(start, start + 20) for start in range(0, 2200, 22)]) == 22
    assert stamps.period([(0, 20)]) == 0


def test_turns_of_two_tenants_are_found() -> None:
    left, right = [(0, 9), (10, 19), (60, 69)], [(30, 39), (40, 49)]
    assert stamps.turns([left, right]) == [(0, 0, 19), (1, 30, 49), (0, 60, 69)]


def test_tick_is_the_smallest_step_of_the_clock() -> None:
    assert stamps.tick([(0, 1024), (2048, 4096)]) == 1024
    assert stamps.tick([]) == 0


def test_exports_are_those_of_the_driver() -> None:
    listed = (ROOT / "native/gpusim/cuda/exports-535.txt").read_text().split()
    found = symbols.exports(ROOT / "native/build/gpusim/libcuda.so.1")
    assert {name for name in listed if name.startswith("cu")} <= set(found)
    with pytest.raises(ValueError, match="no 64-bit"):
        symbols.exports(ROOT / "README.md")


def test_base_names_are_given_with_and_without_suffixes() -> None:
    names = ["cuMemAlloc_v2", "cuMemFreeAsync_ptsz", "cuMemcpyHtoD_v2_ptds", "cuInit"]
    assert symbols.base_names(names) == sorted(["cuMemAlloc", "cuMemFreeAsync", "cuMemcpyHtoD", "cuInit", *names[:3]])


@pytest.mark.parametrize(
    ("ours", "refused", "wrong", "replaced"),
    [
        ([[2000, "one"], [3020, "two_v2"]], 0, 0, 0),
        ([[2000, "elsewhere"]], 0, 0, 1),
        ([[2000, "one"], [3020, "!500/1"]], 1, 0, 0),
        ([[2000, "one"]], 0, 1, 0),
        ([[2000, "!801/0"]], 0, 1, 0),
    ],
)
def test_addresses_that_a_library_changes_are_found(ours: list, refused: int, wrong: int, replaced: int) -> None:
    bare = {"cuOne": {"default": [[2000, "one"], [3020, "two_v2"]]}}
    found = processes.compare(bare, {"cuOne": {"default": ours}})
    assert [bool(part) for part in found] == [bool(refused), bool(wrong), bool(replaced)]


def test_added_function_is_a_wrong_address() -> None:
    bare = {"cuNone": {"default": [[2000, "!500/1"]]}}
    assert processes.compare(bare, {"cuNone": {"default": [[2000, "elsewhere"]]}})[1]


def test_gates_decide_the_status_of_a_stage(tmp_path: Path) -> None:
    def ended(*gates: bool, **how: str) -> dict:
        one = report.Report(tmp_path / "stage.json", "one")
        for number, held in enumerate(gates):
            one.gate(f"gate {number}", held, 1, 2)
        one.goal("a goal", False, 1, 2)
        return one.end(**how)

    assert ended(True)["status"] == "passed"
    assert ended()["status"] == "measured"
    assert ended(skipped="no card")["status"] == "skipped"
    assert ended(True, failure="it broke")["status"] == "failed"
    failed = ended(True, False)
    assert failed["status"] == "failed" and failed["reason"] == "not held: gate 1"
    assert "NOT HELD" in report.table([failed])
    assert report.verdict([ended(True), failed]) == 1
    assert report.verdict([ended(True), ended(skipped="no card")]) == 0
    assert report.verdict([ended(skipped="no card")]) == 2
