# SPDX-License-Identifier: Apache-2.0
"""Tests the node's root, which is the folder that every container mounts at /dev/vgpu. The tests cover its repair, and
allocations of older versions, which had a root of their own.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from vgpu_plugin.allocation.allocation_files import AllocationFiles


def slice_id(gpu) -> str:
    return f"{gpu.uuid}::0"


def whole(root: Path) -> bool:
    """Returns whether the root contains only lib/ and 0/, and the root and these two folders belong to this user and
    have mode 0755.
    """
    folders = [root, root / "lib", root / "0"]
    return (
        all(one.is_dir() and not one.is_symlink() for one in folders)
        and [oct(one.stat().st_mode) for one in folders] == ["0o40755"] * 3
        and {one.stat().st_uid for one in folders} == {os.geteuid()}
        and sorted(root.rglob("*")) == sorted(folders[1:])
    )


def instead(path: Path) -> None:
    """Replaces the folder by a symlink to a folder with the same content."""
    shutil.rmtree(path)
    elsewhere = path.parent / "elsewhere"
    for name in ("lib", "0"):
        (elsewhere / name).mkdir(parents=True)
    path.symlink_to(elsewhere)


def a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


# columns: the state of the root before the repair, the function that causes this state. The share folder is 0/, the
# mount point of an allocation's files.
SPOILT = [
    ("intact root", lambda _root: None),
    ("root missing", shutil.rmtree),
    ("file in place of the root", a_file),
    ("link in place of the root", instead),
    ("lib folder missing", lambda root: (root / "lib").rmdir()),
    ("share folder 0 missing", lambda root: (root / "0").rmdir()),
    ("file in place of the share folder", lambda root: a_file(root / "0")),
    ("link in place of the lib folder", lambda root: instead(root / "lib")),
    ("root closed to container users", lambda root: root.chmod(0o700)),
    ("root writable for all users", lambda root: root.chmod(0o777)),
    ("lib folder writable for all users", lambda root: (root / "lib").chmod(0o1777)),
    ("foreign file in the root", lambda root: (root / "limits").touch()),
    ("foreign file in the lib folder", lambda root: (root / "lib/libvgpu.so").touch()),
]
if os.geteuid() == 0:
    SPOILT += [
        ("root of another user", lambda root: os.chown(root, 1000, 0)),
        ("share folder of another user", lambda root: os.chown(root / "0", 1000, 0)),
    ]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
@pytest.mark.parametrize(("about", "spoil"), SPOILT, ids=[one[0] for one in SPOILT])
def test_root_of_the_node_is_repaired(node, about, spoil, umask):
    files = AllocationFiles(node.paths.allocations, node.mounter)
    before = os.umask(umask)
    try:
        files.prepare()
        made = node.paths.run_dir / "root"
        assert whole(made)
        inode = made.stat().st_ino
        spoil(made)
        assert whole(made) == (about == "intact root")
        files.prepare()
    finally:
        os.umask(before)
    assert whole(made)
    # Running containers have the root mounted, so an intact root must keep its inode.
    assert about != "intact root" or made.stat().st_ino == inode
    assert oct(node.paths.allocations.stat().st_mode) == "0o40700"


def test_allocations_folder_is_root_only(node):
    node.paths.allocations.mkdir(mode=0o755)
    AllocationFiles(node.paths.allocations, node.mounter).prepare()
    assert oct(node.paths.allocations.stat().st_mode) == "0o40700"


def allocation(node, folder_of_its_own: str):
    """Makes an allocation that links to the node's root. If ``folder_of_its_own`` is "whole" or "half", the allocation
    gets a root of its own instead, as older versions made it, complete or incomplete.
    """
    _pool, allocator, files = node.parts()
    (answer,) = allocator.allocate([[slice_id(node.gpus[0])]])
    (record,) = allocator.records.all()
    root = files.folder(record.id) / "root"
    if folder_of_its_own:
        root.unlink()
        for name in ("lib", "0") if folder_of_its_own == "whole" else ("lib",):
            (root / name).mkdir(parents=True)
    (source,) = (Path(host) for inside, host, _read_only in answer.mounts if inside == "/dev/vgpu")
    return allocator, files, record, source


def test_allocations_use_the_nodes_root(node):
    _allocator, files, record, source = allocation(node, "")
    assert source == files.folder(record.id) / "root"
    # If the program is rolled back to the old version, that version finds this link and makes no root for the
    # allocation.
    assert os.readlink(source) == "../../root"
    assert source.samefile(node.paths.run_dir / "root")
    assert [(source / name).is_dir() for name in ("lib", "0")] == [True, True]


AGAIN = [(how, own) for how in ("make", "make_share") for own in ("", "whole", "half")]


@pytest.mark.parametrize(("how", "own"), AGAIN, ids=[f"{how}, {own or 'node'} root" for how, own in AGAIN])
def test_root_of_an_older_allocation_stays(node, how, own):
    """A container may have its allocation's own root mounted. The watcher compares this mount with the folder at the
    root's path on the node, and a new folder there would differ. So only an incomplete root is replaced.
    """
    _allocator, files, record, source = allocation(node, own)
    before = os.stat(source).st_ino
    getattr(files, how)(record)
    assert (os.stat(source).st_ino == before) == (own != "half")
    assert source.is_symlink() == (own != "whole")
    assert [(source / name).is_dir() for name in ("lib", "0")] == [True, True]
    assert files.is_whole(record)


@pytest.mark.parametrize("own", ["", "whole"])
def test_root_is_restored_after_a_reboot(node, own):
    """A reboot empties /run. Afterwards the kubelet mounts the paths that Allocate of this or of an older version
    returned before the reboot.
    """
    allocator, _files, _record, source = allocation(node, own)
    shutil.rmtree(node.paths.run_dir)
    node.mounter.mounted.clear()
    allocator.prestart([slice_id(node.gpus[0])])
    assert [(source / name).is_dir() for name in ("lib", "0")] == [True, True]


def test_root_remains_after_an_allocation_ends(node):
    _allocator, files, record, _source = allocation(node, "")
    files.remove(record.id)
    assert whole(node.paths.run_dir / "root")


@pytest.mark.parametrize("there", [True, False])
def test_uninstall_deletes_the_root(node, there):
    files = AllocationFiles(node.paths.allocations, node.mounter)
    if there:
        files.prepare()
    files.leave()
    assert not (node.paths.run_dir / "root").exists()
