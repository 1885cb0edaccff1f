# SPDX-License-Identifier: Apache-2.0
"""Starts a preemption (the end of pods of lower priority) if slots of GPUs (each for one container) are free and only
memory or compute is short.

The kube-scheduler itself counts only slots, the resource ``nvidia.com/gpu`` of a node. If slots are short, it starts a
preemption and asks the extender (``preemption``). If enough slots are free, it finds no victims and does not ask. So
this module handles pods for which a filter found no room and no call of ``preempt`` came. The rules for victims are the
same. This module writes what the kube-scheduler would write, a nomination and a condition on each victim, so that the
kube-scheduler treats the preemption as its own. Victims are evicted and not deleted: the API server checks an eviction
against every PodDisruptionBudget. Before the first eviction all of them are sent as dry runs, and ``budgets`` counts
the victims of each budget, so that no victim is evicted if another one is protected. A victim is still evicted in vain
if another client disrupts pods of the same budget between this count and the last eviction.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from vgpu_plugin._shared.pods.requests import PodAsk

from . import wire
from .api import ApiError
from .budgets import Limit, beyond, limit
from .preemption import Nominated, Preemption
from .quota import Quotas

log = logging.getLogger(__name__)

# DELAY: seconds after a filter until this module handles the pod; the kube-scheduler's own preemption comes within
# milliseconds. AGAIN: seconds until another attempt for a pod that no preemption could help. PART: maximum part of
# the program's time that is spent here.
DELAY, AGAIN, PART = 1.0, 10.0, 0.2
# MAX_DUE: maximum number of pods that wait here. MAX_NODES: maximum number of nodes tested in one step, because a
# filter call may have to wait for the step. MAX_ROUNDS: maximum number of choices of victims for one pod; each refused
# eviction needs another choice, and each budget that was exceeded.
MAX_DUE, MAX_NODES, MAX_ROUNDS = 100, 64, 5


class Evicts(Protocol):
    """The API calls that a preemption needs."""

    async def nominate(self, namespace: str, name: str, uid: str, node: str) -> None: ...

    async def evict(self, namespace: str, name: str, uid: str, dry_run: bool) -> None: ...

    async def pod(self, namespace: str, name: str) -> dict[str, Any]: ...

    async def budgets(self, namespace: str) -> Sequence[wire.Budget]: ...

    async def pods_of(self, namespace: str, budget: wire.Budget) -> dict[str, dict[str, Any]]: ...

    async def preempted(self, namespace: str, name: str, uid: str, message: str) -> None: ...

    async def event(self, pod: dict[str, str], reason: str, message: str) -> None: ...


class Short(NamedTuple):
    """A pod without room. ``key``: namespace/name; ``names``: nodes on which the end of other pods may make room;
    ``since``: when it was entered.
    """

    key: str
    ask: PodAsk
    priority: int
    names: Sequence[str]
    since: float


class Shortages:
    def __init__(
        self,
        api: Evicts,
        preemption: Preemption,
        quotas: Quotas,
        may: Callable[[], Awaitable[str]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``may`` returns "" or why this replica must not write now."""
        self._api, self._preemption, self._quotas, self._may, self._now = api, preemption, quotas, may, now
        self._due: OrderedDict[str, Short] = OrderedDict()
        # Uid → time of the last attempt that found no preemption.
        self._vain: OrderedDict[str, float] = OrderedDict()
        self._some = asyncio.Event()
        self._warned = False
        self.evicted = 0

    def add(self, uid: str, key: str, ask: PodAsk, priority: int, names: Sequence[str]) -> None:
        """Enters a pod. This is called within a filter, so it must be fast. ``key``: namespace/name."""
        known = self._due.get(uid)
        if known is None:
            vain = self._vain.get(uid, -AGAIN)
            if not uid or len(self._due) >= MAX_DUE or self._now() - vain < AGAIN or not names:
                return
            if priority <= self._preemption.lowest or self._preemption.comes(uid):
                return
        # The names are replaced, because a kube-scheduler first filters the nominated node alone, and then all nodes.
        self._due[uid] = Short(key, ask, priority, names, known.since if known else self._now())
        self._some.set()

    def forget(self, uid: str) -> None:
        """Drops a pod that was helped, has a node, or is gone."""
        self._due.pop(uid, None)
        self._vain.pop(uid, None)

    async def run(self) -> None:
        while True:
            await self._some.wait()
            while self._due:
                first = next(iter(self._due.values()))
                await asyncio.sleep(max(0.0, first.since + DELAY - self._now()))
                began = time.process_time()
                await self.help()
                await asyncio.sleep((time.process_time() - began) / PART)
            self._some.clear()

    async def help(self) -> None:
        """Handles the pod that was entered first."""
        if not self._due:
            return
        uid, short = self._due.popitem(last=False)
        if await self._may() or self._preemption.comes(uid):
            return
        try:
            if not await self._preempt(uid, short):
                self._vain[uid] = self._now()
                if len(self._vain) > MAX_DUE:
                    self._vain.popitem(last=False)
        except ApiError as fault:
            log.warning("pod %s: no preemption: %s", short.key, fault)

    # --- internal

    async def _preempt(self, uid: str, short: Short) -> bool:
        """Makes room for the pod, and returns whether room will be free: because pods are already ending, or because
        victims were evicted.
        """
        space, _slash, name = short.key.partition("/")
        if self._quotas.fits(space, short.ask):
            return False
        limits: list[Limit] = []
        for _round in range(MAX_ROUNDS):
            node, victims = await self._choose(uid, short, limits)
            if not node:
                return False
            refused = [one for one in victims if not await self._evicts(one, dry_run=True)]
            found = await self._limits(victims, refused)
            if not found:
                break
            limits += found
        else:
            return False
        # During the API calls the pod may have been bound, or another pod may have been nominated for the node.
        nominated = Nominated(node, short.priority, short.ask)
        if await self._may() or self._preemption.key_of(uid) or not self._preemption.helps(uid, nominated):
            return False
        self._preemption.nominate(uid, nominated)
        try:
            await self._api.nominate(space, name, uid, node)
        except ApiError:
            # The pod is gone or the outcome is unknown; the watch will show the nomination if it was written.
            self._preemption.nominate(uid, None)
            raise
        for one in victims:
            if not await self._evicts(one, dry_run=False):
                log.warning("pod %s: the eviction of a chosen victim on node %s was refused", short.key, node)
                return True
            self.evicted += 1
            await self._tell(one, uid, node)
        log.info("pod %s: evicted %d pods of lower priority from node %s", short.key, len(victims), node)
        return True

    async def _choose(self, uid: str, short: Short, limits: Sequence[Limit]) -> tuple[str, list[str]]:
        """Returns (node, uids to evict there); the node is "" if no preemption helps."""
        best: tuple[tuple[float, int, int], str, list[str]] | None = None
        for n in range(0, len(short.names), MAX_NODES):
            found = self._preemption.begin(short.ask, uid, short.priority, short.names[n : n + MAX_NODES], limits)
            for name, victims in found.items():
                cost = self._preemption.cost(victims)
                if best is None or cost < best[0]:
                    best = cost, name, victims
            if best is not None and not best[2]:
                break
            await asyncio.sleep(0)
        return (best[1], best[2]) if best else ("", [])

    async def _limits(self, victims: Sequence[str], refused: Sequence[str]) -> list[Limit]:
        """Returns limits for the next choice; none if the victims may be evicted together. A victim whose dry run was
        refused is spared. If a PodDisruptionBudget protects a victim once the victims before it have been evicted, the
        budget limits all of its pods, because there may be more of them than choices.
        """
        spaces: dict[str, dict[str, str]] = {}
        for uid in victims:
            space, _slash, name = self._preemption.key_of(uid).partition("/")
            spaces.setdefault(space, {})[uid] = name
        spared, limits = set(refused), list[Limit]()
        for space, names in spaces.items():
            # For a single victim a successful dry run suffices.
            if not space or (len(names) < 2 and spared.isdisjoint(names)):
                continue
            if budgets := await self._budgets(space):
                found, exceeded = beyond(await self._there(space, names), budgets)
                limits += [limit(one, await self._api.pods_of(space, one)) for one in exceeded]
                # A pod whose labels changed meanwhile is spared, so that each choice differs from the ones before it.
                spared |= set(found).difference(*(one.uids for one in limits))
        return [*limits, Limit(frozenset(spared), 0)] if limits or spared else []

    async def _budgets(self, space: str) -> Sequence[wire.Budget]:
        """Returns the budgets of a namespace; none if they may not be read, as with an operator's own credentials."""
        try:
            return await self._api.budgets(space)
        except ApiError as fault:
            if fault.status != 403:
                raise
            if not self._warned:
                text = "victims are not counted against their budgets: grant this account list poddisruptionbudgets: %s"
                log.warning(text, fault)
            self._warned = True
            return []

    async def _there(self, space: str, names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Returns those pods (uid → name) that still exist, because the watch may be late."""
        found = {}
        for uid, name in names.items():
            try:
                pod = await self._api.pod(space, name)
            except ApiError as fault:
                if fault.status != 404:
                    raise
                continue
            if pod["metadata"]["uid"] == uid:
                found[uid] = pod
        return found

    async def _evicts(self, uid: str, dry_run: bool) -> bool:
        """Evicts a pod; with ``dry_run`` only tests the eviction. Returns False if the API server refuses the eviction:
        because of a PodDisruptionBudget (429) or two of them (500), or by its admission, else True. Raises ApiError if
        nothing is known about the pod.
        """
        key = self._preemption.key_of(uid)
        if not key:
            return True
        space, _slash, name = key.partition("/")
        try:
            await self._api.evict(space, name, uid, dry_run)
        except ApiError as fault:
            # These statuses mean that the pod is gone, or that another pod has its name.
            if fault.status in (404, 409):
                return True
            if fault.status == 401 or not 400 <= fault.status <= 500:
                raise
            if fault.status != 429:
                log.warning("pod %s: its eviction as a victim was refused: %s", key, fault)
            return False
        return True

    async def _tell(self, victim: str, uid: str, node: str) -> None:
        key = self._preemption.key_of(victim)
        space, _slash, name = key.partition("/")
        text = f"Preempted by pod {uid} of higher priority on node {node}, for the memory or compute of its GPUs"
        try:
            await self._api.preempted(space, name, victim, text)
            await self._api.event({"namespace": space, "name": name, "uid": victim}, "Preempted", text)
        except ApiError as fault:
            # A pod without a grace period is already gone, so these statuses are no error.
            if fault.status not in (404, 409):
                log.warning("pod %s: it could not be marked as preempted: %s", key, fault)
