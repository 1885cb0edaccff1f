# SPDX-License-Identifier: Apache-2.0
"""Tests the values that the device plugin caches between the kubelet's calls of Allocate: after any change they must
equal freshly computed values. A lease is a slice of a GPU for a container outside Kubernetes.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.allocation import records
from vgpu_plugin.allocation.records import KUBELET, LEASE, Record, RecordStore
from vgpu_plugin.errors import NotNow
from vgpu_plugin.inject.driver_files import DriverFiles
from vgpu_plugin.offer.settings import make_slices

from ..samples import gpus

OVERSOLD = {"memoryScaling": "2.0"}


def limits_of(answer) -> dict:
    path = next(host for inside, host, _read_only in answer.mounts if inside == "/dev/vgpu/0") + "/limits"
    return abi_files.parse_limits(Path(path).read_bytes())


# ---- flags of the limits


def test_flags_follow_the_settings(node):
    pool, allocator, _files = node.parts(splitCount=4)
    first = node.gpus[0].uuid
    steps = [
        ({"logLevel": 3}, {"log_level": 3, "oom_killer": False, "oversubscribe": False}),
        ({"oomKiller": True}, {"log_level": 1, "oom_killer": True, "oversubscribe": False}),
        (OVERSOLD, {"log_level": 1, "oom_killer": False, "oversubscribe": True}),
        ({}, {"log_level": 1, "oom_killer": False, "oversubscribe": False}),
    ]
    for n, (vcuda, expected) in enumerate(steps):
        settings = node.configure(splitCount=4, **vcuda)
        allocator.configure(settings, DriverFiles())
        pool.update(node.gpus, make_slices(node.gpus, settings), frozenset())
        found = limits_of(allocator.allocate([[f"{first}::{n}"]])[0])
        assert {key: found[key] for key in expected} == expected, vcuda


def test_flags_follow_the_current_gpu_model(node):
    """Another GPU model appears under the same UUID, and the configuration has an exception for that model, so the
    flags must change.
    """
    exception = [{"match": {"model": "V100"}, **OVERSOLD}]
    node.gpus = gpus("T4", "V100-16GB")
    pool, allocator, _files = node.parts(splitCount=4, devices=exception)
    first = node.gpus[0]
    found = [limits_of(allocator.allocate([[f"{first.uuid}::0"]])[0])["oversubscribe"]]
    for n, model in enumerate(("NVIDIA V100-16GB", first.model), start=1):
        seen = [dataclasses.replace(first, model=model), *node.gpus[1:]]
        pool.update(seen, make_slices(seen, allocator.settings), frozenset())
        found.append(limits_of(allocator.allocate([[f"{first.uuid}::{n}"]])[0])["oversubscribe"])
    assert found == [False, True, False]


def test_flags_are_per_container(node):
    """A container whose size is not known yet has the flag ``deny`` (it must not use the GPU yet) in its own limits
    only.
    """
    _pool, allocator, _files = node.parts()
    uuid = node.gpus[0].uuid
    (answer,) = allocator.allocate([[f"{uuid}::0"]])
    allocator.records.get(answer.allocation).limits["deny"] = True
    assert limits_of(allocator.allocate([[f"{uuid}::1"]])[0])["deny"] is False


# ---- GPU page, tenant page and ledger: the files that a container shares with programs of the node


@pytest.mark.parametrize(
    ("pack", "parse"),
    [
        (lambda uuids, name: abi_files.pack_gpu_page(uuids[0], name), abi_files.parse_gpu_page),
        (abi_files.pack_tenant_page, abi_files.parse_tenant_page),
        (abi_files.pack_ledger, abi_files.parse_ledger),
    ],
    ids=["gpu page", "tenant page", "ledger"],
)
def test_gpu_pages_belong_to_their_own_allocation(pack, parse):
    long = "f" * (abi_files.fields.ALLOCATION_SIZE - 1)
    for uuids in (["GPU-a"], ["GPU-b"], ["GPU-a"]):
        for name in ("a1b2", long, "c3", ""):
            found = parse(pack(uuids, name))
            assert (found["allocation"], uuids[0] in json.dumps(found)) == (name, True)
    for _time in range(2):
        with pytest.raises(abi_files.LayoutError):
            pack(["GPU-a"], long + "f")
        with pytest.raises(abi_files.LayoutError):
            pack(["é"], "a1b2")


# ---- records of allocations


def store(path: Path) -> RecordStore:
    out = RecordStore(path)
    out.load()
    return out


def test_cached_leases_equal_reloaded_leases(tmp_path):
    path = tmp_path / "allocations.json"
    kept = store(path)
    rows = [
        # columns: the operation and its argument; expected lease that uses slice a; expected lease that uses slice b;
        # whether a record is expected whose slices differ from those that the kubelet requested
        ("put", Record("1", KUBELET, ("a",)), None, None, False),
        ("put", Record("2", LEASE, ("b",)), None, "2", False),
        ("put", Record("3", KUBELET, ("c",), asked=("d",)), None, "2", True),
        ("put", Record("4", KUBELET, ("e",), asked=("f",)), None, "2", True),
        ("drop", "3", None, "2", True),
        ("drop", "3", None, "2", True),
        ("drop", "2", None, None, True),
        ("put", Record("5", LEASE, ("a", "b")), "5", "5", True),
        ("put", Record("5", LEASE, ("a",)), "5", None, True),
        ("drop", "4", "5", None, False),
        ("drop", "5", None, None, False),
    ]
    for do, what, lease_a, lease_b, substituted in rows:
        getattr(kept, do)(what)
        for one in (kept, store(path)):
            seen = (one.lease_of("a"), one.lease_of("b"), one.substituted)
            assert seen == (lease_a, lease_b, substituted), (do, what)
        assert kept.all() == store(path).all()


def test_unwritten_record_is_not_cached(tmp_path, monkeypatch):
    path = tmp_path / "allocations.json"
    kept = store(path)
    kept.put(Record("1", LEASE, ("a",)))
    real = records._overwrite

    def full(_path, _data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records, "_overwrite", full)
    for one in (Record("2", LEASE, ("b",)), Record("1", KUBELET, ("c",), asked=("d",))):
        with pytest.raises(NotNow, match="No space"):
            kept.put(one)
    assert (kept.lease_of("a"), kept.lease_of("b"), kept.substituted, len(kept.all())) == ("1", None, False, 1)
    monkeypatch.setattr(records, "_overwrite", real)
    kept.put(Record("3", KUBELET, ("e",)))
    assert [one.id for one in store(path).all()] == ["1", "3"]


@pytest.mark.parametrize("kind", [KUBELET, LEASE])
@pytest.mark.parametrize("wrong", ["slice_ids", "asked"])
def test_invalid_file_leaves_no_records(tmp_path, kind, wrong):
    """The file's last entry may be the invalid one. So no entry of the file may be loaded before the whole file is
    checked.
    """
    path = tmp_path / "allocations.json"
    store(path).put(Record("1", LEASE, ("a",), asked=("b",)))
    data = json.loads(path.read_text())
    data["allocations"].append({"id": "2", "kind": kind, "slice_ids": ["c"], wrong: [["d"]]})
    path.write_text(json.dumps(data))
    kept = store(path)
    assert (kept.all(), kept.lease_of("a"), kept.substituted, kept.with_ids(["c"])) == ([], None, False, [])
    assert len(kept.warnings) == 1 and path.with_suffix(".broken").exists()
    kept.put(Record("3", KUBELET, ("e",)))
    assert [one.id for one in store(path).all()] == ["3"]
