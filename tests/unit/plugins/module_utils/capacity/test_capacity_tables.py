# SPDX-License-Identifier: Apache-2.0
"""Tests the report that is printed for a host: the table of its GPUs and slices (parts of a GPU), the lines about
differences between expected and advertised capacity, and the faults that are listed if an isolation check does not
prove that its slice is isolated.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.capacity import tables

# A host with one GPU of three slices. The kubelet advertises only two of them, so the report has a difference.
CAPACITY = {
    "resource": "nvidia.com/gpu",
    "kubelet": True,
    "advertised": ["GPU-a::0", "GPU-a::1"],
    "expected": [{"id": "GPU-a::0"}, {"id": "GPU-a::1"}, {"id": "GPU-a::2"}],
    "sentences": ["advertised nvidia.com/gpu: expected 3 slices, found 2; restart"],
    "gpus": [
        {
            "index": 0,
            "model": "Tesla T4",
            "memory_mib": 15360,
            "slices": 3,
            "slice_mib": 5120,
            "sm_percent": 100,
            "advertised": 2,
        }
    ],
}


def check(name="limit-exact", verdict="passed"):
    return {"name": name, "verdict": verdict, "expected": "5", "found": "6", "unit": "MiB", "detail": "past it"}


def result(verdict="passed", checks=None, detail=""):
    return {
        "uuid": "GPU-a",
        "slice": "GPU-a::1",
        "verdict": verdict,
        "detail": detail,
        "checks": [check()] if checks is None else checks,
    }


PASSED = {"verdict": "passed", "results": [result()]}


def test_the_sum_of_a_host_is_that_of_its_rows():
    """While an isolation check has a lease of a slice (a reservation), the device plugin advertises this slice as
    unhealthy, so that no pod gets it. The row of the GPU and the sum of the host still count the slice."""
    (gpu,) = CAPACITY["gpus"]
    leased = dict(CAPACITY, gpus=[dict(gpu, advertised=3)], sentences=[])
    assert tables.host_report(leased)[0] == "nvidia.com/gpu: 3 advertised by the kubelet, 3 expected"
    foreign = dict(leased, advertised=[*CAPACITY["advertised"], "GPU-c"])
    assert tables.host_report(foreign)[0] == "nvidia.com/gpu: 4 advertised by the kubelet, 3 expected"


def test_host_without_an_installation_says_so_in_place_of_numbers():
    bare = dict(CAPACITY, installed=False, expected=[], advertised=[], gpus=[], sentences=["vgpu.fleet is missing"])
    assert tables.host_report(bare, None, "gpu-1", gpus=True) == [
        "gpu-1  vgpu.fleet is not installed on this host; run site.yml for this host",
        "  DIFFERS: vgpu.fleet is missing",
    ]


# the table of GPUs that is printed for CAPACITY
GPU_TABLE = [
    "  GPU  model     memory MiB  slices  MiB each  SM % each  advertised  expected",
    "  ===  ========  ==========  ======  ========  =========  ==========  ========",
    "    0  Tesla T4       15360       3      5120        100           2         3",
]
RIGHT = dict(CAPACITY, sentences=[])


def test_whole_table_of_a_host():
    assert tables.host_report(CAPACITY, PASSED, "gpu-1", gpus=True, checks=True) == [
        "gpu-1  nvidia.com/gpu: 2 advertised by the kubelet, 3 expected; isolation of 1 slice: 1 passed",
        *GPU_TABLE,
        "  DIFFERS: advertised nvidia.com/gpu: expected 3 slices, found 2; restart",
        "  isolation of slice GPU-a::1: 1 passed",
        "  check        verdict  expected  found",
        "  ===========  =======  ========  =====",
        "  limit-exact  passed   5 MiB     6 MiB",
    ]


def test_consistent_host_is_one_line():
    line = "gpu-1  nvidia.com/gpu: 2 advertised by the kubelet, 3 expected"
    assert tables.host_report(RIGHT, None, "gpu-1") == [line]
    assert tables.host_report(RIGHT, {"skipped": True, "changed": False}, "gpu-1") == [line]
    assert tables.host_report(RIGHT, PASSED, "gpu-1") == [line + "; isolation of 1 slice: 1 passed"]
    many = {"verdict": "passed", "results": [result(), result(checks=[check(), check("watched", "detected")])]}
    assert tables.host_report(RIGHT, many, "gpu-1") == [line + "; isolation of 2 slices: 2 passed, 1 detected"]


def test_warning_of_the_plugin_is_a_line():
    warned = tables.host_report(dict(RIGHT, plugin_warnings=["the disk is full"]), PASSED, "gpu-1")
    assert warned[1:] == ["  WARNING: the disk is full"]


def test_note_is_a_line():
    note = {"what": "split", "where": "GPU-a", "expected": "2 slices", "found": "3 slices", "remedy": "nothing to do"}
    noted = tables.host_report(dict(RIGHT, notes=[note]), PASSED, "gpu-1")
    assert noted[1:] == ["  NOTE: split GPU-a: expected 2 slices, found 3 slices; nothing to do"]


def test_host_with_differences_shows_its_gpus():
    assert tables.host_report(CAPACITY, None, "gpu-1")[1:4] == GPU_TABLE


UUID = "GPU-928148e8-b8c2-c2fc-3505-7382a0416048"


def full(name):
    return {**check(name, "not-run"), "expected": "a result", "detail": f"{UUID}: card full"}


def late(name):
    return {**check(name, "not-run"), "detail": "no time"}


# label → the checks of one slice; expected summary of the checks, expected rows below the summary
SAID = {
    "all checks passed": ([check(), check("b")], "2 passed", []),
    "a detected bypass is no fault": ([check(), check("b", "detected")], "1 passed, 1 detected", []),
    "most checks not run, one reason": (
        [check(), *[full(f"f{n}") for n in range(3)]],
        "1 passed, 3 not run: card full",
        [],
    ),
    "most checks not run, two reasons": (
        [check(), late("x"), *[full(f"f{n}") for n in range(2)]],
        "1 passed, 3 not run: card full (2 of them)",
        [],
    ),
    "open bypass": ([check(), check("way", "open")], "1 passed, 1 open", ["way    open     5 MiB     6 MiB"]),
    "violated limit": (
        [check(), check("totals", "violated"), check("b", "detected")],
        "1 VIOLATED, 1 passed, 1 detected",
        ["totals  violated  5 MiB     6 MiB"],
    ),
}


@pytest.mark.parametrize("case", sorted(SAID))
def test_checks_are_counted_and_only_faults_are_rows(case):
    checks, words, rows = SAID[case]
    verdict = "violated" if "VIOLATED" in words else "passed"
    lines = tables.host_report(RIGHT, {"verdict": verdict, "results": [result(verdict, checks)]}, "gpu-1")
    assert lines[0].endswith(f"; isolation of 1 slice: {words}")
    shown = [line.strip() for line in lines[1:]]
    if rows:
        assert shown[0] == f"isolation of slice GPU-a::1: {words}"
        assert [line.split() for line in shown[3:]] == [row.split() for row in rows]
    else:
        assert not shown
    # With checks=True, the table also has rows for passed checks.
    whole = tables.host_report(RIGHT, {"verdict": verdict, "results": [result(verdict, checks)]}, "gpu-1", checks=True)
    assert len(whole) == 4 + len(checks)


def test_stored_check_is_shown_with_its_age():
    checks = [check(), check("b"), check("share"), check("watched", "detected"), late("x")]
    kept = {**tables.isolation_brief({"verdict": "passed", "results": [result(checks=checks)]}), "time": 1}
    (line,) = tables.host_report(RIGHT, kept, "gpu-1")
    days = int(line.partition("; isolation of 1 slice ")[2].partition(" days ago: ")[0])
    assert days > 20000 and line.endswith(" days ago: 3 passed, 1 detected, 1 not run: no time")


AGES = [(0, " 0 s ago"), (119, " 119 s ago"), (120, " 2 min ago"), (7199, " 119 min ago"), (7200, " 2 h ago")]
AGES += [(172799, " 47 h ago"), (172800, " 2 days ago"), (-50, " 0 s ago")]


@pytest.mark.parametrize(("seconds", "words"), AGES)
def test_age_of_a_stored_check(seconds, words):
    assert tables.age({"time": 1000}, 1000 + seconds) == words
    assert tables.age({}, 1000) == ""


# columns: what the result of a slice lacks; expected name of the slice in the report
NAMELESS = [({}, "GPU-a::1"), ({"slice": None}, "GPU-a"), ({"slice": None, "uuid": None}, "any GPU")]


@pytest.mark.parametrize(("lacks", "where"), NAMELESS)
def test_slice_without_a_check_run_is_not_passed(lacks, where):
    nothing = {"verdict": "not-run", "results": [{**result("not-run", [], "no slice is free"), **lacks}]}
    lines = tables.host_report(RIGHT, nothing, "gpu-1")
    assert lines[0].endswith("; isolation of 1 slice: not run")
    assert lines[1:] == [f"  isolation of slice {where}: not run: no slice is free"]
    assert tables.isolation_faults(nothing) == [f"slice {where}: not-run: no slice is free"]
    assert "passed" not in "".join(lines)


# columns: the result of the isolation check; expected printed faults
@pytest.mark.parametrize(
    ("isolation", "faults"),
    [
        (PASSED, []),
        (
            {"verdict": "violated", "results": [result("violated", [check(), check("totals", "violated")])]},
            ["slice GPU-a::1: totals is violated: expected 5 MiB, found 6 MiB; past it"],
        ),
        # Checks that did not run are one line, because many such lines would hide the violated check.
        (
            {
                "verdict": "violated",
                "results": [
                    result(
                        "violated", [check("bypass-a", "not-run"), check("totals", "violated"), check("b", "not-run")]
                    )
                ],
            },
            [
                ("slice GPU-a::1: totals is violated: expected 5 MiB, found 6 MiB; past it"),
                "slice GPU-a::1: 2 checks not run",
            ],
        ),
        (
            {"verdict": "not-run", "results": [result("not-run", [], "no slice is free")]},
            ["slice GPU-a::1: not-run: no slice is free"],
        ),
        # Two more results are faults: a required check that did not run, and a result that has no check at all.
        (
            {"verdict": "not-run", "results": [result("not-run", [check(verdict="not-run")])]},
            ["slice GPU-a::1: limit-exact is not-run: expected 5 MiB, found 6 MiB; past it"],
        ),
        # A slice that passed does not hide the next one.
        (
            {"verdict": "violated", "results": [result(), result("violated", [check(verdict="violated")])]},
            ["slice GPU-a::1: limit-exact is violated: expected 5 MiB, found 6 MiB; past it"],
        ),
        # An optional check that did not run is no fault of a slice that passed.
        ({"verdict": "passed", "results": [result("passed", [check(), check("nvidia-smi", "not-run")])]}, []),
        ({"verdict": "not-run", "results": []}, ["isolation is not-run: no check ran"]),
        ({"results": []}, ["isolation is not-run: no check ran"]),
        ({"msg": "vgpuctl is absent"}, ["isolation is not-run: vgpuctl is absent"]),
    ],
)
def test_isolation_faults(isolation, faults):
    assert tables.isolation_faults(isolation) == faults


def test_isolation_brief_keeps_names_of_passed_checks():
    share = {**check("share"), "unit": "percent"}
    spoiled, open_way = check("totals", "violated"), check("bypass-ledger-lie", "open")
    whole = result("violated", [check(), share, spoiled, open_way])
    brief = tables.isolation_brief({"verdict": "violated", "results": [whole], "invocation": {}})
    kept = {key: whole.get(key) for key in ("slice", "uuid", "verdict", "detail")}
    kept.update(passed="limit-exact, share", checks=[share, spoiled, open_way])
    assert brief == {"verdict": "violated", "results": [kept]}


@pytest.mark.parametrize("isolation", [{"skipped": True}, {"verdict": "not-run", "results": []}, {}])
def test_isolation_that_did_not_run_has_no_brief(isolation):
    assert tables.isolation_brief(isolation) == {}


def test_table_without_rows_has_a_header():
    assert tables.table(("a", "bc"), []) == ["a  bc", "=  =="]


# columns: value of a cell; expected text, which has at most 44 characters
CELLS = [(None, ""), ("two\n lines", "two lines"), ("x" * 44, "x" * 44), ("x" * 45, "x" * 41 + "...")]


@pytest.mark.parametrize(("value", "shown"), CELLS)
def test_cell_of_a_table_is_one_short_line(value, shown):
    assert tables.table(("a",), [[value]])[2] == shown


# columns: checks of a slice, its detail; expected lines about the slice in the report of a host
LINES = [
    ([check()], "", []),
    ([check()], "the share was not measured", ["isolation of slice GPU-a::1: 1 passed: the share was not measured"]),
    ([], "no slice is free", ["isolation of slice GPU-a::1: not run: no slice is free"]),
    ([], "", ["isolation of slice GPU-a::1: not run"]),
]


@pytest.mark.parametrize(("checks", "detail", "lines"), LINES)
def test_slice_has_a_line_only_if_it_says_more_than_the_summary(checks, detail, lines):
    found = tables.host_report(RIGHT, {"verdict": "passed", "results": [result("passed", checks, detail)]}, "gpu-1")
    assert [line.strip() for line in found if "of slice" in line] == lines
