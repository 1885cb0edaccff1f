# SPDX-License-Identifier: Apache-2.0
"""The slices that this node offers, and which of them the kubelet may use now.

Streams of ListAndWatch wait here for the next change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ._shared.slices import Slice
from .errors import BadRequest, NotNow
from .gpus import Gpu


class Offer(NamedTuple):
    slice: Slice
    gpu: Gpu
    healthy: bool


class Pool:
    """Thread-safe. A slice is healthy unless its GPU is sick or the slice is withheld (leased)."""

    def __init__(self, gpus: Iterable[Gpu], slices: Iterable[Slice]) -> None:
        self._changed = threading.Condition()
        self._generation = 0
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._slices = {piece.id: piece for piece in slices}
        self._sick: dict[str, str] = {}
        self._withheld: dict[str, str] = {}
        self._outside: dict[str, str] = {}

    @property
    def gpus(self) -> list[Gpu]:
        return list(self._gpus.values())

    @property
    def slices(self) -> list[Slice]:
        return list(self._slices.values())

    def gpu(self, uuid: str) -> Gpu:
        return self._gpus[uuid]

    def sickness(self, uuid: str) -> str:
        """Why a GPU is sick; empty while it is well."""
        return self._sick.get(uuid, "")

    def mark_sick(self, uuid: str, reason: str) -> None:
        if uuid in self._gpus:
            self._change(self._sick, uuid, reason)

    def withhold(self, slice_id: str, reason: str) -> None:
        self._change(self._withheld, slice_id, reason)

    def give_back(self, slice_id: str) -> None:
        with self._changed:
            if self._withheld.pop(slice_id, None) is not None:
                self._generation += 1
                self._changed.notify_all()

    def set_outside(self, slice_id: str, reason: str) -> None:
        """Why a slice is used by nobody that the kubelet knows; empty where it is not."""
        with self._changed:
            if self._outside.get(slice_id, "") != reason:
                self._outside[slice_id] = reason
                self._generation += 1
                self._changed.notify_all()

    def outside(self, slice_id: str) -> str:
        return self._outside.get(slice_id, "")

    def limited(self, slice_id: str) -> bool:
        """Whether the sharing library limits this slice."""
        return "::" in slice_id

    def _change(self, table: dict[str, str], key: str, reason: str) -> None:
        with self._changed:
            if table.get(key) != reason:
                table[key] = reason
                self._generation += 1
                self._changed.notify_all()

    def withheld(self, slice_id: str) -> str:
        return self._withheld.get(slice_id, "")

    def offers(self) -> tuple[int, list[Offer]]:
        """The generation, and every slice in NVML's order with its health."""
        with self._changed:
            return self._generation, [
                Offer(piece, self._gpus[piece.uuid], self._is_healthy(piece)) for piece in self._slices.values()
            ]

    def _is_healthy(self, piece: Slice) -> bool:
        return not (piece.uuid in self._sick or piece.id in self._withheld or self._outside.get(piece.id))

    def wait_beyond(self, generation: int, ended: Callable[[], bool]) -> bool:
        """Waits until there is a newer generation; False where ``ended`` became true first (see ``wake``)."""
        with self._changed:
            self._changed.wait_for(lambda: self._generation != generation or ended())
            return not ended()

    def wake(self) -> None:
        """Lets every waiter look at its ``ended`` again."""
        with self._changed:
            self._changed.notify_all()

    def resolve(self, ids: Iterable[str]) -> list[Slice]:
        """The slices of a request. Raises where one was never offered, comes twice, or cannot be used now."""
        chosen: dict[str, Slice] = {}
        for slice_id in ids:
            if slice_id in chosen:
                raise BadRequest(f"slice {slice_id} comes twice in the request; ask for different slices")
            if slice_id not in self._slices:
                raise BadRequest(
                    f"slice {slice_id} was never offered by this node; it offers {len(self._slices)} slices of "
                    f"{len(self._gpus)} GPUs, see: vgpuctl status"
                )
            piece = self._slices[slice_id]
            if sickness := self.sickness(piece.uuid):
                raise NotNow(f"slice {slice_id}: its GPU is unhealthy ({sickness}); see: vgpuctl status")
            chosen[slice_id] = piece
        if not chosen:
            raise BadRequest("the request names no slice; ask for at least one")
        return list(chosen.values())
