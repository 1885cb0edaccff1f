# SPDX-License-Identifier: Apache-2.0
"""A node with one allocation, as the watcher (which compares the driver's data with the limits of containers) sees it.
The driver and /proc are doubles that a test fills. Ledgers, in which containers count their memory, are real files. A
real kernel lock on a slot of a ledger shows that the slot's process is alive.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.allocation.allocation_files import AllocationFiles
from vgpu_plugin.allocation.records import KUBELET, Record
from vgpu_plugin.node.gpus import GpuError
from vgpu_plugin.watch import watcher as watch
from vgpu_plugin.watch.processes import Process, Processes

from .proc import CONTAINER, Proc

F_OFD_SETLK = 37
MIB = 1 << 20
UUID, NEIGHBOUR = "GPU-00000000-0000-0000-0000-000000000000", "bbbb"
# The memory limit of the allocation: half of a T4.
LIMIT = 7680 * MIB


class Folders:
    """Replaces each tmpfs by a plain folder."""

    def mount_tmpfs(self, target: Path, size: int) -> None:
        """Does nothing: the folder exists already."""

    def unmount(self, target: Path) -> None:
        for entry in target.iterdir():
            entry.unlink()

    def is_mount(self, target: Path) -> bool:
        return True


def record(allocation: str, library: str = "", kind: str = KUBELET, **limits: Any) -> Record:
    device = {"uuid": UUID, "memory_bytes": LIMIT, "sm_percent": 50}
    return Record(allocation, kind, (f"{UUID}::0",), {"allocation": allocation, "devices": [device], **limits}, library)


class Card:
    """A double of the driver that returns the processes and the utilisation that the test sets."""

    def __init__(self) -> None:
        self.running: dict[str, dict[int, int | None]] = {}
        self.taken: dict[int, float] | None = None
        self.fault = ""
        self.before_answer = lambda: None

    def processes(self, uuid: str) -> dict[int, int | None]:
        if self.fault:
            raise GpuError(self.fault)
        self.before_answer()
        return dict(self.running.get(uuid, {}))

    def utilisation(self, _uuid: str, _since_us: int) -> dict[int, float] | None:
        return self.taken


class Watched:
    """A node with one allocation on a GPU. A test adds processes, ledger slots and a second allocation."""

    def __init__(self, folder: Path) -> None:
        self.uuid, self.allocation = UUID, "aaaa"
        self.files = AllocationFiles(folder / "allocations", Folders(), lambda _descriptor: None)
        self.library_folder = folder / "lib" / "0.1.0-aaaaaaaaaaaa"
        self.library_folder.mkdir(parents=True)
        self.record = record(self.allocation, str(self.library_folder))
        self.neighbours: dict[str, Record] = {}
        self.files.make(self.record)
        self.folder = self.files.folder(self.allocation)
        self.card, self.proc, self.now = Card(), Proc(folder / "proc"), 100.0
        self.found: list[watch.Finding] = []
        self.mode, self.kind = watch.REPORT, "kubelet"
        self.ender = Ends()
        self.processes = Processes(folder / "proc", lambda: self.now)
        self.device: Callable[[Path], str] = self.device_of
        self.watch = self.watcher()

    def device_of(self, path: Path) -> str:
        return {self.allocation: "0:50", NEIGHBOUR: "0:51"}.get(path.parent.name, "")

    def add_neighbour(self) -> None:
        self.neighbours[NEIGHBOUR] = record(NEIGHBOUR, str(self.library_folder))
        self.files.make(self.neighbours[NEIGHBOUR])

    def watcher(self, **options: Any) -> watch.Watch:
        def device(path: Path) -> str:
            return self.device(path)  # The attribute is read at each call, because tests replace it.

        clocks = (lambda: self.now, device, lambda: self.now, lambda: int(self.now * 1e9))
        kernel = watch.Kernel(self.processes, self.ender, *clocks)
        return watch.Watch(self.card, self.files, self, self.found.append, kernel, **options)

    def uuids(self) -> list[str]:
        return [self.uuid]

    def records(self) -> dict[str, Record]:
        mine = {self.allocation: replace(self.record, kind=self.kind)} if self.kind else {}
        return {**mine, **self.neighbours}

    def library(self) -> str:
        return ""

    def pods(self) -> dict[str, frozenset[str]]:
        return {}

    def policy(self) -> str:
        return self.mode

    def run(self, pid: int, used: int | None, device: str = "0:50") -> None:
        self.proc.add(pid, mounts=f"{device}=/ledger", group=CONTAINER if device == "0:50" else f"/other/{device}")
        self.card.running.setdefault(self.uuid, {})[pid] = used

    def look(self, times: int = 1) -> list[str]:
        for _time in range(times):
            self.now += 2
            self.watch.look()
        return [one.suspicion.reason for one in self.watch.state().findings]

    def charge(
        self,
        pid: int,
        used: int,
        slot: int = 0,
        alive: bool = True,
        exported_mib: int = 0,
        known: bool = True,
        space: int = 77,
    ) -> int:
        """Writes a slot of the ledger as a process of the container does; returns the open descriptor of the ledger.

        ``known``: raise the ledger's field slot_high above this slot. ``alive``: take the lock of a live process.
        """
        path = self.folder / "rw" / "ledger"
        descriptor = os.open(path, os.O_RDWR)
        base = abi_files.fields.LEDGER_SLOT_OFFSET + slot * abi_files.fields.LEDGER_SLOT_SIZE
        os.pwrite(descriptor, struct.pack("<Q", used), base)
        os.pwrite(descriptor, struct.pack("<IQ", pid, space), base + 260)
        os.pwrite(descriptor, struct.pack("<I", exported_mib), base + 272)
        if known:
            os.pwrite(descriptor, struct.pack("<I", slot + 1), abi_files.fields.LEDGER_FIELDS["slot_high"][0])
        if alive:
            self.lock(descriptor, abi_files.fields.LEDGER_ALIVE_BASE + slot)
        return descriptor

    def imported(self) -> int:
        """Takes the lock of a process that imported exported memory; returns the open descriptor."""
        descriptor = os.open(self.folder / "rw" / "ledger", os.O_RDWR)
        self.lock(descriptor, abi_files.fields.LEDGER_IMPORT_BASE)
        return descriptor

    @staticmethod
    def lock(descriptor: int, byte: int) -> None:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        fcntl.fcntl(descriptor, F_OFD_SETLK, lock)


class Ends:
    """Records the processes that the watcher terminates, and terminates none."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.begun: dict[int, float | None] = {}
        self.victims: list[Process] = []
        self.still: Any = None
        self.sent: dict[str, int] = {}

    def end(self, victim: Process, now: float, still: Any, begun: float | None = None) -> str:
        self.asked.append(victim.pid)
        self.begun.setdefault(victim.pid, begun)
        self.victims.append(victim)
        self.still = still
        return "SIGTERM" if still(victim) else ""

    def forget(self) -> None:
        self.asked.clear()
