# SPDX-License-Identifier: Apache-2.0
"""Compute share by the driver: what each container's processes took of a GPU's time over the last ten seconds, against
the share in the node's record. Pure.

A container that is alone on a GPU may use all of it (policy ``default``), and the arbiter, a program of the node,
counts for how long it was let: for that time nothing is held against it. So no neighbour can make an honest container
pass for one that takes too much: while a neighbour says that it is busy, the arbiter holds both to their shares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._shared.abi import files as abi_files

WINDOW_S = 10.0
# The driver samples some times a second, and a kernel that has begun is never stopped: over ten seconds a share is
# exact to a few points for kernels up to a second (native/vcuda/README.md). A quarter and five points are above both.
PART, POINTS = 1.25, 0.05
DISABLED = "disable"
WHOLE_PPM = 1_000_000


@dataclass(frozen=True)
class Part:
    """Between two polls: seconds, time that the container took of the GPU, time for which it might have all of it."""

    seconds: float
    used_s: float
    open_s: float


@dataclass(frozen=True)
class Took:
    """Over a window, as parts of the GPU's time: what was taken, and what might be."""

    found: float
    allowed: float

    @property
    def too_much(self) -> bool:
        return self.found > self.allowed * PART + POINTS

    def text(self) -> str:
        return (
            f"the driver says {100 * self.found:.0f} % of the time of the GPU over {WINDOW_S:.0f} s, its share was "
            f"{100 * self.allowed:.0f} %; up to {100 * (self.allowed * PART + POINTS):.0f} % are tolerated"
        )


class Window:
    """The last ten seconds of one container on one GPU."""

    def __init__(self) -> None:
        self._parts: deque[Part] = deque()

    def add(self, part: Part) -> None:
        self._parts.append(part)
        while sum(one.seconds for one in self._parts) - self._parts[0].seconds >= WINDOW_S:
            self._parts.popleft()

    def took(self, share: float) -> Took | None:
        """None: the window is not full yet."""
        seconds = sum(one.seconds for one in self._parts)
        if seconds < WINDOW_S:
            return None
        used = sum(one.used_s for one in self._parts) / seconds
        alone = min(1.0, sum(one.open_s for one in self._parts) / seconds)
        return Took(used, share + (1 - share) * alone)


def share_of(limits: Mapping[str, Any], device: Mapping[str, Any]) -> float | None:
    """By the record of an allocation; None: it has no share that binds."""
    percent = int(device.get("sm_percent", 0))
    bound = 0 < percent < 100 and limits.get("core_policy", "default") != DISABLED
    return percent / 100 if bound and not limits.get("allow_disable_control", False) else None


def open_s(before: Mapping[str, Any] | None, page: Mapping[str, Any] | None, seconds: float, now_ns: int) -> float:
    """For how long the gate was open, by the arbiter's page at two polls. All of it where that cannot be known: no page
    yet, or an arbiter of a version that does not count. ``now_ns``: by the clock of the arbiter.
    """
    if before is None or page is None:
        return seconds
    passed = int(page["open_ns"]) - int(before["open_ns"])
    speaks = now_ns - int(page["heartbeat_ns"]) < abi_files.fields.ARBITER_SILENT_NS
    uncounted = speaks and passed == 0 and page["gate"] == "open" and page["rate_ppm"] == WHOLE_PPM
    return seconds if passed < 0 or uncounted else passed / 1e9
