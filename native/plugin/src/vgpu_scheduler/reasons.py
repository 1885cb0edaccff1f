# SPDX-License-Identifier: Apache-2.0
"""Finds why a pod does not fit on a node. Each node gets one Reason, that of the first test that fails.

The kube-scheduler merges equal texts of nodes and puts their number before the text ("3 not a GPU with …"). So a text
names only what the pod needs; ``explain`` reports what the node has.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from vgpu_plugin._shared.pods.requests import PodAsk, needs
from vgpu_plugin._shared.pods.resources import CARD

from . import numa, placement
from .table import View

NO_GPUS = "the node publishes no GPUs of which pods may request parts"


class Reason(IntEnum):
    NO_GPU = 0
    SELECTED = 1
    TOO_FEW = 2
    TOO_SMALL = 3
    SLOTS = 4
    MEMORY = 5
    CORES = 6
    TOGETHER = 7
    UNHEALTHY = 8
    NUMA = 9
    LABELS = 10


# These reasons remain if other pods end, so no preemption is tried for them.
LASTING = (
    *(Reason.NO_GPU, Reason.SELECTED, Reason.TOO_FEW, Reason.TOO_SMALL, Reason.UNHEALTHY),
    Reason.LABELS,
)


def of(view: View, ask: PodAsk, allowed: np.ndarray) -> np.ndarray:
    """Returns a Reason for each row (node). The pod must fit on none of these nodes. A node fails a test if fewer of
    its GPUs pass the test than a container requests.
    """
    codes = np.full(len(view.capacity), Reason.TOGETHER, np.int8)
    codes[numa.aligns(view, numa.OF_POD)] = Reason.NUMA
    for one in reversed(ask.asks):
        fit = placement.fit(view, one, allowed)
        # The tests run from the last to the first, so that an earlier test overwrites the reason of a later one.
        for reason, passed in (
            (Reason.NUMA, numa.one_node(view, fit.all, one)),
            (Reason.CORES, allowed & fit.slots & fit.memory & fit.cores),
            (Reason.MEMORY, allowed & fit.slots & fit.memory),
            (Reason.SLOTS, allowed & fit.slots & fit.large),
            (Reason.TOO_SMALL, allowed & fit.large),
            (Reason.SELECTED, allowed),
            (Reason.UNHEALTHY, view.usable),
            (Reason.TOO_FEW, view.there),
        ):
            codes[passed.sum(axis=1) < one.gpus] = reason
    codes[~placement.takes(view, ask)] = Reason.LABELS
    codes[~view.there.any(axis=1)] = Reason.NO_GPU
    return codes


def text(reason: Reason, ask: PodAsk) -> str:
    """Returns the text of a reason: what the pod needs and the node does not have."""
    most = max(ask.asks, key=lambda one: one.gpus)
    many = f"{most.gpus} GPUs" if most.gpus > 1 else "a GPU"
    if reason == Reason.NO_GPU:
        return NO_GPUS
    if reason == Reason.TOO_FEW:
        return f"fewer than {most.gpus} GPUs"
    if reason == Reason.UNHEALTHY:
        return f"not {many} in health"
    if reason == Reason.SELECTED:
        return f"not {many} that the pod's annotations accept"
    if reason == Reason.LABELS:
        whole = all(one.memory.kind == CARD for one in ask.asks)
        return f"labelled for pods that take {'parts of GPUs' if whole else 'whole GPUs'}"
    sizes = " and ".join(dict.fromkeys(needs(one) for one in ask.asks))
    if reason == Reason.TOO_SMALL:
        return f"not {many} large enough for {sizes}"
    if reason == Reason.SLOTS:
        return f"not {many} that no pod uses" if most.alone else f"not {many} with a free slot"
    if reason == Reason.MEMORY:
        return f"not {many} with {sizes} free"
    if reason == Reason.CORES:
        return f"not {many} with {sizes} and its compute free"
    if reason == Reason.NUMA:
        who = "the pod" if most.one_numa else "its topology manager"
        return f"not {many} with {sizes} free on one NUMA node, as {who} requires"
    return f"not all containers fit at once: {sizes}"
