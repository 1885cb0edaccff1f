# SPDX-License-Identifier: Apache-2.0
"""Decides whether and where a pod's GPUs fit, for many nodes at once. At the bind, the same functions choose the GPUs
on one node. Each row of the arrays is a node, each column a GPU.

The GPUs of one container are distinct. Containers are placed one after the other, the largest first, each on the GPUs
that the policy ranks best. If that fails with several containers, ``search`` tries other combinations.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from vgpu_plugin._shared.pods.annotations import APP, INIT, SIDECAR
from vgpu_plugin._shared.pods.node_labels import EXCLUSIVE, SHARED
from vgpu_plugin._shared.pods.preferences import Preferences
from vgpu_plugin._shared.pods.requests import Ask, PodAsk
from vgpu_plugin._shared.pods.resources import CARD, MIB, PERCENT, SLICE, UNITS

from . import numa
from .table import SHARINGS, GpuTable, View

IMPOSSIBLE = np.int32((1 << 31) - 1)


class Picked(NamedTuple):
    """Result of a placement. ``fits``: whether the pod fits, by row; ``columns``: for each request the chosen GPUs, an
    array of shape (rows, GPUs of the request), which is valid only in rows that fit.
    """

    fits: np.ndarray
    columns: tuple[np.ndarray, ...]


def kind_of(ask: Ask) -> str:
    """Returns the kind of a container in a plan."""
    return INIT if ask.init else SIDECAR if ask.sidecar else APP


def memory_of(view: View, ask: Ask) -> np.ndarray:
    """Returns the MiB that the request needs on each GPU; IMPOSSIBLE if the GPU cannot provide that size.

    This is the rule of ``pods.requests.size_on`` for arrays; a test compares both.
    """
    kind, amount = ask.memory
    if kind == CARD:
        need = view.capacity
    elif kind == SLICE:
        need = view.slice_mib
    elif kind == MIB:
        need = np.full_like(view.capacity, amount)
    elif kind == PERCENT:
        need = view.capacity * amount // 100
    elif kind == UNITS:
        gib = view.card // 1024
        # This is computed in 64 bits, because 2^24 MiB times the number of units would overflow 32 bits.
        wide = view.card.astype(np.int64) * amount // np.maximum(gib, 1)
        need = np.where(gib > 0, np.minimum(wide, IMPOSSIBLE), 0).astype(np.int32)
    else:
        raise ValueError(f"no kind of memory is named {kind}")
    return np.where((need > 0) & (need <= view.capacity), need, IMPOSSIBLE)


def cores_of(view: View, ask: Ask) -> np.ndarray:
    if ask.memory.kind == SLICE:
        return np.where(view.slice_cores >= 100, 0, view.slice_cores)
    return np.full_like(view.capacity, ask.cores)


class Fit(NamedTuple):
    """The results of the tests: for each test a mask of the GPUs that pass it, from which the reasons of a refusal are
    derived. ``all``: the GPUs that pass all tests.
    """

    large: np.ndarray
    memory: np.ndarray
    cores: np.ndarray
    slots: np.ndarray
    all: np.ndarray


def fit(view: View, ask: Ask, allowed: np.ndarray) -> Fit:
    """Tests which GPUs fit. A container that requests 100 cores (percent of the GPU's compute) needs an empty GPU and
    excludes others. A container without cores does not fit on a GPU whose cores are all taken. If the request has
    ``alone`` set, the GPU must be empty, but other containers may join it later.
    """
    need, cores = memory_of(view, ask), cores_of(view, ask)
    large = need != IMPOSSIBLE
    memory = large & (need <= view.capacity - view.memory)
    rest = 100 - view.cores
    enough = np.where(cores >= 100, view.shares == 0, (cores <= rest) & (rest > 0))
    slots = view.shares == 0 if ask.alone else view.shares < view.slots
    return Fit(large, memory, enough, slots, allowed & memory & enough & slots)


def enough(view: View, ask: Ask, allowed: np.ndarray) -> np.ndarray:
    """Returns for each row whether this container fits there without the pod's other containers."""
    rows: np.ndarray = numa.one_node(view, fit(view, ask, allowed).all, ask).sum(axis=1) >= ask.gpus
    return rows


def allowed_by(table: GpuTable, rows: np.ndarray, view: View, ask: PodAsk) -> np.ndarray:
    """Returns the usable GPUs that match the pod's selectors, in rows whose node labels admit the pod."""
    usable = view.usable if not view.sharing.any() else view.usable & takes(view, ask)[:, None]
    return selected(table, rows, view, usable, ask.preferences)


def takes(view: View, ask: PodAsk) -> np.ndarray:
    """Returns for each row (node) whether the node's label admits this pod. The label may reserve the node's GPUs for
    pods that take whole GPUs, or for pods that take parts of GPUs.
    """
    whole = all(one.memory.kind == CARD for one in ask.asks)
    rows: np.ndarray = view.sharing != SHARINGS.index(SHARED if whole else EXCLUSIVE)
    return rows


def selected(table: GpuTable, rows: np.ndarray, view: View, gpus: np.ndarray, preferences: Preferences) -> np.ndarray:
    """Restricts the GPUs in the mask ``gpus`` (rows, columns) to those that match the pod's selectors."""
    allowed = gpus
    if not preferences.selects or not len(rows):
        return allowed
    if preferences.use_models or preferences.avoid_models:
        by_model = preferences._replace(use_uuids=(), avoid_uuids=())
        taken = np.array([by_model.takes("", model) for model in table.models] or [False])
        allowed = allowed & taken[view.model]
    if preferences.use_uuids:
        allowed = allowed & table.columns_of(preferences.use_uuids, rows)
    if preferences.avoid_uuids:
        allowed = allowed & ~table.columns_of(preferences.avoid_uuids, rows)
    return allowed


def in_order(asks: Sequence[Ask], view: View) -> np.ndarray:
    """Returns for each row the order in which the containers' requests are placed, an array of shape (rows, requests).
    Sidecars and other containers come by size, the largest first. Init containers come last, because they reuse the
    room of the others.

    A row's order depends only on its own GPUs, because a node must get the same result alone and among other nodes.
    """
    needs = [memory_of(view, ask) for ask in asks]
    sizes = np.stack([np.where(need != IMPOSSIBLE, need, 0).max(axis=1, initial=0) for need in needs], axis=1)
    gpus = np.broadcast_to([-ask.gpus for ask in asks], sizes.shape)
    init = np.broadcast_to([ask.init for ask in asks], sizes.shape)
    order: np.ndarray = np.lexsort((-sizes, gpus, init), axis=1)
    return order


def pick(view: View, asks: Sequence[Ask], allowed: np.ndarray, spread: np.ndarray) -> Picked:
    """Places every container on every row greedily: each container gets the best GPUs that are left. If a pod's GPUs
    must be on one NUMA node, uses the first NUMA node with room for the whole pod. ``spread``: rows on which the
    emptiest GPUs come first; on the other rows the fullest GPUs come first.
    """
    whole = numa.aligns(view, numa.OF_POD) if len(asks) > 1 else np.zeros(len(allowed), bool)
    if not whole.any():
        return pick_any(view, asks, allowed, spread)
    picked = pick_any(view, asks, allowed & ~whole[:, None], spread)
    for node in numa.nodes_of(view, whole):
        left = np.flatnonzero(whole & ~picked.fits)
        some = view.of(left)
        part = pick_any(some, asks, allowed[left] & (some.numa == node), spread[left])
        picked.fits[left] = part.fits
        for columns, found in zip(picked.columns, part.columns, strict=True):
            columns[left] = found
    return picked


def pick_any(view: View, asks: Sequence[Ask], allowed: np.ndarray, spread: np.ndarray) -> Picked:
    """Places every container like ``pick``, without the restriction to one NUMA node."""
    orders = in_order(asks, view)
    height, width = view.capacity.shape
    fits = np.zeros(height, bool)
    columns = tuple(np.zeros((height, min(ask.gpus, width)), np.intp) for ask in asks)
    for order in np.unique(orders, axis=0):
        same = (orders == order).all(axis=1)
        if same.all():
            return pick_in_order(view, asks, allowed, spread, order)
        picked = pick_in_order(view.of(same), asks, allowed[same], spread[same], order)
        fits[same] = picked.fits
        for whole, part in zip(columns, picked.columns, strict=True):
            whole[same] = part
    return Picked(fits, columns)


def pick_in_order(
    view: View, asks: Sequence[Ask], allowed: np.ndarray, spread: np.ndarray, order: Sequence[int]
) -> Picked:
    """Places every container like ``pick``, with the same order of requests for all rows."""
    rows = np.arange(len(view.capacity))[:, None]
    fits = np.ones(len(rows), bool)
    none = np.zeros((len(rows), 0), np.intp)
    columns: list[np.ndarray] = [none] * len(asks)
    inits = inits_by_heir(asks)
    heirs = sorted(inits)
    # ``now``: what other pods and this pod's permanent containers use. ``sides``: for each heir what other pods and the
    # sidecars that start before it use, which is all that runs next to its init containers.
    use, (*others, now) = moments(view, len(heirs) + 1)
    sides = dict(zip(heirs, others, strict=True))
    for n in order:
        ask = asks[n]
        if ask.init:
            continue
        liked = for_all(sides[n], [asks[m] for m in inits[n]], allowed) if n in sides else None
        key = rank(now, spread, liked)
        ok = numa.one_node(now, fit(now, ask, allowed).all, ask, key)
        fits &= ok.sum(axis=1) >= ask.gpus
        columns[n] = chosen = best(key, ok, ask.gpus)
        # If a chosen GPU does not fit, its row has failed already, so no memory and no compute is added for it.
        need, cores = np.where(ok, memory_of(view, ask), 0), np.where(ok, cores_of(view, ask), 0)
        first = bisect(heirs, n) if ask.sidecar else len(heirs)
        use[:, first:, rows, chosen] += np.stack([need, cores, np.ones_like(need)])[:, None, rows, chosen]
    for heir, side in sides.items():
        after = columns[heir] if heir < len(asks) else none
        picked = pick_inits(now, side, [asks[n] for n in inits[heir]], allowed, spread, after)
        fits &= picked.fits
        for n, chosen in zip(inits[heir], picked.columns, strict=True):
            columns[n] = chosen
    return Picked(fits, tuple(columns))


def inits_by_heir(asks: Sequence[Ask]) -> dict[int, list[int]]:
    """Returns heir → its init containers. The heir is the container that gets the devices of these init containers from
    the kubelet: the next one that is no init container. Without such a container, it is the number of containers.
    """
    found: dict[int, list[int]] = {}
    heir = len(asks)
    for n in reversed(range(len(asks))):
        if asks[n].init:
            found.setdefault(heir, []).append(n)
        else:
            heir = n
    return found


def for_all(side: View, asks: Sequence[Ask], allowed: np.ndarray) -> np.ndarray:
    """Returns the GPUs on which each of the init containers of one heir fits. They share these GPUs, because the
    kubelet gives the devices of one also to the next.
    """
    # A pod may have hundreds of equal init containers, so equal requests are tested once.
    different = {ask._replace(container="", where="") for ask in asks}
    mask: np.ndarray = np.logical_and.reduce([fit(side, ask, allowed).all for ask in different])
    return mask


def pick_inits(
    now: View, side: View, asks: Sequence[Ask], allowed: np.ndarray, spread: np.ndarray, after: np.ndarray
) -> Picked:
    """Places the init containers of one heir, after all other containers. ``after``: the heir's GPUs, or no columns
    without an heir.

    The kubelet gives the devices of an init container to the next container, wherever that was planned. So the init
    container must be on GPUs of that container. If it has more GPUs than the next container, the kubelet chooses among
    them, and no plan can name the result.
    """
    ok = for_all(side, asks, allowed)
    inside = np.zeros(ok.shape, bool)
    inside[np.arange(len(ok))[:, None], after] = True
    key = rank(side, spread, (now.shares > side.shares).astype(int) + inside)
    fits = np.ones(len(ok), bool)
    columns = []
    for ask in asks:
        mine = numa.one_node(side, ok & inside if ask.gpus <= after.shape[1] else ok, ask, key)
        fits &= mine.sum(axis=1) >= ask.gpus
        columns.append(best(key, mine, ask.gpus))
    return Picked(fits, tuple(columns))


def moments(view: View, count: int) -> tuple[np.ndarray, list[View]]:
    """Returns copies of the view, whose use can be changed, and the array that contains the use of all copies: memory,
    cores and shares of each copy.
    """
    use = np.repeat(np.stack([view.memory, view.cores, view.shares])[:, None], count, axis=1)
    copies = zip(*use, strict=True)
    return use, [view._replace(memory=memory, cores=cores, shares=shares) for memory, cores, shares in copies]


def rank(view: View, spread: np.ndarray, liked: np.ndarray | None = None) -> np.ndarray:
    """Returns a rank for each GPU; a lower rank is better. On rows of ``spread`` the emptiest GPUs are best, on the
    others the fullest.
    """
    capacity = np.maximum(view.capacity, 1)
    used = np.maximum(view.memory / capacity, view.cores / 100)
    key: np.ndarray = np.where(spread[:, None], used, -used)
    return key if liked is None else key - 10 * liked


def best(key: np.ndarray, ok: np.ndarray, gpus: int) -> np.ndarray:
    """Returns the columns of the best ranked GPUs, as many as requested; among equal GPUs the first."""
    key = np.where(ok, key, np.inf)
    if gpus == 1:
        return key.argmin(axis=1)[:, None]
    return np.argsort(key, axis=1, kind="stable")[:, : min(gpus, key.shape[1])]
