# SPDX-License-Identifier: Apache-2.0
"""Whose slices a pod of higher priority needs, and the room that is kept for it until they have left.

The kube-scheduler picks victims by what it counts itself, ``nvidia.com/gpu`` of the whole node. The ledger knows which
GPU is short of what, so it adds the victims that are missing, and no pod that the other would do without. Then it
deletes them and nominates the node; it keeps its own resources free there, and knows nothing of MiB and compute. Those
are kept here, against pods of the same priority or a lower one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from vgpu_plugin._shared.pods.requests import PodAsk

from . import search, wire
from .ledger import Ledger, NoRoom

# Nodes whose victims are completed in one call, less than twice as many; a kube-scheduler names a tenth of a large
# cluster.
MAX_COMPLETED = 64
# Nominated pods that are placed within one filter call; beyond, nobody else is sent to their nodes.
MAX_KEPT = 32


class Nominated(NamedTuple):
    """A pod that waits for its victims to leave ``node``."""

    node: str
    priority: int
    ask: PodAsk


class Preemption:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # Of bound pods, by uid; of a hundred thousand, so nothing but a number each.
        self._priorities: dict[str, int] = {}
        self._counts: Counter[int] = Counter()
        self._ending: set[str] = set()
        self._nominated: dict[str, Nominated] = {}

    # --- facts

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
        """Until the API server tells it; None takes it back."""
        if one is None:
            self._nominated.pop(uid, None)
        else:
            self._nominated[uid] = one

    # --- questions

    @property
    def lowest(self) -> float:
        """The lowest priority of a bound pod; nobody has to go for a pod that has no higher one."""
        return min(self._counts, default=math.inf)

    def key_of(self, uid: str) -> str:
        """namespace/name of a pod that holds GPUs."""
        held = self._ledger.held(uid)
        return held.pod if held is not None else ""

    def cost(self, victims: Iterable[str]) -> tuple[float, int, int]:
        """What their end costs, as the kube-scheduler compares: the highest priority, how many, and their MiB."""
        uids = list(victims)
        held = [self._ledger.held(uid) for uid in uids]
        memory = sum(use[1] for one in held if one is not None for use in one.uses)
        return max((self._priorities.get(uid, 0) for uid in uids), default=-math.inf), len(uids), memory

    def comes(self, uid: str) -> bool:
        """Whether a nominated pod has room on its node once those have left that are ending now."""
        one = self._nominated.get(uid)
        if one is None:
            return False
        ending = {one.node: [other for other in self._lower(one.node, one.priority, ()) if other in self._ending]}
        return bool(self._ledger.filter(one.ask, [one.node], ending).fits)

    def begin(
        self, ask: PodAsk, uid: str, priority: int, names: Sequence[str], spared: Collection[str] = ()
    ) -> dict[str, list[str]]:
        """By node, the uids of those that have to be asked to leave, where that makes room for the pod; those that are
        ending need not be asked. ``spared`` stay."""
        ending = {name: [one for one in self._lower(name, priority, spared) if one in self._ending] for name in names}
        taken = self._taken(uid, priority, names)
        free = [name for name in names if name not in taken]
        done = self._ledger.filter(ask, free, ending).fits
        if done:
            return {name: [] for name in done}
        found = self.victims(ask, uid, priority, {name: wire.MetaVictims() for name in free}, spared)
        return {name: [pod.UID for pod in one.Pods or [] if pod.UID not in self._ending] for name, one in found.items()}

    def victims(
        self,
        ask: PodAsk,
        uid: str,
        priority: int,
        picked: Mapping[str, wire.MetaVictims],
        spared: Collection[str] = (),
    ) -> dict[str, wire.MetaVictims]:
        """The nodes on which the pod has room once its victims are gone, with all of them: those that the
        kube-scheduler picked, which it needs for resources that are not ours, and the fewest of ours that are missing.

        Those that are ending go first, then lower priorities. A node where pods of lower priority do not hold enough
        is left out, and so is one where room is kept for another pod. ``spared`` are not added.
        """
        taken = self._taken(uid, priority, picked)
        gone = {name: [pod.UID for pod in one.Pods or []] for name, one in picked.items() if name not in taken}
        found = {name: picked[name] for name in self._ledger.filter(ask, list(gone), gone).fits}
        # A node that tells no GPUs, as one with the stock plugin, comes here when its own count of slots is short.
        short = [name for name in gone if name not in found and name in self._ledger.nodes]
        lower: dict[str, list[str]] = {}
        # They come by the alphabet, each time: those that cannot help must not stand before those that can.
        for n in range(0, len(short), MAX_COMPLETED):
            some = {name: self._lower(name, priority, {*gone[name], *spared}) for name in short[n : n + MAX_COMPLETED]}
            self._leave(ask, gone, some)
            lower.update(some)
            if len(lower) >= MAX_COMPLETED:
                break
        more = {name: self._cheapest(ask, name, uids, gone[name]) for name, uids in lower.items()}
        self._leave(ask, gone, more)
        # Where that was not enough, all of them are tried.
        more.update((name, list(uids)) for name, uids in lower.items() if name not in more)
        # Each may stay without whom there is still room; asked of all nodes in one go.
        for n in range(max(map(len, more.values()), default=0)):
            tried = {name: uids[-1 - n] for name, uids in more.items() if n < len(uids)}
            without = {name: gone[name] + [uid for uid in more[name] if uid != one] for name, one in tried.items()}
            for name in self._ledger.filter(ask, list(without), without).fits:
                # In its place, so that the numbers of the others stay.
                more[name][-1 - n] = ""
        for name, uids in more.items():
            pods = [*(picked[name].Pods or []), *(wire.MetaPod(uid) for uid in uids if uid)]
            found[name] = wire.MetaVictims(pods, picked[name].NumPDBViolations)
        return found

    @contextmanager
    def kept(self, uid: str, priority: int, names: Iterable[str]) -> Iterator[set[str]]:
        """While it lasts, nominated pods that this one must not overtake hold in the ledger. Yields the nodes that have
        no room for them yet, since their victims are still there: nobody else may begin to fill what becomes free.

        Nothing is kept where no victim's end makes room any more, as on a node whose GPU is unhealthy since: the
        kube-scheduler takes a nomination back late or never, and others could use what is there.
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

    # --- inside

    def _against(self, uid: str, priority: int) -> list[tuple[str, Nominated]]:
        """Nominated pods of this priority or a higher one, the highest first. One whose bind is under way holds.

        Of two of one priority on one node, which are nominated where the second asks before we hear of the first, one
        goes before the other: each would wait for the other otherwise, and the node with them.
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
        """Whether a pod may be nominated there: room comes once lower ones are gone, and is kept for nobody else."""
        return not self._taken(uid, one.priority, [one.node]) and self._helps(one)

    def _forget_priority(self, uid: str) -> None:
        found = self._priorities.pop(uid, None)
        if found is not None:
            self._counts[found] -= 1
            if not self._counts[found]:
                del self._counts[found]

    def _taken(self, uid: str, priority: int, names: Collection[str]) -> set[str]:
        """Of the nodes those on which room is kept for another pod."""
        waiting = [one for _other, one in self._against(uid, priority) if one.node in names]
        return {one.node for n, one in enumerate(waiting) if n >= MAX_KEPT or self._helps(one)}

    def _helps(self, one: Nominated) -> bool:
        """Whether the pod has room on its node once all pods of lower priority are gone."""
        lower = {one.node: self._lower(one.node, one.priority, ())}
        return bool(self._ledger.filter(one.ask, [one.node], lower).fits)

    def _lower(self, node: str, priority: int, picked: Iterable[str]) -> list[str]:
        """Pods of lower priority that hold GPUs of the node, in the order in which they go: those that are ending, then
        by priority, then the largest, so that few have to go and not many."""
        chosen = set(picked)
        ranked = []
        for uid in self._ledger.pods_of(node):
            held, found = self._ledger.held(uid), self._priorities.get(uid)
            # The kube-scheduler may not know yet of one whose bind is on the way; it has no priority here.
            if held is not None and found is not None and found < priority and uid not in chosen:
                memory = sum(use[1] for use in held.uses)
                ranked.append((uid not in self._ending, found, -memory, uid))
        return [uid for *_rank, uid in sorted(ranked)]

    def _cheapest(self, ask: PodAsk, node: str, lower: Sequence[str], picked: Sequence[str]) -> list[str]:
        """A guess for ``_leave`` to judge: pods of the few GPUs that are made free with the least."""
        largest = max(ask.asks, key=lambda one: (one.gpus, one.memory.amount, one.cores))
        used = {uuid: list(use) for uuid, use in self._ledger.use(node).items()}
        for uid in picked:
            self._take_off(used, uid, node)
        ways = []
        for gpu in self._ledger.nodes[node]:
            if not ask.preferences.takes(gpu.uuid, gpu.model):
                continue
            taken, going = {gpu.uuid: list(used[gpu.uuid])}, []
            for uid in lower:
                if search.fits(largest, gpu, taken[gpu.uuid]):
                    break
                if self._take_off(taken, uid, node):
                    going.append(uid)
            if search.fits(largest, gpu, taken[gpu.uuid]):
                ways.append((max((self._priorities[uid] for uid in going), default=-math.inf), len(going), going))
        ways.sort(key=lambda way: way[:2])
        wanted = {uid for way in ways[: sum(one.gpus for one in ask.asks)] for uid in way[2]}
        return [uid for uid in lower if uid in wanted]

    def _take_off(self, used: dict[str, list[int]], uid: str, node: str) -> bool:
        """Whether the pod held any of these GPUs."""
        held, found = self._ledger.held(uid), False
        for uuid, *amounts in held.uses if held is not None and held.node == node else ():
            if uuid in used:
                used[uuid] = [have - amount for have, amount in zip(used[uuid], amounts, strict=True)]
                found = True
        return found

    def _leave(self, ask: PodAsk, gone: Mapping[str, list[str]], more: dict[str, list[str]]) -> None:
        """Drops from ``more`` the nodes on which the pod has no room without them."""
        all_gone = {name: gone[name] + uids for name, uids in more.items() if uids}
        fits = set(self._ledger.filter(ask, list(all_gone), all_gone).fits)
        for name in [name for name in more if name not in fits]:
            del more[name]
