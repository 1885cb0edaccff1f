# SPDX-License-Identifier: Apache-2.0
"""Chooses the slices (parts of GPUs) that the kubelet should prefer for a container: slices of distinct GPUs first, and
the least used GPU first (``distributed``).

The functions read and write nothing outside their arguments. The kubelet may ignore the preference, so Allocate checks
the ids that the kubelet really chose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ..errors import BadRequest, counted


def gpu_of(slice_id: str) -> str:
    """Returns the UUID in a slice id; the id of a GPU that is not shared is its UUID."""
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
    """Returns ``size`` ids of ``available`` that the kubelet should prefer. ``totals``: number of slices of each GPU;
    ``order``: UUIDs in NVML's order.

    Each step takes a slice of the GPU with the fewest slices in this result. Among equal GPUs it prefers the one with
    the fewest slices in use (with ``packed`` the most), then the first in ``order``. A second slice of one GPU is
    chosen only when every GPU with a free slice has given one.
    """
    offers = set(available)
    if size > len(offers):
        found = counted(len(offers), "available slice")
        raise BadRequest(f"found {found}, expected {size} as requested; request fewer")
    missing = [one for one in must_include if one not in offers]
    if missing:
        raise BadRequest(f"slice {missing[0]} must be included and is not available; offer it as available")
    rank = {uuid: n for n, uuid in enumerate(order)}
    chosen = list(must_include)
    given = frozenset(chosen)
    taken = Counter(gpu_of(one) for one in chosen)
    free: dict[str, list[str]] = {}
    for one in offers:
        free.setdefault(one.partition("::")[0], []).append(one)
    used = {uuid: totals.get(uuid, 0) - len(ids) for uuid, ids in free.items()}
    if given:
        free = {uuid: [one for one in ids if one not in given] for uuid, ids in free.items()}
    open_gpus = [uuid for uuid, ids in free.items() if ids]
    # Each list is sorted so that the slice to take next is at its end. A list is sorted only when its GPU is first
    # picked, because most GPUs are never picked.
    ordered: set[str] = set()
    while len(chosen) < size:
        uuid = min(
            open_gpus, key=lambda one: (taken[one], -used[one] if packed else used[one], rank.get(one, len(rank)), one)
        )
        ids = free[uuid]
        if uuid not in ordered:
            # The ids of one GPU end with a number, so comparing lengths first orders them by number.
            ids.sort(reverse=True)
            ids.sort(key=len, reverse=True)
            ordered.add(uuid)
        chosen.append(ids.pop())
        taken[uuid] += 1
        if not ids:
            open_gpus.remove(uuid)
    return chosen
