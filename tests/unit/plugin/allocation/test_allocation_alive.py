# SPDX-License-Identifier: Apache-2.0
"""Tests that a slice (a part of a GPU) does not become free while a process of its container still runs on the GPU.
This must hold even if the container's files are gone or the plugin has no record of the container.
"""

from __future__ import annotations

import json

import pytest
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.allocation.collector import GRACE_S, Collector

from ..inject.test_inject_handover import static_slices


@pytest.mark.parametrize("recorded", [True, False])
def test_allocation_does_not_end_while_its_processes_run(node, recorded):
    """Covers two cases: an allocation whose pod was deleted, and an allocation's folder without a record."""
    pool, allocator, files = node.parts()
    time, alive = [0.0], set()
    collector = Collector(allocator, files, node.paths.checkpoint, monotonic=lambda: time[0])
    collector.alive = lambda: frozenset(alive)
    (one,) = allocator.allocate([[pool.slices[0].id]])
    if not recorded:
        allocator.records.drop(one.allocation)
    node.paths.checkpoint.write_text(json.dumps({"Data": {"PodDeviceEntries": [], "RegisteredDevices": {}}}))
    alive.add(one.allocation)
    for _time in range(3):
        assert collector.collect() == []
        time[0] += GRACE_S
    assert files.present() == [one.allocation]
    alive.clear()
    # From this poll on, the allocation is not in the kubelet's checkpoint (its file of allocated devices).
    assert collector.collect() == []
    time[0] += GRACE_S
    assert collector.collect() == [one.allocation]


def test_slice_of_a_container_whose_files_were_removed_is_not_free(node):
    """A ledger is the file in which a container's processes count their GPU memory. The container still uses its
    removed ledger, so the new ledger at the same path shows no process.
    """
    outside, pool, _allocator, files = static_slices(node, splitCount=2)
    outside.refresh()
    piece = pool.slices[0].id
    name = files.static_name(piece)
    removed = {name}
    outside.stale = lambda: frozenset(removed)
    (files.folder(name) / "rw" / "ledger").unlink()
    outside.refresh_if_changed()
    outside.poll()
    assert piece not in {offer.slice.id for offer in pool.offers()[1] if offer.healthy}
    assert piece in outside.in_use()
    limits = files.folder(name) / "limits"
    # A second ledger would allow the slice's memory twice, so no other container may start in the slice.
    assert abi_files.parse_limits(limits.read_bytes())["deny"] is True
    outside.deny([piece], False)
    assert abi_files.parse_limits(limits.read_bytes())["deny"] is True
    removed.clear()
    outside.refresh_if_changed()
    outside.poll()
    assert abi_files.parse_limits(limits.read_bytes())["deny"] is False
    assert piece in {offer.slice.id for offer in pool.offers()[1] if offer.healthy}
