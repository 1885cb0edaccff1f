# SPDX-License-Identifier: Apache-2.0
"""Computes how close GPUs are to each other, and chooses whole GPUs for one container that are close together. It does
no I/O.

The score of a pair of GPUs is 100 for each NVLink between them, plus a part for their PCIe connection. This part is 60
if the PCIe paths meet on the same board, less if they meet farther away, and 10 if they meet only between sockets. It
is 0 if the driver does not report the connection.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from ..errors import BadRequest, counted

NVLINK = 100
# All possible sets are compared if there are no more than this number. 8 GPUs have at most 70 sets.
MOST_SETS = 300
# Level at which the PCIe paths of two GPUs meet (NVML's nvmlGpuTopologyLevel_t) → score.
PCIE = {0: 60, 10: 50, 20: 40, 30: 30, 40: 20, 50: 10}

Links = Mapping[str, Mapping[str, int]]


def scores(
    levels: Mapping[tuple[str, str], int],
    direct: Mapping[tuple[str, str], int],
    switched: Mapping[str, int],
) -> dict[str, tuple[tuple[str, int], ...]]:
    """Returns UUID → (other UUID, score) of each connected GPU. ``levels`` has the PCIe level at which each pair meets.
    ``direct`` has the number of NVLinks from the first GPU to the second. ``switched`` has the number of NVLinks from a
    GPU to an NVSwitch, which connects all its GPUs.
    """
    uuids = sorted(
        {uuid for pair in levels for uuid in pair} | {uuid for pair in direct for uuid in pair} | {*switched}
    )
    out = {}
    for one in uuids:
        row = []
        for other in uuids:
            if other == one:
                continue
            level = levels.get((one, other), levels.get((other, one)))
            lanes = direct.get((one, other), 0) + min(switched.get(one, 0), switched.get(other, 0))
            score = NVLINK * lanes + PCIE.get(-1 if level is None else level, 0)
            if score:
                row.append((other, score))
        out[one] = tuple(row)
    return out


def nearest(
    available: Sequence[str], must_include: Sequence[str], size: int, links: Links, order: Iterable[str]
) -> list[str]:
    """Returns the ``size`` GPUs of ``available`` with the highest sum of scores.

    If several sets have the same sum, the set with the lowest scores to the remaining GPUs is preferred, so that close
    GPUs remain together. After that, the first set by index is preferred. If there are too many sets to compare, one
    set is grown from each GPU, and the best of these is chosen.
    """
    if size > len(set(available)):
        found = counted(len(set(available)), "available GPU")
        raise BadRequest(f"found {found}, expected {size} as requested; request fewer")
    missing = [one for one in must_include if one not in set(available)]
    if missing:
        raise BadRequest(f"GPU {missing[0]} must be included and is not available; offer it as available")
    if len(must_include) >= size:
        return list(must_include)
    rank = {uuid: n for n, uuid in enumerate(order)}
    pool = sorted(set(available), key=lambda uuid: (rank.get(uuid, len(rank)), uuid))
    rest = [one for one in pool if one not in must_include]
    if math.comb(len(rest), size - len(must_include)) <= MOST_SETS:
        sets = ([*must_include, *more] for more in itertools.combinations(rest, size - len(must_include)))
        return max(sets, key=lambda chosen: _worth(chosen, pool, links))
    starts = [list(must_include)] if must_include else [[one] for one in pool]
    return max((_grown(start, size, pool, links) for start in starts), key=lambda chosen: _worth(chosen, pool, links))


def _worth(chosen: Sequence[str], pool: Sequence[str], links: Links) -> tuple[int, int]:
    """Returns the value of a set for comparison: the sum of scores inside the set, then the negative sum of scores
    between the set and the other GPUs.
    """
    inside = outside = 0
    for one in chosen:
        row = links.get(one, {})
        inner = sum(row.get(other, 0) for other in chosen)
        inside += inner
        outside += sum(row.get(other, 0) for other in pool) - inner
    return inside, -outside


def _grown(start: list[str], size: int, pool: Sequence[str], links: Links) -> list[str]:
    """Returns a set of GPUs that is grown from ``start``: each step adds the GPU with the highest score to the set."""
    chosen = start
    near = {one: sum(links.get(one, {}).get(other, 0) for other in chosen) for one in pool if one not in chosen}
    while len(chosen) < size:
        take = max(near, key=lambda one: near[one])
        del near[take]
        chosen = [*chosen, take]
        for one in near:
            near[one] += links.get(one, {}).get(take, 0)
    return chosen
