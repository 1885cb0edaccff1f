# SPDX-License-Identifier: Apache-2.0
"""Whose a process on a GPU is: the container of which allocation, or none of ours. Read from /proc, never from the
process's own files.

A container's ledger is a file of a tmpfs that belongs to one allocation alone, so a process with that very mount is in
its container: a tenant without CAP_SYS_ADMIN can neither make nor copy it. One that hides its mounts (chroot, a mount
namespace of its own), or lost them because somebody removed the folders on the node that they lay on, is known by the
ledger that it has mapped, or by its control group, which it cannot leave. What lives in the host's mount namespace, or
shares its pid namespace outside a container's control group, is a process of the host and never anybody's. Any other
process on a GPU is of no container that is known here.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import mounts
from .mounts import Table

# Of the mount that the container gets; its file may have been replaced on the node since.
REMOVED_ROOT = "/ledger//deleted"
LEDGER_ROOTS = ("/ledger", REMOVED_ROOT)
# Of a pod's control group, with dashes or, by systemd's driver, underscores.
POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})")
# Of a container's control group: docker, containerd, CRI-O and podman name it by the container's id.
CONTAINER_ID = re.compile(r"[0-9a-f]{64}")
# Controllers of version 1 that every runtime gives a container a group of.
CONTROLLERS = ("memory", "pids", "devices", "name=systemd")
MOST_GROUPS = 4096
# A look at every process of a machine takes some 20 ms; it is not repeated sooner for the same container.
VAIN_S = 30.0
# Of such a look, in bytes: of the list of one process, where ours come first, for they are there before its container
# runs; and of all lists of one container, whose tenant may have thousands of processes with the longest lists.
LONGEST_OF_OTHERS, MOST_OF_OTHERS = 64 << 10, 1 << 20
# Of the maps of a process that shows no ledger, in bytes.
MOST_OF_MAPS = 4 << 20


@dataclass(frozen=True)
class Process:
    """``start`` tells a pid from the same pid given out again; ``own``: (inode of its pid namespace, its pid there)."""

    pid: int
    start: int
    name: str
    own: tuple[int, int]


@dataclass
class Placed:
    """Where processes belong: ``owners`` by pid; ``strangers`` live in no container that is known here; ``gone`` cannot
    be looked at (any more); ``host`` are programs of the host itself. ``removed``: allocations whose container has a
    ledger that was removed from the node, which no tenant can do.
    """

    owners: dict[int, frozenset[str]] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    strangers: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    host: set[int] = field(default_factory=set)


class Processes:
    """``proc`` is the host's /proc."""

    def __init__(self, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self.proc = self._proc = proc
        self._clock = clock
        # Control group → allocations of the container that it is; names of groups are not given out twice.
        self._groups: dict[str, frozenset[str]] = {}
        # Control group → when all processes were looked at for it, a container without a slice most likely.
        self._vain: dict[str, float] = {}
        # The lists of mounts that were read last: many processes have the same, and few change between two looks.
        self._tables: dict[bytes, Table] = {}
        self._used: set[bytes] = set()

    def process(self, pid: int) -> Process | None:
        """None where it is gone or about to go: its memory is given back, its GPU perhaps not yet."""
        try:
            fields = next(filter(_lives, map(_status, self._threads(pid))), None)
            namespace = self._link(pid, "pid")
            if fields is None or not namespace:
                return None
            stat = (self._proc / str(pid) / "stat").read_text(errors="replace")
            # The name in parentheses may hold anything; the time of start is the 20th figure after it.
            start = int(stat.rpartition(")")[2].split()[19])
            inner = int(fields.get("NStgid", str(pid)).split()[-1])
            name = "".join(char if char.isprintable() else "?" for char in fields["Name"].strip())
            return Process(pid, start, name, (_inode(namespace), inner))
        except (OSError, ValueError, KeyError, IndexError):
            return None

    def of(
        self, pids: Iterable[int], devices: Mapping[str, str], pods: Callable[[], Mapping[str, frozenset[str]]] = dict
    ) -> dict[int, frozenset[str]]:
        """The owners of ``place`` alone."""
        return self.place(pids, devices, pods).owners

    def place(
        self, pids: Iterable[int], devices: Mapping[str, str], pods: Callable[[], Mapping[str, frozenset[str]]] = dict
    ) -> Placed:
        """The allocations of the container of each pid.

        ``devices``: major:minor of the tmpfs of each allocation → allocation; ``pods``: uid of a pod → allocations of
        its containers, asked only where somebody hides.
        """
        known = set(devices.values())
        self._groups = {group: mine for group, mine in self._groups.items() if mine <= known}
        # This program's own count as the host's too: it may not be allowed to look at process 1.
        host_mounts, host_pids = ({self._link(one, kind) for one in (1, "self")} - {""} for kind in ("mnt", "pid"))
        out = Placed()
        hidden = []
        for pid in pids:
            mounted, space = self._link(pid, "mnt"), self._link(pid, "pid")
            if not mounted or not space:
                out.gone.add(pid)
                continue
            if mounted in host_mounts:
                out.host.add(pid)
                continue
            contained = bool(host_pids) and (space not in host_pids or _is_container(self.group(pid)))
            table = self.table(pid) if devices else Table()
            if mine := _shown(table, devices):
                out.owners[pid] = mine
                out.removed |= _shown(table, devices, (REMOVED_ROOT,))
                if contained:
                    self._learn(pid, mine)
            elif contained and (mine := self._mapped(pid, devices, out)):
                out.owners[pid] = mine
                self._learn(pid, mine)
            elif contained:
                hidden.append(pid)
            else:
                out.host.add(pid)
        if hidden:
            out.owners |= self._hidden(hidden, devices, pods, host_pids)
            out.strangers = set(hidden) - set(out.owners)
        return out

    def _hidden(
        self,
        pids: list[int],
        devices: Mapping[str, str],
        pods: Callable[[], Mapping[str, frozenset[str]]],
        host_pids: set[str],
    ) -> dict[int, frozenset[str]]:
        found: dict[int, frozenset[str]] = {}
        asked = False
        for pid in pids:
            group = self.group(pid)
            if not group:
                continue
            mine = self._of_group(group)
            if not mine and not asked and self._clock() - self._vain.get(group, -VAIN_S) >= VAIN_S:
                # All others of the machine are looked at once: one of the same container shows its mounts.
                asked = True
                if len(self._vain) >= MOST_GROUPS:
                    self._vain.clear()
                self._vain[group] = self._clock()
                self._look_at_all(devices, host_pids)
                mine = self._of_group(group)
            if not mine and (pod := POD.search(group)):
                of_pod = pods().get(pod.group(1).replace("_", "-"), frozenset())
                mine = of_pod if len(of_pod) == 1 else frozenset()
            if mine:
                found[pid] = mine
        return found

    def _look_at_all(self, devices: Mapping[str, str], host_pids: set[str]) -> None:
        """Learns the groups of all processes in containers that show a ledger."""
        read: dict[str, int] = {}
        for one in self._all():
            if self._link(one, "pid") in {"", *host_pids}:
                continue
            group = self.group(one)
            container = _outermost(group)
            if read.get(container, 0) >= MOST_OF_OTHERS or group in self._groups:
                continue
            # Of hundreds of containers: none of these lists is kept.
            table = self.table(one, keep=False, most=LONGEST_OF_OTHERS)
            read[container] = read.get(container, 0) + table.size
            if shown := _shown(table, devices):
                self._learn(one, shown)

    def group(self, pid: int) -> str:
        """The control group of a process, empty where it is the root group or none.

        A hybrid host has version 2 for systemd's services alone: there all containers of a daemon are in the group of
        that daemon, and only version 1 tells one from another.
        """
        try:
            lines = (self._proc / str(pid) / "cgroup").read_text(errors="replace").splitlines()
        except OSError:
            return ""
        paths = {name: path for _number, name, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)}
        for name in (*CONTROLLERS, ""):
            for controllers, path in paths.items():
                # Seen from a namespace of control groups the root is /../.. or so.
                if name in controllers.split(",") and path.strip("/."):
                    return path
        return ""

    def _learn(self, pid: int, mine: frozenset[str]) -> None:
        group = self.group(pid)
        if group and (group in self._groups or len(self._groups) < MOST_GROUPS):
            self._groups[group] = mine

    def _of_group(self, group: str) -> frozenset[str]:
        """Of the group or of the nearest one above it: a container may make groups below its own."""
        while group.strip("/"):
            if group in self._groups:
                return self._groups[group]
            group = group.rpartition("/")[0]
        return frozenset()

    def _mapped(self, pid: int, devices: Mapping[str, str], out: Placed) -> frozenset[str]:
        """The allocations whose files a process has mapped, which none but its container can open."""
        found = set()
        for thread in self._threads(pid) if devices else ():
            with contextlib.suppress(OSError), open(thread / "maps", "rb") as stream:
                for line in stream.read(MOST_OF_MAPS).splitlines():
                    words = line.split(None, 5)
                    # Files alone have a device.
                    if len(words) == 6 and words[3] != b"00:00" and (mine := devices.get(_decimal(words[3]))):
                        found.add(mine)
                        out.removed |= {mine} if words[5].endswith(b"(deleted)") else set()
                return frozenset(found)
        return frozenset()

    def table(self, pid: int | str, keep: bool = True, most: int = 0) -> Table:
        """The mounts of a process, as they are now; none where it is gone. ``most``: bytes of the list, 0: LONGEST.
        This program's own are read whole.
        """
        most = 0 if pid == "self" else most or mounts.LONGEST
        for thread in self._threads(pid):
            with contextlib.suppress(OSError):
                data = mounts.read(thread / "mountinfo", most)
                table = self._tables.get(data) or mounts.parse(data, most)
                if keep:
                    self._tables[data] = table
                    self._used.add(data)
                return table
        return Table()

    def sees_own_root(self) -> bool:
        """Whether this program lives among the mounts of the host; one in a pod does not."""
        return self._link(1, "mnt") in ("", self._link("self", "mnt"))

    def end_look(self) -> None:
        """Forgets the lists of mounts that nobody had in this look."""
        self._tables = {data: table for data, table in self._tables.items() if data in self._used}
        self._used.clear()

    def _link(self, pid: int | str, name: str) -> str:
        for thread in self._threads(pid):
            with contextlib.suppress(OSError):
                return os.readlink(thread / "ns" / name)
        return ""

    def _threads(self, pid: int | str) -> Iterator[Path]:
        """The folder of a process, then those of its threads: a process whose first thread has ended shows neither
        memory nor mounts in its own, and runs on in another thread.
        """
        yield self._proc / str(pid)
        with contextlib.suppress(OSError):
            yield from (self._proc / str(pid) / "task").iterdir()

    def _all(self) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self._proc) if name.isdigit()]
        except OSError:
            return []


def _shown(table: Table, devices: Mapping[str, str], roots: tuple[str, ...] = LEDGER_ROOTS) -> frozenset[str]:
    """The allocations whose ledger file is in a list of mounts."""
    return frozenset(devices[row.device] for row in table.rows if row.root in roots and row.device in devices)


def _outermost(group: str) -> str:
    """The container that a control group is of, without what it made below its own; else the pod, or the group."""
    found = CONTAINER_ID.search(group) or POD.search(group)
    return group[: found.end()] if found else group


def _is_container(group: str) -> bool:
    """Whether a control group is one of a container, by its name."""
    return bool(POD.search(group) or CONTAINER_ID.search(group))


def _status(thread: Path) -> dict[str, str]:
    """The fields of a thread's status; empty where it is gone."""
    try:
        lines = (thread / "status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _lives(fields: Mapping[str, str]) -> bool:
    """Whether a thread with this status runs and has memory: one that ends has given it back."""
    return "VmSize" in fields and fields["State"].split()[0] not in ("Z", "X")


def _decimal(device: bytes) -> str:
    """``00:1f`` of maps, as mountinfo has it: 0:31; empty for what is none."""
    try:
        major, minor = (int(number, 16) for number in device.split(b":"))
    except ValueError:
        return ""
    return f"{major}:{minor}"


def _inode(link: str) -> int:
    """Of ``pid:[4026531836]``."""
    return int(link.partition("[")[2].rstrip("]"))


def device_of(path: Path) -> str:
    """major:minor of the mount that a path is, as /proc names it; empty where it is no mount of its own."""
    try:
        device = os.stat(path).st_dev
        if device == os.stat(path.parent).st_dev:
            return ""
    except OSError:
        return ""
    return f"{os.major(device)}:{os.minor(device)}"
