# SPDX-License-Identifier: Apache-2.0
"""Restricts GPUs to one NUMA node, if the kubelet's topology manager requires it (``single-numa-node``) or the pod
requests it (``nvidia.com/numa-bind``).

The topology manager refuses a pod whose devices it cannot align, and such a pod never recovers. So on such a node no
pod is planned on GPUs of several NUMA nodes. The scope of the topology manager decides whether the devices of each
container or of the whole pod must be on one NUMA node. A GPU without a known NUMA node matches no NUMA node, and a node
on which no GPU has a known NUMA node is treated as if it had no policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from vgpu_plugin._shared.pods.annotations import CONTAINER, POD, SINGLE_NUMA_NODE, Topology
from vgpu_plugin._shared.pods.resources import Ask

if TYPE_CHECKING:
    from .table import View

# Scopes of the alignment on a node (a row of the table), which say what must be on one NUMA node: nothing, the GPUs of
# each container, or the GPUs of the whole pod.
NONE, OF_CONTAINER, OF_POD = 0, 1, 2
SCOPES = {CONTAINER: OF_CONTAINER, POD: OF_POD}


def scope_of(topology: Topology) -> int:
    return SCOPES.get(topology.scope, OF_CONTAINER) if topology.policy == SINGLE_NUMA_NODE else NONE


def aligns(view: View, least: int = OF_CONTAINER) -> np.ndarray:
    """Returns for each row (node) whether GPUs must be on one NUMA node there, with the scope ``least`` or
    a wider one.
    """
    rows: np.ndarray = view.aligned >= least
    return rows & (view.there & (view.numa >= 0)).any(axis=1) if rows.any() else rows


def nodes_of(view: View, rows: np.ndarray) -> Iterator[int]:
    """Returns the numbers of the NUMA nodes of the GPUs in these rows."""
    some = view.numa[rows][view.there[rows]]
    return (int(one) for one in np.unique(some) if one >= 0)


def one_node(view: View, ok: np.ndarray, ask: Ask, key: np.ndarray | None = None) -> np.ndarray:
    """Restricts the GPUs in the mask ``ok`` (rows, columns) to one NUMA node, in the rows that require one NUMA node
    or, if the pod requests one, in all rows. Of the NUMA nodes that have enough GPUs for the container, the function
    picks the one where the needed GPUs have the lowest sum of ``key``. If no NUMA node has enough GPUs, no GPU of
    the row is left.
    """
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
