# SPDX-License-Identifier: Apache-2.0
"""Which slices the kubelet should take: distinct GPUs first, and the least used GPU first (``distributed``).

Pure. It is advice to the kubelet; Allocate checks what really comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .errors import BadRequest


def gpu_of(slice_id: str) -> str:
    """The UUID in a slice id; the id of a GPU that is not shared is its UUID."""
    return slice_id.partition("::")[0]


def ordinal(slice_id: str) -> int:
    _uuid, _colons, number = slice_id.partition("::")
    return int(number) if number.isdigit() else 0


def preferred(
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    totals: Mapping[str, int],
    order: Iterable[str],
    packed: bool = False,
) -> list[str]:
    """``size`` ids out of ``available``. ``totals``: slices of each GPU; ``order``: UUIDs in NVML's order.

    Each pick takes the GPU with the fewest slices in this answer, then the one with the fewest slices in use
    (``packed``: the most), then the first by index; a second slice of one GPU comes only when every GPU with a free
    slice has given one.
    """
    different = len(set(available))
    if size > different:
        raise BadRequest(f"{size} slices are asked for out of {different} available ones; ask for fewer")
    missing = [one for one in must_include if one not in set(available)]
    if missing:
        raise BadRequest(f"slice {missing[0]} must be included and is not available; offer it as available")
    rank = {uuid: n for n, uuid in enumerate(order)}
    free: dict[str, list[str]] = {}
    for one in sorted(set(available) - set(must_include), key=ordinal, reverse=True):
        free.setdefault(gpu_of(one), []).append(one)
    chosen = list(must_include)
    taken = Counter(gpu_of(one) for one in chosen)
    offered = Counter(gpu_of(one) for one in available)
    used = {uuid: totals.get(uuid, 0) - offered[uuid] for uuid in offered}
    while len(chosen) < size:
        uuid = min(
            (one for one, ids in free.items() if ids),
            key=lambda one: (taken[one], -used[one] if packed else used[one], rank.get(one, len(rank)), one),
        )
        chosen.append(free[uuid].pop())
        taken[uuid] += 1
    return chosen[:size] if len(must_include) <= size else list(must_include)
