# SPDX-License-Identifier: Apache-2.0
"""Sample nodes and requests, and a check of plans (which pod gets which GPUs) that shares no code with the scheduler's
ledger.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations, product

from vgpu_plugin._shared.pods.annotations import NodeGpu
from vgpu_plugin._shared.pods.requests import Ask, Card, Memory, PodAsk, Preferences, size_on
from vgpu_plugin._shared.pods.resources import CARD, MIB, PERCENT, SLICE, UNITS

__all__ = ("CARD", "MIB", "PERCENT", "SLICE", "UNITS", "ask", "gpu", "node", "pod_ask")


def gpu(uuid, memory=16160, capacity=None, slots=10, model="Tesla V100-SXM2-16GB", **more):
    capacity = capacity or memory
    return NodeGpu(uuid, model, memory, capacity, slots, max(1, capacity // slots), max(1, 100 // slots), **more)


def node(name, count=8, **more):
    return tuple(gpu(f"GPU-{name}-{n}", **more) for n in range(count))


def ask(amount=3000, cores=0, gpus=1, kind=MIB, name="main", **more):
    return Ask(name, gpus, Memory(kind, amount), cores, "hami", "nvidia.com/gpumem", "spec", **more)


def pod_ask(*asks, **preferences):
    named = [one._replace(container=f"c{n}") for n, one in enumerate(asks or [ask()])]
    return PodAsk("hami", tuple(named), Preferences(**preferences), None, ())


def faults(nodes, plans):
    """Returns the faults of ``plans``, a list of (node, plan) with one entry for each pod. Finds them by adding up what
    the pods use.

    A pod runs in phases: each init container together with the sidecars that started before it, and then all other
    containers at once. On each GPU a pod counts with its greatest phase. The greatest phases of several pods are added,
    because they may happen at the same time.
    """
    found = []
    sums, owners, shares = defaultdict(lambda: [0, 0, 0]), defaultdict(int), defaultdict(int)
    for name, plan in plans:
        highest = defaultdict(lambda: [0, 0, 0])
        moments = [[part for part in plan if part.kind != "init"]]
        moments += [
            [part, *(one for one in plan[:n] if one.kind == "sidecar")]
            for n, part in enumerate(plan)
            if part.kind == "init"
        ]
        for moment in moments:
            now = defaultdict(lambda: [0, 0, 0])
            for part in moment:
                if len({device.uuid for device in part.devices}) != len(part.devices):
                    found.append(f"{part.container} has a GPU twice")
                for device in part.devices:
                    now[device.uuid][0] += device.memory_mib
                    now[device.uuid][1] += device.cores
                    now[device.uuid][2] += 1
                    if device.cores == 100 and now[device.uuid][2] > 1:
                        found.append(f"{device.uuid} is owned and shared in one pod")
            for uuid, values in now.items():
                highest[uuid] = [max(pair) for pair in zip(highest[uuid], values, strict=True)]
        for uuid, values in highest.items():
            sums[name, uuid] = [a + b for a, b in zip(sums[name, uuid], values, strict=True)]
            shares[name, uuid] += 1
            owners[name, uuid] += any(d.uuid == uuid and d.cores == 100 for part in plan for d in part.devices)
    for (name, uuid), (memory, cores, slots) in sums.items():
        (card,) = [one for one in nodes[name] if one.uuid == uuid]
        if memory > card.capacity_mib or cores > 100 or slots > card.slots:
            found.append(
                f"{name} {uuid}: {memory} of {card.capacity_mib} MiB, {cores} %, {slots} of {card.slots} slots"
            )
        if owners[name, uuid] and shares[name, uuid] > 1:
            found.append(f"{name} {uuid} is owned by one pod and shared with another")
    return found


def can_place(gpus, asks):
    """Returns whether the containers fit on empty GPUs, by trying all combinations."""
    ways = [list(combinations(range(len(gpus)), one.gpus)) for one in asks]
    for way in product(*ways):
        used = [[0, 0, 0, 0] for _each in gpus]
        fine = True
        for one, columns in zip(asks, way, strict=True):
            for column in columns:
                size = size_on(one, card_of(gpus[column]))
                if size is None:
                    fine = False
                    continue
                used[column][0] += size.memory_mib
                used[column][1] += size.cores
                used[column][2] += 1
                used[column][3] += size.cores == 100
        for one, (memory, cores, slots, owners) in zip(gpus, used, strict=True):
            fine &= memory <= one.capacity_mib and cores <= 100 and slots <= one.slots and not (owners and slots > 1)
        if fine:
            return True
    return False


def card_of(one):
    return Card(one.memory_mib, one.capacity_mib, one.slice_mib, one.slice_cores)
