# SPDX-License-Identifier: Apache-2.0
"""Tests how the isolation check, which tries to exceed the limits of a slice (a part of a GPU), observes the processes
in this slice from the host. It reads their GPU memory by NVML, which the processes cannot falsify, and checks that the
mounted files are those of the host.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu.nvml import NvmlError
from ansible_collections.vgpu.fleet.plugins.module_utils.host.mount_namespace import Mount
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import observer
from doubles.nvml import Reader
from doubles.proc import of_slice


@pytest.fixture
def proc(tmp_path):
    return of_slice(tmp_path)


def test_watch_sums_the_memory_of_the_slice_and_keeps_the_maximum(proc):
    looks = [{}, {10: 5, 20: 1000}, {10: 5, 11: 7, 20: 1000, 30: 1000}, {11: 1}, NvmlError(15, "x")]
    watch = observer.MemoryWatch(Reader(gpus=2, processes=looks), "GPU-1", proc)
    assert watch.fault == ""
    for _look in looks:
        watch.poll(10)
    assert (watch.most_bytes, watch.polls, watch.untold) == (12, 4, False)
    assert "15" in watch.fault


def test_poll_of_an_exited_process_counts_no_memory(proc):
    """The memory of a slice is found by the mount namespace of its process. If that process has exited, its namespace
    is unknown, and no memory counts; otherwise other exited processes would match."""
    watch = observer.MemoryWatch(Reader(gpus=2, processes=[{30: 1000, 99: None}]), "GPU-1", proc)
    watch.poll(30)
    assert (watch.most_bytes, watch.untold, watch.polls) == (None, False, 1)


# columns: processes in NVML's answer as (pid, bytes); expected bytes by pid (None: the driver does not report them)
LISTED = [
    ([], {}),
    ([(7, 0), (8, 5)], {7: 0, 8: 5}),
    ([(7, 2**64 - 1), (8, 2**64 - 2)], {7: None, 8: 2**64 - 2}),
    ([(pid, pid) for pid in range(1, 66)], {pid: pid for pid in range(1, 66)}),
]


@pytest.mark.parametrize(("listed", "read"), LISTED)
def test_list_of_processes_is_read(listed, read):
    reader = observer.ProcessReader.__new__(observer.ProcessReader)

    def call(name, _handle, count, table):
        assert name == "nvmlDeviceGetComputeRunningProcesses_v3"
        if count._obj.value < len(listed):
            raise NvmlError(observer.INSUFFICIENT_SIZE, "too small")
        count._obj.value = len(listed)
        for one, (pid, used) in zip(table, listed):
            one.pid, one.used = pid, used

    reader._call = call
    assert reader.processes(0) == read


@pytest.mark.parametrize("code", [3, observer.INSUFFICIENT_SIZE])
def test_unreadable_list_of_processes_is_a_fault(code):
    """If the answer is "insufficient size", NVML is called again with a larger buffer. After a few attempts this is a
    fault."""
    reader = observer.ProcessReader.__new__(observer.ProcessReader)
    sizes = []

    def call(_name, _handle, count, _table):
        sizes.append(count._obj.value)
        raise NvmlError(code, "x")

    reader._call = call
    with pytest.raises(NvmlError):
        reader.processes(0)
    assert len(sizes) == (1 if code == 3 else 6)


def test_watch_notes_memory_that_the_driver_does_not_report(proc):
    """A single unreported value is remembered in ``untold``, because the greatest value of the other polls may then be
    too small."""
    watch = observer.MemoryWatch(Reader(gpus=2, processes=[{10: None}, {10: 5}]), "GPU-1", proc)
    assert watch.untold is False
    watch.poll(10)
    assert (watch.most_bytes, watch.untold) == (None, True)
    watch.poll(10)
    assert (watch.most_bytes, watch.untold) == (5, True)


def test_gpu_missing_in_nvml_is_a_fault(proc):
    watch = observer.MemoryWatch(Reader(gpus=2), "GPU-7", proc)
    watch.poll(10)
    assert (watch.most_bytes, watch.fault) == (None, "NVML on the host lists no GPU GPU-7")


def test_mounts_are_compared_by_inode_and_not_by_content(tmp_path, proc):
    root = tmp_path / "10" / "root"
    for name in ("same", "copy"):
        (tmp_path / name).write_text("x")
        (root / name).parent.mkdir(exist_ok=True)
    (root / "same").hardlink_to(tmp_path / "same")
    (root / "copy").write_text("x")
    mounts = [Mount("/same", str(tmp_path / "same"), True), Mount("/copy", str(tmp_path / "copy"), True)]
    mounts.append(Mount("/gone", str(tmp_path / "same"), True))
    assert observer.missing_mounts(10, mounts, proc) == ["/copy", "/gone"]
    assert observer.missing_mounts(30, mounts, proc) is None
