# SPDX-License-Identifier: Apache-2.0
"""vgpu-probe checks in a container whether its slice (its part of a GPU) is complete and limited. The probe passes in a
complete slice, fails if a part of the slice is missing, and reports the driver's figures."""

from __future__ import annotations

import json
import subprocess
import time

import layouts
import pytest
from conftest import CARD, LIMIT, PROBE, Host

MEMORY = [
    "totals",
    "visible-devices",
    "limit-exact",
    "private-context",
    "every-allocator",
    "four-processes",
    "dlsym-route",
    "getprocaddress-route",
    "freed",
    "neighbours",
]
# The check of the compute share takes seconds on each GPU, so few tests run it.
NAMES = [*MEMORY, "share"]


def run(host: Host, *arguments: str, **options: object) -> tuple:
    environment = host.env(**options)  # type: ignore[arg-type]
    command = [PROBE, "--json", *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    return done.returncode, json.loads(done.stdout)


def verdicts(report: dict) -> dict:
    return {one["name"]: one["verdict"] for one in report["checks"]}


def test_probe_passes_in_a_slice(host: Host) -> None:
    status, report = run(host, "--checks", ",".join(NAMES))  # test_bypass.py tests the bypass checks.
    assert verdicts(report) == dict.fromkeys(NAMES, "passed")
    assert (status, report["version"]) == (0, 1)
    assert [(one["index"], one["uuid"], one["total_cuda"], one["total_nvml"]) for one in report["devices"]] == [
        (i, uuid, LIMIT, LIMIT) for i, uuid in enumerate(host.uuids)
    ]
    exact = next(one for one in report["checks"] if one["name"] == "limit-exact")
    assert (exact["expected"], exact["found"], exact["unit"]) == (LIMIT, LIMIT, "bytes")
    assert [(one["name"], one["index"], one["unit"], one["value"] > 0) for one in report["measures"]] == [
        ("launch-call", 0, "ns", True),
        ("launch-call", 1, "ns", True),
        ("kernel", 0, "ns", True),
        ("kernel", 1, "ns", True),
    ]
    assert host.on_card() == host.charged() == 0, "the probe left memory on the card"


def test_probe_tries_every_allocator(host: Host) -> None:
    _status, report = run(host, "--checks", "every-allocator")
    (found,) = report["checks"]
    assert (found["verdict"], found["found"]) == ("passed", LIMIT), found
    assert found["detail"].endswith(", cuArrayCreate, a graph's node, a capture"), found["detail"]


def test_environment_does_not_raise_the_share(host: Host) -> None:
    # With the policy "force" the share also limits a container that uses the GPU alone.
    host.write_limits(core_policy="force")
    _status, report = run(host, "--checks", "share")
    (found,) = report["checks"]
    assert (found["verdict"], found["expected"]) == ("passed", 33), found


@pytest.mark.parametrize("mib", [700, 1000])
def test_probe_passes_in_a_slice_too_small_for_four_contexts(host: Host, mib: int) -> None:
    host.write_limits(memory=mib << 20)
    status, report = run(host, "--checks", ",".join(MEMORY))
    assert verdicts(report) == dict.fromkeys(MEMORY, "passed"), report
    assert status == 0


def test_without_the_preload_every_check_is_violated(host: Host) -> None:
    status, report = run(host, preload=False)
    assert status == 1
    found = verdicts(report)
    assert found.pop("visible-devices") == "passed"
    found.pop("graphics")  # The result of the graphics check depends on the machine, not on the library.
    assert set(found.values()) == {"violated"}
    assert next(one for one in report["checks"] if one["name"] == "limit-exact")["found"] == CARD


def test_without_a_limits_file_every_check_is_violated(host: Host) -> None:
    status, report = run(host, limits=False, preload=False)
    assert status == 1
    found = verdicts(report)
    found.pop("graphics")
    assert set(found.values()) == {"violated"}


def test_without_a_ledger_the_memory_checks_fail(host: Host) -> None:
    host.ledger.write_bytes(b"gone" * 100000)
    status, report = run(host, "--checks", ",".join(MEMORY))
    assert status == 1
    assert "passed" not in {verdicts(report)[name] for name in ("totals", "limit-exact", "four-processes", "freed")}


def test_probe_reports_a_gpu_missing_in_the_limits(host: Host) -> None:
    device = {"uuid": host.uuids[0], "memory_bytes": LIMIT}
    host.limits.write_bytes(layouts.pack_limits({"allocation": "t", "devices": [device]}))
    _unused, report = run(host, "--checks", "visible-devices")
    assert verdicts(report) == {"visible-devices": "violated"}
    assert host.uuids[1] in report["checks"][0]["detail"]


def test_without_a_driver_no_check_is_run(host: Host) -> None:
    status, report = run(host, LD_LIBRARY_PATH="/nonexistent")
    assert status == 2
    assert set(verdicts(report).values()) == {"not-run"}
    assert report["devices"] == []


@pytest.mark.parametrize(("arguments", "names"), [("totals", ["totals"]), ("freed,totals", ["totals", "freed"])])
def test_probe_runs_only_the_chosen_checks(host: Host, arguments: str, names: list) -> None:
    _unused, report = run(host, "--checks", arguments)
    assert list(verdicts(report)) == names


@pytest.mark.parametrize("arguments", [["--checks", "no-such"], ["--checks"], ["--what"]])
def test_invalid_arguments_print_the_usage(host: Host, arguments: list) -> None:
    done = subprocess.run([PROBE, *arguments], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 64
    assert "usage" in done.stderr


def test_probe_lowers_the_limit_of_a_slice_larger_than_the_card(host: Host) -> None:
    """The slice is larger than the card, so the card would be full before the limit is reached. The probe therefore
    tests with a lower limit."""
    host.write_limits(memory=2 * CARD, oversubscribe=True)
    status, report = run(host, "--checks", ",".join(MEMORY))
    assert verdicts(report) == dict.fromkeys(MEMORY, "passed"), report
    assert status == 0
    found = {one["name"]: one for one in report["checks"]}
    assert found["totals"]["found"] == 2 * CARD
    assert found["limit-exact"]["found"] == found["limit-exact"]["expected"] <= CARD // 2
    # Without oversubscription, a card that is full before the limit is a violation.
    host.write_limits(memory=2 * CARD)
    _unused, report = run(host, "--checks", "limit-exact,four-processes")
    assert set(verdicts(report).values()) == {"violated"}


def test_full_card_is_no_violation_of_an_oversold_slice(host: Host) -> None:
    host.write_limits(memory=10773 << 20, oversubscribe=True)
    neighbour = host.puppet(preload=False).start()
    neighbour.get("alloc", 10000 << 20)
    _unused, report = run(host, "--checks", "limit-exact,four-processes")
    assert verdicts(report) == {"limit-exact": "passed", "four-processes": "passed"}, report


def test_probe_keeps_the_slice_full_for_the_hold_time(host: Host) -> None:
    command = [PROBE, "--json", "--checks", "limit-exact", "--hold", "20000"]
    probe = subprocess.Popen(command, env=host.env(), stdout=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while host.on_card() != LIMIT and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (host.on_card(), probe.poll()) == (LIMIT, None)
    finally:
        probe.kill()
        probe.wait()


@pytest.mark.parametrize("hold", ["", "-1", "1s", "60001"])
def test_invalid_hold_time_is_refused(host: Host, hold: str) -> None:
    done = subprocess.run([PROBE, "--hold", hold], env=host.env(), stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr[:6]) == (64, b"usage:")
