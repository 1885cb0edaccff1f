# SPDX-License-Identifier: Apache-2.0
"""Marks every slice of a GPU unhealthy when the driver reports a critical Xid for it, and of no other GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from .gpus import GpuError, GpuSource
from .pool import Pool

# Faults of the application and not of the GPU, by NVIDIA's list of Xid errors.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
# Also how long a stop may wait for the driver.
WAIT_MS = 1000
PAUSE_S = 5.0

log = logging.getLogger(__name__)


class HealthWatch:
    """``run`` is one thread. A GPU stays unhealthy until the program starts anew."""

    def __init__(self, source: GpuSource, pool: Pool, ignored: Iterable[int] = APPLICATION_XIDS) -> None:
        self._source = source
        self._pool = pool
        self._ignored = frozenset(ignored)
        self._stopping = threading.Event()

    def run(self) -> None:
        fault_told = ""
        while not self._stopping.is_set():
            try:
                event = self._source.next_xid(WAIT_MS)
            except GpuError as fault:
                if str(fault) != fault_told:
                    log.warning("health is not watched: %s; trying again every %.0f s", fault, PAUSE_S)
                    fault_told = str(fault)
                self._stopping.wait(PAUSE_S)
                continue
            fault_told = ""
            if event is not None:
                self.saw(*event)

    def saw(self, uuid: str, xid: int) -> None:
        if xid in self._ignored:
            log.info("GPU %s: Xid %d is a fault of an application; the GPU stays healthy", uuid, xid)
            return
        log.error("GPU %s: critical Xid %d; all its slices are unhealthy now", uuid, xid)
        self._pool.mark_sick(uuid, f"Xid {xid}")

    def stop(self) -> None:
        self._stopping.set()
