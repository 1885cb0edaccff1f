# SPDX-License-Identifier: Apache-2.0
"""What was found of a node for an ask stands until the node changes: pods of one job ask for the same, one after the
other, and a pod that is bound changes one node of thousands.

No reader is notified of a change, so none can be forgotten: the table counts each change of a row, and an answer
holds for the count at which it was found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from vgpu_plugin._shared.pods.requests import PodAsk

from .table import GpuTable

# Kinds of pods that are scheduled at a time; an entry is ten bytes a node.
MAX_ASKS = 32
# Of a code: the pod fits. All others are a Reason.
FITS = -1


class Judged(NamedTuple):
    """Of each row: FITS or the reason why not, and its score."""

    codes: np.ndarray
    scores: np.ndarray


Judge = Callable[[PodAsk, np.ndarray], Judged]


class Memo:
    def __init__(self, table: GpuTable, judge: Judge) -> None:
        """``judge`` looks at rows; what it says of a row depends on the ask and on that row alone."""
        self._table, self._judge = table, judge
        self._known: OrderedDict[PodAsk, tuple[np.ndarray, Judged]] = OrderedDict()
        # Rows that were looked at, for metrics and tests.
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
            # No row has version -1.
            known = np.full(size, -1, np.int64), Judged(np.zeros(size, np.int8), np.zeros(size, np.int8))
            self._known[ask] = known
            if len(self._known) > MAX_ASKS:
                self._known.popitem(last=False)
        self._known.move_to_end(ask)
        return known
