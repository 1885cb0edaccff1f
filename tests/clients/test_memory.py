# SPDX-License-Identifier: Apache-2.0
"""Tests that real Python clients of CUDA can allocate all memory of a slice (part of a GPU) but no more, and can free
it. The usage is read from the simulated driver's accounting."""

from __future__ import annotations

import json
import subprocess

import pytest
from conftest import MIB, Filler, Machine

LIMIT, PIECE = 1024 * MIB, 16 * MIB
BINDINGS = ["cuMemAlloc", "cuMemAllocManaged", "cuMemAllocAsync", "cuMemCreate"]
CORE = ["device", "pool", "pool for other processes", "VirtualMemoryResource"]
# Memory that a client does not return to the driver before its process ends, even without the library: cuda-core 1.2.2
# keeps a handle of each allocation, taichi keeps 128 MiB in its pool.
KEPT = {"VirtualMemoryResource": LIMIT, "ndarray": 128 * MIB}
# Memory that a launch of taichi leaves in the driver's pool; the driver frees it when memory gets short.
SPARE = {"taichi": 2 * MIB}
# columns: CUDA's major version of the client's packages, client, call by which the client allocates
WAYS = [
    *((cuda, "bindings", way) for cuda in (12, 13) for way in BINDINGS),
    *((cuda, "core", way) for cuda in (12, 13) for way in CORE),
    *((cuda, "numba", way) for cuda in (12, 13) for way in ("device_array", "managed_array")),
    (13, "tinygrad", "CUDA"),
    (13, "taichi", "ndarray"),
]


@pytest.mark.parametrize(("cuda", "client", "way"), WAYS)
def test_client_gets_all_of_the_slice_and_no_more(machine: Machine, cuda: int, client: str, way: str) -> None:
    filler = Filler(machine, cuda, client, way)
    filler.step("ready")
    before = machine.on_card()
    assert before >= 412 * MIB, "the simulated GPU must show the client's context; else the client uses another driver"
    full = filler.step("full")
    assert full["granted"] == (LIMIT - before) // PIECE
    held = machine.on_card()
    assert 0 <= before + full["granted"] * PIECE - held <= SPARE.get(client, 0)
    assert held <= LIMIT
    assert full["refusal"] and full["total"] in (None, LIMIT)
    filler.step("empty")
    assert machine.on_card() <= min(held, before + KEPT.get(way, 0))
    assert filler.end() == 0
    assert machine.on_card() == 0


@pytest.mark.parametrize("client", ["numba", "taichi"])
def test_client_without_the_library_gets_more(tmp_path, client: str) -> None:
    """Negative control: without the library a client allocates more than the slice."""
    machine = Machine(tmp_path, None)
    filler = Filler(machine, 13, client, {"numba": "device_array", "taichi": "ndarray"}[client])
    filler.step("ready")
    assert filler.step("full")["granted"] == 200
    assert machine.on_card() > 200 * PIECE > LIMIT
    filler.step("empty")
    assert filler.end() == 0


@pytest.mark.parametrize("tool", ["nvidia_ml_py", "gpustat", "nvitop"])
def test_a_tool_shows_the_slice(machine: Machine, tool: str) -> None:
    filler = Filler(machine, 13, "bindings", "cuMemAlloc")
    filler.step("ready")
    filler.step("full")
    done = subprocess.run(machine.command(13, "shown.py", tool), env=machine.env, stdout=subprocess.PIPE, check=True)
    held = machine.on_card()
    assert held > 1000 * MIB
    assert json.loads(done.stdout) == {"total": LIMIT, "used": held, "processes": {str(filler.process.pid): held}}
    filler.step("empty")
    assert filler.end() == 0
