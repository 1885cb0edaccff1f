# SPDX-License-Identifier: Apache-2.0
"""Writes events on pods that found no node. An event says which limits are exceeded on which nodes, and what would
help.

The kube-scheduler's own event only counts the nodes for each reason. The event of this module adds what only the ledger
(which pod holds how much of which GPU) knows. This event is written after the filter's response,
one pod at a time, and rarely: when a pod begins to wait, when the reasons change, and before the API server deletes the
last event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

from vgpu_plugin._shared.pods.requests import PodAsk

from . import explain
from .api import ApiError
from .ledger import Ledger

log = logging.getLogger(__name__)

REASON = "GpusNotFree"
# Minimum seconds between two events. BETWEEN: on any pods. CHANGED: on one pod, with different reasons. AGAIN: on one
# pod, with equal reasons.
BETWEEN, CHANGED, AGAIN = 0.2, 60.0, 1800.0
# MAX_DUE: maximum number of pods that wait for their event, because each keeps the names of its nodes in memory.
# Further pods are added by a later filter call. MAX_REPORTED: maximum number of pods whose last event is remembered.
MAX_DUE, MAX_REPORTED = 100, 20_000
# To find a pod whose end would help, each pod in turn is treated as gone. This is the maximum number of pods tried. It
# is small, so that no filter call waits long for an event.
TRIED = 50


class Waits(NamedTuple):
    """A pod that fits on no node. ``names``: the nodes of its filter call; ``over``: a reason that the ledger does not
    know, such as the quota of its namespace.
    """

    pod: dict[str, str]
    ask: PodAsk
    names: list[str]
    over: str


class Teller(Protocol):
    async def event(self, pod: dict[str, str], reason: str, message: str) -> None: ...


class WaitingPods:
    def __init__(self, api: Teller, ledger: Ledger, now: Callable[[], float] = time.monotonic) -> None:
        self._api, self._ledger, self._now = api, ledger, now
        self._due: OrderedDict[str, Waits] = OrderedDict()
        # Uid → the reported reasons and the time of the report.
        self._reported: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._some = asyncio.Event()
        self.events = 0

    def add(self, waits: Waits) -> None:
        """Adds a pod to those that wait for their event. A filter call waits for this, so it must be fast."""
        uid = waits.pod.get("uid") or ""
        reported = self._reported.get(uid)
        if not uid or uid in self._due or len(self._due) >= MAX_DUE:
            return
        if reported is not None and self._now() - reported[1] < CHANGED:
            return
        self._due[uid] = waits
        self._some.set()

    def forget(self, uid: str) -> None:
        """Drops a pod that has a node or is gone."""
        self._due.pop(uid, None)
        self._reported.pop(uid, None)

    async def run(self) -> None:
        while True:
            await self._some.wait()
            while self._due:
                await self.tell()
                await asyncio.sleep(BETWEEN)
            self._some.clear()

    async def tell(self) -> None:
        """Writes the event of the pod that was added first, unless a recent event had the same reasons."""
        uid, waits = self._due.popitem(last=False)
        space = waits.pod.get("namespace") or "default"
        reasons, text = explain.sentence(self._ledger, waits.ask, waits.names, space, TRIED)
        if waits.over:
            reasons = text = waits.over
        reported = self._reported.pop(uid, None)
        if reported is not None and reported[0] == reasons and self._now() - reported[1] < AGAIN:
            self._reported[uid] = reported
            return
        self._reported[uid] = (reasons, self._now())
        if len(self._reported) > MAX_REPORTED:
            self._reported.popitem(last=False)
        try:
            await self._api.event(waits.pod, REASON, text)
            self.events += 1
        except ApiError as fault:
            log.warning("the event on pod %s/%s could not be written: %s", space, waits.pod.get("name"), fault)
