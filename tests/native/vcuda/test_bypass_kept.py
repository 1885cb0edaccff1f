# SPDX-License-Identifier: Apache-2.0
"""Memory that a program has released must stay charged as long as another process or object uses it. vgpu-probe has a
check for each such case. Each check passes with the library, and fails with a library that omits the charge."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from conftest import CARD, LIMIT, MIB, PROBE, Host
from test_probe import run, verdicts
from test_probe_finds import broken

pytestmark = pytest.mark.slow

IPC, HANDLE, POOL, ARRAY = "bypass-ipc-kept", "bypass-handle-kept", "bypass-pool-kept", "bypass-array-kept"
KEPT = [IPC, HANDLE, POOL, ARRAY]
RELEASED, ENDED = "released", "ended"

# The library has a second way to charge memory: it charges the memory that NVML shows for a process beyond the
# process's charges. UNSEEN disables this way, so that the missing charge is noticed.
EXPORTED = "ledger_export(exported->device, exported->bytes, true);"
SETTLE = "void unaccounted_settle(int index)\n{\n"
UNSEEN = ("unaccounted.c", SETTLE, SETTLE + "    if (index >= 0) return;\n")
# Keys: defects. Values: source file, original code, replacement code, the check that must fail, and whether the
# exporting process releases its memory or exits before the check.
MUTANTS = {
    "IPC export not recorded": ("ipc.c", "start = start_of(pointer, &block);", "start = 0;", IPC, RELEASED),
    "memory of array tiles not kept": ("vmm.c", "physical_of(block.owner)->kept = true;", ";", ARRAY, RELEASED),
    "IPC export uncharged at the exporter's exit": ("ipc.c", EXPORTED, ";", IPC, ENDED),
    "shared handles not searched": ("vmm.c", "return object->shared && (", "return false && (", HANDLE, RELEASED),
    "shared handle uncharged at the exporter's exit": (
        "vmm_shared.c",
        "ledger_export(object->device->ledger, object->bytes, exported);",
        ";",
        HANDLE,
        ENDED,
    ),
    "shared pool uncharged at the exporter's exit": (
        "pool.c",
        "ledger_export(pool->device->ledger, pool->charged, true);",
        ";",
        POOL,
        ENDED,
    ),
}  # fmt: skip


def test_memory_in_use_elsewhere_stays_charged(host: Host) -> None:
    status, report = run(host, "--checks", ",".join(KEPT))
    assert verdicts(report) == dict.fromkeys(KEPT, "passed"), report
    assert status == 0
    details = {one["name"]: one["detail"] for one in report["checks"]}
    assert not any("not tried" in detail or "freed by the driver" in detail for detail in details.values()), details
    assert host.on_card() == host.charged() == 0, "an attempt left memory on the card"


def test_without_the_library_every_check_is_violated(host: Host) -> None:
    """The negative control: without the library, the driver grants more memory although the slice is full, in every
    check except ARRAY. There the tiles of a sparse array keep their memory, so the last request is refused, but in
    total the driver has granted more than the slice."""
    status, report = run(host, "--checks", ",".join(KEPT), preload=False)
    assert verdicts(report) == dict.fromkeys(KEPT, "violated"), report
    granted = [one["name"] for one in report["checks"] if "more were granted" in one["detail"]]
    assert granted == [name for name in KEPT if name != ARRAY]
    assert status == 1 and host.on_card() == 0


@pytest.mark.parametrize("mutant", MUTANTS)
def test_probe_finds_a_library_that_omits_a_charge(host: Host, tmp_path: Path, mutant: str) -> None:
    name, old, new, check, when = MUTANTS[mutant]
    environment = host.env(preload=False, LD_PRELOAD=str(broken(tmp_path, name, old, new, UNSEEN)))
    done = subprocess.run(
        [PROBE, "--json", "--checks", ",".join(KEPT)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    found = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert {one for one in found if found[one]["verdict"] == "violated"} == {check}, done.stdout
    # The detail text of the check says whether the exporting process released its memory or exited.
    assert f"{when}: with the slice full" in found[check]["detail"].replace("lost its exporting process, which ", "")


def test_check_is_not_run_in_a_slice_too_small_for_two_processes(host: Host) -> None:
    host.write_limits(memory=700 * MIB)
    _status, report = run(host, "--checks", ",".join(KEPT))
    assert set(verdicts(report).values()) <= {"not-run", "passed"}, report
    assert verdicts(report)[IPC] == "not-run"


def test_checks_are_not_run_on_a_full_card(host: Host) -> None:
    """A GPU is oversold if its slices are together larger than its memory. If a neighbour has filled the GPU, the
    driver refuses the memory in each check. Such a refusal proves nothing about the library, so no check may pass."""
    host.write_limits(memory=LIMIT, oversubscribe=True)
    neighbour = host.puppet(preload=False).start()
    neighbour.get("alloc", CARD - host.on_card() - 2000 * MIB)
    _status, report = run(host, "--checks", ",".join(KEPT))
    assert verdicts(report) == dict.fromkeys(KEPT, "not-run"), report
