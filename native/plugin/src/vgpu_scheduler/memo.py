# SPDX-License-Identifier: Apache-2.0
"""Caches for each request whether it fits on each node, until the node changes. This helps because the pods of one job
come one after the other with equal requests, and each bind changes only one node of thousands.

No change needs to be announced: the table of GPUs counts the changes of each row (one row is one node), and a cached
result is valid while the count of its row is unchanged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from vgpu_plugin._shared.pods.requests import PodAsk

from .table import GpuTable

# Maximum number of different requests that are cached. An entry takes ten bytes for each node.
MAX_ASKS = 32
# Code of a row (node) on which the pod fits. Every other code is the number of a Reason.
FITS = -1


class Judged(NamedTuple):
    """The result for each row. ``codes``: FITS, or the Reason why the pod does not fit; ``scores``: how good the node
    is.
    """

    codes: np.ndarray
    scores: np.ndarray


Judge = Callable[[PodAsk, np.ndarray], Judged]


class Memo:
    def __init__(self, table: GpuTable, judge: Judge) -> None:
        """``judge`` computes results for rows. The result of a row may depend only on the request and on that row."""
        self._table, self._judge = table, judge
        self._known: OrderedDict[PodAsk, tuple[np.ndarray, Judged]] = OrderedDict()
        # Number of rows whose result was computed and not taken from the cache, for metrics and tests.
        self.looked = 0

    def ask(self, ask: PodAsk, rows: np.ndarray) -> Judged:
        versions = self._table.versions
        seen, judged = self._entry(ask, len(versions))
        stale = rows[seen[rows] != versions[rows]]
        if stale.size:
            found = self._judge(ask, stale)
            judged.codes[stale], judged.scores[stale] = found
            seen[stale] = versions[stale]
            self.looked += len(stale)
        return Judged(judged.codes[rows], judged.scores[rows])

    def _entry(self, ask: PodAsk, size: int) -> tuple[np.ndarray, Judged]:
        known = self._known.get(ask)
        if known is None or len(known[0]) != size:
            # No row has the version -1, so all rows will be computed.
            known = np.full(size, -1, np.int64), Judged(np.zeros(size, np.int8), np.zeros(size, np.int8))
            self._known[ask] = known
            if len(self._known) > MAX_ASKS:
                self._known.popitem(last=False)
        self._known.move_to_end(ask)
        return known
