# SPDX-License-Identifier: Apache-2.0
"""Whose a process on a GPU is: the container of which allocation, or none of ours. Read from /proc, never from the
process's own files.

A container's ledger is a file of a tmpfs that belongs to one allocation alone, so a process with that very mount is in
its container: a tenant without CAP_SYS_ADMIN can neither make nor copy it. One that hides its mounts (chroot, a mount
namespace of its own) is known by its control group, which it cannot leave. What lives in the host's mount namespace, or
shares its pid namespace without such a mount, is a process of the host and never anybody's.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Of the mount that the container gets; its file may have been replaced on the node since.
LEDGER_ROOTS = ("/ledger", "/ledger//deleted")
# Of a pod's control group, with dashes or, by systemd's driver, underscores.
POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})")
# Controllers of version 1 that every runtime gives a container a group of.
CONTROLLERS = ("memory", "pids", "devices", "name=systemd")
MOST_GROUPS = 4096
# A look at every process of a machine takes some 20 ms; it is not repeated sooner for the same container.
VAIN_S = 30.0


@dataclass(frozen=True)
class Process:
    """``start`` tells a pid from the same pid given out again; ``own``: (inode of its pid namespace, its pid there)."""

    pid: int
    start: int
    name: str
    own: tuple[int, int]


class Processes:
    """``proc`` is the host's /proc."""

    def __init__(self, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        # Control group → allocations of the container that it is; names of groups are not given out twice.
        self._groups: dict[str, frozenset[str]] = {}
        # Control group → when all processes were looked at for it, a container without a slice most likely.
        self._vain: dict[str, float] = {}

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
        """The allocations of the container of each pid; pids of the host and of strangers are left out.

        ``devices``: major:minor of the tmpfs of each allocation → allocation; ``pods``: uid of a pod → allocations of
        its containers, asked only where somebody hides.
        """
        known = set(devices.values())
        self._groups = {group: mine for group, mine in self._groups.items() if mine <= known}
        # This program's own count as the host's too: it may not be allowed to look at process 1.
        host_mounts, host_pids = ({self._link(one, kind) for one in (1, "self")} - {""} for kind in ("mnt", "pid"))
        found: dict[int, frozenset[str]] = {}
        hidden = []
        for pid in pids:
            mounts, space = self._link(pid, "mnt"), self._link(pid, "pid")
            if not mounts or not space or mounts in host_mounts:
                continue
            if mine := self._mounted(pid, devices):
                found[pid] = mine
                if host_pids and space not in host_pids:
                    self._learn(pid, mine)
            elif host_pids and space not in host_pids:
                hidden.append(pid)
        if hidden:
            found |= self._hidden(hidden, devices, pods, host_pids)
        return found

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
                for one in self._all():
                    if self._link(one, "pid") not in {"", *host_pids} and (shown := self._mounted(one, devices)):
                        self._learn(one, shown)
                mine = self._of_group(group)
            if not mine and (pod := POD.search(group)):
                of_pod = pods().get(pod.group(1).replace("_", "-"), frozenset())
                mine = of_pod if len(of_pod) == 1 else frozenset()
            if mine:
                found[pid] = mine
        return found

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

    def _mounted(self, pid: int, devices: Mapping[str, str]) -> frozenset[str]:
        """The allocations whose ledger file is mounted for a process."""
        rows = [line.split(" ", 4) for line in self._mounts(pid).splitlines()]
        return frozenset(
            devices[row[2]] for row in rows if len(row) > 4 and row[3] in LEDGER_ROOTS and row[2] in devices
        )

    def _mounts(self, pid: int) -> str:
        for thread in self._threads(pid):
            with contextlib.suppress(OSError):
                return (thread / "mountinfo").read_text(errors="replace")
        return ""

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
