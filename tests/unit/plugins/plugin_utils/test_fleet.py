# SPDX-License-Identifier: Apache-2.0
"""Tests the report of a fleet of hosts: the state of each node, the sums over all nodes, and the changes since the last
report.
"""

from __future__ import annotations

import copy
import json

import pytest
from ansible_collections.vgpu.fleet.plugins.filter.fleet import fleet_report, script_json
from ansible_collections.vgpu.fleet.plugins.plugin_utils import fleet

UUID = "GPU-a"
IDS = [f"{UUID}::{number}" for number in range(2)]
# The capacity of a node as the module reports it: one T4 with two slices (parts of the GPU), both advertised.
CAPACITY = {
    "ok": True,
    "shared": True,
    "proven": False,
    "kubelet": True,
    "resources": ["nvidia.com/gpu"],
    "expected": [{"id": one, "uuid": UUID} for one in IDS],
    "advertised": IDS,
    "drift": [],
    "versions": {"driver": "535.261.03", "plugin": "0.1.0"},
    "library": "0.1.0-x",
    "memory_enforcement": "memory is enforced by the driver: a limit was set and read back",
    "usage": [],
    "gpus": [
        {
            "index": 0,
            "uuid": UUID,
            "model": "Tesla T4",
            "memory_mib": 15360,
            "used_mib": 100,
            "slices": 2,
            "slice_mib": 7680,
            "sm_percent": 50,
            "mode": "vcuda",
            "advertised": 2,
            "utilisation": 42,
            "temperature": 61,
            "xids": [{"xid": 31, "count": 2, "last": "2026-11-24T04:00:00Z"}],
        }
    ],
}
DRIFT = {"what": "slice", "where": IDS[1], "expected": "made", "found": "not made", "remedy": "restart"}
ONE_ROW = [{**CAPACITY["gpus"][0], "advertised": 1}]
DIFFERS = {**CAPACITY, "ok": False, "advertised": IDS[:1], "gpus": ONE_ROW, "drift": [DRIFT]}
SHARE = {"name": "share", "verdict": "passed", "expected": "50", "found": "51", "unit": "percent", "detail": ""}
PASSED = {"verdict": "passed", "results": [{"slice": IDS[1], "verdict": "passed", "detail": "", "checks": [SHARE]}]}
VIOLATED = {"verdict": "violated", "results": [{"slice": IDS[1], "verdict": "violated", "detail": "", "checks": []}]}
NONE_FREE = {"slice": "", "verdict": "not-run", "detail": "none is free", "checks": []}
NOT_RUN = {"verdict": "not-run", "results": [NONE_FREE]}


def checked(ran, left_out):
    """Returns the result of an isolation check of one slice that passed: ``ran`` checks ran, and ``left_out`` checks
    had no time."""
    names = ", ".join(["share", *(f"c{n}" for n in range(ran - 1))])
    silent = [{**SHARE, "name": f"n{n}", "verdict": "not-run"} for n in range(left_out)]
    result = {**PASSED["results"][0], "passed": names, "checks": [SHARE, *silent]}
    return {"verdict": "passed", "results": [result], "time": 1_795_000_000}


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"capacity": CAPACITY, "isolation": PASSED}, "passed"),
        ({"capacity": {**CAPACITY, "proven": True}}, "passed"),
        ({"capacity": CAPACITY}, "unproven"),
        ({"capacity": CAPACITY, "isolation": NOT_RUN}, "unproven"),
        ({"capacity": CAPACITY, "isolation": {"skipped": True}}, "unproven"),
        ({"capacity": CAPACITY, "isolation": VIOLATED}, "violated"),
        ({"capacity": {**CAPACITY, "proven": True}, "isolation": VIOLATED}, "violated"),
        ({"capacity": DIFFERS, "isolation": VIOLATED}, "violated"),
        ({"capacity": DIFFERS, "isolation": PASSED}, "differs"),
        ({"capacity": {**CAPACITY, "shared": False}}, "whole"),
        ({"capacity": {**CAPACITY, "plugin_warnings": ["full"]}, "isolation": PASSED}, "warned"),
        ({"capacity": {**CAPACITY, "shared": False, "plugin_warnings": ["full"]}}, "warned"),
        ({"capacity": {**DIFFERS, "plugin_warnings": ["full"]}, "isolation": PASSED}, "differs"),
        ({"capacity": CAPACITY, "isolation": checked(6, 4)}, "partly"),
        ({"capacity": {**CAPACITY, "proven": True}, "isolation": checked(6, 4)}, "partly"),
        ({"capacity": CAPACITY, "isolation": checked(7, 3)}, "passed"),
        ({"fault": {"state": "unreachable", "message": "timed out"}}, "unreachable"),
        ({}, "failed"),
    ],
)
def test_state_of_a_node_follows_its_facts(facts, state):
    made = fleet.node("gpu-1", facts)
    assert made["state"] == state
    assert (made["state"] in fleet.TROUBLE) == (state in ("unreachable", "failed", "violated", "differs", "warned"))
    assert bool(made["message"]) == (state in ("unreachable", "failed"))


def test_report_has_the_facts_of_a_node():
    usage = [{"by": "ns/pod/main", "uuid": UUID, "slices": [IDS[0]], "used_mib": 900}]
    made = fleet.node("gpu-1", {"groups": ["t4"], "capacity": {**DIFFERS, "usage": usage}, "isolation": PASSED})
    assert {key: made[key] for key in ("driver", "library", "plugin", "expected", "advertised", "in_use")} == {
        "driver": "535.261.03",
        "library": "0.1.0-x",
        "plugin": "0.1.0",
        "expected": 2,
        "advertised": 1,
        "in_use": 1,
    }
    assert made["enforcement"] == "memory is enforced by the driver: a limit was set and read back"
    gpu = made["gpus"][0]
    assert (gpu["sold_mib"], gpu["missing"]) == (15360, ["1"])
    assert (gpu["utilisation"], gpu["temperature"], gpu["xids"][0]["xid"]) == (42, 61, 31)
    assert gpu["taken"] == [{"slice": "0", "by": "ns/pod/main", "used_mib": 900}]
    assert made["shares"] == [{"wanted": 50.0, "got": 51.0}]


def test_a_leased_slice_is_advertised_in_every_figure():
    """While a slice is leased for a check, the kubelet does not list it. It is still advertised, so the sum of the node
    must count it as the row of the GPU does."""
    usage = [{"by": "0614c4f6ff8a05da", "uuid": UUID, "slices": [IDS[1]], "used_mib": 900}]
    made = fleet.node("gpu-1", {"capacity": {**CAPACITY, "advertised": IDS[:1], "usage": usage}})
    (gpu,) = made["gpus"]
    assert (made["advertised"], gpu["advertised"], gpu["missing"]) == (2, 2, [])


@pytest.mark.parametrize(
    ("before", "isolation", "proven"),
    [(False, PASSED, True), (True, {}, True), (False, {}, False), (False, NOT_RUN, False), (False, VIOLATED, False)],
)
def test_isolation_of_a_node_is_proven_by_a_pass(before, isolation, proven):
    assert fleet.node("a", {"capacity": {**CAPACITY, "proven": before}, "isolation": isolation})["proven"] is proven


@pytest.mark.parametrize(
    ("check", "shares"),
    [
        (SHARE, [{"wanted": 50.0, "got": 51.0}]),
        ({**SHARE, "expected": "0", "found": "0", "unit": "shares"}, []),  # with all SMs, no share is measured
        ({**SHARE, "name": "share-beside", "expected": "50 and 50", "found": "50 and 49"}, []),
        ({**SHARE, "name": "another-check"}, []),
        ({**SHARE, "found": "none"}, []),
    ],
)
def test_shares_list_only_measured_shares(check, shares):
    result = {**PASSED["results"][0], "checks": [check]}
    made = fleet.node("a", {"capacity": CAPACITY, "isolation": {"verdict": "passed", "results": [result]}})
    assert made["shares"] == shares


def test_report_has_the_time_of_the_isolation_check():
    assert fleet.node("a", {"capacity": CAPACITY, "isolation": checked(7, 3)})["checked"] == "2026-11-18T11:06:40Z"
    assert fleet.node("a", {"capacity": CAPACITY, "isolation": PASSED})["checked"] is None


def test_report_keeps_warnings_of_the_plugin():
    assert fleet.node("a", {"capacity": {**CAPACITY, "plugin_warnings": ["full"]}})["warnings"] == ["full"]
    assert fleet.node("a", {"capacity": CAPACITY})["warnings"] == []


NOTE = {"what": "split", "where": "GPU-e", "expected": "7 slices", "found": "4", "remedy": "wait"}
SUMS = {"nvidia.com/gpu": {"capacity": 4, "allocatable": 4, "allocated": 2}}
RUNS = {"pod": "ns/a", "resource": "nvidia.com/gpu", "count": 1, "phase": "Running"}
WAITS = {"pod": "ns/b", "resource": "nvidia.com/gpu", "count": 1, "phase": "Pending"}


# columns: changed parts of the node's capacity; expected parts of the report: notes (differences that are not faults),
# sources that gave no answer, Kubernetes
@pytest.mark.parametrize(
    ("capacity", "notes", "unheard", "kubernetes"),
    [
        ({}, [], {}, None),
        ({"notes": [NOTE]}, [NOTE], {}, None),
        (
            {"missing": {"nvml": "gone", "kubelet": "none"}, "kubernetes": None},
            [],
            {"kubelet": "none", "nvml": "gone"},
            None,
        ),
        (
            {"kubernetes": {"ready": False, "resources": SUMS, "pods": [RUNS, {**RUNS, "resource": "x/gpu"}, WAITS]}},
            [],
            {},
            {"ready": False, "resources": SUMS, "pods": 2, "waiting": [WAITS]},
        ),
    ],
)
def test_report_has_notes_missing_sources_and_kubernetes(capacity, notes, unheard, kubernetes):
    made = fleet.node("gpu-1", {"capacity": {**CAPACITY, **capacity}})
    assert (made["notes"], made["unheard"], made["kubernetes"]) == (notes, unheard, kubernetes)


def test_names_of_passed_checks_are_not_repeated():
    def proof(names):
        return {"verdict": "passed", "results": [{"slice": IDS[1], "verdict": "passed", "passed": names, "checks": []}]}

    hosts = {"a": proof("freed, totals"), "b": proof("totals"), "c": proof("freed, totals"), "d": PASSED}
    nodes = [fleet.node(name, {"capacity": CAPACITY, "isolation": one}) for name, one in hosts.items()]
    before = copy.deepcopy(nodes)
    made = fleet.report([*nodes, fleet.node("e", {"capacity": CAPACITY})], "now", "Lab")
    shown = {one["name"]: one["isolation"]["results"][0]["passed"] for one in made["nodes"] if one["isolation"]}
    assert made["passed"] == ["freed, totals", "totals", ""]
    assert shown == {"a": 0, "b": 1, "c": 0, "d": 2}
    assert nodes == before


def test_sums_of_all_nodes():
    nodes = [fleet.node("a", {"capacity": CAPACITY, "isolation": PASSED}), fleet.node("b", {"capacity": DIFFERS})]
    nodes.append(fleet.node("c", {}))
    sums = fleet.totals(nodes)
    assert {key: sums[key] for key in ("nodes", "gpus", "memory_mib", "sold_mib", "used_mib", "expected")} == {
        "nodes": 3,
        "gpus": 2,
        "memory_mib": 30720,
        "sold_mib": 30720,
        "used_mib": 200,
        "expected": 4,
    }
    assert (sums["advertised"], sums["trouble"], sums["passed"], sums["differs"], sums["failed"]) == (3, 2, 1, 1, 1)
    assert fleet.totals([])["nodes"] == 0


def with_driver(version):
    changed = copy.deepcopy(CAPACITY)
    changed["versions"]["driver"] = version
    return changed


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"a": {"capacity": CAPACITY}}, {"a": {"capacity": CAPACITY}}, []),
        ({}, {"a": {"capacity": CAPACITY}}, [("a", "node", "", "unproven")]),
        ({"a": {"capacity": CAPACITY}}, {}, [("a", "node", "unproven", "")]),
        (
            {"a": {"capacity": CAPACITY}},
            {"a": {"capacity": with_driver("550.1")}},
            [("a", "driver", "535.261.03", "550.1")],
        ),
        (
            {"a": {"capacity": CAPACITY}},
            {"a": {"capacity": DIFFERS}},
            [("a", "state", "unproven", "differs"), ("a", "advertised", "2", "1")],
        ),
        # Nothing is known about the driver of a node without facts, so this is not a change of the driver.
        ({"a": {"capacity": CAPACITY}}, {"a": {}}, [("a", "state", "unproven", "failed")]),
    ],
)
def test_changes_since_the_last_report(before, now, expected):
    then = json.dumps(fleet_report(before, "2026-01-01T00:00:00Z"))
    made = fleet_report(now, "2026-01-02T00:00:00Z", "Lab", then)
    assert [tuple(one[key] for key in ("node", "what", "before", "now")) for one in made["changes"]] == expected
    assert made["last"] == "2026-01-01T00:00:00Z"
    assert [one["made"] for one in made["history"]] == ["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"]


# texts of a last report that cannot be used
@pytest.mark.parametrize("last", ["", "{", "[]", "null", '{"schema": 99, "made": "x"}'])
def test_invalid_last_report_is_ignored(last):
    made = fleet_report({"a": {"capacity": CAPACITY}}, "2026-01-02T00:00:00Z", "Lab", last)
    assert (made["last"], made["changes"], len(made["history"])) == (None, [], 1)


def test_history_has_a_maximum_length():
    last = ""
    for number in range(fleet.HISTORY + 3):
        last = json.dumps(fleet_report({}, f"run {number}", "", last))
    kept = [one["made"] for one in json.loads(last)["history"]]
    assert (len(kept), kept[0], kept[-1]) == (fleet.HISTORY, "run 3", f"run {fleet.HISTORY + 2}")


def test_worst_node_is_first():
    hosts = {"a": {"capacity": CAPACITY, "isolation": PASSED}, "b": {}, "c": {"capacity": DIFFERS}}
    assert [one["name"] for one in fleet_report(hosts, "now")["nodes"]] == ["b", "c", "a"]


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "<!--", "a & b", "\u2028"])
def test_script_json_escapes_markup(text):
    made = script_json({"name": text})
    assert not set("<>&\u2028\u2029") & set(made)
    assert json.loads(made) == {"name": text}
