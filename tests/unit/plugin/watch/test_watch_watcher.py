# SPDX-License-Identifier: Apache-2.0
"""The watcher: its rule on tables, whom it names, and who is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from doubles.proc import CONTAINER, Proc
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.admin import metrics
from vgpu_plugin.node.gpus import GpuError
from vgpu_plugin.watch import rule as watch_rule
from vgpu_plugin.watch import watcher as watch
from vgpu_plugin.watch.end import GRACE_S, Ender
from vgpu_plugin.watch.processes import Process, Processes
from vgpu_plugin.watch.rule import MEMORY, MIB, NO_SLOT, Account, judge, tolerance

from ..conftest import Node
from ..samples import until


def process(pid: int = 10, space: int = 77) -> Process:
    return Process(pid, 5, "python", (space, pid))


# What the sample allocation may hold: half of a T4.
LIMIT = 7680 * MIB
# Bytes by the driver of each process; slots by (namespace, pid); contexts count; the reasons.
RULE: list[tuple[str, dict[int, int | None], dict[tuple[int, int], int], bool, list[str]]] = [
    ("charged to the byte", {10: 900 * MIB}, {(77, 10): 900 * MIB}, True, []),
    ("charged more than it has", {10: 300 * MIB}, {(77, 10): 900 * MIB}, True, []),
    ("no slot at all", {10: 1}, {}, True, [NO_SLOT]),
    ("no slot, and the driver does not tell its memory", {10: None}, {}, True, [NO_SLOT]),
    ("the slot of the same pid in another pid namespace", {10: 1}, {(78, 10): 5}, True, [NO_SLOT]),
    ("a library that wrote no namespace", {10: 1}, {(0, 10): 5}, True, []),
    ("within a step of the library", {10: 164 * MIB}, {(77, 10): 100 * MIB}, True, []),
    ("a byte over it", {10: 164 * MIB + 1}, {(77, 10): 100 * MIB}, True, [MEMORY]),
    ("large ones by part", {10: 16000 * MIB}, {(77, 10): 15000 * MIB}, True, []),
    ("and a byte over that", {10: 16000 * MIB}, {(77, 10): 15000 * MIB - 1}, True, [MEMORY]),
    ("a context that does not count", {10: 1164 * MIB}, {(77, 10): 100 * MIB}, False, []),
    ("more than any context", {10: 1200 * MIB}, {(77, 10): 100 * MIB}, False, [MEMORY]),
    ("charged to another process of the container", {10: 500 * MIB}, {(77, 10): 0, (77, 11): 500 * MIB}, True, []),
    ("a slot that says nothing", {10: 500 * MIB}, {(77, 10): 0}, True, [MEMORY]),
    ("one honest, one without a slot", {10: 500 * MIB, 11: 70 * MIB}, {(77, 10): 500 * MIB}, True, [NO_SLOT]),
    ("the driver tells no memory", {10: None}, {(77, 10): 0}, True, []),
]


@pytest.mark.parametrize(("about", "seen", "slots", "counted", "reasons"), RULE, ids=[row[0] for row in RULE])
def test_rule(about, seen, slots, counted, reasons):
    listed = [(process(pid), used) for pid, used in seen.items()]
    found = judge(listed, Account(slots, 20000 * MIB, counted))
    assert [one.reason for one in found] == reasons


# The limit; bytes by the driver; what the ledger says of each slot and of exported memory; the reasons.
LIMITED: list[tuple[str, int, dict[int, int | None], dict[tuple[int, int], int], int, list[str]]] = [
    ("a ledger that is true, over the limit", 2048, {10: 10228}, {(77, 10): 10228}, 0, [MEMORY]),
    ("the same in two processes", 2048, {10: 5000, 11: 5228}, {(77, 10): 5000, (77, 11): 5228}, 0, [MEMORY]),
    ("a slot that says any figure", 2048, {10: 10228}, {(77, 10): 1 << 42}, 0, [MEMORY]),
    ("a slot of nobody that says any figure", 2048, {10: 10228}, {(77, 10): 0, (77, 99): 1 << 42}, 0, [MEMORY]),
    ("exported memory of any size", 2048, {10: 10228}, {(77, 10): 0}, 1 << 42, [MEMORY]),
    ("filled to the limit", 2048, {10: 2048}, {(77, 10): 2048}, 0, []),
    ("a step of the library over it", 2048, {10: 2176}, {(77, 10): 2176}, 0, []),
    ("nearly the limit", 2048, {10: 2036}, {(77, 10): 2036}, 0, []),
    ("below the limit and above the ledger", 2048, {10: 1000}, {(77, 10): 100}, 0, [MEMORY]),
]
LIMITED_IDS = [row[0] for row in LIMITED]


@pytest.mark.parametrize(("about", "limit", "seen", "slots", "exported", "reasons"), LIMITED, ids=LIMITED_IDS)
def test_the_limit_binds_whatever_the_ledger_says(about, limit, seen, slots, exported, reasons):
    listed = [(process(pid), used * MIB) for pid, used in seen.items()]
    account = Account({key: used * MIB for key, used in slots.items()}, limit * MIB, exported=exported * MIB)
    assert [one.reason for one in judge(listed, account)] == reasons


def test_who_is_furthest_beyond_is_named_first():
    seen = [(process(10), 600 * MIB), (process(11), 900 * MIB), (process(12), 100 * MIB)]
    (found,) = judge(seen, Account({(77, 10): 100 * MIB, (77, 11): 800 * MIB, (77, 12): 100 * MIB}, LIMIT))
    assert [one.pid for one, _used in found.processes] == [10, 11, 12]
    assert (found.found, found.accounted) == (1600 * MIB, 1000 * MIB)


def test_tolerance_is_twice_the_step_of_the_library():
    """The twin of STEP_LEAST and STEP_PART in unaccounted.c."""
    source = (Path(__file__).resolve().parents[4] / "native/vcuda/src/context/unaccounted.c").read_text()
    assert "#define STEP_LEAST (32 * MIB)" in source
    assert "#define STEP_PART 32" in source
    assert (tolerance(0, True), tolerance(3200 * MIB, True)) == (64 * MIB, 200 * MIB)


class Card:
    """A driver that says what the test says."""

    def __init__(self) -> None:
        self.running: dict[str, dict[int, int | None]] = {}
        self.fault = ""
        self.before_answer = lambda: None

    def processes(self, uuid: str) -> dict[int, int | None]:
        if self.fault:
            raise GpuError(self.fault)
        self.before_answer()
        return dict(self.running.get(uuid, {}))


class Watched:
    """A node with one allocation on GPU 0, whose process 20 the watcher sees; the ledger's liveness is the kernel's."""

    def __init__(self, node: Node, proc: Path) -> None:
        _pool, allocator, self.files = node.parts()
        self.uuid = node.gpus[0].uuid
        self.allocation = allocator.allocate([[f"{self.uuid}::0"]])[0].allocation
        self.folder = self.files.folder(self.allocation)
        self.card, self.proc, self.now = Card(), Proc(proc), 100.0
        self.found: list[watch.Finding] = []
        self.mode, self.kind = watch.REPORT, "kubelet"
        self.ender = Ends()
        self.processes = Processes(proc)
        self.device = lambda path: "0:50" if self.allocation in str(path) else ""
        self.watch = self.watcher()

    def watcher(self, **options: Any) -> watch.Watch:
        def device(path: Path) -> int | None:
            return self.device(path)  # looked up at each call: tests replace it

        kernel = watch.Kernel(self.processes, self.ender, lambda: self.now, device)
        return watch.Watch(self.card, self.files, self, self.found.append, kernel, **options)

    def uuids(self) -> list[str]:
        return [self.uuid]

    def kinds(self) -> dict[str, str]:
        return {self.allocation: self.kind} if self.kind else {}

    def pods(self) -> dict[str, frozenset[str]]:
        return {}

    def policy(self) -> str:
        return self.mode

    def run(self, pid: int, used: int | None) -> None:
        self.proc.add(pid, mounts="0:50=/ledger", group=CONTAINER)
        self.card.running.setdefault(self.uuid, {})[pid] = used

    def look(self, times: int = 1) -> list[str]:
        for _time in range(times):
            self.now += 2
            self.watch.look()
        return [one.suspicion.reason for one in self.watch.state().findings]

    def charge(
        self, pid: int, used: int, slot: int = 0, alive: bool = True, exported_mib: int = 0, known: bool = True
    ) -> int:
        """Writes a slot, and holds its lock as a process does; the descriptor. ``known``: slot_high is above it."""
        import struct

        path = self.folder / "rw" / "ledger"
        descriptor = os.open(path, os.O_RDWR)
        base = abi_files.fields.LEDGER_SLOT_OFFSET + slot * abi_files.fields.LEDGER_SLOT_SIZE
        os.pwrite(descriptor, struct.pack("<Q", used), base)
        os.pwrite(descriptor, struct.pack("<IQ", pid, 77), base + 260)
        os.pwrite(descriptor, struct.pack("<I", exported_mib), base + 272)
        if known:
            os.pwrite(descriptor, struct.pack("<I", slot + 1), abi_files.fields.LEDGER_FIELDS["slot_high"][0])
        if alive:
            self.lock(descriptor, abi_files.fields.LEDGER_ALIVE_BASE + slot)
        return descriptor

    def imported(self) -> int:
        """Holds a reference to exported memory, as a process that imported it does; the descriptor."""
        descriptor = os.open(self.folder / "rw" / "ledger", os.O_RDWR)
        self.lock(descriptor, abi_files.fields.LEDGER_IMPORT_BASE)
        return descriptor

    @staticmethod
    def lock(descriptor: int, byte: int) -> None:
        import fcntl
        import struct

        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        fcntl.fcntl(descriptor, 37, lock)  # F_OFD_SETLK


class Ends:
    """Keeps account of who is to be ended."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.victims: list[Process] = []
        self.still: Any = None
        self.sent: dict[str, int] = {}

    def end(self, victim: Process, now: float, still: Any) -> str:
        self.asked.append(victim.pid)
        self.victims.append(victim)
        self.still = still
        return "SIGTERM" if still(victim) else ""

    def forget(self) -> None:
        self.asked.clear()


@pytest.fixture
def watched(node, tmp_path) -> Watched:
    return Watched(node, tmp_path / "proc")


def test_second_poll_names_the_process_and_reports_it_once(watched):
    watched.run(20, 70 * MIB)
    assert watched.look() == []
    assert watched.look() == [NO_SLOT]
    assert watched.look(5) == [NO_SLOT]
    (found,) = watched.found
    assert "process 20 (python) holds 70 MiB" in found.text()
    assert watched.watch.state().totals == {(NO_SLOT, "kubelet"): 1}


def test_another_process_each_look_does_not_escape(watched):
    """A process that restarts all the time is not named by its pid, but by its container."""
    watched.run(20, MIB)
    watched.look()
    watched.card.running[watched.uuid] = {}
    watched.run(21, MIB)
    assert watched.look() == [NO_SLOT]


def test_finding_that_comes_and_goes_is_reported_once_a_minute(watched):
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


def test_slot_of_a_dead_process_covers_nobody(watched):
    watched.run(20, 70 * MIB)
    os.close(watched.charge(20, 70 * MIB, alive=False))
    assert watched.look(2) == [NO_SLOT]


@pytest.mark.parametrize("exported_mib, found", [(900, []), (700, [MEMORY]), (0, [MEMORY]), (1 << 31, [])])
def test_exports_of_a_dead_process_stay_charged(watched, exported_mib, found):
    """Who imported it holds it on, and the ledger keeps it in the slot of the dead; never more than that one had."""
    watched.run(20, 900 * MIB)
    descriptors = [watched.charge(20, 0), watched.imported()]
    os.close(watched.charge(19, 900 * MIB, slot=1, alive=False, exported_mib=exported_mib))
    assert watched.look(2) == found
    for descriptor in descriptors:
        os.close(descriptor)


# (slot, whether a process imported anything, whether slot_high is above the slot)
FORGED = [(1023, True, False), (1023, False, True), (1, False, True), (1, True, False)]


@pytest.mark.parametrize(("slot", "held", "known"), FORGED)
def test_exported_memory_that_nobody_holds_covers_nobody(watched, slot, held, known):
    """One write into a slot that the library never reads, and everything else would be tolerated."""
    watched.run(20, 900 * MIB)
    descriptors = [watched.charge(20, 0)] + ([watched.imported()] if held else [])
    os.close(watched.charge(19, 1 << 62, slot, alive=False, exported_mib=0xFFFFFFFF, known=known))
    assert watched.look(2) == [MEMORY]
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("charged", [10228 * MIB, 1 << 62])
def test_more_than_the_limit_is_named_whatever_the_ledger_says(watched, charged):
    """The tenant writes the ledger: a true sum over the limit, or any other figure in its own live slot."""
    watched.run(20, 10228 * MIB)
    descriptor = watched.charge(20, charged)
    assert watched.look(2) == [MEMORY]
    (finding,) = watched.found
    assert f"its limit is {LIMIT >> 20} MiB" in finding.text()
    os.close(descriptor)


def test_honest_process_is_not_named_whatever_it_frees(watched):
    """It frees all between the two accounts, in each look."""
    watched.run(20, 900 * MIB)
    descriptor = watched.charge(20, 900 * MIB)
    assert watched.look(3) == []

    def freed() -> None:
        # The driver has answered by now; the ledger is read after that.
        watched.card.running[watched.uuid][20] = 900 * MIB

    watched.card.before_answer = freed
    before = watched.watch._account
    turns = iter(range(10**6))

    def flickering(*arguments: Any) -> Any:
        account = before(*arguments)
        # Read before the driver's answer it is full, read after it is empty.
        return account if next(turns) % 2 else watch_rule.Account({(77, 20): 0}, LIMIT)

    watched.watch._account = flickering
    assert watched.look(6) == []
    os.close(descriptor)


def test_lie_of_a_live_slot_is_named(watched):
    watched.run(20, 900 * MIB)
    descriptor = watched.charge(20, 0)
    assert watched.look(2) == [MEMORY]
    (found,) = watched.found
    assert "the driver says 900 MiB" in found.text()
    os.close(descriptor)


def rewrite(watched: Watched, **changes: Any) -> None:
    path = watched.folder / "limits"
    limits = abi_files.as_packed(abi_files.parse_limits(path.read_bytes()), **changes)
    path.chmod(0o644)
    path.write_bytes(abi_files.pack_limits(limits))


def test_who_may_do_without_the_library_is_not_named(watched):
    rewrite(watched, allow_disable_control=True)
    watched.run(20, 900 * MIB)
    assert watched.look(3) == []


def test_whole_gpu_without_a_limit_is_not_named(watched):
    devices = abi_files.parse_limits((watched.folder / "limits").read_bytes())["devices"]
    rewrite(watched, devices=[{**one, "memory_bytes": 0, "unlimited": True} for one in devices])
    watched.run(20, 900 * MIB)
    assert watched.look(3) == []


def test_ledger_that_was_taken_away_with_the_allocation_is_no_finding(watched):
    watched.run(20, 900 * MIB)
    (watched.folder / "rw" / "ledger").unlink()
    assert watched.look(3) == []


def test_driver_that_does_not_answer_changes_nothing_and_is_said(watched):
    watched.run(20, MIB)
    watched.look(2)
    watched.card.fault = "NVML does not list the processes: GPU is lost"
    assert watched.look(3) == [NO_SLOT]
    assert "GPU is lost" in watched.watch.state().fault
    watched.card.fault = ""
    watched.card.running.clear()
    assert watched.look() == []
    assert watched.watch.state().fault == ""


def test_watcher_goes_on_after_a_fault_of_its_own(watched, running):
    calls = []

    def broken() -> list[str]:
        calls.append(1)
        raise RuntimeError("boom")

    watched.uuids = broken
    one = watched.watcher(interval_s=0.01)
    running(one)
    until(lambda: len(calls) > 2, "three polls")
    assert one.state().fault == "RuntimeError: boom"


def test_policy_end(watched):
    watched.run(20, MIB)
    watched.mode = watch.END
    watched.look()
    assert watched.ender.asked == []
    watched.look()
    assert watched.ender.asked == [20]
    assert watched.watch.state().findings[0].action == "SIGTERM"


@pytest.mark.parametrize("kind, asked", [("lease", []), ("kubelet", [20]), ("", [])])
def test_lease_and_what_nobody_has_a_record_of_are_never_ended(watched, kind, asked):
    """A lease that is over has files without a record for a moment; longer, where they cannot be removed."""
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


def test_pid_that_is_another_process_by_now_is_spared(watched):
    """Between the look and the signal: the process is in no container of ours any more."""
    watched.run(20, MIB)
    watched.mode = watch.END
    watched.look(2)
    (victim,), still = watched.ender.victims, watched.ender.still
    assert still(victim)
    watched.device = lambda _path: ""
    assert not still(victim)


@pytest.fixture
def victim() -> Any:
    """A process that ignores SIGTERM."""
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('x', flush=True); time.sleep(60)"
    one = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert one.stdout is not None
    assert one.stdout.readline()
    yield one
    one.kill()
    one.wait()


def test_end_first_asks_then_kills(victim):
    processes = Processes()
    ender = Ender(processes.process)
    found = processes.process(victim.pid)
    assert found is not None
    assert ender.end(found, 100.0, lambda _one: False) == ""  # not the one that was meant
    assert ender.end(found, 100.0, lambda _one: True) == "SIGTERM"
    assert ender.end(found, 100.0 + GRACE_S - 0.1, lambda _one: True) == ""
    time.sleep(0.05)
    assert victim.poll() is None
    assert ender.end(found, 100.0 + GRACE_S, lambda _one: True) == "SIGKILL"
    victim.wait(30)
    assert victim.returncode == -signal.SIGKILL
    assert ender.end(found, 200.0, lambda _one: True) == ""  # gone
    assert ender.sent == {"SIGTERM": 1, "SIGKILL": 1}


def test_end_spares_who_has_the_pid_now(victim):
    processes = Processes()
    found = processes.process(victim.pid)
    assert found is not None
    older = Process(found.pid, found.start - 1, found.name, found.own)
    assert Ender(processes.process).end(older, 1.0, lambda _one: True) == ""
    assert victim.poll() is None


def test_grace_ends_with_the_policy(victim):
    processes = Processes()
    ender = Ender(processes.process)
    found = processes.process(victim.pid)
    assert found is not None
    assert ender.end(found, 1.0, lambda _one: True) == "SIGTERM"
    ender.forget()
    assert ender.end(found, 1000.0, lambda _one: True) == "SIGTERM"


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
    status = {"gpus": [], "slices": [], "registered": True, "config_fault": "", "warnings": [], "allocations": []}
    status.update(version="1", config_name="", library="x", config_sha256="0" * 64)
    answer = {
        "findings": [FINDING],
        "totals": [{"reason": NO_SLOT, "kind": "kubelet", "count": 3}],
        "looks": 7,
        "fault": "blind",
        "sigterm": 1,
        "sigkill": 0,
    }
    text = metrics.text(status, [], answer)
    assert 'vgpu_container_watch_finding{allocation="aaaa",uuid="GPU-1",namespace="default",pod="p",' in text
    assert 'vgpu_watch_findings_total{reason="no-slot",kind="kubelet"} 3' in text
    assert 'vgpu_watch_signals_total{signal="SIGTERM"} 1' in text
    assert "vgpu_watch_polls_total 7" in text
    assert "vgpu_watch_incomplete 1" in text
    assert "pid" not in text.replace("GPU-1", "")
    assert "vgpu_watch" not in metrics.text(status, [])
