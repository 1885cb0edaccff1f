# SPDX-License-Identifier: Apache-2.0
"""The table that a person reads, and what counts as isolation not proven."""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.capacity import tables

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
    """A slice that is leased is advertised as unhealthy meanwhile; the row counts it, and so does the sum."""
    (gpu,) = CAPACITY["gpus"]
    leased = dict(CAPACITY, gpus=[dict(gpu, advertised=3)], sentences=[])
    assert tables.host_report(leased)[0] == "nvidia.com/gpu: 3 advertised by the kubelet, 3 expected"
    foreign = dict(leased, advertised=[*CAPACITY["advertised"], "GPU-c"])
    assert tables.host_report(foreign)[0] == "nvidia.com/gpu: 4 advertised by the kubelet, 3 expected"


def test_the_table_of_a_host():
    assert tables.host_report(CAPACITY, PASSED, "gpu-1") == [
        "gpu-1  nvidia.com/gpu: 2 advertised by the kubelet, 3 expected",
        "  GPU  model     memory MiB  slices  MiB each  SM % each  advertised  expected",
        "  ===  ========  ==========  ======  ========  =========  ==========  ========",
        "    0  Tesla T4       15360       3      5120        100           2         3",
        "  DIFFERS: advertised nvidia.com/gpu: expected 3 slices, found 2; restart",
        "",
        "  isolation of slice GPU-a::1: passed",
        "  check        verdict  expected  found",
        "  ===========  =======  ========  =====",
        "  limit-exact  passed   5 MiB     6 MiB",
    ]


def test_without_isolation_the_table_is_of_capacity_alone():
    assert len(tables.host_report(CAPACITY, {"skipped": True, "changed": False})) == 5
    assert len(tables.host_report(CAPACITY)) == 5


@pytest.mark.parametrize(
    "isolation, faults",
    [
        (PASSED, []),
        (
            {"verdict": "violated", "results": [result("violated", [check(), check("totals", "violated")])]},
            ["slice GPU-a::1: totals is violated: expected 5 MiB, found 6 MiB; past it"],
        ),
        # Where a slice was exceeded, twenty checks that were not run would hide it.
        (
            {
                "verdict": "violated",
                "results": [
                    result(
                        "violated", [check("bypass-a", "not-run"), check("totals", "violated"), check("b", "not-run")]
                    )
                ],
            },
            ["slice GPU-a::1: totals is violated: expected 5 MiB, found 6 MiB; past it", "slice GPU-a::1: 2 not run"],
        ),
        (
            {"verdict": "not-run", "results": [result("not-run", [], "no slice is free")]},
            ["slice GPU-a::1: not-run: no slice is free"],
        ),
        # A check that did not run is no pass, and neither is a result without any check.
        (
            {"verdict": "not-run", "results": [result("not-run", [check(verdict="not-run")])]},
            ["slice GPU-a::1: limit-exact is not-run: expected 5 MiB, found 6 MiB; past it"],
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
def test_of_isolation_that_did_not_run_a_fleet_keeps_nothing(isolation):
    assert tables.isolation_brief(isolation) == {}


def test_a_table_without_rows_has_its_head():
    assert tables.table(("a", "bc"), []) == ["a  bc", "=  =="]
