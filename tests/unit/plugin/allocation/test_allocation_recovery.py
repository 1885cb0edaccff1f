# SPDX-License-Identifier: Apache-2.0
"""Tests the recovery of the plugin's records (its list of allocations). If the records file is lost, the plugin must
restore it from the copies in /run/vgpu, so that no slice in use becomes free.
"""

from __future__ import annotations

import json
import os

import pytest
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.allocation import recovery
from vgpu_plugin.allocation.leases import Leases, Terms
from vgpu_plugin.allocation.repair import Repair
from vgpu_plugin.errors import NoFreeSlice

# Damage to the records file: the case → the function that causes it.
LOST = {
    "records file missing": lambda path: path.unlink(),
    "records file truncated": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "records file empty": lambda path: path.write_bytes(b""),
    "records file of another format": lambda path: path.write_text('{"version": 99, "allocations": []}'),
    "records file not UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
}


def leases_of(node, parts) -> Leases:
    pool, allocator, _files = parts
    out = Leases(allocator, pool, node.paths.checkpoint, lambda: False, node.clock)
    out.restore()
    return out


def begun(node, split: int = 2):
    """Builds the parts that know slices, allocations and files, and recovers the records, as the daemon does at its
    start.
    """
    parts = node.parts(splitCount=split)
    parts[2].prepare()
    recovery.recover(parts[1].records, parts[2])
    return parts


@pytest.mark.parametrize("how", LOST)
def test_recovered_slices_are_not_allocated_twice(node, how):
    parts = begun(node, 1)
    leases = leases_of(node, parts)
    lease = leases.lease(ttl_s=100)
    (pod,) = parts[1].allocate([[next(one.id for one in parts[0].slices if one.id not in lease.slice_ids)]])
    before = {one.id: one for one in parts[1].records.all()}
    LOST[how](node.paths.records)
    parts = begun(node, 1)
    leases = leases_of(node, parts)
    assert {one.id: one for one in parts[1].records.all()} == before
    assert [offer.slice.id for offer in parts[0].offers()[1] if offer.healthy] == list(pod.slice_ids)
    with pytest.raises(NoFreeSlice):
        leases.lease()
    assert len(json.loads(node.paths.records.read_text())["allocations"]) == 2
    # Recovered allocations behave as before: they are released, expire and are collected.
    node.clock.seconds += 100
    leases.expire()
    assert [one.id for one in parts[1].records.all()] == [pod.allocation]


@pytest.mark.parametrize("how", LOST)
def test_recovery_is_reported_as_a_warning(node, how):
    parts = begun(node, 1)
    leases_of(node, parts).lease()
    LOST[how](node.paths.records)
    parts = begun(node, 1)
    warnings = " ".join(parts[1].records.warnings)
    assert "1 allocation" in warnings and "recovered" in warnings
    assert str(node.paths.allocations) in warnings


def test_intact_records_take_precedence(node):
    """If the records are intact, a folder without a record is a leftover of an ended allocation and is
    not recovered.
    """
    parts = begun(node)
    (one,) = parts[1].allocate([[parts[0].slices[0].id]])
    parts[1].records.drop(one.allocation)
    parts = begun(node)
    assert (parts[1].records.all(), parts[1].records.warnings) == ([], [])


# Damage to the copy of the record in an allocation's folder: the case → the function that causes it.
SPOILT = {
    "record copy missing": lambda folder: (folder / "record").unlink(),
    "record copy truncated": lambda folder: (folder / "record").write_text('{"id": '),
    "record copy of another allocation": lambda folder: (folder / "record").write_text(
        (folder / "record").read_text().replace(folder.name, "0" * 16)
    ),
    "directory in place of the record copy": lambda folder: ((folder / "record").unlink(), (folder / "record").mkdir()),
    "JSON list in place of an object": lambda folder: (folder / "record").write_text("[]"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_unreadable_folder_does_not_stop_the_recovery(node, how):
    parts = begun(node)
    (bad, good) = parts[1].allocate([[parts[0].slices[0].id], [parts[0].slices[3].id]])
    SPOILT[how](parts[2].folder(bad.allocation))
    node.paths.records.unlink()
    parts = begun(node, 1)
    assert [one.id for one in parts[1].records.all()] == [good.allocation]
    assert parts[2].present() == sorted([bad.allocation, good.allocation])


def test_current_limits_are_recovered(node):
    """A recovered record has the limits that the container has now, not the limits that it had at its start."""
    parts = begun(node)
    (one,) = parts[1].allocate([[parts[0].slices[0].id]])
    path = parts[2].folder(one.allocation) / "limits"
    found = abi_files.parse_limits(path.read_bytes())
    found["devices"][0]["memory_bytes"] = 64 << 20
    abi_files.rewrite_limits(str(path), abi_files.as_packed(found))
    node.paths.records.unlink()
    (record,) = begun(node, 1)[1].records.all()
    assert record.limits["devices"][0]["memory_bytes"] == 64 << 20
    assert abi_files.says(path.read_bytes(), record.limits)


def test_record_copy_is_readable_by_root_only(node):
    parts = begun(node)
    (one,) = parts[1].allocate([[parts[0].slices[0].id]])
    path = parts[2].folder(one.allocation) / "record"
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    assert not (parts[2].folder(one.allocation) / "ro" / "record").exists()


def test_old_allocations_get_a_record_copy_at_the_start(node):
    parts = begun(node)
    (one,) = parts[1].allocate([[parts[0].slices[0].id]])
    (parts[2].folder(one.allocation) / "record").unlink()
    begun(node, 1)
    node.paths.records.unlink()
    assert [record.id for record in begun(node, 1)[1].records.all()] == [one.allocation]


REPLICAS = {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 2}]}}
# Users of whole GPUs: a lease (a temporary allocation on this host) without a container, the lease of a docker
# container, and a pod.
OF_WHOLE = {
    "lease": lambda node, parts: leases_of(node, parts).lease(ttl_s=100),
    "docker container": lambda node, parts: leases_of(node, parts).lease(
        terms=Terms("container", "docker web", "docker", gpus=2)
    ),
    "pod": lambda node, parts: parts[1].allocate([[parts[0].slices[0].id]])[0],
}


def whole(node) -> None:
    node.config_text = json.dumps({"version": "v1", "sharing": REPLICAS})


@pytest.mark.parametrize("who", OF_WHOLE)
@pytest.mark.parametrize("how", LOST)
def test_allocations_of_unlimited_gpus_are_recovered(node, how, who):
    whole(node)
    parts = begun(node)
    given = OF_WHOLE[who](node, parts)
    before = parts[1].records.all()
    assert [one.limits for one in before] == [{}]
    LOST[how](node.paths.records)
    parts = begun(node)
    leases = leases_of(node, parts)
    assert parts[1].records.all() == before
    assert leases.in_use() == frozenset(given.slice_ids)
    assert "1 allocation was recovered" in " ".join(parts[1].records.warnings)
    # After the end of the allocation no copy of its record may remain, because the copy could be recovered by mistake.
    parts[1].forget(given.allocation)
    node.paths.records.unlink()
    assert begun(node)[1].records.all() == []
    assert sorted(one.name for one in node.paths.allocations.iterdir()) == []


def test_removed_record_copy_is_made_again(node):
    """Somebody may empty /run while the program runs. If the records are lost afterwards, they must still be
    recoverable.
    """
    whole(node)
    parts = begun(node)
    lease = leases_of(node, parts).lease()
    for one in node.paths.allocations.iterdir():
        one.unlink()
    Repair(node.paths, parts[1].records, parts[2]).poll()
    node.paths.records.unlink()
    assert [one.id for one in begun(node)[1].records.all()] == [lease.allocation]


# columns: free bytes, free inodes and total inodes of the file system; expected words of the warning ("" means no
# warning)
ROOMS = [
    (1 << 30, 1000, 2000, ""),
    ((1 << 20) - 4096, 1000, 2000, "1020 KiB"),
    (0, 1000, 2000, "0 KiB"),
    (1 << 30, 3, 2000, "room for 3 files"),
    (1 << 30, 0, 0, ""),  # btrfs reports 0 inodes because it has no limit on them.
]


@pytest.mark.parametrize(("left", "files", "all_files", "said"), ROOMS)
def test_full_folder_causes_a_warning_before_a_container_fails(node, monkeypatch, left, files, all_files, said):
    full = {str(node.paths.state_dir)}
    real = os.statvfs

    def statvfs(path):
        if str(path) not in full:
            return real(path)
        return os.statvfs_result((4096, 4096, 9, 9, left // 4096, all_files, files, files, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    parts = begun(node)
    repair = Repair(node.paths, parts[1].records, parts[2])
    repair.poll()
    assert len(repair.notes()) == bool(said)
    if said:
        assert str(node.paths.state_dir) in repair.notes()[0] and f"({said} left)" in repair.notes()[0]
    full.clear()
    repair.poll()
    assert repair.notes() == []
