# SPDX-License-Identifier: Apache-2.0
"""The label of SELinux on what a container is given: which files get it, and what is told where the kernel refuses."""

from __future__ import annotations

import os

import pytest
from vgpu_plugin import confinement
from vgpu_plugin.allocation_files import AllocationFiles
from vgpu_plugin.paths import CONTAINER_LIBRARY
from vgpu_plugin.records import RecordStore


@pytest.mark.parametrize("before", [False, True], ids=["a new folder", "one that was there"])
def test_every_file_of_an_allocation_is_labelled(node, before):
    """All that is mounted but the library, which lies below /usr, where containers may read."""
    _pool, allocator, _files = node.parts()
    (answer,) = allocator.allocate([[f"{node.gpus[0].uuid}::0"]])
    store = RecordStore(node.paths.records)
    store.load()
    (record,) = store.all()
    labelled: list[int] = []

    def label(descriptor: int) -> None:
        labelled.append(os.fstat(descriptor).st_ino)

    files = AllocationFiles(node.paths.allocations, node.mounter, label)
    if not before:
        files.remove(record.id)
    files.make(record)
    hosts = [host for inside, host, _read_only in answer.mounts if inside != CONTAINER_LIBRARY]
    assert len(hosts) == 5
    assert sorted(os.stat(host).st_ino for host in hosts) == sorted(labelled)


def test_the_label_is_of_all_containers():
    calls: list[tuple[int, str, bytes]] = []
    confinement.Labeller(lambda *words: calls.append(words))(7)
    assert calls == [(7, "security.selinux", b"system_u:object_r:container_file_t:s0\0")]


def test_a_refusal_is_told_once_and_stops_nothing(caplog):
    def refuse(descriptor: int, name: str, value: bytes) -> None:
        raise OSError(22, "Invalid argument")

    label = confinement.Labeller(refuse)
    for descriptor in range(3):
        label(descriptor)
    assert [one.message.count("container-selinux") for one in caplog.records] == [1]


@pytest.mark.parametrize(("there", "labels"), [(True, True), (False, False)])
def test_a_host_without_selinux_labels_nothing(tmp_path, there, labels):
    if there:
        (tmp_path / "enforce").write_text("0")
    assert (confinement.labeller(str(tmp_path / "enforce")) is not None) is labels
