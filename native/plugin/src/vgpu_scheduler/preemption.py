# SPDX-License-Identifier: Apache-2.0
"""Finds the victims of a preemption, pods that must end so that a pod of higher priority fits. It reserves the freed
room for that pod until it is bound.

The kube-scheduler picks victims by its own count, ``nvidia.com/gpu`` of the whole node. The ledger (which pod holds how
much of which GPU) shows what room the pod lacks on each GPU. So this module adds the missing victims, as few as
possible. The kube-scheduler then deletes the victims and nominates the node. There it reserves its own resources, but
not MiB and compute. This module keeps pods of the same or a lower priority from taking the freed MiB and compute.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from vgpu_plugin._shared.pods.requests import PodAsk

from . import search, wire
from .budgets import Limit, allows, within
from .ledger import Ledger, NoRoom

# ``victims`` adds victims on nodes in groups of this many nodes. It stops after the group with which at least this many
# nodes can make room. The limit is needed because a kube-scheduler may name a tenth of a large cluster.
MAX_COMPLETED = 64
# Maximum number of nominated pods (which wait for their victims to end) that are placed within one filter call. The
# nodes of further nominated pods count as full in that call.
MAX_KEPT = 32


class Nominated(NamedTuple):
    """A pod that waits until its victims on ``node`` have ended."""

    node: str
    priority: int
    ask: PodAsk


class Preemption:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # Uid → priority of each bound pod. Only the number is kept, because there may be a hundred thousand pods.
        self._priorities: dict[str, int] = {}
        self._counts: Counter[int] = Counter()
        self._ending: set[str] = set()
        self._nominated: dict[str, Nominated] = {}

    # --- updates

    def bound(self, pod: wire.Pod) -> None:
        uid = pod.metadata.uid
        self._nominated.pop(uid, None)
        self._forget_priority(uid)
        self._priorities[uid] = pod.spec.priority or 0
        self._counts[self._priorities[uid]] += 1
        if pod.metadata.deletionTimestamp is not None:
            self._ending.add(uid)

    def waits(self, pod: wire.Pod, ask: PodAsk) -> None:
        node = pod.status.nominatedNodeName
        if node and pod.metadata.deletionTimestamp is None:
            self._nominated[pod.metadata.uid] = Nominated(node, pod.spec.priority or 0, ask)
        else:
            self._nominated.pop(pod.metadata.uid, None)

    def gone(self, uid: str) -> None:
        self._forget_priority(uid)
        self._nominated.pop(uid, None)
        self._ending.discard(uid)

    def forget_others(self, there: set[str]) -> None:
        for uid in [uid for known in (self._priorities, self._nominated) for uid in known if uid not in there]:
            self.gone(uid)

    def nominate(self, uid: str, one: Nominated | None) -> None:
        """Enters a nomination before the API server reports it; None withdraws it."""
        if one is None:
            self._nominated.pop(uid, None)
        else:
            self._nominated[uid] = one

    # --- queries

    @property
    def lowest(self) -> float:
        """Returns the lowest priority of all bound pods. A pod whose own priority is not higher can preempt no pod."""
        return min(self._counts, default=math.inf)

    def key_of(self, uid: str) -> str:
        """Returns namespace/name of a pod that holds GPUs; empty if it holds none."""
        held = self._ledger.held(uid)
        return held.pod if held is not None else ""

    def cost(self, victims: Iterable[str]) -> tuple[float, int, int]:
        """Returns the cost of a set of victims, in the order of the kube-scheduler's comparison: their highest
        priority, their number, and their MiB.
        """
        uids = list(victims)
        held = [self._ledger.held(uid) for uid in uids]
        memory = sum(use[1] for one in held if one is not None for use in one.uses)
        return max((self._priorities.get(uid, 0) for uid in uids), default=-math.inf), len(uids), memory

    def comes(self, uid: str) -> bool:
        """Returns whether a nominated pod will have room on its node once the pods that are now ending have left."""
        one = self._nominated.get(uid)
        if one is None:
            return False
        ending = {one.node: [other for other in self._lower(one.node, one.priority, ()) if other in self._ending]}
        return bool(self._ledger.filter(one.ask, [one.node], ending).fits)

    def begin(
        self, ask: PodAsk, uid: str, priority: int, names: Sequence[str], limits: Sequence[Limit] = ()
    ) -> dict[str, list[str]]:
        """Chooses victims like ``victims``, but for a preemption that shortage.py starts. Returns for each node the
        uids of the pods to evict, without those that are already ending. The victims of each node keep to ``limits``.
        """
        ending = {name: [one for one in self._lower(name, priority, ()) if one in self._ending] for name in names}
        taken = self._taken(uid, priority, names)
        free = [name for name in names if name not in taken]
        done = self._ledger.filter(ask, free, ending).fits
        if done:
            return {name: [] for name in done}
        found = self.victims(ask, uid, priority, {name: wire.MetaVictims() for name in free}, limits)
        return {name: [pod.UID for pod in one.Pods or [] if pod.UID not in self._ending] for name, one in found.items()}

    def victims(
        self,
        ask: PodAsk,
        uid: str,
        priority: int,
        picked: Mapping[str, wire.MetaVictims],
        limits: Sequence[Limit] = (),
    ) -> dict[str, wire.MetaVictims]:
        """Returns the nodes on which the pod has room once its victims are gone, with all victims: those that the
        kube-scheduler picked, because it needs them for its own resources, and as few additional ones as possible.

        Pods that are already ending are chosen first, then pods of the lowest priority. A node is left out if pods of
        lower priority do not hold enough, or if room is reserved for another pod. The added victims keep to ``limits``.
        """
        taken = self._taken(uid, priority, picked)
        gone = {name: [pod.UID for pod in one.Pods or []] for name, one in picked.items() if name not in taken}
        found = {name: picked[name] for name in self._ledger.filter(ask, list(gone), gone).fits}
        # The kube-scheduler may also name nodes that publish no GPUs, such as nodes with NVIDIA's own plugin. They are
        # left out.
        short = [name for name in gone if name not in found and name in self._ledger.nodes]
        lower: dict[str, list[str]] = {}
        spared = {uid for one in limits if one.allowed < 1 for uid in one.uids}
        # Only nodes that can make room count towards the limit. The order of the nodes is the same at each call, so
        # otherwise the same useless nodes would use up the limit every time.
        for n in range(0, len(short), MAX_COMPLETED):
            some = {name: self._lower(name, priority, {*gone[name], *spared}) for name in short[n : n + MAX_COMPLETED]}
            self._leave(ask, gone, some)
            lower.update(some)
            if len(lower) >= MAX_COMPLETED:
                break
        more = {name: self._cheapest(ask, name, uids, gone[name], limits) for name, uids in lower.items()}
        self._leave(ask, gone, more)
        # If the cheapest victims do not make enough room, take all pods of lower priority, as far as allowed.
        rest = {name: within(uids, limits) for name, uids in lower.items() if name not in more}
        if limits:
            self._leave(ask, gone, rest)
        more.update(rest)
        # Take a victim off the list if the pod has room without ending it. Each step tries one victim on every node, so
        # that one filter call checks all nodes.
        for n in range(max(map(len, more.values()), default=0)):
            tried = {name: uids[-1 - n] for name, uids in more.items() if n < len(uids)}
            without = {name: gone[name] + [uid for uid in more[name] if uid != one] for name, one in tried.items()}
            for name in self._ledger.filter(ask, list(without), without).fits:
                # The entry is emptied and not removed, so that the indexes of the other victims stay valid.
                more[name][-1 - n] = ""
        for name, uids in more.items():
            pods = [*(picked[name].Pods or []), *(wire.MetaPod(uid) for uid in uids if uid)]
            found[name] = wire.MetaVictims(pods, picked[name].NumPDBViolations)
        return found

    @contextmanager
    def kept(self, uid: str, priority: int, names: Iterable[str]) -> Iterator[set[str]]:
        """Holds room in the ledger for the nominated pods that pod ``uid`` must not overtake, until the ``with`` block
        ends. Yields the nodes on which a nominated pod has no room yet, because its victims are still there. Pod
        ``uid`` may not be placed on these nodes, because it would fill the freed room.

        Nothing is reserved for a nominated pod that has no room even once all pods of lower priority are gone, for
        example because a GPU became unhealthy. The kube-scheduler withdraws such a nomination late or never, and other
        pods could not use the node until then.
        """
        wanted = set(names) if self._nominated else ()
        full: set[str] = set()
        held: list[str] = []
        try:
            for n, (other, one) in enumerate(each for each in self._against(uid, priority) if each[1].node in wanted):
                if n >= MAX_KEPT:
                    full.add(one.node)
                    continue
                try:
                    self._ledger.hold(other, "/", one.node, self._ledger.place(one.ask, one.node))
                    held.append(other)
                except NoRoom:
                    if self._helps(one):
                        full.add(one.node)
            yield full
        finally:
            for other in held:
                self._ledger.release(other)

    # --- internal

    def _against(self, uid: str, priority: int) -> list[tuple[str, Nominated]]:
        """Returns the nominated pods of this or a higher priority, the highest priority first, without pods whose bind
        is under way.

        Two pods of equal priority may be nominated for one node, if the second asks before the first nomination is
        known. Then the one with the lower uid goes first, because otherwise each would wait for the other for ever.
        """
        own = self._nominated.get(uid)
        found = [
            (other, one)
            for other, one in self._nominated.items()
            if other != uid
            and one.priority >= priority
            and not (own is not None and (own.node, own.priority) == (one.node, one.priority) and uid < other)
            and self._ledger.held(other) is None
        ]
        return sorted(found, key=lambda each: (-each[1].priority, each[0]))

    def helps(self, uid: str, one: Nominated) -> bool:
        """Returns whether a pod may be nominated for the node: ``_helps`` is true, and no room on the node is reserved
        for another pod.
        """
        return not self._taken(uid, one.priority, [one.node]) and self._helps(one)

    def _forget_priority(self, uid: str) -> None:
        found = self._priorities.pop(uid, None)
        if found is not None:
            self._counts[found] -= 1
            if not self._counts[found]:
                del self._counts[found]

    def _taken(self, uid: str, priority: int, names: Collection[str]) -> set[str]:
        """Returns the nodes on which room is reserved for a pod other than this one."""
        waiting = [one for _other, one in self._against(uid, priority) if one.node in names]
        return {one.node for n, one in enumerate(waiting) if n >= MAX_KEPT or self._helps(one)}

    def _helps(self, one: Nominated) -> bool:
        """Returns whether the pod has room on its node once all pods of lower priority are gone."""
        lower = {one.node: self._lower(one.node, one.priority, ())}
        return bool(self._ledger.filter(one.ask, [one.node], lower).fits)

    def _lower(self, node: str, priority: int, picked: Iterable[str]) -> list[str]:
        """Returns the pods of lower priority that hold GPUs of the node, in the order of eviction: pods that are
        ending, then the lowest priority, then the largest, so that few pods must go.
        """
        chosen = set(picked)
        ranked = []
        for uid in self._ledger.pods_of(node):
            held, found = self._ledger.held(uid), self._priorities.get(uid)
            # A pod without a known priority is left out: its bind is under way, and the kube-scheduler may not know the
            # pod yet.
            if held is not None and found is not None and found < priority and uid not in chosen:
                memory = sum(use[1] for use in held.uses)
                ranked.append((uid not in self._ending, found, -memory, uid))
        return [uid for *_rank, uid in sorted(ranked)]

    def _cheapest(
        self, ask: PodAsk, node: str, lower: Sequence[str], picked: Sequence[str], limits: Sequence[Limit]
    ) -> list[str]:
        """Returns the probably cheapest victims: the pods on those few GPUs that can be freed at the lowest cost.
        ``_leave`` then checks whether their end makes enough room.
        """
        largest = max(ask.asks, key=lambda one: (one.gpus, one.memory.amount, one.cores))
        used = {uuid: list(use) for uuid, use in self._ledger.use(node).items()}
        for uid in picked:
            self._take_off(used, uid, node)
        ways = []
        for gpu in self._ledger.nodes[node]:
            if not ask.preferences.takes(gpu.uuid, gpu.model):
                continue
            taken: dict[str, list[int]] = {gpu.uuid: list(used[gpu.uuid])}
            going: list[str] = []
            for uid in lower:
                if search.fits(largest, gpu, taken[gpu.uuid]):
                    break
                if allows(going, uid, limits) and self._take_off(taken, uid, node):
                    going.append(uid)
            if search.fits(largest, gpu, taken[gpu.uuid]):
                ways.append((max((self._priorities[uid] for uid in going), default=-math.inf), len(going), going))
        ways.sort(key=lambda way: way[:2])
        wanted = {uid for way in ways[: sum(one.gpus for one in ask.asks)] for uid in way[2]}
        return within((uid for uid in lower if uid in wanted), limits)

    def _take_off(self, used: dict[str, list[int]], uid: str, node: str) -> bool:
        """Subtracts what the pod holds from ``used`` (GPU → amounts). Returns whether it holds any GPU in ``used``."""
        held, found = self._ledger.held(uid), False
        for uuid, *amounts in held.uses if held is not None and held.node == node else ():
            if uuid in used:
                used[uuid] = [have - amount for have, amount in zip(used[uuid], amounts, strict=True)]
                found = True
        return found

    def _leave(self, ask: PodAsk, gone: Mapping[str, list[str]], more: dict[str, list[str]]) -> None:
        """Removes from ``more`` (node → additional victims) the nodes where the pod has no room even once these victims
        and the kube-scheduler's (``gone``) have ended.
        """
        all_gone = {name: gone[name] + uids for name, uids in more.items() if uids}
        fits = set(self._ledger.filter(ask, list(all_gone), all_gone).fits)
        for name in [name for name in more if name not in fits]:
            del more[name]
