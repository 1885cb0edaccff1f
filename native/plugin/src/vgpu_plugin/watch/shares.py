# SPDX-License-Identifier: Apache-2.0
"""Compares how much of a GPU's time each container used over the last ten seconds, by the driver's data, with its share
in the node's record (its saved data about the container). The functions read and write nothing outside their arguments.

A container that is alone on a GPU may use all of it (policy ``default``). The arbiter, a program of the node, counts
the time for which it allowed this, and that time does not count as an excess. While a neighbour reports demand, the
arbiter limits each of the two to its share. So a neighbour cannot make an honest container look suspicious.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._shared.abi import files as abi_files

WINDOW_S = 10.0
# The measured share has two errors: the driver samples only a few times a second, and a running kernel is never
# stopped. Over ten seconds and with kernels up to one second, a share is exact to a few percentage points
# (native/vcuda/README.md). The tolerance, a quarter of the share plus five percentage points, is larger than both
# errors.
PART, POINTS = 1.25, 0.05
DISABLED = "disable"
WHOLE_PPM = 1_000_000


@dataclass(frozen=True)
class Part:
    """The measurement between two polls. ``seconds``: time between them; ``used_s``: GPU time that the container used;
    ``open_s``: time in which it was allowed to use all of the GPU.
    """

    seconds: float
    used_s: float
    open_s: float


@dataclass(frozen=True)
class Took:
    """Fractions of the GPU's time over a window of ten seconds. ``found``: what the container used; ``allowed``: what
    it may use.
    """

    found: float
    allowed: float

    @property
    def too_much(self) -> bool:
        return self.found > self.allowed * PART + POINTS

    def text(self) -> str:
        return (
            f"the driver reports {100 * self.found:.0f} % of the GPU's time over {WINDOW_S:.0f} s, its share was "
            f"{100 * self.allowed:.0f} %; up to {100 * (self.allowed * PART + POINTS):.0f} % are tolerated"
        )


class Window:
    """The measurements of the last ten seconds of one container on one GPU."""

    def __init__(self) -> None:
        self._parts: deque[Part] = deque()

    def add(self, part: Part) -> None:
        self._parts.append(part)
        while sum(one.seconds for one in self._parts) - self._parts[0].seconds >= WINDOW_S:
            self._parts.popleft()

    def took(self, share: float) -> Took | None:
        """Returns used and allowed time. Returns None until ten seconds have been measured."""
        seconds = sum(one.seconds for one in self._parts)
        if seconds < WINDOW_S:
            return None
        used = sum(one.used_s for one in self._parts) / seconds
        alone = min(1.0, sum(one.open_s for one in self._parts) / seconds)
        return Took(used, share + (1 - share) * alone)


def share_of(limits: Mapping[str, Any], device: Mapping[str, Any]) -> float | None:
    """Returns the share in an allocation's record, 0 to 1; None if the record sets no limit."""
    percent = int(device.get("sm_percent", 0))
    bound = 0 < percent < 100 and limits.get("core_policy", "default") != DISABLED
    return percent / 100 if bound and not limits.get("allow_disable_control", False) else None


def open_s(before: Mapping[str, Any] | None, page: Mapping[str, Any] | None, seconds: float, now_ns: int) -> float:
    """Returns the seconds for which the container was allowed all of the GPU, from the arbiter's page (the data that it
    publishes) at two polls. Returns all seconds if the time is unknown, because there is no page yet or an older
    arbiter does not count the time. ``now_ns``: present time on the arbiter's clock.
    """
    if before is None or page is None:
        return seconds
    passed = int(page["open_ns"]) - int(before["open_ns"])
    speaks = now_ns - int(page["heartbeat_ns"]) < abi_files.fields.ARBITER_SILENT_NS
    uncounted = speaks and passed == 0 and page["gate"] == "open" and page["rate_ppm"] == WHOLE_PPM
    return seconds if passed < 0 or uncounted else passed / 1e9
