# SPDX-License-Identifier: Apache-2.0
"""Lets a filter call that found no room wait a moment for this program's watches.

When a pod ends or a node comes, the kube-scheduler asks for the waiting pods again within milliseconds, often before
our own watch shows the change. If the answer were "no room" then, the kube-scheduler would try the pod again only
after the next change in the cluster or after its interval for refused pods, so a free GPU could stay unused for 60 to
90 seconds.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

# LAG: maximum seconds that one call waits. PART: maximum part of the time in which calls wait, because a kube-scheduler
# asks for one pod at a time. After a time without calls that wait, they may exceed PART by BURST seconds.
LAG, PART, BURST = 0.25, 0.2, 1.0


class LateWatch:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._news = asyncio.Event()
        # No call waits before this time. Each second of waiting moves it by 1 / PART seconds.
        self._paid = -math.inf
        # When a call last waited in vain. The kube-scheduler asks for all waiting pods after one change, and the calls
        # that follow this one come from the same change.
        self._vain = -math.inf
        # Number of calls that found room because they waited.
        self.helped = 0

    def report(self) -> None:
        """Says that a watch has shown a change of a pod or a node."""
        self._news.set()

    def until(self) -> float:
        """Returns the time until which a call may wait for news; the present if it must not wait."""
        now = self._now()
        return now + LAG if self._paid <= now and self._vain + LAG < now else now

    async def news(self, until: float) -> bool:
        """Waits for news. Returns false if there were none until the given time."""
        began = self._now()
        if until <= began:
            return False
        self._news.clear()
        try:
            async with asyncio.timeout(until - began):
                await self._news.wait()
        except TimeoutError:
            # On a busy machine the news may have come with the end of the time.
            self._vain = self._now()
            return self._news.is_set()
        finally:
            self._paid = max(self._paid, began - BURST / PART) + (self._now() - began) / PART
        return True
