# SPDX-License-Identifier: Apache-2.0
"""GPUs of one NUMA node, where the kubelet's topology manager admits nothing else (``single-numa-node``) or the pod
wants it (``nvidia.com/numa-bind``).

It refuses a pod whose devices it cannot align, and such a pod has failed for good; so no plan goes over several NUMA
nodes there. By its scope the devices of each container are on one, or those of the whole pod. It aligns by what devices
tell: GPUs that tell no NUMA node count for none, and a node whose GPUs all tell none is as one without a policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from vgpu_plugin._shared.pods.annotations import CONTAINER, POD, SINGLE_NUMA_NODE, Topology
from vgpu_plugin._shared.pods.resources import Ask

if TYPE_CHECKING:
    from .table import View

# Of a row of the table: no alignment, of each container, of the whole pod.
NONE, OF_CONTAINER, OF_POD = 0, 1, 2
SCOPES = {CONTAINER: OF_CONTAINER, POD: OF_POD}


def scope_of(topology: Topology) -> int:
    return SCOPES.get(topology.scope, OF_CONTAINER) if topology.policy == SINGLE_NUMA_NODE else NONE


def aligns(view: View, least: int = OF_CONTAINER) -> np.ndarray:
    """The rows whose GPUs must be of one NUMA node, in this scope at least."""
    rows: np.ndarray = view.aligned >= least
    return rows & (view.there & (view.numa >= 0)).any(axis=1) if rows.any() else rows


def nodes_of(view: View, rows: np.ndarray) -> Iterator[int]:
    """The NUMA nodes of the GPUs of these rows."""
    some = view.numa[rows][view.there[rows]]
    return (int(one) for one in np.unique(some) if one >= 0)


def one_node(view: View, ok: np.ndarray, ask: Ask, key: np.ndarray | None = None) -> np.ndarray:
    """Of the mask ``ok`` (rows, columns), on rows that align, the GPUs of the one NUMA node that has as many of them as
    a container asks for, where their ``key`` is the lowest in sum; none where no NUMA node has so many. All rows align
    where the pod wants that."""
    gpus = ask.gpus
    rows = aligns(view, NONE if ask.one_numa else OF_CONTAINER) if gpus > 1 else np.zeros(len(ok), bool)
    if not rows.any():
        return ok
    kept = np.where(rows[:, None], False, ok)
    best = np.full(len(ok), np.inf)
    for node in nodes_of(view, rows):
        mask = ok & (view.numa == node) & rows[:, None]
        enough = mask.sum(axis=1) >= gpus
        cost = np.zeros(len(ok)) if key is None else _lowest(np.where(mask, key, np.inf), gpus)
        better = enough & (cost < best)
        kept[better], best[better] = mask[better], cost[better]
    return kept


def _lowest(key: np.ndarray, count: int) -> np.ndarray:
    some: np.ndarray = np.sort(key, axis=1)[:, :count].sum(axis=1)
    return some
