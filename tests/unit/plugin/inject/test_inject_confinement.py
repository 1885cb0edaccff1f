# SPDX-License-Identifier: Apache-2.0
"""Tests the SELinux label on the files of a container's allocation: which files get the label, and the report if the
kernel refuses it.
"""

from __future__ import annotations

import os

import pytest
from vgpu_plugin.allocation.allocation_files import AllocationFiles
from vgpu_plugin.allocation.records import RecordStore
from vgpu_plugin.inject import confinement
from vgpu_plugin.node.paths import CONTAINER_LIBRARY_FOLDER, OLD_LIBRARY


@pytest.mark.parametrize("before", [False, True], ids=["new folder", "existing folder"])
def test_every_file_of_an_allocation_is_labelled(node, before):
    """All mounted files are labelled, except the library: it is below /usr, where SELinux lets
    containers read anyway.
    """
    _pool, allocator, _files = node.parts()
    (answer,) = allocator.allocate([[f"{node.gpus[0].uuid}::0"]])
    store = RecordStore(node.paths.records)
    store.load()
    (record,) = store.all()
    labelled: list[int] = []

    def label(descriptor: int) -> None:
        labelled.append(os.fstat(descriptor).st_ino)

    files = AllocationFiles(node.paths.allocations, node.mounter, label)
    files.leave()
    files.prepare()
    if not before:
        files.remove(record.id)
    files.make(record)
    hosts = [host for inside, host, _read_only in answer.mounts if inside != CONTAINER_LIBRARY_FOLDER]
    hosts += [host for inside, host, _read_only in files.old_mounts(record) if inside != OLD_LIBRARY]
    share = files.folder(record.id) / "ro"
    hosts += [str(one) for one in (*share.iterdir(), *(files.folder(record.id) / "root").iterdir())]
    # The sum counts inodes. 4: the read-only folder, the root folder and two mount points. 2: the limits file and the
    # GPU page (the file with the permitted compute time), each with two names. 2: the files that the container writes.
    # 2: the mount points of these files. 2: the preload files.
    assert len({os.stat(host).st_ino for host in hosts}) == 4 + 2 + 2 + 2 + 2
    assert {os.stat(host).st_ino for host in hosts} == set(labelled)


def test_label_allows_all_containers():
    calls: list[tuple[int, str, bytes]] = []
    confinement.Labeller(lambda *words: calls.append(words))(7)
    assert calls == [(7, "security.selinux", b"system_u:object_r:container_file_t:s0\0")]


def test_refused_label_is_reported_once_and_stops_no_allocation(caplog):
    def refuse(descriptor: int, name: str, value: bytes) -> None:
        raise OSError(22, "Invalid argument")

    label = confinement.Labeller(refuse)
    for descriptor in range(3):
        label(descriptor)
    assert [one.message.count("container-selinux") for one in caplog.records] == [1]


KERNELS = [
    ("nodev\tsysfs\nnodev\tselinuxfs\n\text4\n", True),
    ("nodev\tsysfs\nnodev\tsecurityfs\n\text4\n", False),
    (None, False),
]


@pytest.mark.parametrize(("text", "labels"), KERNELS, ids=["SELinux", "another", "no list"])
def test_labelling_depends_on_the_kernel(tmp_path, text, labels):
    """The plugin decides by /proc/filesystems whether it sets labels, because a pod of a DaemonSet does not see the
    host's SELinux file system.
    """
    if text is not None:
        (tmp_path / "filesystems").write_text(text)
    assert (confinement.labeller(str(tmp_path / "filesystems")) is not None) is labels
