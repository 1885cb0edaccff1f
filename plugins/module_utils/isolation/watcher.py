# SPDX-License-Identifier: Apache-2.0
"""Checks whether the node's watcher names a bypass while the bypass runs. The watcher is the part of the device plugin
that finds processes which use a GPU past their limits; this file polls its findings while the probe tries bypasses.

A finding counts if it names the leased allocation, and one of its processes or a parent of that process is in the mount
namespace of this run. So findings of an earlier run do not count.
"""

from __future__ import annotations

import time
from typing import Any, Callable, Mapping

from .observer import namespace_of, parent_of

# Seconds between two polls of the findings. They are not shorter, because each poll starts vgpuctl.
ASK_S = 0.5
# The bypass runs for this many polls of the watcher more than the watcher needs. If the watcher made fewer polls than
# it needs, a bypass that it missed is no violation.
MORE_LOOKS = 3
# Seconds for which a bypass runs at least.
LEAST_HOLD_S = 8.0
# Number of processes to inspect, from the process of a bypass up through its parents. The process itself may not show
# to which run it belongs, because it has its own mount namespace, or because its first thread has ended. In these cases
# one of its parents shows the run. The last such parent is the probe.
MOST_PARENTS = 8

# Maximum length of a process's name in the kernel.
NAME_BYTES = 15


class AllNamed(Exception):
    """The watcher named every bypass. It is raised from within the runner, so that the run ends early."""


class Observation:
    """Observes one run of the probe. ``ask`` returns the report of ``vgpuctl watch``, None if the call fails. Three
    mappings have bypasses as keys. ``names``: the name of the bypass's process. ``reasons``: the reason that the
    finding must have; without an entry any finding counts. ``named``: the seconds from the start until the watcher
    named the bypass, and the finding's text.
    """

    def __init__(
        self,
        ask: Callable[[], dict[str, Any] | None],
        allocation: str,
        names: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        proc: str = "/proc",
        reasons: Mapping[str, str] | None = None,
    ) -> None:
        self._reasons = reasons or {}
        self._ask, self._allocation, self._clock, self._proc = ask, allocation, clock, proc
        self._ways = {name[:NAME_BYTES]: way for way, name in names.items()}
        self.named: dict[str, tuple[float, str]] = {}
        self._begun = self._asked = clock()
        self._first = ask()
        self.last = self._first

    @property
    def absent(self) -> str:
        """Returns why the watcher cannot name a bypass; empty if the watcher polls processes."""
        if self._first is None:
            return "this device plugin has no watcher"
        if not self._first["interval_s"]:
            return "the watcher is switched off (--watch-interval 0)"
        return ""

    @property
    def needed(self) -> int:
        """Returns the number of polls after which the watcher must have named a running bypass."""
        return int(self._first["looks_to_name"]) + MORE_LOOKS if self._first else 0

    @property
    def hold_s(self) -> float:
        """Returns the seconds for which a bypass must run."""
        return max(LEAST_HOLD_S, self.needed * float(self._first["interval_s"])) if self._first else 0.0

    @property
    def polls(self) -> int:
        """Returns the watcher's polls since the run began, by its last report."""
        return int(self.last["looks"]) - int(self._first["looks"]) if self.last and self._first else 0

    @property
    def fault(self) -> str:
        return str(self.last["fault"]) if self.last else "the device plugin does not answer"

    def poll(self, pid: int) -> None:
        """Reads the watcher's report, at most once in ASK_S. ``pid``: any process of the run. Raises AllNamed."""
        if self._clock() - self._asked < ASK_S:
            return
        inside = namespace_of(pid, self._proc)
        self.last = self._ask()
        self._asked = self._clock()
        for finding in (self.last or {}).get("findings") or []:
            if finding["allocation"] != self._allocation:
                continue
            for one in finding["processes"]:
                way = self._ways.get(self._name(one["pid"])) if self._is_inside(one["pid"], inside) else None
                if way and way not in self.named and self._reasons.get(way) in (None, finding.get("reason")):
                    said = f"process {one['pid']} was named: {finding['text']}"
                    self.named[way] = (self._clock() - self._begun, said)
        if len(self.named) == len(self._ways):
            raise AllNamed()

    def _is_inside(self, pid: int, namespace: str) -> bool:
        for _generation in range(MOST_PARENTS if namespace else 0):
            if namespace_of(pid, self._proc) == namespace:
                return True
            pid = parent_of(pid, self._proc)
        return False

    def _name(self, pid: int) -> str:
        """Returns the process's name; empty if it has ended since the watcher's poll."""
        try:
            with open(f"{self._proc}/{pid}/comm", encoding="utf-8", errors="replace") as stream:
                return stream.read().rstrip("\n")
        except OSError:
            return ""
