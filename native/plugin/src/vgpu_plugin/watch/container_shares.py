# SPDX-License-Identifier: Apache-2.0
"""Measures which share of each GPU's time containers used, from the driver's samples of the GPU use of processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..allocation.records import Record
from ..node.gpus import GpuSource
from . import shares
from .accounts import Accounts, device_of
from .rule import together
from .shares import Part, Took, Window


@dataclass
class OfGpu:
    """The measurement of one GPU. ``at``, ``wall_us``: time of the last reading from the driver, on two clocks;
    ``windows``: allocation (slices of one container) → its last ten seconds; ``pages``: allocation → data published by
    the arbiter (the node's program that divides GPU time) at that time.
    """

    at: float
    wall_us: int
    windows: dict[str, Window] = field(default_factory=dict)
    pages: dict[str, dict[str, Any] | None] = field(default_factory=dict)


class ContainerShares:
    """Measures all GPUs. ``clock``: the watcher's clock; ``wall``: the clock of the driver's samples; ``arbiter_ns``:
    the clock of the arbiter's pages.
    """

    def __init__(
        self,
        source: GpuSource,
        accounts: Accounts,
        clock: Callable[[], float],
        wall: Callable[[], float],
        arbiter_ns: Callable[[], int],
    ) -> None:
        self._source, self._accounts = source, accounts
        self._clock, self._wall, self._arbiter_ns = clock, wall, arbiter_ns
        self._gpus: dict[str, OfGpu] = {}

    def forget(self, uuid: str) -> None:
        """Discards the measurement of a GPU that no process used or that did not respond."""
        self._gpus.pop(uuid, None)

    @staticmethod
    def _share(uuid: str, records: list[Record]) -> float | None:
        """Returns the sum of a container's shares of a GPU; None if one of the shares sets no limit."""
        devices = [(one, device) for one in records if (device := device_of(one, uuid)) is not None]
        parts = [shares.share_of(one.limits, device) for one, device in devices]
        known = [one for one in parts if one is not None]
        return min(1.0, sum(known)) if known and len(known) == len(parts) else None

    def look(self, uuid: str, owners: Mapping[int, frozenset[str]], records: Mapping[str, Record]) -> dict[str, Took]:
        """Returns for each container which part of the GPU's time it used. Containers without a share of this GPU, or
        measured for less than ten seconds, are left out. Raises GpuError.
        """
        bound = {}
        for allocation, mine in together(owners).items():
            share = self._share(uuid, [records[one] for one in mine if one in records])
            if share is not None and allocation in records and device_of(records[allocation], uuid):
                bound[allocation] = share
        now, wall_us = self._clock(), int(self._wall() * 1e6)
        before = self._gpus.get(uuid)
        if not bound:
            self.forget(uuid)
            return {}
        pages = {allocation: self._accounts.gpu_page(allocation, uuid) for allocation in bound}
        this = self._gpus[uuid] = OfGpu(now, wall_us, pages=pages)
        if before is None or not 0 < now - before.at < shares.WINDOW_S:
            return {}
        samples = self._source.utilisation(uuid, before.wall_us)
        if samples is None:
            return {}
        seconds = now - before.at
        out = {}
        for allocation, share in bound.items():
            taken = sum(percent for pid, percent in samples.items() if allocation in owners.get(pid, ()))
            alone = shares.open_s(before.pages.get(allocation), pages[allocation], seconds, self._arbiter_ns())
            window = this.windows[allocation] = before.windows.get(allocation) or Window()
            window.add(Part(seconds, min(1.0, taken / 100) * seconds, min(seconds, alone)))
            if (took := window.took(share)) is not None:
                out[allocation] = took
        return out
