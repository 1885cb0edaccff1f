# SPDX-License-Identifier: Apache-2.0
"""Whether the node's watcher names a way round while it is gone: the plugin is asked again and again beside the probe.

A finding counts where it is of the leased allocation and one of its processes lives in the mount namespace of this very
run, so that what was found of an earlier one proves nothing.
"""

from __future__ import annotations

import time
from typing import Any, Callable

from .slice_outside import namespace_of

# Between two questions; each starts vgpuctl.
ASK_S = 0.5
# Looks that the watcher is given beyond those that it needs; below, nothing is said against it.
MORE_LOOKS = 3
LEAST_HOLD_S = 8.0


class Named(Exception):
    """The watcher named the run; ``seconds`` since it began. Raised out of the runner, which ends the run."""

    def __init__(self, seconds: float, text: str) -> None:
        self.seconds, self.text = seconds, text
        super().__init__(text)


class Witness:
    """One run of the probe. ``ask`` answers ``vgpuctl watch``, None where that fails."""

    def __init__(
        self,
        ask: Callable[[], dict[str, Any] | None],
        allocation: str,
        clock: Callable[[], float] = time.monotonic,
        proc: str = "/proc",
    ) -> None:
        self._ask, self._allocation, self._clock, self._proc = ask, allocation, clock, proc
        self._begun = self._asked = clock()
        self._first = ask()
        self.last = self._first

    @property
    def absent(self) -> str:
        """Why no watcher can name anything; empty where one looks."""
        if self._first is None:
            return "this device plugin has no watcher"
        if not self._first["interval_s"]:
            return "the watcher is switched off (--watch-interval 0)"
        return ""

    @property
    def needed(self) -> int:
        """Looks after which a way round that was held must be named."""
        return int(self._first["looks_to_name"]) + MORE_LOOKS if self._first else 0

    @property
    def hold_s(self) -> float:
        """How long a way round is to be held."""
        return max(LEAST_HOLD_S, self.needed * float(self._first["interval_s"])) if self._first else 0.0

    @property
    def looks(self) -> int:
        """Looks of the watcher since the run began, as far as was asked."""
        return int(self.last["looks"]) - int(self._first["looks"]) if self.last and self._first else 0

    @property
    def fault(self) -> str:
        return str(self.last["fault"]) if self.last else "the device plugin does not answer"

    def look(self, pid: int) -> None:
        """``pid``: any process of the run. Raises Named."""
        if self._clock() - self._asked < ASK_S:
            return
        inside = namespace_of(pid, self._proc)
        self.last = self._ask()
        self._asked = self._clock()
        for finding in (self.last or {}).get("findings") or []:
            pids = [one["pid"] for one in finding["processes"]]
            if finding["allocation"] == self._allocation and any(self._is_inside(one, inside) for one in pids):
                raise Named(self._clock() - self._begun, str(finding["text"]))

    def _is_inside(self, pid: int, namespace: str) -> bool:
        return bool(namespace) and namespace_of(pid, self._proc) == namespace
