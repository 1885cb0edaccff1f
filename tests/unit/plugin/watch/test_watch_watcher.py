# SPDX-License-Identifier: Apache-2.0
"""Tests the watcher. It compares the memory that the driver reports for each process with the container's limit and
with its ledger (the file in which each process of the container counts its memory in a slot of its own). The tests
check its rule by tables of cases, the processes that it reports, and the processes that it terminates.
"""

from __future__ import annotations

import fcntl
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.watched import LIMIT, Watched
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.admin import metrics
from vgpu_plugin.watch import rule as watch_rule
from vgpu_plugin.watch import watcher as watch
from vgpu_plugin.watch.processes import Process
from vgpu_plugin.watch.rule import MEMORY, MIB, NO_SLOT, UNPLACED, Account, judge, tolerance

from ..samples import until


def process(pid: int = 10, space: int = 77) -> Process:
    return Process(pid, 5, "python", (space, pid))


# columns: the case; pid → memory that the driver reports; (pid namespace, pid) → memory in the ledger's slot; whether
# the ledger counts CUDA contexts; expected findings
RULE: list[tuple[str, dict[int, int | None], dict[tuple[int, int], int], bool, list[str]]] = [
    ("ledger equals the driver's value", {10: 900 * MIB}, {(77, 10): 900 * MIB}, True, []),
    ("ledger has more than the driver", {10: 300 * MIB}, {(77, 10): 900 * MIB}, True, []),
    ("process without a slot", {10: 1}, {}, True, [NO_SLOT]),
    ("process without a slot, memory unknown to the driver", {10: None}, {}, True, [NO_SLOT]),
    ("slot of an equal pid in another pid namespace", {10: 1}, {(78, 10): 5}, True, [NO_SLOT]),
    ("slot without a namespace", {10: 1}, {(0, 10): 5}, True, []),
    ("driver's value at the tolerance", {10: 164 * MIB}, {(77, 10): 100 * MIB}, True, []),
    ("driver's value one byte over the tolerance", {10: 164 * MIB + 1}, {(77, 10): 100 * MIB}, True, [MEMORY]),
    ("large process within the relative tolerance", {10: 16000 * MIB}, {(77, 10): 15000 * MIB}, True, []),
    (
        "large process one byte over the relative tolerance",
        {10: 16000 * MIB},
        {(77, 10): 15000 * MIB - 1},
        True,
        [MEMORY],
    ),
    ("contexts are not counted", {10: 1164 * MIB}, {(77, 10): 100 * MIB}, False, []),
    ("more memory than any context needs", {10: 1200 * MIB}, {(77, 10): 100 * MIB}, False, [MEMORY]),
    (
        "charged to another process of the container",
        {10: 500 * MIB},
        {(77, 10): 0, (77, 11): 500 * MIB},
        True,
        [],
    ),
    ("slot with 0 bytes", {10: 500 * MIB}, {(77, 10): 0}, True, [MEMORY]),
    ("one honest process, one without a slot", {10: 500 * MIB, 11: 70 * MIB}, {(77, 10): 500 * MIB}, True, [NO_SLOT]),
    ("memory unknown to the driver", {10: None}, {(77, 10): 0}, True, []),
]


@pytest.mark.parametrize(("about", "seen", "slots", "counted", "reasons"), RULE, ids=[row[0] for row in RULE])
def test_each_process_has_this_finding(about, seen, slots, counted, reasons):
    listed = [(process(pid), used) for pid, used in seen.items()]
    found = judge(listed, Account(slots, 20000 * MIB, counted))
    assert [one.reason for one in found] == reasons


# columns: the case; the limit in MiB; pid → MiB that the driver reports; (pid namespace, pid) → MiB in the ledger's
# slot; MiB of exported memory in the ledger; expected findings
LIMITED: list[tuple[str, int, dict[int, int | None], dict[tuple[int, int], int], int, list[str]]] = [
    ("live slot with the true sum", 2048, {10: 10228}, {(77, 10): 10228}, 0, [MEMORY]),
    (
        "live slots of two processes with the true sum",
        2048,
        {10: 5000, 11: 5228},
        {(77, 10): 5000, (77, 11): 5228},
        0,
        [MEMORY],
    ),
    ("live slot with a forged value", 2048, {10: 10228}, {(77, 10): 1 << 42}, 0, [MEMORY]),
    ("dead slot with a forged value", 2048, {10: 10228}, {(77, 10): 0, (77, 99): 1 << 42}, 0, [MEMORY]),
    ("forged exported memory", 2048, {10: 10228}, {(77, 10): 0}, 1 << 42, [MEMORY]),
    ("driver's value at the limit", 2048, {10: 2048}, {(77, 10): 2048}, 0, []),
    ("memory over the limit within the tolerance", 2048, {10: 2176}, {(77, 10): 2176}, 0, []),
    ("memory just below the limit", 2048, {10: 2036}, {(77, 10): 2036}, 0, []),
    ("memory below the limit and above the ledger", 2048, {10: 1000}, {(77, 10): 100}, 0, [MEMORY]),
]
LIMITED_IDS = [row[0] for row in LIMITED]


@pytest.mark.parametrize(("about", "limit", "seen", "slots", "exported", "reasons"), LIMITED, ids=LIMITED_IDS)
def test_memory_over_the_limit_is_a_finding_for_any_ledger(about, limit, seen, slots, exported, reasons):
    listed = [(process(pid), used * MIB) for pid, used in seen.items()]
    account = Account({key: used * MIB for key, used in slots.items()}, limit * MIB, exported=exported * MIB)
    assert [one.reason for one in judge(listed, account)] == reasons


def test_largest_excess_is_reported_first():
    seen = [(process(10), 600 * MIB), (process(11), 900 * MIB), (process(12), 100 * MIB)]
    (found,) = judge(seen, Account({(77, 10): 100 * MIB, (77, 11): 800 * MIB, (77, 12): 100 * MIB}, LIMIT))
    assert [one.pid for one, _used in found.processes] == [10, 11, 12]
    assert (found.found, found.accounted) == (1600 * MIB, 1000 * MIB)


def test_tolerance_is_twice_the_step_of_the_library():
    """The library compares its charge with the driver's figure each time the charge has changed by a step. STEP_LEAST
    and STEP_PART in unaccounted.c define the step. The tolerance must be twice the step.
    """
    source = (Path(__file__).resolve().parents[4] / "native/vcuda/src/context/unaccounted.c").read_text()
    assert "#define STEP_LEAST (32 * MIB)" in source
    assert "#define STEP_PART 32" in source
    assert (tolerance(0, True), tolerance(3200 * MIB, True)) == (64 * MIB, 200 * MIB)


@pytest.fixture
def watched(tmp_path) -> Watched:
    return Watched(tmp_path)


def test_process_is_reported_once_at_the_second_poll(watched):
    watched.run(20, 70 * MIB)
    assert watched.look() == []
    assert watched.look() == [NO_SLOT]
    assert watched.look(5) == [NO_SLOT]
    (found,) = watched.found
    assert "process 20 (python) holds 70 MiB" in found.text()
    assert watched.watch.state().totals == {(NO_SLOT, "kubelet"): 1}


def test_container_with_a_new_process_at_each_poll_is_reported(watched):
    """A process that restarts all the time has a new pid at each poll, so the container is named instead."""
    watched.run(20, MIB)
    watched.look()
    watched.card.running[watched.uuid] = {}
    watched.run(21, MIB)
    assert watched.look() == [NO_SLOT]


def test_recurring_finding_is_reported_once_a_minute(watched):
    watched.run(20, MIB)
    gone: dict[int, int | None] = {}
    for _times in range(5):
        watched.look(2)
        watched.card.running[watched.uuid], gone = gone, watched.card.running[watched.uuid]
        assert watched.look() == []
        watched.card.running[watched.uuid], gone = gone, watched.card.running[watched.uuid]
    assert len(watched.found) == 1
    assert watched.watch.state().totals == {(NO_SLOT, "kubelet"): 5}
    assert len(watched.watch.state().past) == 5
    watched.look(40)
    watched.card.running[watched.uuid] = {}
    watched.look()
    watched.card.running[watched.uuid] = {20: MIB}
    watched.look(2)
    assert len(watched.found) == 2


def test_process_of_an_unknown_container_is_a_metric_and_a_finding(watched):
    """A process of an unknown container becomes a metric and a finding; a process of the host does not."""
    watched.mode = watch.END
    watched.proc.add(40, group="/docker/other")
    watched.proc.add(41, mnt="mnt:[1]", pid="pid:[2]")
    watched.card.running[watched.uuid] = {40: 300 * MIB, 41: 300 * MIB}
    assert watched.look() == []
    assert watched.watch.state().unplaced == {watched.uuid: 1}
    assert watched.look() == [UNPLACED]
    (finding,) = watched.found
    assert finding.text().startswith(f"process 40 (python) uses {watched.uuid}")
    assert (finding.allocation, finding.kind, watched.ender.asked) == ("", "unknown", [])
    watched.card.running.clear()
    assert watched.look() == []
    assert watched.watch.state().unplaced == {watched.uuid: 0}


def test_invisible_process_is_reported(watched):
    """A process that is invisible at one poll may have just ended, so it is not reported yet. If there is an unknown
    process at every poll, it is reported.
    """
    for pid in range(50, 55):
        watched.card.running[watched.uuid] = {pid: MIB}
        assert watched.look() == []
        assert watched.watch.state().unplaced == {watched.uuid: 0}
    assert watched.look(2) == [UNPLACED]
    assert watched.watch.state().unplaced == {watched.uuid: 1}


def test_file_lease_on_the_ledger_does_not_block_the_poll(watched):
    """If a process has a file lease (F_SETLEASE) on the ledger, a plain open waits for up to 45 seconds. So the watcher
    must open the ledger without waiting."""
    watched.run(20, 900 * MIB)
    descriptor = os.open(watched.folder / "rw" / "ledger", os.O_RDWR)
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pytest.raises(BlockingIOError):
            abi_files.read_ledger(str(watched.folder / "rw" / "ledger"))
        assert watched.look(2) == [NO_SLOT]
    finally:
        os.close(descriptor)
        signal.signal(signal.SIGIO, signal.SIG_DFL)


def test_slot_of_a_dead_process_covers_no_live_process(watched):
    watched.run(20, 70 * MIB)
    os.close(watched.charge(20, 70 * MIB, alive=False))
    assert watched.look(2) == [NO_SLOT]


@pytest.mark.parametrize(("exported_mib", "found"), [(900, []), (700, [MEMORY]), (0, [MEMORY]), (1 << 31, [])])
def test_exports_of_a_dead_process_stay_charged(watched, exported_mib, found):
    """A process exported memory and died, but another process that imported the memory still uses it. So the memory
    stays charged in the slot of the dead process, but at most as much as that process had.
    """
    watched.run(20, 900 * MIB)
    descriptors = [watched.charge(20, 0), watched.imported()]
    os.close(watched.charge(19, 900 * MIB, slot=1, alive=False, exported_mib=exported_mib))
    assert watched.look(2) == found
    for descriptor in descriptors:
        os.close(descriptor)


# columns: the number of the dead slot, whether a process imported any memory, whether the ledger's field slot_high
# covers this slot
FORGED = [(1023, True, False), (1023, False, True), (1, False, True), (1, True, False)]


@pytest.mark.parametrize(("slot", "held", "known"), FORGED)
def test_exported_memory_without_importers_covers_no_process(watched, slot, held, known):
    """If exported memory without importers counted, a tenant could write a large value into a slot that the library
    never reads, and all the tenant's memory would be tolerated.
    """
    watched.run(20, 900 * MIB)
    descriptors = [watched.charge(20, 0)] + ([watched.imported()] if held else [])
    os.close(watched.charge(19, 1 << 62, slot, alive=False, exported_mib=0xFFFFFFFF, known=known))
    assert watched.look(2) == [MEMORY]
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("charged", [10228 * MIB, 1 << 62])
def test_use_over_the_limit_is_reported_for_any_ledger(watched, charged):
    """A container uses more than its limit. Its process writes the true sum or any other value into its own slot. In
    both cases the use must be reported."""
    watched.run(20, 10228 * MIB)
    descriptor = watched.charge(20, charged)
    assert watched.look(2) == [MEMORY]
    (finding,) = watched.found
    assert f"its limit is {LIMIT >> 20} MiB" in finding.text()
    os.close(descriptor)


def test_honest_process_that_frees_memory_is_not_reported(watched):
    """The process frees all its memory between the two reads of the ledger, at each poll."""
    watched.run(20, 900 * MIB)
    descriptor = watched.charge(20, 900 * MIB)
    assert watched.look(3) == []

    def freed() -> None:
        # The driver answers first; the ledger is read afterwards.
        watched.card.running[watched.uuid][20] = 900 * MIB

    watched.card.before_answer = freed
    before = watched.watch._account
    turns = iter(range(10**6))

    def flickering(*arguments: Any) -> Any:
        account = before(*arguments)
        # The first read of the ledger, before the driver's answer, shows the memory; the second read, after it, shows
        # none.
        return account if next(turns) % 2 else watch_rule.Account({(77, 20): 0}, LIMIT)

    watched.watch._account = flickering
    assert watched.look(6) == []
    os.close(descriptor)


def test_forged_live_slot_is_reported(watched):
    watched.run(20, 900 * MIB)
    descriptor = watched.charge(20, 0)
    assert watched.look(2) == [MEMORY]
    (found,) = watched.found
    assert "the driver reports 900 MiB" in found.text()
    os.close(descriptor)


def rewrite(watched: Watched, **changes: Any) -> None:
    watched.record = replace(watched.record, limits={**watched.record.limits, **changes})


def test_process_without_the_library_is_allowed_if_permitted(watched):
    rewrite(watched, allow_disable_control=True)
    watched.run(20, 900 * MIB)
    assert watched.look(3) == []


def test_unlimited_gpu_is_not_reported(watched):
    devices = watched.record.limits["devices"]
    rewrite(watched, devices=[{**one, "memory_bytes": 0, "unlimited": True} for one in devices])
    watched.run(20, 900 * MIB)
    assert watched.look(3) == []


@pytest.mark.parametrize(("kind", "found"), [("", []), ("kubelet", [NO_SLOT])])
def test_removed_ledger_of_a_recorded_allocation_is_a_finding(watched, kind, found):
    """If both ledger and record are missing, the allocation has ended, so nothing is reported. If only the ledger is
    missing, no slot covers the process, so it is reported.
    """
    watched.kind = kind
    watched.run(20, 900 * MIB)
    (watched.folder / "rw" / "ledger").unlink()
    assert watched.look(3) == found


def test_unresponsive_driver_is_reported_and_changes_no_finding(watched):
    watched.run(20, MIB)
    watched.look(2)
    watched.card.fault = "NVML does not list the processes: GPU is lost"
    assert watched.look(3) == [NO_SLOT]
    assert "GPU is lost" in watched.watch.state().fault
    watched.card.fault = ""
    watched.card.running.clear()
    assert watched.look() == []
    assert watched.watch.state().fault == ""


def test_watcher_continues_after_an_internal_error(watched, running):
    calls = []

    def broken() -> list[str]:
        calls.append(1)
        raise RuntimeError("boom")

    watched.uuids = broken
    one = watched.watcher(interval_s=0.01)
    running(one)
    until(lambda: len(calls) > 2, "three polls")
    assert one.state().fault == "RuntimeError: boom"


def test_policy_end_terminates_the_process(watched):
    watched.run(20, MIB)
    watched.mode = watch.END
    watched.look()
    assert watched.ender.asked == []
    watched.look()
    assert watched.ender.asked == [20]
    assert watched.watch.state().findings[0].action == "SIGTERM"


@pytest.mark.parametrize(("kind", "asked"), [("lease", []), ("kubelet", [20]), ("", [])])
def test_leases_and_processes_without_a_record_are_never_terminated(watched, kind, asked):
    """The files of an ended lease remain without a record for a moment, or longer if they cannot be removed."""
    watched.run(20, MIB)
    watched.mode, watched.kind = watch.END, kind
    assert watched.look(3) == [NO_SLOT]
    assert sorted(set(watched.ender.asked)) == asked


def test_no_process_is_killed_on_findings_from_before_the_driver_fell_silent(watched):
    watched.run(20, MIB)
    watched.look(2)
    watched.mode = watch.END
    watched.card.fault = "NVML does not list the processes: GPU is lost"
    assert watched.look(8) == [NO_SLOT]
    assert watched.ender.asked == []
    watched.card.fault = ""
    watched.look()
    assert watched.ender.asked == [20]


def test_process_with_a_reused_pid_is_not_terminated(watched):
    """After the poll and before the signal, the pid belongs to a process of no known container."""
    watched.run(20, MIB)
    watched.mode = watch.END
    watched.look(2)
    (victim,), still = watched.ender.victims, watched.ender.still
    assert still(victim)
    watched.device = lambda _path: ""
    assert not still(victim)


def test_process_that_replaces_a_terminated_process_gets_no_grace_period(watched):
    watched.mode = watch.END
    watched.run(20, MIB)
    watched.look(2)
    watched.card.running[watched.uuid] = {}
    watched.run(21, MIB)
    watched.look(3)
    assert watched.ender.begun == {20: None, 21: 104.0}


# columns: the case, MiB of each process by the driver, MiB that the ledger charges to it; expected terminated processes
VICTIMS: list[tuple[str, dict[int, int], dict[int, int], list[int]]] = [
    ("one process without a slot", {10: 7000, 11: 3000}, {10: 7000}, [11]),
    ("two processes without a slot", {10: 7000, 11: 3000, 12: 2000}, {10: 7000}, [11, 12]),
    ("true ledger over the limit: the largest process", {10: 3000, 11: 9000, 12: 500}, {}, [11]),
    ("each process alone over the limit", {10: 9000, 11: 9000}, {10: 9000, 11: 9000}, [10, 11]),
    ("forged slot changes only the order", {10: 9000, 11: 500}, {10: 1 << 40, 11: 500}, [11, 10]),
]


@pytest.mark.parametrize(("about", "used", "charged", "ended"), VICTIMS, ids=[row[0] for row in VICTIMS])
def test_processes_terminated_for_their_memory(about, used, charged, ended):
    """One poll terminates as many processes as needed to bring the container below its limit."""
    slots = {(77, pid): size * MIB for pid, size in (charged or used).items()}
    found = judge([(process(pid), size * MIB) for pid, size in used.items()], Account(slots, LIMIT))
    (memory,) = [one for one in found if one.reason == MEMORY]
    assert [one.pid for one in watch_rule.to_end(memory)] == ended


FINDING = {
    "allocation": "aaaa",
    "uuid": "GPU-1",
    "namespace": "default",
    "pod": "p",
    "container": "c",
    "reason": NO_SLOT,
    "kind": "kubelet",
}


def test_metrics_are_bounded_by_containers_and_reasons():
    status = {
        "gpus": [],
        "slices": [],
        "registered": True,
        "config_fault": "",
        "mounts_unchecked": 0,
        "warnings": [],
        "allocations": [],
    }
    status.update(version="1", config_name="", library="x", config_sha256="0" * 64)
    answer = {
        "findings": [FINDING],
        "totals": [{"reason": NO_SLOT, "kind": "kubelet", "count": 3}],
        "looks": 7,
        "old_mounts": [{"allocation": "bbbb", "namespace": "default", "pod": "q", "container": "c", "kind": "kubelet"}],
        "unplaced": [{"uuid": "GPU-1", "processes": 2, "bytes": 300, "host_bytes": 5}],
        "fault": "blind",
        "sigterm": 1,
        "sigkill": 0,
    }
    text = metrics.text(status, [], answer)
    assert 'vgpu_container_watch_finding{allocation="aaaa",uuid="GPU-1",namespace="default",pod="p",' in text
    assert 'vgpu_watch_findings_total{reason="no-slot",kind="kubelet"} 3' in text
    assert 'vgpu_watch_signals_total{signal="SIGTERM"} 1' in text
    assert 'vgpu_watch_findings_total{reason="more-memory",kind="static"} 0' in text
    assert 'vgpu_container_old_mounts{allocation="bbbb",namespace="default",pod="q",container="c"} 1' in text
    assert 'vgpu_watch_unplaced{uuid="GPU-1"} 2' in text
    assert 'vgpu_watch_host_bytes{uuid="GPU-1"} 5' in text
    assert "vgpu_watch_polls_total 7" in text
    assert "vgpu_watch_incomplete 1" in text
    assert "pid" not in text.replace("GPU-1", "")
    assert "vgpu_watch" not in metrics.text(status, [])


def test_certain_memory_is_the_drivers_value_minus_the_tolerance(tmp_path):
    """The resizer compares a smaller size with this value, because a tenant can forge the ledger."""
    node = Watched(tmp_path)
    assert node.watch.surely_holds(node.record, node.record.limits["devices"][0]["uuid"]) == 0
    node.run(20, 3200 * MIB)
    node.run(21, 70 * MIB)
    node.look(1)
    uuid = node.record.limits["devices"][0]["uuid"]
    assert node.watch.surely_holds(node.record, uuid) == (3000 + 6) * MIB
    uncounted = replace(node.record, limits={**node.record.limits, "count_context": False})
    assert node.watch.surely_holds(uncounted, uuid) == (3006 - 2048) * MIB
    assert node.watch.surely_holds(replace(node.record, id="other"), uuid) == 0
