# SPDX-License-Identifier: Apache-2.0
"""Places a pod on one node if the fast greedy placement failed: tries other orders and combinations of several
containers. It also chooses sets of GPUs that are close to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations, islice

from vgpu_plugin._shared.pods.annotations import NodeGpu, Use
from vgpu_plugin._shared.pods.preferences import NUMA, TOPOLOGY
from vgpu_plugin._shared.pods.requests import Ask, Card, Size, size_on

# Maximum number of sets of GPUs that are tried for one container, and maximum number of steps of a whole search.
# Without these limits a bind could take long.
MAX_WAYS = 500
MAX_STEPS = 5000


def search(
    asks: Sequence[Ask],
    gpus: Sequence[NodeGpu],
    used: Mapping[str, Use],
    allowed: Sequence[bool],
    aligned: bool = False,
) -> list[tuple[int, ...]] | None:
    """Returns the chosen GPUs of each request, as positions in ``gpus``, or None if no combination was found within the
    limits. ``asks`` contains no init containers, because the caller uses only the greedy placement for pods with init
    containers. ``aligned``: the GPUs of a request must be on one NUMA node.
    """
    # A container that requests no compute needs a GPU whose compute is not used up, so it is placed before the others.
    order = sorted(range(len(asks)), key=lambda n: (asks[n].cores > 0, -asks[n].gpus, n))
    taken = [list(used.get(gpu.uuid, Use(0, 0, 0))) for gpu in gpus]
    found: list[tuple[int, ...]] = [()] * len(asks)
    steps = 0

    def place(position: int) -> bool:
        nonlocal steps
        if position == len(order):
            return True
        ask = asks[order[position]]
        for way in ways(ask, gpus, taken, allowed, aligned):
            steps += 1
            if steps > MAX_STEPS:
                return False
            sizes = [size_of(ask, gpus[column]) for column in way]
            change(taken, way, sizes, +1)
            found[order[position]] = way
            if place(position + 1):
                return True
            change(taken, way, sizes, -1)
        return False

    return found if place(0) else None


def ways(
    ask: Ask,
    gpus: Sequence[NodeGpu],
    taken: Sequence[Sequence[int]],
    allowed: Sequence[bool],
    aligned: bool = False,
) -> Iterator[tuple[int, ...]]:
    """Yields sets of GPUs on which one container fits. Of GPUs that are equal in all relevant values, only as many are
    tried as the container needs.
    """
    columns: list[int] = []
    seen: dict[tuple[NodeGpu, tuple[int, ...]], int] = {}
    for n, gpu in enumerate(gpus):
        if not allowed[n] or not fits(ask, gpu, taken[n]):
            continue
        kind = (gpu._replace(uuid="", links=()), tuple(taken[n]))
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= ask.gpus:
            columns.append(n)
    # The fullest GPUs come first, so that large free parts remain on the others.
    columns.sort(key=lambda n: gpus[n].capacity_mib - taken[n][0])
    wanted = ask.one_numa and any(gpu.numa >= 0 for gpu in gpus)
    if not (aligned or wanted) or ask.gpus == 1:
        return islice(combinations(columns, ask.gpus), MAX_WAYS)
    nodes = sorted({gpus[n].numa for n in columns if gpus[n].numa >= 0})
    sets = (combinations([n for n in columns if gpus[n].numa == node], ask.gpus) for node in nodes)
    return islice(chain.from_iterable(sets), MAX_WAYS)


def fits(ask: Ask, gpu: NodeGpu, taken: Sequence[int]) -> bool:
    """Whether one container fits on the GPU. This is the rule of ``placement.fit`` for one GPU. ``taken``: used MiB,
    used percent, and number of containers.
    """
    size = size_of(ask, gpu)
    slots = 1 if ask.alone else gpu.slots
    if size is None or not gpu.healthy or taken[2] >= slots or size.memory_mib > gpu.capacity_mib - taken[0]:
        return False
    return taken[2] == 0 if size.cores >= 100 else size.cores <= 100 - taken[1] and taken[1] < 100


def size_of(ask: Ask, gpu: NodeGpu) -> Size | None:
    return size_on(ask, card_of(gpu))


def card_of(gpu: NodeGpu) -> Card:
    return Card(gpu.memory_mib, gpu.capacity_mib, gpu.slice_mib, gpu.slice_cores)


def change(taken: Sequence[list[int]], way: Sequence[int], sizes: Sequence[Size | None], sign: int) -> None:
    for column, size in zip(way, sizes, strict=True):
        assert size is not None
        taken[column][0] += sign * size.memory_mib
        taken[column][1] += sign * size.cores
        taken[column][2] += sign


def best_set(
    gpus: Sequence[NodeGpu], columns: Sequence[int], count: int, words: Sequence[str], key: Sequence[float]
) -> tuple[int, ...]:
    """Returns the set of ``count`` GPUs that a policy ranks best. A word of the policy counts only if all words before
    it rank the sets equally. ``topology`` prefers the best links, then GPUs of one NUMA node; ``numa`` prefers GPUs of
    one NUMA node; every other word prefers the lowest sum of ``key``.
    """
    scores = [dict(gpu.links) for gpu in gpus]
    # The keys are rounded to integers, because a sum of floats depends on the order of addition.
    keys = [round(one * 1_000_000) for one in key]

    def liking(way: tuple[int, ...]) -> tuple[int, ...]:
        pairs = list(combinations(way, 2))
        links = sum(scores[a].get(gpus[b].uuid, 0) + scores[b].get(gpus[a].uuid, 0) for a, b in pairs)
        same = sum(gpus[a].numa == gpus[b].numa and gpus[a].numa >= 0 for a, b in pairs)
        by_word = {TOPOLOGY: (links, same), NUMA: (same,)}
        return tuple(one for word in words for one in by_word.get(word) or (-sum(keys[n] for n in way),))

    return max(islice(combinations(columns, count), 20 * MAX_WAYS), key=liking)
