# SPDX-License-Identifier: Apache-2.0
"""Finds to which allocation (the slices of one container) a process on a GPU belongs. It reads only /proc, never the
process's own files.

Each allocation has a tmpfs with its container's ledger, the file in which the library counts GPU memory. A process with
a mount of that tmpfs is in the container, because a tenant without CAP_SYS_ADMIN can neither create nor copy the mount.
Some processes do not have the mount: they hide it (by chroot or their own mount namespace), or the folders were removed
on the node. These are identified by the ledger that they have mapped, or by their control group, which they cannot
leave. A process in the host's mount namespace, or in the host's pid namespace and outside a container's control group,
is a process of the host. Any other process on a GPU belongs to an unknown container.
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

# Root that a container's mountinfo shows for the ledger's mount after the ledger was replaced on the node.
REMOVED_ROOT = "/ledger//deleted"
LEDGER_ROOTS = ("/ledger", REMOVED_ROOT)
# Matches the control group of a pod. Its uid is written with dashes or, by the systemd driver, with underscores.
POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})")
# Matches the control group of a container: docker, containerd, CRI-O and podman put the container's id into its name.
CONTAINER_ID = re.compile(r"[0-9a-f]{64}")
# Controllers of control groups version 1 in which every runtime creates a group for each container.
CONTROLLERS = ("memory", "pids", "devices", "name=systemd")
MOST_GROUPS = 4096
# Seconds between two searches of all processes for the allocation of the same container. Such a search takes some 20
# ms, so it must be rare.
VAIN_S = 30.0
# Maximum bytes that such a search reads. LONGEST_OF_OTHERS: of the list of mounts of one process; our mounts come first
# in it, because they exist before the container runs. MOST_OF_OTHERS: of all lists of one container, because a tenant
# may have thousands of processes with long lists.
LONGEST_OF_OTHERS, MOST_OF_OTHERS = 64 << 10, 1 << 20
# Maximum bytes that are read of the maps file of a process that has no ledger among its mounts.
MOST_OF_MAPS = 4 << 20


@dataclass(frozen=True)
class Process:
    """A process. ``start``: its start time, which tells it from a later process with the same pid. ``own``: (inode of
    its pid namespace, its pid in that namespace).
    """

    pid: int
    start: int
    name: str
    own: tuple[int, int]


@dataclass
class Placed:
    """The result for a set of pids. ``owners``: pid → allocations of its container. ``strangers``: pids in an unknown
    container. ``gone``: pids of ended or unreadable processes. ``host``: pids of programs of the host. ``removed``:
    allocations whose container still has a ledger that was removed on the node. No tenant can do that.
    """

    owners: dict[int, frozenset[str]] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    strangers: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    host: set[int] = field(default_factory=set)


class Processes:
    """Finds owners of processes. ``proc`` is the host's /proc."""

    def __init__(self, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self.proc = self._proc = proc
        self._clock = clock
        # Control group → allocations of its container. Entries stay valid, because names of groups are never reused.
        self._groups: dict[str, frozenset[str]] = {}
        # Control group → when all processes were last searched for its allocation without success. Most likely this is
        # the group of a container without a slice.
        self._vain: dict[str, float] = {}
        # Text of mountinfo → the parsed mounts. Cached, because many processes have equal lists and few lists change
        # between two polls.
        self._tables: dict[bytes, Table] = {}
        self._used: set[bytes] = set()

    def process(self, pid: int) -> Process | None:
        """Returns the process; None if it is gone or is ending. An ending process has freed its memory, but perhaps not
        yet its GPU.
        """
        try:
            fields = next(filter(_lives, map(_status, self._threads(pid))), None)
            namespace = self._link(pid, "pid")
            if fields is None or not namespace:
                return None
            stat = (self._proc / str(pid) / "stat").read_text(errors="replace")
            # The name in parentheses may contain anything; the start time is the 20th field after it.
            start = int(stat.rpartition(")")[2].split()[19])
            inner = int(fields.get("NStgid", str(pid)).split()[-1])
            name = "".join(char if char.isprintable() else "?" for char in fields["Name"].strip())
            return Process(pid, start, name, (_inode(namespace), inner))
        except (OSError, ValueError, KeyError, IndexError):
            return None

    def of(
        self, pids: Iterable[int], devices: Mapping[str, str], pods: Callable[[], Mapping[str, frozenset[str]]] = dict
    ) -> dict[int, frozenset[str]]:
        """Returns only the ``owners`` that ``place`` finds."""
        return self.place(pids, devices, pods).owners

    def place(
        self, pids: Iterable[int], devices: Mapping[str, str], pods: Callable[[], Mapping[str, frozenset[str]]] = dict
    ) -> Placed:
        """Finds the allocations of the container of each pid.

        ``devices``: major:minor of each allocation's tmpfs → allocation; ``pods`` returns uid of a pod → allocations of
        its containers, and is called only if a process hides its mounts.
        """
        known = set(devices.values())
        self._groups = {group: mine for group, mine in self._groups.items() if mine <= known}
        # The host's namespaces are those of process 1. This program's own namespaces count as the host's as well,
        # because it may have no permission to read those of process 1.
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
                # Search all processes once, because another process of the same container may have the ledger among its
                # mounts.
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
        """Stores the control groups of all processes in containers that have a ledger among their mounts."""
        read: dict[str, int] = {}
        for one in self._all():
            if self._link(one, "pid") in {"", *host_pids}:
                continue
            group = self.group(one)
            container = _outermost(group)
            if read.get(container, 0) >= MOST_OF_OTHERS or group in self._groups:
                continue
            # These lists belong to hundreds of containers, so they are not cached.
            table = self.table(one, keep=False, most=LONGEST_OF_OTHERS)
            read[container] = read.get(container, 0) + table.size
            if shown := _shown(table, devices):
                self._learn(one, shown)

    def group(self, pid: int) -> str:
        """Returns the control group of a process; empty if it is in the root group or in none.

        A hybrid host uses both versions of control groups, version 2 only for systemd's services. All containers of a
        daemon are then in the daemon's group of version 2, so version 1 is preferred, which distinguishes them.
        """
        try:
            lines = (self._proc / str(pid) / "cgroup").read_text(errors="replace").splitlines()
        except OSError:
            return ""
        paths = {name: path for _number, name, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)}
        for name in (*CONTROLLERS, ""):
            for controllers, path in paths.items():
                # Seen from inside a control group namespace, the root group is a path such as /../.., which does not
                # count.
                if name in controllers.split(",") and path.strip("/."):
                    return path
        return ""

    def _learn(self, pid: int, mine: frozenset[str]) -> None:
        group = self.group(pid)
        if group and (group in self._groups or len(self._groups) < MOST_GROUPS):
            self._groups[group] = mine

    def _of_group(self, group: str) -> frozenset[str]:
        """Returns the allocations of the group or of its nearest known parent group, because a container may create
        groups below its own.
        """
        while group.strip("/"):
            if group in self._groups:
                return self._groups[group]
            group = group.rpartition("/")[0]
        return frozenset()

    def _mapped(self, pid: int, devices: Mapping[str, str], out: Placed) -> frozenset[str]:
        """Returns the allocations whose files a process has mapped. Only processes of an allocation's container can
        open its files.
        """
        found = set()
        for thread in self._threads(pid) if devices else ():
            with contextlib.suppress(OSError), open(thread / "maps", "rb") as stream:
                for line in stream.read(MOST_OF_MAPS).splitlines():
                    words = line.split(None, 5)
                    # Only mapped files have a device other than 00:00.
                    if len(words) == 6 and words[3] != b"00:00" and (mine := devices.get(_decimal(words[3]))):
                        found.add(mine)
                        out.removed |= {mine} if words[5].endswith(b"(deleted)") else set()
                return frozenset(found)
        return frozenset()

    def table(self, pid: int | str, keep: bool = True, most: int = 0) -> Table:
        """Returns the current mounts of a process; empty if it is gone. ``most``: maximum bytes of the list; 0 means
        LONGEST. ``keep``: whether the result is cached. This program's own list is read completely.
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
        """Returns whether this program is in the host's mount namespace. In a pod it is not."""
        return self._link(1, "mnt") in ("", self._link("self", "mnt"))

    def end_look(self) -> None:
        """Ends a poll: drops the cached lists of mounts that no process had in this poll."""
        self._tables = {data: table for data, table in self._tables.items() if data in self._used}
        self._used.clear()

    def _link(self, pid: int | str, name: str) -> str:
        for thread in self._threads(pid):
            with contextlib.suppress(OSError):
                return os.readlink(thread / "ns" / name)
        return ""

    def _threads(self, pid: int | str) -> Iterator[Path]:
        """Yields the folder of a process, then the folders of its threads: if the main thread has ended, the process's
        own folder shows neither memory nor mounts, although other threads run.
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
    """Returns the allocations whose ledger is in a list of mounts."""
    return frozenset(devices[row.device] for row in table.rows if row.root in roots and row.device in devices)


def _outermost(group: str) -> str:
    """Returns the part of a control group's path up to the container's group. Without a container in the path, returns
    it up to the pod's group, and without a pod the whole path.
    """
    found = CONTAINER_ID.search(group) or POD.search(group)
    return group[: found.end()] if found else group


def _is_container(group: str) -> bool:
    """Returns whether a control group belongs to a container or pod, by its name."""
    return bool(POD.search(group) or CONTAINER_ID.search(group))


def _status(thread: Path) -> dict[str, str]:
    """Returns the fields of a thread's status; empty if it is gone."""
    try:
        lines = (thread / "status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _lives(fields: Mapping[str, str]) -> bool:
    """Returns whether a thread with this status is alive and has memory. An ending thread has freed its memory."""
    return "VmSize" in fields and fields["State"].split()[0] not in ("Z", "X")


def _decimal(device: bytes) -> str:
    """Converts a device number from the form of maps, such as ``00:1f``, to that of mountinfo, 0:31. Returns an empty
    text if it is invalid.
    """
    try:
        major, minor = (int(number, 16) for number in device.split(b":"))
    except ValueError:
        return ""
    return f"{major}:{minor}"


def _inode(link: str) -> int:
    """Returns the number in the text of a namespace link, such as ``pid:[4026531836]``."""
    return int(link.partition("[")[2].rstrip("]"))


def device_of(path: Path) -> str:
    """Returns major:minor of the mount at a path, as in /proc; empty if the path is not a mount point."""
    try:
        device = os.stat(path).st_dev
        if device == os.stat(path.parent).st_dev:
            return ""
    except OSError:
        return ""
    return f"{os.major(device)}:{os.minor(device)}"


def host_is_seen(proc: Path = Path("/proc")) -> str:
    """Returns why this program cannot see the processes of containers; empty if it can."""
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and os.readlink(proc / "1/ns/mnt") == os.readlink(
            proc / "self/ns/mnt"
        ):
            return "this program sees only the processes of its own pod; its DaemonSet needs hostPID: true"
    except OSError as fault:
        return f"{proc}/1 cannot be read: {fault.strerror}"
    return ""
