# SPDX-License-Identifier: Apache-2.0
"""Quotas of namespaces for GPU memory and compute: ``limits.nvidia.com/gpumem`` and ``limits.nvidia.com/gpucores``
under ``spec.hard`` of a ResourceQuota.

Kubernetes stores these limits and does not enforce them, because a pod names the memory of one GPU and may request
several. Here a pod counts with its total over all its GPUs, whichever resource names it uses. The quota is checked
twice: admission refuses a pod over the quota and names the numbers; the replica that binds makes the final decision.
Admission reserves nothing, because anybody may send a review. So pods that are admitted at the same moment may exceed
the quota together; then the bind lets some of them wait. If a quota is lowered, running pods stay.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from vgpu_plugin._shared.pods.annotations import Device, Part, use_of
from vgpu_plugin._shared.pods.quantity import exact
from vgpu_plugin._shared.pods.requests import Ask, Card, Config, PodAsk, Size, size_on

from . import wire
from .ledger import Ledger
from .placement import kind_of

log = logging.getLogger(__name__)


class Demand(NamedTuple):
    """Memory (MiB) and percent of compute over all GPUs together."""

    memory_mib: int = 0
    cores: int = 0


NOTHING = Demand()


class Limit(NamedTuple):
    """One limit of one quota. ``hard`` is the limit in its own unit; ``of`` converts a demand to that unit."""

    quota: str
    name: str
    hard: int
    of: Callable[[Demand], int]


def least(ask: PodAsk, cards: Iterable[Card]) -> Demand:
    """Returns the smallest demand that a pod can have on any of these GPUs. A size that fits on no GPU counts as
    nothing, because such a pod is never bound.
    """
    known = list(cards)

    def one(ask: Ask) -> Device:
        sizes = [size for size in (size_on(ask, card) for card in known) if size is not None] or [Size(0, 0)]
        return Device("", *(ask.gpus * min(each) for each in zip(*sizes, strict=True)))

    # All GPUs count as one, because a quota limits their sum.
    uses = use_of([Part(each.container, kind_of(each), (one(each),)) for each in ask.asks])
    return Demand(*uses[""][:2]) if uses else NOTHING


def _sum(demands: Iterable[Demand]) -> Demand:
    every = list(demands)
    return Demand(sum(one.memory_mib for one in every), sum(one.cores for one in every))


class Quotas:
    """The limits of namespaces, and how much of them is used. ``ledger`` knows what pods hold."""

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self._config, self._ledger = config, ledger
        self._limits: dict[str, dict[str, list[Limit]]] = {}
        # Namespace → uid → demand, for stored pods that have no node yet.
        self._waiting: dict[str, dict[str, Demand]] = {}

    # --- updates

    def enter(self, gone: bool, quota: wire.Quota) -> None:
        """Enters one ResourceQuota as the API server reports it."""
        space, name = quota.metadata.namespace, quota.metadata.name
        limits = [] if gone else self._read(name, quota.spec.hard or {})
        here = self._limits.setdefault(space, {})
        if limits:
            here[name] = limits
        else:
            here.pop(name, None)
        if not here:
            del self._limits[space]

    def enter_all(self, quotas: Iterable[wire.Quota], _began: float = 0.0) -> None:
        self._limits = {}
        for quota in quotas:
            self.enter(False, quota)

    def waits(self, namespace: str, uid: str, ask: PodAsk) -> None:
        """Counts a stored pod that has no node yet as waiting."""
        self._waiting.setdefault(namespace, {})[uid] = least(ask, self._ledger.cards)

    def forget(self, namespace: str, uid: str) -> None:
        """Stops counting a pod as waiting, because it has a node or is gone."""
        here = self._waiting.get(namespace)
        if here is not None:
            here.pop(uid, None)
            if not here:
                del self._waiting[namespace]

    def forget_others(self, there: set[str]) -> None:
        """Stops counting pods that are not in the new list."""
        for space, pods in list(self._waiting.items()):
            for uid in [uid for uid in pods if uid not in there]:
                self.forget(space, uid)

    # --- queries

    @property
    def namespaces(self) -> Iterable[str]:
        return self._limits.keys()

    def admit(self, namespace: str, uid: str, ask: PodAsk) -> str:
        """Returns "" or why a new pod exceeds the quota. Pods that hold GPUs and pods that wait are counted."""
        if namespace not in self._limits:
            return ""
        return self._over(namespace, least(ask, self._ledger.cards), self._spoken_for(namespace, uid))

    def fits(self, namespace: str, ask: PodAsk) -> str:
        """Returns "" or why a pod cannot be bound now, whichever GPUs it would get. Pods that wait are not counted."""
        if namespace not in self._limits:
            return ""
        return self._over(namespace, least(ask, self._ledger.cards), self.held(namespace))

    def takes(self, namespace: str, demand: Demand, own: Demand = NOTHING) -> str:
        """Returns "" or why a pod with this demand cannot be bound now. ``own``: what the pod holds already."""
        if namespace not in self._limits:
            return ""
        held = self.held(namespace)
        return self._over(namespace, demand, Demand(held.memory_mib - own.memory_mib, held.cores - own.cores), own)

    def held(self, namespace: str) -> Demand:
        return Demand(*self._ledger.held_in(namespace))

    def rows(self) -> Iterable[tuple[str, Limit, int]]:
        """Yields (namespace, limit, used) for metrics."""
        for space, quotas in self._limits.items():
            used = self.held(space)
            for limits in quotas.values():
                for limit in limits:
                    yield space, limit, limit.of(used)

    # --- internal

    def _read(self, name: str, hard: dict[str, object]) -> list[Limit]:
        factor = self._config.memory_factor
        found = []
        for resource, of in (
            ("limits." + self._config.memory, lambda demand: -(-demand.memory_mib // factor)),
            ("limits." + self._config.cores, lambda demand: demand.cores),
        ):
            if resource not in hard:
                continue
            value = exact(hard[resource])
            if value is None:
                # The API server stores only quantities. If it returns another value, the intended limit is unknown, so
                # every pod that needs this resource is refused.
                text = "ResourceQuota %s: %s: %r is not a quantity; all pods that need this resource are refused"
                log.warning(text, name, resource, hard[resource])
            found.append(Limit(name, resource, math.floor(value or 0), of))
        return found

    def _spoken_for(self, namespace: str, uid: str) -> Demand:
        """Returns the demand of all other pods that hold GPUs or wait."""
        pods = self._waiting.get(namespace, {})
        # Between its bind and the event about it, a pod both holds GPUs and waits; it is counted once.
        counted = (demand for one, demand in pods.items() if one != uid and self._ledger.held(one) is None)
        return _sum([self.held(namespace), *counted])

    def _over(self, namespace: str, demand: Demand, used: Demand, own: Demand = NOTHING) -> str:
        for limits in self._limits[namespace].values():
            for limit in limits:
                asked, spent = limit.of(demand), limit.of(used)
                # A pod that needs no more of this resource is not refused by an exhausted quota.
                if asked > limit.of(own) and spent + asked > limit.hard:
                    return (
                        f"quota {limit.quota} of namespace {namespace}: {limit.name}: {asked} asked for on all GPUs of "
                        f"the pod together, {spent} of {limit.hard} in use; ask for at most "
                        f"{max(limit.hard - spent, 0)}, wait until pods of the namespace end, or have the quota raised"
                    )
        return ""
