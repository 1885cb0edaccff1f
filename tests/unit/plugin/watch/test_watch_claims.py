# SPDX-License-Identifier: Apache-2.0
"""Tests the watcher, which compares the driver's data about GPU processes with each container's limits and ledgers
(files in which a container counts its memory). Here a container has several shares (parts of a GPU that it got by
ResourceClaims). Each process has a slot in the ledger of each share, and the watcher compares the sum of the slots.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles.proc import CONTAINER
from doubles.watched import MIB, UUID, Watched
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.allocation.records import CLAIM, Record
from vgpu_plugin.node.paths import CONTAINER_SHARE
from vgpu_plugin.watch import mounts
from vgpu_plugin.watch.mounts import Mount, Place, Table
from vgpu_plugin.watch.rule import MEMORY, MORE_TIME, NO_SLOT, Account, sum_of, together

FIRST, SECOND = "cccc", "dddd"
LIMIT = 1000 * MIB

TOGETHER = [
    ({}, {}),
    ({1: frozenset("a")}, {"a": frozenset("a")}),
    ({1: frozenset("ab"), 2: frozenset("b")}, {"a": frozenset("ab"), "b": frozenset("ab")}),
    ({1: frozenset("a"), 2: frozenset("b")}, {"a": frozenset("a"), "b": frozenset("b")}),
]


@pytest.mark.parametrize(("owners", "expected"), TOGETHER)
def test_shares_are_grouped_by_container(owners: dict, expected: dict) -> None:
    assert together(owners) == expected


def test_accounts_of_several_shares_are_added() -> None:
    one, other = Account({(77, 10): 5, (77, 11): 1}, 100, True, 2), Account({(77, 10): 7}, 50, False, 3)
    assert sum_of([one, other]) == Account({(77, 10): 12, (77, 11): 1}, 150, False, 5)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Watched]:
    """Makes a node with two claims on one GPU; the tests add processes that have shares of both claims."""
    out = Watched(tmp_path)
    out.kind = ""
    out.devices = {FIRST: "0:60", SECOND: "0:61"}
    out.device = lambda path: out.devices.get(path.parent.name, "")
    for number, name in enumerate((FIRST, SECOND)):
        device = {"uuid": UUID, "memory_bytes": LIMIT, "sm_percent": 30}
        limits = {"allocation": name, "devices": [device]}
        out.neighbours[name] = Record(
            name, CLAIM, (f"{UUID}::{number}",), limits, claim=name, request="gpu", number=number
        )
        out.files.make(out.neighbours[name])
    out.held = []
    yield out
    for descriptor in out.held:
        os.close(descriptor)


def run(node: Watched, pid: int, used: int, *shares: str) -> None:
    text = " ".join(f"{node.devices[one]}=/ledger" for one in shares)
    node.proc.add(pid, mounts=text, group=CONTAINER)
    node.card.running.setdefault(UUID, {})[pid] = used


def charge(node: Watched, allocation: str, pid: int, used: int, slot: int = 0) -> None:
    path = node.files.folder(allocation) / "rw" / "ledger"
    descriptor = os.open(path, os.O_RDWR)
    base = abi_files.fields.LEDGER_SLOT_OFFSET + slot * abi_files.fields.LEDGER_SLOT_SIZE
    os.pwrite(descriptor, struct.pack("<Q", used), base)
    os.pwrite(descriptor, struct.pack("<IQ", pid, 77), base + 260)
    os.pwrite(descriptor, struct.pack("<I", slot + 1), abi_files.fields.LEDGER_FIELDS["slot_high"][0])
    node.lock(descriptor, abi_files.fields.LEDGER_ALIVE_BASE + slot)
    node.held.append(descriptor)


# The process has shares of both claims. columns: MiB that the driver reports for it, MiB in its first ledger, MiB in
# its second ledger (None means no slot); expected findings
JUDGED = [
    (1500, 1000, 500, []),
    (2000, 1000, 1000, []),
    (1500, 1000, None, [MEMORY]),
    (1500, None, None, [NO_SLOT]),
    (1800, 1000, 500, [MEMORY]),
    (2500, 1000, 1500, [MEMORY]),
]


@pytest.mark.parametrize(("used", "first", "second", "reasons"), JUDGED)
def test_process_is_judged_by_the_sum_of_its_shares(
    node: Watched, used: int, first: int | None, second: int | None, reasons: list
) -> None:
    run(node, 20, used * MIB, FIRST, SECOND)
    for name, charged in ((FIRST, first), (SECOND, second)):
        if charged is not None:
            charge(node, name, 20, charged * MIB)
    assert sorted(set(node.look(2))) == reasons


def test_share_used_by_two_containers(node: Watched) -> None:
    run(node, 20, 1500 * MIB, FIRST, SECOND)
    run(node, 21, 400 * MIB, SECOND)
    charge(node, FIRST, 20, 1000 * MIB)
    charge(node, SECOND, 20, 500 * MIB)
    charge(node, SECOND, 21, 400 * MIB, slot=1)
    assert node.look(2) == []
    node.card.running[UUID][21] = 900 * MIB
    assert set(node.look(2)) == {MEMORY}


@pytest.mark.parametrize(("percent", "reasons"), [(58, []), (95, [MORE_TIME])])
def test_compute_share_of_a_container_is_the_sum_of_its_shares(node: Watched, percent: int, reasons: list) -> None:
    run(node, 20, 100 * MIB, FIRST, SECOND)
    for name in (FIRST, SECOND):
        charge(node, name, 20, 100 * MIB)
        page = node.files.folder(name) / f"gpu-{UUID}"
        page.write_bytes(abi_files.pack_gpu_page(UUID, name))
    node.card.taken = {20: float(percent)}
    found = []
    for _time in range(10):
        found = node.look()
        # The arbiter, which balances compute time, is alive and never allows the container more than its share.
        for name in (FIRST, SECOND):
            _heartbeat(node.files.folder(name) / f"gpu-{UUID}", int(node.now * 1e9))
    assert sorted(set(found)) == reasons


def _heartbeat(page: Path, now_ns: int) -> None:
    data = bytearray(page.read_bytes())
    offset, _form = abi_files.fields.GPU_PAGE_FIELDS["heartbeat_ns"]
    struct.pack_into("<Q", data, offset, now_ns)
    page.write_bytes(data)


PLACES = [Place("/dev/vgpu", "8:1", "/claims"), Place(f"{CONTAINER_SHARE}", "8:1", "/cccc/ro")]
OTHERS = {"/dev/vgpu/7": Place("/dev/vgpu/7", "8:1", "/dddd/ro")}
ROOT = Mount(1, 0, "8:1", "/", "/")
BASE = (ROOT, Mount(2, 1, "8:1", "/claims", "/dev/vgpu"), Mount(3, 2, "8:1", "/cccc/ro", "/dev/vgpu/0"))
# columns: the case, the container's mounts in addition to those of the node; the paths at which a foreign mount is
# expected to be found
MOUNTS = [
    ("mounts of the node only", (), []),
    ("additional share of the node", (Mount(4, 2, "8:1", "/dddd/ro", "/dev/vgpu/7"),), []),
    ("volume at the path of another share", (Mount(4, 2, "8:9", "/evil", "/dev/vgpu/7"),), ["/dev/vgpu/7"]),
    ("share number without a claim", (Mount(4, 2, "8:1", "/dddd/ro", "/dev/vgpu/8"),), ["/dev/vgpu/8"]),
    ("volume over the container's share", (Mount(4, 3, "8:9", "/evil", "/dev/vgpu/0"),), ["/dev/vgpu/0"]),
]


@pytest.mark.parametrize(("more", "named"), [one[1:] for one in MOUNTS], ids=[one[0] for one in MOUNTS])
def test_only_mounts_that_the_node_made_are_accepted_as_shares(more: tuple, named: list) -> None:
    found = mounts.foreign(Table((*BASE, *more)), PLACES, mounts.GUARDED, True, OTHERS)
    assert [one.split()[1] for one in found] == named
