# SPDX-License-Identifier: Apache-2.0
"""Tests directories that a container engine leaves. If the engine starts a container before the plugin has made the
files that the container mounts, the engine makes a directory in place of each file. The plugin must replace these
directories.
"""

from __future__ import annotations

import os
import shutil

import pytest
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.assembly import build
from vgpu_plugin.inject.driver_files import DriverFiles
from vgpu_plugin.offer import settings

from ..conftest import FakeGpus
from ..inject.test_inject_handover import specs, static_slices

# Paths below an allocation's folder that containers mount: those of this version and those of an older version.
NOW = ("root", "ro", "rw/ledger", "rw/tenant", "ro/ld.so.preload")
FORMER = ("ld.so.preload", "limits", "rw/ledger", "rw/tenant", "gpu-{uuid}")
SINGLE = tuple(dict.fromkeys((*NOW, *FORMER, "ro/limits", "ro/ledger", "ro/tenant", "ro/gpu-{uuid}", "limits.new")))


def engine_makes(node, folder, names: tuple[str, ...], uuid: str) -> None:
    """Simulates a reboot after which the engine started first: the tmpfs mounts are gone, and in their place are
    directories with the engine's own mode.
    """
    node.mounter.mounted.clear()
    shutil.rmtree(folder)
    for name in names:
        os.makedirs(folder / name.format(uuid=uuid), 0o755, exist_ok=True)


def one_becomes_a_directory(folder, name: str, uuid: str) -> None:
    path = folder / name.format(uuid=uuid)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.mkdir()


@pytest.mark.parametrize("names", [NOW, FORMER, NOW + FORMER], ids=["now", "former", "both"])
def test_engine_made_directories_are_replaced_before_a_start(node, names):
    _pool, allocator, files = node.parts()
    uuid = node.gpus[0].uuid
    (answer,) = allocator.allocate([[f"{uuid}::0"]])
    (record,) = allocator.records.all()
    engine_makes(node, files.folder(answer.allocation), names, uuid)
    assert not files.is_whole(record)
    allocator.prestart([f"{uuid}::0"])
    assert files.is_whole(record)
    for inside, host, _read_only in answer.mounts:
        expected_folder = inside in ("/dev/vgpu", "/dev/vgpu/lib", "/dev/vgpu/0")
        assert (os.path.isdir(host), os.path.isfile(host)) == (expected_folder, not expected_folder), inside
    for inside, host, _read_only in files.old_mounts(record):
        assert os.path.isfile(host), inside


@pytest.mark.parametrize("again", ["make", "make_share"])
@pytest.mark.parametrize("name", SINGLE)
def test_single_engine_made_directory_is_replaced(node, name, again):
    _pool, allocator, files = node.parts()
    uuid = node.gpus[0].uuid
    (answer,) = allocator.allocate([[f"{uuid}::0"]])
    (record,) = allocator.records.all()
    one_becomes_a_directory(files.folder(answer.allocation), name, uuid)
    of_share = name.startswith("ro") or name == "root"
    assert files.has_share(record) is not (of_share or name in ("limits", "gpu-{uuid}"))
    if again == "make":
        files.make(record)
        assert files.is_whole(record)
    elif of_share:
        files.make_share(record)
        assert files.has_share(record)


@pytest.mark.parametrize("name", SINGLE)
def test_slice_for_docker_and_podman_is_restored(node, name):
    outside, pool, _allocator, files = static_slices(node, splitCount=3)
    outside.refresh()
    desired = specs(node)
    uuid = pool.slices[0].uuid
    one_becomes_a_directory(files.folder(files.static_name(pool.slices[0].id)), name, uuid)
    outside.refresh()
    assert specs(node) == desired
    for one in desired["vgpu.fleet/slice"]["devices"]:
        for mount in one["containerEdits"]["mounts"]:
            found = os.path.isdir(mount["hostPath"])
            assert found is (mount["containerPath"] in ("/dev/vgpu", "/dev/vgpu/lib", "/dev/vgpu/0")), mount
    assert outside.notes() == []


def unusable(node, monkeypatch, slice_name: str) -> None:
    """Makes the creation of the folder of one slice fail, even for root."""
    real = node.mounter.mount_tmpfs

    def mount(target, size):
        if slice_name in str(target):
            raise OSError(28, "No space left on device", str(target))
        real(target, size)

    monkeypatch.setattr(node.mounter, "mount_tmpfs", mount)


def test_broken_slice_does_not_affect_others(node, monkeypatch):
    outside, pool, _allocator, files = static_slices(node, splitCount=3)
    bad, *others = [one.id for one in pool.slices]
    unusable(node, monkeypatch, files.static_name(bad))
    outside.refresh()
    assert [one["name"] for one in specs(node)["vgpu.fleet/slice"]["devices"]] == others
    (note,) = outside.notes()
    assert bad in note
    assert "No space left on device" in note
    for one in others:
        assert not abi_files.parse_limits((files.folder(files.static_name(one)) / "limits").read_bytes())["deny"]
    monkeypatch.undo()
    outside.refresh()
    assert [one["name"] for one in specs(node)["vgpu.fleet/slice"]["devices"]] == [bad, *others]
    assert outside.notes() == []


def test_fault_of_all_slices_causes_one_warning(node):
    """A fault that affects all slices causes one warning in the status, not one for each slice."""
    outside, _pool, _allocator, _files = static_slices(node)
    outside.refresh()
    (node.library_root / "current").unlink()
    outside.refresh()
    (note,) = outside.notes()
    assert "the role vcuda installs it" in note
    node.install_library("0.2.0-bbbbbbbbbbbb")
    outside.refresh()
    assert outside.notes() == []


def test_status_warns_of_a_slice_that_cannot_be_offered(node, monkeypatch):
    """The test assembles the program's parts in the same way as the daemon does."""
    driver = DriverFiles((("libcuda.so.1", "/lib/libcuda.so.1"),))
    monkeypatch.setattr("vgpu_plugin.inject.driver_files.find", lambda *_given, **_named: driver)
    found = node.configure(splitCount=2)
    parts = build(node.setup(), found, settings.make_slices(node.gpus, found), FakeGpus(node.gpus), node.gpus)
    bad = parts.pool.slices[0].id
    unusable(node, monkeypatch, parts.files.static_name(bad))
    parts.files.prepare()
    parts.static_slices.refresh()
    assert [bad in one for one in parts.admin.status().warnings] == [True]
