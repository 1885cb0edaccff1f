# SPDX-License-Identifier: Apache-2.0
"""The ledger: a record in memory of what every pod holds of every GPU. It answers three questions of the
kube-scheduler: which nodes have room, which node is best, and which GPUs a pod gets.

It is built only from the GPUs that nodes publish and the plans on pods (annotations with their GPUs), so it can be
rebuilt at any time and in any order with the same result. A pod holds GPUs from its first bind request until it has
ended or is gone. Only one thread uses the ledger.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from vgpu_plugin._shared.pods.annotations import NO_POLICY, Device, NodeGpu, Part, Topology, Use, use_of, write_plan
from vgpu_plugin._shared.pods.node_labels import NO_LABELS, NodeLabels
from vgpu_plugin._shared.pods.preferences import BINPACK, NUMA, SPREAD, TOPOLOGY, Preferences, words_of
from vgpu_plugin._shared.pods.requests import Card, PodAsk

from . import numa, placement, reasons, search
from .memo import FITS, Judged, Memo
from .reasons import Reason
from .table import ORDERS, GpuTable, View

# The highest score that an extender may return.
MAX_SCORE = 10
# Number of nodes on which a filter call tries all combinations for a pod with several containers, if the fast greedy
# placement found too few nodes.
MAX_SEARCHED = 16
ENOUGH = 1


class NoRoom(Exception):
    """Raised if a pod does not fit on a node; the text says why."""


class Held(NamedTuple):
    """What one pod holds. ``pod`` is namespace/name; ``uses``: (UUID, MiB, percent of compute, slots) of each GPU; a
    slot is a place for one container. ``plan`` is the text of the pod's annotation.
    """

    pod: str
    node: str
    uses: tuple[tuple[str, int, int, int], ...]
    plan: str


class Answer(NamedTuple):
    """The result of a filter call: nodes that fit, and the reasons for the others. ``never``: reasons that a preemption
    cannot change.
    """

    fits: list[str]
    failed: dict[str, str]
    never: dict[str, str]


class Drift(NamedTuple):
    """A pod whose entry in the ledger (``found``) differs from its plan (``expected``). ``found`` is empty without an
    entry, ``expected`` if the plan gives the pod nothing.
    """

    uid: str
    pod: str
    found: tuple[tuple[str, int, int, int], ...]
    expected: tuple[tuple[str, int, int, int], ...]


class Ledger:
    def __init__(self, node_policy: str = BINPACK, gpu_policy: str = SPREAD) -> None:
        self.node_policy, self.gpu_policy = node_policy, gpu_policy
        self._table = GpuTable()
        self._memo = Memo(self._table, self._judge)
        self._held: dict[str, Held] = {}
        # Node → uids of pods that hold its GPUs. Nodes that are gone are included, because their pods hold GPUs again
        # when the node returns.
        self._pods_of: dict[str, set[str]] = {}
        # Namespace → MiB and percent of compute that its pods hold.
        self._spaces: dict[str, list[int]] = {}
        # Kind of GPU: its memory, and its slice if slices are equal → number of such GPUs.
        self._cards: Counter[Card] = Counter()
        # (number of GPUs, MiB of the largest GPU) → number of such nodes.
        self._shapes: Counter[tuple[int, int]] = Counter()

    # --- updates

    def set_node(
        self, name: str, gpus: Sequence[NodeGpu], topology: Topology = NO_POLICY, labels: NodeLabels = NO_LABELS
    ) -> bool:
        """Enters the GPUs that a node publishes, its topology manager's policy and its labels. Returns whether anything
        changed.
        """
        table = self._table
        if name in table and (table.gpus[name], table.topologies[name], table.labels[name]) == (
            tuple(gpus),
            topology,
            labels,
        ):
            return False
        self._count(name, -1)
        self._table.put(name, gpus, topology, labels)
        self._count(name, +1)
        for uid in self._pods_of.get(name, ()):
            self._table.add(name, _mapping(self._held[uid].uses), +1)
        return True

    def drop_node(self, name: str) -> None:
        if name in self._table:
            self._count(name, -1)
            self._table.drop(name)

    def hold(self, uid: str, pod: str, node: str, plan: Iterable[Part]) -> bool:
        """Enters what a pod holds according to its plan, in place of its former entry. Returns whether anything
        changed.

        The plan is entered as it is, even if it exceeds the GPU.
        """
        parts = tuple(plan)
        held = Held(pod, sys.intern(node), _tuple(use_of(parts)), write_plan(parts))
        if self._held.get(uid) == held:
            return False
        self.release(uid)
        self._held[uid] = held
        self._pods_of.setdefault(held.node, set()).add(uid)
        self._spend(held, +1)
        if node in self._table:
            self._table.add(node, _mapping(held.uses), +1)
        return True

    def release(self, uid: str) -> bool:
        held = self._held.pop(uid, None)
        if held is None:
            return False
        self._spend(held, -1)
        if held.node in self._table:
            self._table.add(held.node, _mapping(held.uses), -1)
        pods = self._pods_of[held.node]
        pods.discard(uid)
        if not pods:
            del self._pods_of[held.node]
        return True

    # --- queries

    def filter(self, ask: PodAsk, names: Sequence[str], without: Mapping[str, Iterable[str]] | None = None) -> Answer:
        """Returns which of the nodes have room for the pod. ``without``: node → uids of pods that are
        treated as gone.
        """
        rows = self._table.rows(names)
        known = rows >= 0
        inside = rows[known]
        listed = np.array(names, object)
        codes = self._codes(ask, inside, listed[known], without)
        fits = codes == FITS
        failed: dict[str, str] = {}
        never: dict[str, str] = {}
        if not known.all():
            never.update(dict.fromkeys(listed[~known].tolist(), reasons.NO_GPUS))
        if not fits.all():
            missing = ~fits
            codes = codes[missing]
            lost = listed[known][missing]
            for code in np.unique(codes):
                reason = Reason(int(code))
                text = reasons.text(reason, ask)
                place = never if reason in reasons.LASTING else failed
                place.update(dict.fromkeys(lost[codes == code].tolist(), text))
        return Answer(listed[known][fits].tolist(), failed, never)

    def prioritize(self, ask: PodAsk, names: Sequence[str]) -> list[int]:
        """Returns a score from 0 to 10 for each node; 0 without GPUs. The score says how full (policy binpack) or empty
        (spread) the node's GPUs would be, or how close the pod's GPUs can be to each other (topology).
        """
        rows = self._table.rows(names)
        known = rows >= 0
        scores = np.zeros(len(names), np.int64)
        if known.any():
            inside = rows[known]
            one = len(ask.asks) == 1
            scores[known] = self._memo.ask(ask, inside).scores if one else self._scores(inside, ask)
        return scores.tolist()

    def place(self, ask: PodAsk, node: str) -> tuple[Part, ...]:
        """Returns a plan of the pod's GPUs on a node, without reserving them. Raises NoRoom."""
        rows = self._table.rows([node])
        if rows[0] < 0:
            raise NoRoom(f"node {node}: {reasons.NO_GPUS}")
        view = self._table.view(rows)
        allowed = placement.allowed_by(self._table, rows, view, ask)
        picked = self._pick(view, ask, allowed)
        gpus = self._table.gpus[node]
        if picked.fits[0]:
            columns = [tuple(chosen[0].tolist()) for chosen in picked.columns]
        else:
            found = self._search(ask, node, allowed[0])
            if found is None:
                reason = Reason(int(reasons.of(view, ask, allowed)[0]))
                raise NoRoom(f"node {node}: {reasons.text(reason, ask)}")
            columns = found
        policy = words_of(ask.preferences.gpu_policy or self._table.labels[node].policy or self.gpu_policy)
        if {TOPOLOGY, NUMA} & set(policy) and len(ask.asks) == 1 and ask.asks[0].gpus > 1:
            key = placement.rank(view, np.array([SPREAD in policy]))
            ok = numa.one_node(view, placement.fit(view, ask.asks[0], allowed).all, ask.asks[0], key)[0]
            free = np.flatnonzero(ok).tolist()
            columns = [search.best_set(gpus, free, ask.asks[0].gpus, policy, key[0].tolist())]
        parts = []
        for one, chosen in zip(ask.asks, columns, strict=True):
            devices = []
            for column in chosen:
                size = search.size_of(one, gpus[column])
                assert size is not None
                # A limit above the GPU's memory is reduced to the GPU's memory.
                burst = min(one.burst_mib, gpus[column].capacity_mib - size.memory_mib)
                devices.append(Device(gpus[column].uuid, size.memory_mib, size.cores, burst))
            parts.append(Part(one.container, placement.kind_of(one), tuple(devices)))
        return tuple(parts)

    # --- data for people and metrics

    @property
    def nodes(self) -> Mapping[str, tuple[NodeGpu, ...]]:
        return self._table.gpus

    def held(self, uid: str) -> Held | None:
        return self._held.get(uid)

    def pods_of(self, node: str) -> Collection[str]:
        """Returns the uids of pods that hold GPUs of a node."""
        return self._pods_of.get(node, ())

    def held_by(self) -> Iterable[tuple[str, Held]]:
        return self._held.items()

    def held_in(self, namespace: str) -> tuple[int, int]:
        """Returns the MiB and percent, over all GPUs, that the pods of a namespace hold."""
        memory, cores = self._spaces.get(namespace, (0, 0))
        return memory, cores

    @property
    def cards(self) -> Collection[Card]:
        """Returns the kinds of GPUs in the cluster, each once."""
        return [card for card, count in self._cards.items() if count]

    @property
    def shapes(self) -> Collection[tuple[int, int]]:
        """Returns (number of GPUs, MiB of the largest GPU) for each kind of node."""
        return [shape for shape, count in self._shapes.items() if count]

    def most_gpus(self, preferences: Preferences) -> tuple[str, int]:
        """Returns the node with most GPUs that match the preferences, healthy or not, and their number; returns ("", 0)
        if no node has such a GPU.
        """
        names = list(self._table.names)
        rows = self._table.rows(names)
        if not names:
            return "", 0
        view = self._table.view(rows)
        counts = placement.selected(self._table, rows, view, view.there, preferences).sum(axis=1)
        first = int(counts.argmax())
        return (names[first], int(counts[first])) if counts[first] else ("", 0)

    def use(self, node: str) -> dict[str, Use]:
        return self._table.use(node)

    def oversold(self) -> list[tuple[str, str]]:
        """Returns (node, UUID) of GPUs whose pods hold more memory, cores or slots than the GPU has. The cause is an
        error, or a kubelet that took other GPUs than planned.
        """
        found = []
        for node, gpus in self._table.gpus.items():
            use = self._table.use(node)
            for gpu in gpus:
                one = use[gpu.uuid]
                if one.memory_mib > gpu.capacity_mib or one.cores > 100 or one.slots > gpu.slots:
                    found.append((node, gpu.uuid))
        return found

    def drift(self, truth: Mapping[str, tuple[str, str, tuple[Part, ...]]]) -> list[Drift]:
        """Returns the differences between this ledger and ``truth``: uid → (namespace/name, node, plan) of every pod
        that holds GPUs.
        """
        found = []
        for uid, (pod, node, plan) in truth.items():
            expected, held = _tuple(use_of(plan)), self._held.get(uid)
            if held is None or held.node != node or held.uses != expected:
                found.append(Drift(uid, pod, held.uses if held else (), expected))
        found += [Drift(uid, held.pod, held.uses, ()) for uid, held in self._held.items() if uid not in truth]
        return found

    # --- internal

    def _spend(self, held: Held, sign: int) -> None:
        space = held.pod.partition("/")[0]
        sums = self._spaces.setdefault(space, [0, 0])
        for _uuid, memory, cores, _slots in held.uses:
            sums[0] += sign * memory
            sums[1] += sign * cores
        if not any(sums):
            del self._spaces[space]

    def _count(self, name: str, sign: int) -> None:
        gpus = self._table.gpus.get(name)
        if gpus is None:
            return
        for gpu in gpus:
            self._cards[search.card_of(gpu)] += sign
        self._shapes[len(gpus), max((gpu.capacity_mib for gpu in gpus), default=0)] += sign

    def _view(self, rows: np.ndarray, names: np.ndarray, without: Mapping[str, Iterable[str]] | None) -> View:
        view = self._table.view(rows)
        for n, name in enumerate(names) if without else ():
            columns = {gpu.uuid: column for column, gpu in enumerate(self._table.gpus[name])}
            for uid in (without or {}).get(name, ()):
                held = self._held.get(uid)
                for uuid, memory, cores, slots in held.uses if held and held.node == name else ():
                    if uuid in columns:
                        view.memory[n, columns[uuid]] -= memory
                        view.cores[n, columns[uuid]] -= cores
                        view.shares[n, columns[uuid]] -= slots
        return view

    def _codes(
        self, ask: PodAsk, rows: np.ndarray, names: np.ndarray, without: Mapping[str, Iterable[str]] | None
    ) -> np.ndarray:
        """Returns for each row (node) the code FITS or the Reason why the pod does not fit."""
        if without is None and len(ask.asks) == 1:
            return self._memo.ask(ask, rows).codes
        view = self._view(rows, names, without)
        allowed = placement.allowed_by(self._table, rows, view, ask)
        return _reasoned(self._fits(view, ask, allowed, names), view, ask, allowed)

    def _judge(self, ask: PodAsk, rows: np.ndarray) -> Judged:
        """Computes the results of rows (nodes) that the cache lacks, for a pod with one container. The cache has no
        results for pods with several containers: for these only some rows are searched, so a row's result depends on
        the other rows.
        """
        view = self._table.view(rows)
        allowed = placement.allowed_by(self._table, rows, view, ask)
        fits = placement.enough(view, ask.asks[0], allowed)
        return Judged(_reasoned(fits, view, ask, allowed), self._scores(rows, ask))

    def _fits(self, view: View, ask: PodAsk, allowed: np.ndarray, names: np.ndarray) -> np.ndarray:
        if len(ask.asks) == 1:
            return placement.enough(view, ask.asks[0], allowed)
        alone = np.ones(len(view.capacity), bool)
        for one in ask.asks:
            alone &= placement.enough(view, one, allowed)
        fits = alone.copy()
        fits[alone] = self._pick(view.of(alone), ask, allowed[alone]).fits
        if fits.sum() < ENOUGH:
            for n in np.flatnonzero(alone & ~fits)[:MAX_SEARCHED]:
                fits[n] = self._search(ask, names[n], allowed[n], view.of(np.array([n]))) is not None
        return fits

    def _pick(self, view: View, ask: PodAsk, allowed: np.ndarray) -> placement.Picked:
        """Places the pod on each row (node) by its policy. If the policy finds no room on a row, the pod is placed
        there on the fullest GPUs first.

        Filter and bind use this same function: otherwise the filter could name a node on which the bind fails, and the
        pod would return to that node without end.
        """
        own = ask.preferences.gpu_policy
        spread = np.full(len(allowed), SPREAD in words_of(own or self.gpu_policy))
        if not own and view.order.any():
            spread = np.where(view.order == 0, spread, view.order == ORDERS.index(SPREAD))
        picked = placement.pick(view, ask.asks, allowed, spread)
        missing = spread & ~picked.fits
        if missing.any():
            tight = placement.pick(view.of(missing), ask.asks, allowed[missing], np.zeros(missing.sum(), bool))
            picked.fits[missing] = tight.fits
            for columns, found in zip(picked.columns, tight.columns, strict=True):
                columns[missing] = found
        return picked

    def _search(
        self, ask: PodAsk, node: str, allowed: np.ndarray, view: View | None = None
    ) -> list[tuple[int, ...]] | None:
        if any(one.init for one in ask.asks):
            return None
        gpus = self._table.gpus[node]
        if view is None:
            used = self._table.use(node)
        else:
            used = {
                gpu.uuid: Use(int(view.memory[0, n]), int(view.cores[0, n]), int(view.shares[0, n]))
                for n, gpu in enumerate(gpus)
            }
        row = self._table.view(self._table.rows([node]))
        if not numa.aligns(row)[0]:
            return search.search(ask.asks, gpus, used, allowed.tolist())
        if not numa.aligns(row, numa.OF_POD)[0]:
            return search.search(ask.asks, gpus, used, allowed.tolist(), aligned=True)
        masks = ((allowed & (row.numa[0] == one)).tolist() for one in numa.nodes_of(row, np.array([True])))
        found = (search.search(ask.asks, gpus, used, mask) for mask in masks)
        return next((one for one in found if one is not None), None)

    def _scores(self, rows: np.ndarray, ask: PodAsk) -> np.ndarray:
        view = self._table.view(rows)
        policy = ask.preferences.node_policy or self.node_policy
        if policy == TOPOLOGY:
            return self._near(rows, view, ask)
        wanted = np.zeros(len(rows), np.float64)
        cores = 0
        for one in ask.asks:
            need = placement.memory_of(view, one)
            known = (need != placement.IMPOSSIBLE) & view.usable
            mean = np.where(known, need, 0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
            wanted += mean * one.gpus
            cores += one.gpus * one.cores
        room = np.maximum(np.where(view.usable, view.capacity, 0).sum(axis=1), 1)
        memory = (np.where(view.usable, view.memory, 0).sum(axis=1) + wanted) / room
        percent = np.maximum(100 * view.usable.sum(axis=1), 1)
        compute = (np.where(view.usable, view.cores, 0).sum(axis=1) + cores) / percent
        full = np.clip(np.maximum(memory, compute), 0, 1)
        scores: np.ndarray = np.rint(MAX_SCORE * (full if policy == BINPACK else 1 - full)).astype(np.int64)
        return scores

    def _near(self, rows: np.ndarray, view: View, ask: PodAsk) -> np.ndarray:
        """Returns a score for each node: the fraction of containers whose GPUs fit on one NUMA node, times 10."""
        allowed = placement.allowed_by(self._table, rows, view, ask)
        near = np.zeros(len(rows), np.float64)
        for one in ask.asks:
            ok = placement.fit(view, one, allowed).all
            together = np.zeros(len(rows), bool)
            for node in np.unique(view.numa[view.usable]):
                if node >= 0:
                    together |= (ok & (view.numa == node)).sum(axis=1) >= one.gpus
            near += together
        scores: np.ndarray = np.rint(MAX_SCORE * near / max(len(ask.asks), 1)).astype(np.int64)
        return scores


def _reasoned(fits: np.ndarray, view: View, ask: PodAsk, allowed: np.ndarray) -> np.ndarray:
    codes = np.full(len(fits), FITS, np.int8)
    missing = ~fits
    if missing.any():
        codes[missing] = reasons.of(view.of(missing), ask, allowed[missing])
    return codes


def _tuple(uses: Mapping[str, Use]) -> tuple[tuple[str, int, int, int], ...]:
    return tuple((sys.intern(uuid), *use) for uuid, use in sorted(uses.items()))


def _mapping(uses: Iterable[tuple[str, int, int, int]]) -> dict[str, Use]:
    return {uuid: Use(memory, cores, slots) for uuid, memory, cores, slots in uses}
