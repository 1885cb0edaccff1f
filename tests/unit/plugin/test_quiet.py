# SPDX-License-Identifier: Apache-2.0
"""Tests an idle device plugin: it reads few files, and still notices every change."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pytest
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.allocation import static_slices
from vgpu_plugin.allocation.records import KUBELET
from vgpu_plugin.inject import cdi
from vgpu_plugin.node import nvml
from vgpu_plugin.node.nvml import Nvml
from vgpu_plugin.watch import watcher as watch
from vgpu_plugin.watch.setup import NodeView

from .inject.test_inject_handover import specs
from .inject.test_inject_handover import static_slices as made
from .samples import until


@pytest.fixture
def looks(monkeypatch):
    """Counts the full checks of the slices for containers outside Kubernetes. Usually the plugin makes only a cheap
    check of file times, and a full check if a time has changed.
    """
    seen = []
    whole = cdi.common_edits
    monkeypatch.setattr(static_slices.cdi, "common_edits", lambda *given: seen.append(1) or whole(*given))
    return seen


def test_nothing_is_read_while_nothing_changes(node, looks):
    outside, _pool, _allocator, _files = made(node, splitCount=3)
    outside.refresh()
    for _time in range(static_slices.WHOLE_EVERY - 1):
        outside.refresh_if_changed()
    assert len(looks) == 1
    outside.refresh_if_changed()
    assert len(looks) == 2, "everything is checked occasionally, even without a visible change"


def folder_of(files, pool) -> Path:
    return files.folder(files.static_name(pool.slices[0].id))


# A change to a file that the plugin wrote earlier → the function that makes this change.
CHANGES = {
    "CDI file missing": lambda node, files, pool, allocator: (
        node.paths.cdi_dir / cdi.file_name(cdi.SLICE_KIND)
    ).unlink(),
    "CDI file changed": lambda node, files, pool, allocator: (
        node.paths.cdi_dir / cdi.file_name(cdi.GPU_KIND)
    ).write_text("{}"),
    "folder missing": lambda node, files, pool, allocator: files.remove(files.static_name(pool.slices[0].id)),
    "file missing": lambda node, files, pool, allocator: (folder_of(files, pool) / "ld.so.preload").unlink(),
    "limits changed": lambda node, files, pool, allocator: abi_files.rewrite_limits(
        str(folder_of(files, pool) / "limits"),
        {"allocation": "x", "devices": [{"uuid": pool.slices[0].uuid, "memory_bytes": 1, "sm_percent": 1}]},
    ),
    "ledger damaged": lambda node, files, pool, allocator: (folder_of(files, pool) / "rw/ledger").write_bytes(
        b"spoilt"
    ),
    "ledger missing": lambda node, files, pool, allocator: (folder_of(files, pool) / "rw/ledger").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_are_repaired_at_the_next_check(node, looks, change):
    outside, pool, allocator, files = made(node, splitCount=3)
    outside.refresh()
    # File times advance by clock ticks, so a change within the tick of the last check would be invisible. To avoid
    # this, the files get old times.
    for path in (*node.paths.cdi_dir.rglob("*"), *node.paths.allocations.rglob("*"), node.paths.cdi_dir):
        os.utime(path, (1, 1))
    outside.refresh()
    looks.clear()
    wanted = specs(node)
    limits = abi_files.parse_limits((folder_of(files, pool) / "limits").read_bytes())
    outside.refresh_if_changed()
    assert not looks
    CHANGES[change](node, files, pool, allocator)
    outside.refresh_if_changed()
    assert len(looks) == 1
    assert specs(node) == wanted
    folder = folder_of(files, pool)
    found = abi_files.parse_limits((folder / "limits").read_bytes())
    assert found["devices"] == limits["devices"]
    assert abi_files.parse_ledger((folder / "rw/ledger").read_bytes())["devices"] == [pool.slices[0].uuid]
    outside.refresh_if_changed()
    assert len(looks) == 1, "no further file is read"


def test_changed_library_or_user_is_noticed(node, looks):
    outside, pool, allocator, files = made(node, splitCount=3)
    outside.refresh()
    node.install_library("0.2.0-bbbbbbbbbbbb")
    outside.refresh_if_changed()
    (first, *_rest) = specs(node)["vgpu.fleet/slice"]["devices"]
    assert "/0.2.0-bbbbbbbbbbbb'" in str(first)
    allocator.grant([pool.slices[0].id], KUBELET)
    outside.refresh_if_changed()
    assert abi_files.parse_limits((folder_of(files, pool) / "limits").read_bytes())["deny"] is True
    assert len(looks) == 3


def test_changes_during_a_check_are_found_at_the_next(node, looks, monkeypatch):
    outside, _pool, _allocator, _files = made(node, splitCount=3)
    outside.refresh()
    whole = static_slices.cdi.write

    def switched(*given):
        # The running check has read the library's path before this point, so it still writes the old path.
        monkeypatch.setattr(static_slices.cdi, "write", whole)
        whole(*given)
        node.install_library("0.2.0-bbbbbbbbbbbb")

    slices_alone = outside._make
    monkeypatch.setattr(
        outside,
        "_make",
        lambda *given: monkeypatch.setattr(static_slices.cdi, "write", switched) or slices_alone(*given),
    )
    outside.refresh()
    assert "/0.1.0-aaaaaaaaaaaa'" in str(specs(node)["vgpu.fleet/slice"])
    monkeypatch.setattr(outside, "_make", slices_alone)
    outside.refresh_if_changed()
    assert len(looks) == 3
    assert "/0.2.0-bbbbbbbbbbbb'" in str(specs(node)["vgpu.fleet/slice"])
    outside.refresh_if_changed()
    assert len(looks) == 3


def test_every_change_of_the_pool_is_noticed(node, looks, monkeypatch):
    """The new list may be at the memory address of the old list, which must not hide the change."""
    monkeypatch.setattr(static_slices, "id", lambda _thing: 1, raising=False)
    outside, pool, _allocator, files = made(node, splitCount=3)
    outside.refresh()
    for memory in range(1, 21):
        pieces = [one._replace(memory_mib=memory) for one in pool.slices]
        pool.update(node.gpus, pieces, frozenset())
        outside.refresh_if_changed()
        (device,) = abi_files.parse_limits((folder_of(files, pool) / "limits").read_bytes())["devices"]
        assert device["memory_bytes"] == memory << 20
    assert len(looks) == 21


# ---- the library's folder


def test_library_follows_the_link_current(node):
    """The plugin resolves the link ``current`` again only if it has changed. The test covers each kind of change."""
    _pool, allocator, _files = node.parts()
    first = node.library_root / "0.1.0-aaaaaaaaaaaa"
    current = node.library_root / "current"
    first = allocator.library()
    assert first == current.resolve() == allocator.library()
    second = node.install_library("0.3.0-cccccccccccc")
    assert allocator.library() == second.resolve()
    # Folder and link get a new name: the same inode, another path.
    renamed = second.rename(node.library_root / "0.4.0-dddddddddddd")
    current.unlink()
    current.symlink_to(renamed.name)
    assert allocator.library() == renamed.resolve()
    # Another folder gets the old name: the same path, another inode.
    shutil.rmtree(renamed)
    node.install_library(renamed.name)
    assert allocator.library() == renamed.resolve()
    (renamed / "libvgpu.so").unlink()
    with pytest.raises(Exception, match=r"current/libvgpu\.so does not exist"):
        allocator.library()


# ---- the files of an allocation


def test_limits_file_is_written_last_and_complete(node, monkeypatch):
    """The arbiter (which balances compute time) and the watcher (which looks for bypasses) find an allocation by its
    limits file. So this file must appear last and complete.
    """
    pool, allocator, files = node.parts()
    order = []
    for name in ("open", "replace"):
        whole = getattr(os, name)

        def seen(path, *rest, whole=whole, **named):
            order.append(Path(rest[0] if isinstance(rest[0], str) else path).name)
            return whole(path, *rest, **named)

        monkeypatch.setattr(f"vgpu_plugin.allocation.allocation_files.os.{name}", seen)
    answer = allocator.grant([pool.slices[0].id], KUBELET)
    uuid = pool.slices[0].uuid
    made_first = [f"gpu-{uuid}", "ledger", "tenant", "limits.new", "limits"]
    assert [one for one in order if "allocations" not in one][: len(made_first)] == made_first
    assert sorted(one.name for one in files.folder(answer.allocation).iterdir()) == sorted(
        [f"gpu-{uuid}", "limits", "ro", "root", "rw"]
    )


def test_incomplete_folder_of_a_killed_program_is_completed(node):
    pool, allocator, files = node.parts()
    answer = allocator.grant([pool.slices[0].id], KUBELET)
    folder = files.folder(answer.allocation)
    (folder / "limits").unlink()
    (folder / "limits.new").write_bytes(b"half")
    (folder / "rw/tenant").write_bytes(b"")
    record = allocator.records.get(answer.allocation)
    assert not files.is_whole(record)
    files.make(record)
    assert files.is_whole(record)
    assert (folder / "rw/tenant").stat().st_size == abi_files.fields.TENANT_FILE_SIZE


# ---- the header of a ledger, the file in which a container's processes count their memory


def with_slots_at(offset: int) -> bytes:
    """Returns a ledger in which a tenant has changed the field for the offset of the slots."""
    data = bytearray(abi_files.pack_ledger(["GPU-1"]))
    struct.pack_into("<I", data, abi_files.fields.LEDGER_FIELDS["slot_offset"][0], offset)
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"VGPULED1",
        abi_files.pack_ledger(["GPU-1"])[:-1],
        b"X" + abi_files.pack_ledger(["GPU-1"])[1:],
        abi_files.pack_ledger(["GPU-1", "GPU-2"]),
        abi_files.pack_ledger(["GPU-1"]) + b"more",
        with_slots_at(abi_files.fields.LEDGER_FILE_SIZE) + bytes(abi_files.fields.LEDGER_FILE_SIZE),
    ],
)
def test_header_check_agrees_with_full_parse(tmp_path, data):
    path = tmp_path / "ledger"
    path.write_bytes(data)
    try:
        # A tenant may append bytes to the file; bytes beyond the size of a ledger are never read.
        expected = abi_files.parse_ledger(data[: abi_files.fields.LEDGER_FILE_SIZE])["devices"]
    except abi_files.LayoutError as fault:
        with pytest.raises(abi_files.LayoutError) as found:
            abi_files.is_ledger_of(str(path), ["GPU-1"], "")
        assert str(found.value) == str(fault)
    else:
        assert abi_files.is_ledger_of(str(path), expected, "")
        assert not abi_files.is_ledger_of(str(path), [*expected, "GPU-3"], "")


def says(**fields: int) -> bytes:
    """Returns a ledger of GPU-1 and allocation a in which these header fields have other values."""
    data = bytearray(abi_files.pack_ledger(["GPU-1"], "a"))
    for name, value in fields.items():
        struct.pack_into("<I", data, abi_files.fields.LEDGER_FIELDS[name][0], value)
    return bytes(data)


# Ledgers that do not match GPU-1, allocation a or the layout of this version.
OTHERS = {
    "ledger of another allocation": abi_files.pack_ledger(["GPU-1"], "b"),
    "ledger of another GPU": abi_files.pack_ledger(["GPU-2"], "a"),
    "fewer slots": says(slot_count=abi_files.fields.LEDGER_SLOTS - 1),
    "slots elsewhere": says(slot_offset=abi_files.fields.LEDGER_SLOT_OFFSET - 8),
    "smaller slots": says(slot_size=264),
    "ledger of another size": says(size=abi_files.fields.LEDGER_FILE_SIZE - 1),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_readable_ledger_of_another_program_is_replaced(node, kind):
    """parse_ledger can read each of these ledgers, so only the check against the record shows that they are wrong."""
    abi_files.parse_ledger(OTHERS[kind])
    pool, allocator, files = node.parts()
    record = allocator.records.get(allocator.grant([pool.slices[0].id], KUBELET).allocation)
    ledger = files.folder(record.id) / "rw/ledger"
    whole = ledger.read_bytes()
    uuid, allocation = abi_files.fields.LEDGER_FIELDS["devices"][0], abi_files.fields.LEDGER_FIELDS["allocation"][0]
    data = bytearray(OTHERS[kind])
    if kind != "ledger of another GPU":
        data[uuid : uuid + abi_files.fields.UUID_SIZE] = whole[uuid : uuid + abi_files.fields.UUID_SIZE]
    if kind != "ledger of another allocation":
        data[allocation : allocation + 64] = whole[allocation : allocation + 64]
    assert files.is_whole(record)
    ledger.write_bytes(data)
    assert not files.is_whole(record)
    files.make(record)
    assert files.is_whole(record)
    assert ledger.read_bytes() == whole


def test_ledger_of_another_version_that_can_be_read_is_kept(node):
    """A newer version's ledger may be larger. It is kept, because version N must work with version N+1."""
    assert abi_files.fields.LEDGER_MIN_READER <= abi_files.fields.LEDGER_VERSION
    path = node.paths.allocations.parent / "ledger"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = bytearray(says(version=abi_files.fields.LEDGER_VERSION + 1, size=abi_files.fields.LEDGER_FILE_SIZE + 4096))
    path.write_bytes(data)
    assert abi_files.is_ledger_of(str(path), ["GPU-1"], "a")
    assert not abi_files.is_ledger_of(str(path), ["GPU-1"], "b")


# ---- the driver and the watcher


def test_numa_nodes_are_read_once_until_the_driver_is_reopened(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(nvml, "numa_node", lambda _root, pci: read.append(pci) or 1)
    one = Nvml.__new__(Nvml)
    one._numa, one._sys_root, one._events = {}, tmp_path, None
    assert [one._numa_node("a"), one._numa_node("a"), one._numa_node("b")] == [1, 1, 1]
    assert read == ["a", "b"]
    monkeypatch.setattr(one, "close", lambda: None)
    monkeypatch.setattr(one, "_open", lambda: None)
    one.reopen()
    one._numa_node("a")
    assert read == ["a", "b", "a"]


class Source:
    def __init__(self) -> None:
        self.on: dict[str, dict[int, int | None]] = {}
        self.asked: list[str] = []

    def processes(self, uuid):
        self.asked.append(uuid)
        return self.on.get(uuid, {})

    def utilisation(self, _uuid, _since_us):
        return {}


def test_watcher_reads_ledgers_only_if_a_gpu_is_in_use(node):
    pool, allocator, files = node.parts()
    allocator.grant([pool.slices[0].id], KUBELET)
    mounts = []
    source = Source()
    uuids = [gpu.uuid for gpu in node.gpus]
    view = NodeView(pool, allocator.records, node.paths.checkpoint, lambda: watch.REPORT)
    one = watch.Watch(source, files, view, kernel=watch.Kernel(device=lambda path: mounts.append(path) or ""))
    one.look()
    assert (source.asked, mounts) == (uuids, [])
    source.on = {uuid: {1: 1} for uuid in uuids}
    one.look()
    assert len(mounts) == 1, "one read per poll for any number of busy GPUs"


def test_shared_gpus_follow_the_pool(node):
    pool, _allocator, _files = node.parts()
    uuids = tuple(gpu.uuid for gpu in node.gpus)
    assert pool.shape().limited == uuids
    pool.update(node.gpus[:1], [one for one in pool.slices if one.uuid == uuids[0]], frozenset())
    assert pool.shape().limited == uuids[:1]
    until(lambda: pool.shape() is pool.shape(), "a stable list of GPUs")
