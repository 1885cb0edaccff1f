# SPDX-License-Identifier: Apache-2.0
"""Computes shares of a GPU from the stamps of kernels: the values of the GPU's clock %globaltimer at a kernel's first
and last instruction. Only ``read`` reads a file; the other functions compute from their arguments alone."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Sequence


def read(path: Path) -> list[tuple[int, int]]:
    """Reads (start, end) of every launch in nanoseconds, in the order of the starts; skips launches without stamps."""
    data = path.read_bytes()
    (count,) = struct.unpack_from("<Q", data, 0)
    if len(data) != 8 + 16 * count:
        raise ValueError(f"{path}: {len(data)} bytes are not the stamps of {count} launches")
    starts = struct.unpack_from(f"<{count}Q", data, 8)
    ends = struct.unpack_from(f"<{count}Q", data, 8 + 8 * count)
    return sorted((start, end) for start, end in zip(starts, ends) if 0 < start <= end < 2**63)


def union(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the union of the intervals, sorted and without overlaps."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def busy(intervals: Sequence[tuple[int, int]], since: int, until: int) -> int:
    """Returns the nanoseconds of [since, until) that disjoint sorted intervals cover."""
    return sum(max(0, min(end, until) - max(start, since)) for start, end in intervals)


def windows(intervals: Sequence[tuple[int, int]], since: int, until: int, length: int) -> list[float]:
    """Returns the covered fraction of each whole window of ``length`` ns between since and until."""
    joined = union(intervals)
    return [busy(joined, at, at + length) / length for at in range(since, until - length + 1, length)]


def period(intervals: Sequence[tuple[int, int]]) -> float:
    """Returns the median nanoseconds from one launch's start to the next's. Without throttling this is the cost of a
    launch on an otherwise idle GPU, with the gap between two kernels."""
    steps = sorted(later[0] - earlier[0] for earlier, later in zip(intervals, intervals[1:]))
    return float(steps[len(steps) // 2]) if steps else 0.0


def work(intervals: Sequence[tuple[int, int]], cost: float, since: int, until: int, length: int) -> list[float]:
    """Returns the share in each window: the number of launches times the cost of a single launch, divided by the
    window's length. The result is right even if the stamps of two tenants overlap, because their kernels run in time
    slices."""
    shares = []
    for at in range(since, until - length + 1, length):
        done = 0.0
        for start, end in intervals:
            if end > at and start < at + length:
                inside = min(end, at + length) - max(start, at)
                done += inside / (end - start) if end > start else 1.0
        shares.append(done * cost / length)
    return shares


def turns(tenants: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int, int]]:
    """Returns (tenant, start, end) of each turn: a series of launches of one tenant, between which no other tenant's
    launch starts."""
    marked = sorted((start, end, who) for who, intervals in enumerate(tenants) for start, end in intervals)
    runs: list[tuple[int, int, int]] = []
    for start, end, who in marked:
        if runs and runs[-1][0] == who:
            runs[-1] = (who, runs[-1][1], max(end, runs[-1][2]))
        else:
            runs.append((who, start, end))
    return runs


def middle(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return float(ordered[len(ordered) // 2]) if ordered else 0.0


def tick(intervals: Sequence[tuple[int, int]]) -> int:
    """Returns the smallest step of the stamps' clock in nanoseconds, or 0 with fewer than two different readings."""
    readings = sorted({moment for interval in intervals[:20000] for moment in interval})
    return min((later - earlier for earlier, later in zip(readings, readings[1:])), default=0)
