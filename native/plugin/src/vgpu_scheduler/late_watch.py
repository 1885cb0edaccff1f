# SPDX-License-Identifier: Apache-2.0
"""Lets a filter call that found no room wait a moment for this program's watches.

When a pod ends or a node comes, the kube-scheduler asks for the waiting pods again within milliseconds, often before
our own watch shows the change. If the answer were "no room" then, the kube-scheduler would try the pod again only
after the next change in the cluster or after its interval for refused pods, so a free GPU could stay unused for 60 to
90 seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# LAG: maximum seconds that one call waits. PART: maximum part of the time in which calls wait, because a kube-scheduler
# asks for one pod at a time. BURST: seconds of waiting that may come at once after a time without any.
LAG, PART, BURST = 0.25, 0.2, 1.0


class LateWatch:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._news = asyncio.Event()
        # The time at which the past waiting is no more than PART of the time since it began.
        self._balanced = now() - BURST / PART
        # Number of calls that found room because they waited.
        self.helped = 0

    def tell(self) -> None:
        """Says that a pod or a node has changed in a way that may make room."""
        self._news.set()

    def until(self) -> float:
        """Returns the time until which a call may wait for news; the present if calls have waited too much lately."""
        now = self._now()
        return now + LAG if self._balanced <= now else now

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
            return False
        finally:
            ended = self._now()
            self._balanced = max(self._balanced, began - BURST / PART) + (ended - began) / PART
        return True
