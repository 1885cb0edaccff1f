# SPDX-License-Identifier: Apache-2.0
"""Marks all slices (the parts of a GPU that are offered to pods) of a GPU unhealthy if the driver reports a critical
Xid (error number of NVIDIA's driver), an ECC error or the loss of that GPU. It marks the slices healthy again after a
period without errors.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..node.gpus import GpuError, GpuSource
from .pool import LOST, Pool

# Xids that one program causes and that are no fault of the GPU. A tenant may cause them, so they must not make a GPU
# unhealthy for others. The set contains the Xids that NVIDIA's device plugin ignores, and those for which NVIDIA's
# catalogue of Xids recommends only a restart of the application (errors of its command stream, copy and video engines).
# Xid 94 is not in the set: the catalogue recommends the same for it, but it is a memory error.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109}) | frozenset(
    {8, 11, 25, 32, 69, 80}
    | {39, 40, 41, 60, 70, 71, 72, 75, 76, 77, 82, 83, 84, 85, 86, 88, 89, 139}
    | {*range(96, 106), *range(126, 136)}
)
DISABLE, ENABLE = "DP_DISABLE_HEALTHCHECKS", "DP_ENABLE_HEALTHCHECKS"
# Maximum milliseconds for which the thread waits in the driver for an event. If the program is stopped meanwhile, it
# ends only after this wait.
WAIT_MS = 1000
PAUSE_S = 5.0
LOOK_S = 5.0
# Seconds without an error after which a GPU is healthy again, if the driver responds for it.
CLEAN_S = 300.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Xids:
    """The Xids of one GPU since the program began. ``counts``: Xid → how often it was reported; ``times``: Xid → time
    of its last report (monotonic clock); ``last``: the Xid reported last, None if there was none.
    """

    counts: Mapping[int, int] = field(default_factory=dict)
    times: Mapping[int, float] = field(default_factory=dict)
    last: int | None = None

    def with_one(self, xid: int, now: float) -> Xids:
        return Xids({**self.counts, xid: self.counts.get(xid, 0) + 1}, {**self.times, xid: now}, xid)


@dataclass(frozen=True)
class Rules:
    """Decides which Xids make a GPU unhealthy. Xids in ``ignored`` never make it unhealthy. If ``only`` is set, only
    Xids in ``only`` do, whatever ``ignored`` contains.
    """

    ignored: frozenset[int] = APPLICATION_XIDS
    only: frozenset[int] | None = None

    def critical(self, xid: int) -> bool:
        return xid in self.only if self.only is not None else xid not in self.ignored


def rules(environment: Mapping[str, str]) -> Rules:
    """Reads the rules from the two environment variables of NVIDIA's plugin. DISABLE contains ``all`` or ``xids``,
    which turn the checks off, or the numbers of Xids that are ignored in addition to those of applications. ENABLE
    contains the numbers of Xids that count despite DISABLE, or ``all``, which means all except those of applications.
    So with DISABLE=all and ENABLE=79 an Xid 79 counts; NVIDIA's plugin ignores it.
    """
    disabled, all_off = _words(environment.get(DISABLE, ""), DISABLE, ("all", "xids"))
    enabled, all_on = _words(environment.get(ENABLE, ""), ENABLE, ("all",))
    if all_off and not all_on:
        return Rules(only=frozenset(enabled))
    return Rules(ignored=(APPLICATION_XIDS | disabled) - enabled)


def _words(text: str, variable: str, switches: tuple[str, ...]) -> tuple[set[int], bool]:
    numbers, switched = set(), False
    for word in (one.strip().lower() for one in re.split(r"[,\s]+", text)):
        if word in switches:
            switched = True
        elif word.isdigit():
            numbers.add(int(word))
        elif word:
            log.warning(
                '%s: "%s" is ignored; expected the number of an Xid, or one of %s', variable, word, ", ".join(switches)
            )
    return numbers, switched


class HealthWatch:
    """Watches the health of the GPUs. ``run`` is one thread, the only one that waits in the driver. It calls ``look``
    every few seconds.
    """

    def __init__(
        self,
        source: GpuSource,
        pool: Pool,
        rules: Rules | None = None,
        look: Callable[[], None] = lambda: None,
        clean_s: float = CLEAN_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._pool = pool
        self._rules = rules or Rules()
        self._look = look
        self._clean_s = clean_s
        self._monotonic = monotonic
        self._stopping = threading.Event()
        self._asked = threading.Event()
        # UUID → time of the GPU's last error. The time is 0 for a GPU that had no error but was lost, so it is healthy
        # as soon as the driver responds for it.
        self._last: dict[str, float] = {}
        self._xids: dict[str, Xids] = {}
        # UUID of each lost GPU → the reason, such as an Xid, for which it was unhealthy before the loss. The GPU gets
        # this reason again when the driver responds for it, and keeps it until its period without errors is over.
        self._besides: dict[str, str] = {}

    def ask(self) -> None:
        """Makes the next check come soon."""
        self._asked.set()

    def run(self) -> None:
        reported_fault = ""
        next_look = self._monotonic() + LOOK_S
        while not self._stopping.is_set():
            try:
                event = self._source.next_xid(WAIT_MS)
                reported_fault = ""
            except GpuError as fault:
                if str(fault) != reported_fault:
                    log.warning("health is not watched: %s; trying again every %.0f s", fault, PAUSE_S)
                    reported_fault = str(fault)
                self._stopping.wait(PAUSE_S)
                self._reopen()
                event = None
            if event is not None:
                self.saw(*event)
            if self._asked.is_set() or self._monotonic() >= next_look:
                self._asked.clear()
                self._guarded(self._look)
                self._guarded(self.recover)
                next_look = self._monotonic() + LOOK_S

    @staticmethod
    def _guarded(task: Callable[[], None]) -> None:
        """Runs a check; its failure must not end the thread."""
        try:
            task()
        except Exception:
            log.exception("the check of the node failed; it is tried again in %.0f s", LOOK_S)

    def _reopen(self) -> None:
        try:
            self._source.reopen()
        except GpuError as fault:
            for gpu in self._pool.gpus:
                self.lost(gpu.uuid, str(fault))

    def saw(self, uuid: str, xid: int) -> None:
        """Handles an Xid of one GPU, or of all GPUs if the driver does not name one."""
        uuids = [uuid] if uuid else [gpu.uuid for gpu in self._pool.gpus]
        for one in uuids:
            self._xids[one] = self.xids(one).with_one(xid, self._monotonic())
        if not self._rules.critical(xid):
            log.info(
                "GPU %s: Xid %d is an application's error or is ignored by configuration; the GPU stays healthy",
                uuid,
                xid,
            )
            return
        for one in uuids:
            log.error("GPU %s: critical Xid %d; all its slices are unhealthy now", one, xid)
            self._last[one] = self._monotonic()
            if self._pool.is_lost(one):
                self._besides[one] = f"Xid {xid}"
            else:
                self._pool.mark_unhealthy(one, f"Xid {xid}")

    def xids(self, uuid: str) -> Xids:
        """Returns all Xids that the driver reported for a GPU, including uncritical ones."""
        return self._xids.get(uuid, Xids())

    def lost(self, uuid: str, reason: str) -> None:
        """Marks a GPU lost because the driver no longer responds for it. This reason replaces the Xid that came with
        the loss.
        """
        if self._pool.is_lost(uuid):
            return
        if before := self._pool.unhealthy_reason(uuid):
            self._besides[uuid] = before
        log.error("GPU %s is lost: %s; all its slices are unhealthy now", uuid, reason)
        self._last.setdefault(uuid, 0.0)
        self._pool.mark_unhealthy(uuid, f"{LOST}{reason}")

    def recover(self) -> None:
        """Marks GPUs healthy that had no error for the clean period and for which the driver responds."""
        for uuid, last in list(self._last.items()):
            if last and self._monotonic() - last < self._clean_s:
                if uuid in self._besides and not self._source.fault_of(uuid):
                    self._pool.mark_unhealthy(uuid, self._besides.pop(uuid))
                continue
            if fault := self._source.fault_of(uuid):
                log.debug("GPU %s stays unhealthy: %s", uuid, fault)
                continue
            log.info("GPU %s: no error for %.0f s; its slices are healthy again", uuid, self._clean_s)
            del self._last[uuid]
            self._besides.pop(uuid, None)
            self._pool.mark_healthy(uuid)

    def stop(self) -> None:
        self._stopping.set()
