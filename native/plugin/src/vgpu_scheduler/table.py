# SPDX-License-Identifier: Apache-2.0
"""All GPUs of all nodes as arrays, one row for each node and one column for each GPU, so that all nodes are tested at
once.

The table knows no pods; the ledger (which pod holds how much of which GPU) adds and subtracts what they use. Free
memory is capacity minus use. It is negative if pods use more than the capacity; then no more pods fit on that GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from vgpu_plugin._shared.pods.annotations import NO_POLICY, NodeGpu, Topology, Use
from vgpu_plugin._shared.pods.node_labels import EXCLUSIVE, NO_LABELS, SHARED, NodeLabels
from vgpu_plugin._shared.pods.preferences import BINPACK, SPREAD, TOPOLOGY

from . import numa

FIELDS = ("card", "capacity", "slice_mib", "slice_cores", "slots", "memory", "cores", "shares", "model", "numa")
# Orders in which a node's GPUs are filled, from its label gpu-policy (node_labels.py); "" is for a node without it.
ORDERS = ("", BINPACK, SPREAD, TOPOLOGY)
# Which pods may use a node's GPUs, from its label gpu-sharing; "" admits all pods.
SHARINGS = ("", EXCLUSIVE, SHARED)
USE = slice(FIELDS.index("memory"), FIELDS.index("shares") + 1)


class View(NamedTuple):
    """Some rows of the table. ``memory`` (MiB), ``cores`` (percent of compute) and ``shares`` (slots, one for each
    container) are the amounts in use. ``there`` marks existing GPUs, ``usable`` the healthy ones.
    """

    card: np.ndarray
    capacity: np.ndarray
    slice_mib: np.ndarray
    slice_cores: np.ndarray
    slots: np.ndarray
    memory: np.ndarray
    cores: np.ndarray
    shares: np.ndarray
    model: np.ndarray
    numa: np.ndarray
    usable: np.ndarray
    there: np.ndarray
    # For each row one of the scopes of numa.py: whether GPUs must be on one NUMA node.
    aligned: np.ndarray
    # For each row its index in ORDERS.
    order: np.ndarray
    # For each row its index in SHARINGS.
    sharing: np.ndarray

    def of(self, rows: np.ndarray) -> View:
        """Returns the rows that a mask or a list of row numbers selects."""
        return View(*(array[rows] for array in self))


class GpuTable:
    def __init__(self, rows: int = 64, columns: int = 8) -> None:
        # 32 bits suffice for MiB and for percent times MiB (2^24 * 100). All fields are in one array, so that one index
        # operation selects rows of all fields.
        self._block = np.zeros((len(FIELDS), rows, columns), np.int32)
        self._usable = np.zeros((rows, columns), bool)
        self._there = np.zeros((rows, columns), bool)
        self._aligned = np.zeros(rows, np.int8)
        # Two numbers for each row of the table: its index in ORDERS and its index in SHARINGS.
        self._labels = np.zeros((2, rows), np.int8)
        # For each row the value of ``_changes`` at its last change.
        self.versions = np.zeros(rows, np.int64)
        self._changes = 0
        self._row: dict[str, int] = {}
        self._column: list[dict[str, int]] = [{} for _each in range(rows)]
        self._free = list(range(rows - 1, -1, -1))
        self._models: list[str] = []
        self._names = np.full(rows, "", object)
        self.gpus: dict[str, tuple[NodeGpu, ...]] = {}
        self.topologies: dict[str, Topology] = {}
        self.labels: dict[str, NodeLabels] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._row

    def __len__(self) -> int:
        return len(self._row)

    @property
    def models(self) -> Sequence[str]:
        return self._models

    @property
    def names(self) -> Iterable[str]:
        return self._row.keys()

    def put(
        self, name: str, gpus: Sequence[NodeGpu], topology: Topology = NO_POLICY, labels: NodeLabels = NO_LABELS
    ) -> None:
        """Sets a node's GPUs. What is used of them is reset to zero."""
        if name not in self._row:
            if not self._free:
                self._grow_rows()
            self._row[name] = self._free.pop()
            self._names[self._row[name]] = name
        row = self._row[name]
        if len(gpus) > self._usable.shape[1]:
            self._grow_columns(len(gpus))
        self._block[:, row] = 0
        self._usable[row] = self._there[row] = False
        self._column[row] = {gpu.uuid: n for n, gpu in enumerate(gpus)}
        self.gpus[name] = tuple(gpus)
        self.topologies[name] = topology
        self._aligned[row] = numa.scope_of(topology)
        self.labels[name] = labels
        self._labels[:, row] = ORDERS.index(labels.policy), SHARINGS.index(labels.sharing)
        for n, gpu in enumerate(gpus):
            values = (gpu.memory_mib, gpu.capacity_mib, gpu.slice_mib, gpu.slice_cores, gpu.slots, 0, 0, 0)
            for field, value in zip(FIELDS, (*values, self._model(gpu.model), gpu.numa), strict=True):
                self._field(field)[row, n] = value
            self._usable[row, n] = gpu.healthy
            self._there[row, n] = True
        self._changed(row)

    def drop(self, name: str) -> None:
        row = self._row.pop(name)
        del self.gpus[name], self.topologies[name], self.labels[name]
        self._usable[row] = self._there[row] = False
        self._column[row] = {}
        self._names[row] = ""
        self._free.append(row)
        self._changed(row)

    def add(self, name: str, uses: Mapping[str, Use], sign: int) -> None:
        """Adds (+1) or subtracts (-1) what a pod uses. GPUs that the node does not have are ignored."""
        row = self._row[name]
        for uuid, use in uses.items():
            column = self._column[row].get(uuid)
            if column is not None:
                self._block[USE, row, column] += (sign * use.memory_mib, sign * use.cores, sign * use.slots)
        self._changed(row)

    def rows(self, names: Sequence[str]) -> np.ndarray:
        """Returns the row of each name, -1 for unknown nodes."""
        row = self._row
        return np.fromiter([row.get(name, -1) for name in names], np.intp, len(names))

    def view(self, rows: np.ndarray) -> View:
        fields = dict(zip(FIELDS, self._block[:, rows], strict=True))
        order, sharing = self._labels[:, rows]
        masks = {"usable": self._usable[rows], "there": self._there[rows], "aligned": self._aligned[rows]}
        return View(**fields, **masks, order=order, sharing=sharing)

    def columns_of(self, uuids: Iterable[str], rows: np.ndarray) -> np.ndarray:
        """Returns a mask over ``rows`` of the GPUs with these UUIDs (in lower case)."""
        wanted = set(uuids)
        mask = np.zeros((len(rows), self._usable.shape[1]), bool)
        for n, row in enumerate(rows):
            for uuid, column in self._column[row].items():
                if uuid.lower() in wanted:
                    mask[n, column] = True
        return mask

    def use(self, name: str) -> dict[str, Use]:
        """Returns UUID → what is used of each GPU of a node."""
        row = self._row[name]
        memory, cores, shares = self._block[USE, row]
        return {uuid: Use(int(memory[n]), int(cores[n]), int(shares[n])) for uuid, n in self._column[row].items()}

    def _field(self, name: str) -> np.ndarray:
        array: np.ndarray = self._block[FIELDS.index(name)]
        return array

    def _changed(self, row: int) -> None:
        self._changes += 1
        self.versions[row] = self._changes

    def _model(self, model: str) -> int:
        if model not in self._models:
            self._models.append(model)
        return self._models.index(model)

    def _grow_rows(self) -> None:
        old = len(self._names)
        self._resize(((0, old), (0, 0)))
        self._names = np.concatenate([self._names, np.full(old, "", object)])
        self.versions = np.concatenate([self.versions, np.zeros(old, np.int64)])
        self._aligned = np.concatenate([self._aligned, np.zeros(old, np.int8)])
        self._labels = np.pad(self._labels, ((0, 0), (0, old)))
        self._column += [{} for _each in range(old)]
        self._free = list(range(2 * old - 1, old - 1, -1))

    def _grow_columns(self, columns: int) -> None:
        self._resize(((0, 0), (0, columns - self._usable.shape[1])))

    def _resize(self, more: tuple[tuple[int, int], tuple[int, int]]) -> None:
        self._block = np.pad(self._block, ((0, 0), *more))
        self._usable, self._there = np.pad(self._usable, more), np.pad(self._there, more)
