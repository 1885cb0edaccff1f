# SPDX-License-Identifier: Apache-2.0
"""The slices (parts of GPUs) that this node offers, by resource name, and which of them the kubelet may use now.

The threads that serve the kubelet's ListAndWatch streams wait here for the next change.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .._shared.config.sharing import MIG, NONE, VCUDA, Piece
from ..errors import BadRequest, NotNow, counted
from ..node.gpus import Gpu

# Prefix of the reason for a GPU that the driver no longer finds.
LOST = "lost: "


class Offer(NamedTuple):
    slice: Piece
    gpu: Gpu
    healthy: bool


class Shape(NamedTuple):
    """What is known about the GPUs when the kubelet asks which slices it should prefer. ``totals``: device → number of
    its slices. ``order``: devices in NVML's order. ``whole``: ids of GPUs that are offered whole. ``links``: GPU →
    other GPU → score of the link between them. ``limited``: UUIDs of the GPUs whose slices are limited by libvgpu, our
    library in the containers.
    """

    totals: dict[str, int]
    order: tuple[str, ...]
    whole: frozenset[str]
    links: dict[str, dict[str, int]]
    limited: tuple[str, ...]


class Pool:
    """The slices and their state. The class is thread-safe. A slice is offered as unhealthy if its GPU is unhealthy,
    missing or drained (an administrator excludes it from new allocations). The same holds if the slice is withheld
    (leased with ``vgpuctl``, or its memory is used by a resized container), or if a container outside Kubernetes uses
    it. Otherwise it is offered as healthy.
    """

    def __init__(self, gpus: Iterable[Gpu], pieces: Iterable[Piece]) -> None:
        self._changed = threading.Condition()
        self._generation = 0
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._slices = {piece.id: piece for piece in pieces}
        self._shape: Shape | None = None
        self._unhealthy: dict[str, str] = {}
        self._drained: frozenset[str] = frozenset()
        self._withheld: dict[str, str] = {}
        self._outside: dict[str, str] = {}

    @property
    def gpus(self) -> list[Gpu]:
        return list(self._gpus.values())

    @property
    def slices(self) -> list[Piece]:
        return list(self._slices.values())

    @property
    def resources(self) -> list[str]:
        return list(dict.fromkeys(piece.resource for piece in self._slices.values()))

    def shape(self) -> Shape:
        """Returns the shape. It is cached until slices or GPUs change, because the kubelet asks which slices to prefer
        for every container, and a node may have 1600 slices.
        """
        with self._changed:
            if self._shape is None:
                totals = Counter(piece.device for piece in self._slices.values())
                whole = frozenset(piece.id for piece in self._slices.values() if piece.mode == NONE)
                links = {gpu.uuid: dict(gpu.links) for gpu in self._gpus.values()}
                limited = tuple(dict.fromkeys(one.uuid for one in self._slices.values() if one.mode == VCUDA))
                self._shape = Shape(dict(totals), tuple(totals), whole, links, limited)
            return self._shape

    def gpu(self, uuid: str) -> Gpu:
        return self._gpus[uuid]

    def piece(self, slice_id: str) -> Piece | None:
        return self._slices.get(slice_id)

    def update(self, gpus: Iterable[Gpu], pieces: Iterable[Piece], held: frozenset[str]) -> list[str]:
        """Applies new GPUs and slices, GPU by GPU. ``held``: ids of allocated slices. A GPU with allocated slices of
        the old split keeps its old slices until all of them are free. All GPUs change in one step, so that no stream
        sends a mixture. Returns the UUIDs of GPUs that keep their old slices.
        """
        new_gpus = {gpu.uuid: gpu for gpu in gpus}
        desired: dict[str, list[Piece]] = {uuid: [] for uuid in new_gpus}
        for piece in pieces:
            desired[piece.uuid].append(piece)
        with self._changed:
            waiting = []
            slices: dict[str, Piece] = {}
            for uuid in dict.fromkeys([*new_gpus, *self._gpus]):
                old = [one for one in self._slices.values() if one.uuid == uuid]
                new = desired.get(uuid, [])
                if old != new and any(one.id in held and one not in new for one in old):
                    waiting.append(uuid)
                    # A missing GPU stays known while its slices are allocated; the slices are offered as unhealthy.
                    new_gpus.setdefault(uuid, self._gpus[uuid])
                    new = old
                slices.update({one.id: one for one in new})
            self._unhealthy = {uuid: reason for uuid, reason in self._unhealthy.items() if uuid in new_gpus}
            if list(slices.items()) != list(self._slices.items()) or new_gpus != self._gpus:
                self._gpus, self._slices, self._shape = new_gpus, slices, None
                self._bump()
        return waiting

    def _bump(self) -> None:
        self._generation += 1
        self._changed.notify_all()

    def unhealthy_reason(self, uuid: str) -> str:
        """Returns why a GPU is unhealthy; empty if it is healthy."""
        return self._unhealthy.get(uuid, "")

    def is_lost(self, uuid: str) -> bool:
        """Returns whether the driver no longer finds a GPU."""
        return self.unhealthy_reason(uuid).startswith(LOST)

    def drain(self, uuids: frozenset[str]) -> None:
        """Sets which GPUs are drained: their free slices are no longer offered. Running containers keep their slices
        and may restart on the GPU.
        """
        with self._changed:
            if uuids != self._drained:
                self._drained = uuids
                self._bump()

    def is_drained(self, uuid: str) -> bool:
        """Returns whether an administrator drains the GPU."""
        return uuid in self._drained

    def unavailable_reason(self, uuid: str) -> str:
        """Returns why no more slices of a GPU are offered, because it is unhealthy or drained; empty if they are
        offered.
        """
        return self.unhealthy_reason(uuid) or ("an administrator drains it" if self.is_drained(uuid) else "")

    def notes(self) -> list[str]:
        """Returns messages about drained GPUs for the administrator."""
        return [
            f"GPU {gpu.index} {gpu.uuid} is drained and assigns no more slices; kubectl vgpu undrain ends that"
            for gpu in self.gpus
            if gpu.uuid in self._drained
        ]

    def mark_unhealthy(self, uuid: str, reason: str) -> None:
        if uuid in self._gpus:
            self._change(self._unhealthy, uuid, reason)

    def mark_healthy(self, uuid: str) -> None:
        with self._changed:
            if self._unhealthy.pop(uuid, None) is not None:
                self._bump()

    def withhold(self, slice_id: str, reason: str) -> None:
        self._change(self._withheld, slice_id, reason)

    def give_back(self, slice_id: str) -> None:
        with self._changed:
            if self._withheld.pop(slice_id, None) is not None:
                self._bump()

    def set_outside(self, slice_id: str, reason: str) -> None:
        """Sets how a slice is used outside Kubernetes; an empty reason means that it is not used there."""
        with self._changed:
            if self._outside.get(slice_id, "") != reason:
                self._outside[slice_id] = reason
                self._bump()

    def outside(self, slice_id: str) -> str:
        return self._outside.get(slice_id, "")

    def limited(self, slice_id: str) -> bool:
        """Returns whether libvgpu limits this slice."""
        piece = self._slices.get(slice_id)
        return piece is not None and piece.mode == VCUDA

    def _change(self, table: dict[str, str], key: str, reason: str) -> None:
        with self._changed:
            if table.get(key) != reason:
                table[key] = reason
                self._bump()

    def withheld(self, slice_id: str) -> str:
        return self._withheld.get(slice_id, "")

    def offers(self, resource: str = "") -> tuple[int, list[Offer]]:
        """Returns the generation (a number that grows with each change), and every slice of one resource or of all, in
        NVML's order, with its health.
        """
        with self._changed:
            return self._generation, [
                Offer(piece, self._gpus[piece.uuid], self._is_healthy(piece))
                for piece in self._slices.values()
                if not resource or piece.resource == resource
            ]

    def _is_healthy(self, piece: Piece) -> bool:
        return not (self.unavailable_reason(piece.uuid) or piece.id in self._withheld or self._outside.get(piece.id))

    def wait_beyond(self, generation: int, ended: Callable[[], bool], seconds: float | None = None) -> bool:
        """Waits at most ``seconds`` for a generation newer than the given one. Returns False if ``ended`` became true
        (see ``wake``), otherwise True, also after a timeout.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._generation != generation or ended(), seconds)
            return not ended()

    def send_again(self) -> None:
        """Sends the list of slices to every stream again although nothing changed. When the kubelet receives a list, it
        removes deleted pods from its checkpoint file, so this program sees which slices are free.
        """
        with self._changed:
            self._bump()

    def wake(self) -> None:
        """Makes every thread that waits in ``wait_beyond`` call its ``ended`` again."""
        with self._changed:
            self._changed.notify_all()

    def resolve(self, ids: Iterable[str]) -> list[Piece]:
        """Returns the slices of a request. Raises BadRequest if an id was never offered or is repeated, NotNow if its
        GPU is unhealthy.
        """
        chosen: dict[str, Piece] = {}
        for slice_id in ids:
            if slice_id in chosen:
                raise BadRequest(f"slice {slice_id} is in the request twice; request different slices")
            if slice_id not in self._slices:
                shown = slice_id if len(slice_id) <= 80 else slice_id[:77] + "..."
                raise BadRequest(
                    f"slice {shown} was never offered by this node; it offers {counted(len(self._slices), 'slice')} of "
                    f"{counted(len(self._gpus), 'GPU')}, see: vgpuctl status"
                )
            piece = self._slices[slice_id]
            self._refuse_unhealthy(piece)
            chosen[slice_id] = piece
        if not chosen:
            raise BadRequest("the request names no slice; request at least one")
        return list(chosen.values())

    def refuse_unhealthy(self, ids: Iterable[str]) -> None:
        """Raises NotNow if the GPU of a slice is unhealthy; ids that are no longer offered are ignored."""
        for piece in (self._slices.get(one) for one in ids):
            if piece is not None:
                self._refuse_unhealthy(piece)

    def _refuse_unhealthy(self, piece: Piece) -> None:
        if reason := self.unhealthy_reason(piece.uuid):
            raise NotNow(f"slice {piece.id}: its GPU is unhealthy ({reason}); see: vgpuctl status")

    @staticmethod
    def runtime_name(piece: Piece, gpu: Gpu, by_index: bool) -> str:
        """Returns the name of a slice's device for a runtime: UUID or index."""
        if not by_index:
            return piece.device
        mig = next((one for one in gpu.mig if one.uuid == piece.device), None) if piece.mode == MIG or gpu.mig else None
        return str(gpu.index) if mig is None else f"{gpu.index}:{mig.index}"
