# SPDX-License-Identifier: Apache-2.0
"""Allocates other slices than the kubelet named, without I/O. This is needed for a kubelet before 1.19: it takes any
free id without asking the plugin for a preference, so its pods would fill one GPU.

Such a kubelet only counts ids, and the node has as many free slices as the kubelet has free ids. So the kubelet's id
may stand for a slice with another id. The record (the saved data of the allocation) contains both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..errors import NotNow, counted
from ..offer.pool import Offer
from ..offer.preference import preferred
from .records import Record


def substitute(
    ids: Sequence[str], offers: Sequence[Offer], records: Iterable[Record], spread: bool, packed: bool = False
) -> list[str]:
    """Returns the slices to allocate for ``ids``. ``offers`` are the slices of the requested resource with their
    health, in NVML's order. The slices are chosen by the rules of preference.py if ``spread`` is true, or if an
    allocation with other ids already holds one of the slices that ``ids`` name. Otherwise ``ids`` is returned. Raises
    NotNow if too few slices are free.
    """
    wanted, records = frozenset(ids), list(records)
    # The kubelet may name an id again after its pod has ended, or for another container of the same pod that runs
    # later. The same ids get the same slices again.
    again = next((one for one in records if one.asked and frozenset(one.asked) == wanted), None)
    known = {offer.slice.id for offer in offers}
    if again is not None and known.issuperset(again.slice_ids):
        return list(again.slice_ids)
    others = [one for one in records if wanted.isdisjoint(one.kubelet_ids)]
    held = {one for record in others for one in record.slice_ids}
    if not spread and not any(wanted.intersection(record.slice_ids) for record in others if record.asked):
        return list(ids)
    free = [offer.slice.id for offer in offers if offer.healthy and offer.slice.id not in held]
    if len(free) < len(ids):
        raise NotNow(
            f"found {counted(len(free), 'free healthy slice')} on this node, expected {len(ids)}; see: vgpuctl status"
        )
    totals = Counter(offer.slice.device for offer in offers)
    return preferred(free, [], len(ids), totals, totals, packed)


def on_gpus(uuids: Sequence[str], ids: Sequence[str], offers: Sequence[Offer], records: Iterable[Record]) -> list[str]:
    """Chooses slices for a container whose record is lost. ``uuids`` are its GPUs, from the kubelet's checkpoint.
    Returns ``ids`` if they are on these GPUs or no GPU is known, and otherwise free slices of these GPUs.
    """
    devices = {offer.slice.id: offer.slice.uuid for offer in offers}
    if not uuids or sorted(devices.get(one, "") for one in ids) == sorted(uuids):
        return list(ids)
    held = {one for record in records for one in record.slice_ids}
    chosen: list[str] = []
    for uuid in uuids:
        free = (one for one, on in devices.items() if on == uuid and one not in held and one not in chosen)
        found = next(free, None)
        if found is None:
            raise NotNow(f"GPU {uuid} has no free slice for an allocation whose record is lost; delete the pod")
        chosen.append(found)
    return chosen
