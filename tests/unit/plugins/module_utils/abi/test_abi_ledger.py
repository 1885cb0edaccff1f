# SPDX-License-Identifier: Apache-2.0
"""Tests the ledger, the file in which the library counts the GPU memory of a container's processes: which memory of
ended processes still counts, how the ledger of an older library is read, and how a ledger is emptied in place.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tracemalloc
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.abi import fields, files

MIB = 1 << 20
UUIDS = ["GPU-a", "GPU-b"]
# <fcntl.h> has this value; the fcntl module has no name for it before Python 3.9.
F_OFD_SETLK = 37


def ledger(slots: list[tuple[int, int, int]], high: int = 0, slot_size: int = fields.LEDGER_SLOT_SIZE) -> bytes:
    """Returns a ledger in which each slot (index, MiB used, MiB exported) has this memory of GPU-b."""
    data = bytearray(files.pack_ledger(UUIDS, "one"))
    files.put_field(data, 0, fields.LEDGER_FIELDS, "slot_high", high)
    files.put_field(data, 0, fields.LEDGER_FIELDS, "slot_size", slot_size)
    for index, used, exported in slots:
        base = fields.LEDGER_SLOT_OFFSET + index * slot_size
        struct.pack_into("<Q", data, base + fields.LEDGER_SLOT_FIELDS["used"][0] + 8, used * MIB)
        if exported:
            struct.pack_into("<I", data, base + fields.LEDGER_SLOT_FIELDS["exported_mib"][0] + 4, exported)
    return bytes(data)


def test_ledger_names_its_devices_in_order() -> None:
    uuids = ["GPU-a", "GPU-b", "GPU-c"]
    assert files.parse_ledger(files.pack_ledger(uuids, "one"))["devices"] == uuids


def test_a_ledger_has_at_most_as_many_devices_as_fit() -> None:
    uuids = [f"GPU-{n}" for n in range(fields.MAX_DEVICES + 1)]
    assert files.parse_ledger(files.pack_ledger(uuids[:-1], "one"))["devices"] == uuids[:-1]
    with pytest.raises(files.LayoutError):
        files.pack_ledger(uuids, "one")


# columns: fields of the ledger's head, of which one is out of range
LARGER = [
    {"device_count": fields.MAX_DEVICES + 1},
    {"slot_count": fields.LEDGER_SLOTS + 1, "slot_size": 264},
    {"slot_size": 263},
    {"slot_offset": fields.LEDGER_SLOT_OFFSET + 1},
]


@pytest.mark.parametrize("head", LARGER)
def test_ledger_with_more_than_its_file_holds_is_refused(head: dict[str, int]) -> None:
    data = bytearray(files.pack_ledger(UUIDS, "one"))
    for name, value in head.items():
        files.put_field(data, 0, fields.LEDGER_FIELDS, name, value)
    with pytest.raises(files.LayoutError, match="the ledger names"):
        files.parse_ledger(bytes(data))


def test_size_of_a_slot_takes_no_memory_if_there_is_no_slot() -> None:
    """A tenant could write any size, and the device plugin reads every ledger."""
    data = bytearray(files.pack_ledger(UUIDS, "one"))
    for name, value in (("slot_count", 0), ("slot_size", 1 << 30)):
        files.put_field(data, 0, fields.LEDGER_FIELDS, name, value)
    tracemalloc.start()
    found = files.parse_ledger(bytes(data))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["slots"] == [] and peak < 8 * MIB


def lock(fd: int, first: int) -> None:
    fcntl.fcntl(fd, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, first, 1, 0))


# columns: slots of GPU-b as (index, MiB used, MiB exported), slot_high, indexes of the slots with a living process,
# whether a process has imported memory; expected MiB in use, MiB that ended processes had exported
READ = [
    ([(0, 5, 0)], 1, [0], False, 5, 0),
    ([(0, 5, 3)], 1, [0], True, 5, 0),
    ([(0, 5, 3)], 1, [], False, 0, 0),
    ([(0, 5, 3)], 1, [], True, 3, 3),
    ([(0, 2, 3)], 1, [], True, 2, 2),  # Exported memory is a part of the used memory, so at most 2 MiB count.
    ([(0, 5, 3), (1, 5, 4)], 2, [], True, 7, 7),
    ([(0, 5, 3), (1, 5, 4)], 1, [], True, 3, 3),  # The library does not read slots from slot_high on.
    ([(0, 5, 3), (1, 5, 4)], 2, [1], True, 8, 3),
]


@pytest.mark.parametrize(("slots", "high", "alive", "imported", "used", "exported"), READ)
def test_exported_memory_of_ended_processes_counts_while_it_is_imported(
    tmp_path: Path,
    slots: list[tuple[int, int, int]],
    high: int,
    alive: list[int],
    imported: bool,
    used: int,
    exported: int,
) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(ledger(slots, high))
    with path.open("r+b") as stream:
        for slot in alive:
            lock(stream.fileno(), fields.LEDGER_ALIVE_BASE + slot)
        if imported:
            lock(stream.fileno(), fields.LEDGER_IMPORT_BASE)
        found = files.read_ledger(str(path))
    assert [one["slot"] for one in found["slots"]] == alive
    assert found["exported"] == [0, exported * MIB]
    assert [one["used"] for one in found["totals"]] == [0, used * MIB]


def test_ledger_of_an_older_library_exports_nothing() -> None:
    """The slots of the first libraries end before the field exported_mib."""
    (slot,) = files.parse_ledger(ledger([(2, 5, 0)], slot_size=264))["slots"]
    assert (slot["slot"], slot["used"], slot["exported"]) == (2, [0, 5 * MIB], [0, 0])


@pytest.mark.parametrize("before", [b"", b"\xff" * fields.LEDGER_FILE_SIZE, ledger([(0, 5, 3)]) + b"more"])
def test_ledger_is_emptied_in_place(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(before)
    inode = path.stat().st_ino
    files.rewrite_ledger(str(path), UUIDS, "two")
    assert (path.read_bytes(), path.stat().st_ino) == (files.pack_ledger(UUIDS, "two"), inode)


# columns: error when the ledger is opened; expected: whether the ledger counts as used. The kernel reports
# BlockingIOError while a process holds a lease on the file.
@pytest.mark.parametrize(("fault", "used"), [(BlockingIOError(), True), (FileNotFoundError(), False)])
def test_ledger_that_cannot_be_opened_is_used_only_if_a_process_leases_it(
    monkeypatch: pytest.MonkeyPatch, fault: OSError, used: bool
) -> None:
    def refuse(_path: str) -> int:
        raise fault

    monkeypatch.setattr(files, "open_shared", refuse)
    assert files.ledger_in_use("/ledger") is used


# columns: fields of slot 0; expected: whether the slot counts as used. A slot with a pid counts even without memory. A
# slot without pid and memory does not count, even if an ended process left its pid namespace there.
SLOT_FIELDS: list[tuple[dict[str, int], bool]] = [({"pid": 7}, True), ({"pid_namespace": 9}, False), ({}, False)]


@pytest.mark.parametrize(("slot", "used"), SLOT_FIELDS)
def test_slot_of_a_process_is_read(slot: dict[str, int], used: bool) -> None:
    data = bytearray(ledger([]))
    for name, value in slot.items():
        files.put_field(data, fields.LEDGER_SLOT_OFFSET, fields.LEDGER_SLOT_FIELDS, name, value)
    found = files.parse_ledger(bytes(data))["slots"]
    assert [(one["slot"], one["pid"]) for one in found] == ([(0, 7)] if used else [])


def test_uuid_without_a_final_zero_byte_ends_at_its_field() -> None:
    data = bytearray(files.pack_ledger(UUIDS, "one"))
    start = fields.LEDGER_FIELDS["devices"][0]
    data[start : start + fields.UUID_SIZE] = b"G" * fields.UUID_SIZE
    assert files.parse_ledger(bytes(data))["devices"] == ["G" * fields.UUID_SIZE, "GPU-b"]
