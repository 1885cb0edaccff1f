# SPDX-License-Identifier: Apache-2.0
"""Tests the watcher, which compares the driver's data about GPU processes with the limits of their containers. Here the
files of the container were removed from the node, or the process belongs to no known container. The watcher must report
such processes, as unknown if it cannot judge them, and must terminate none of them.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from doubles.proc import CONTAINER
from doubles.watched import MIB, Watched
from vgpu_plugin.watch import setup as watch_setup
from vgpu_plugin.watch import usage
from vgpu_plugin.watch import watcher as watch
from vgpu_plugin.watch.rule import MEMORY, NO_SLOT

DELETED = "0:50=/ledger//deleted"


@pytest.fixture
def watched(tmp_path) -> Watched:
    out = Watched(tmp_path)
    out.mode = watch.END
    return out


def run(watched: Watched, pid: int, used: int, mounts: str = DELETED) -> None:
    watched.proc.add(pid, mounts=mounts, group=CONTAINER)
    watched.card.running.setdefault(watched.uuid, {})[pid] = used


# The case → the function that changes the files of the container's allocation on the node.
STATES = {
    "all files removed": lambda watched: (
        shutil.rmtree(watched.folder / "ro") or [one.unlink() for one in watched.folder.rglob("*") if one.is_file()]
    ),
    "ledger removed": lambda watched: (watched.folder / "rw" / "ledger").unlink(),
    "files replaced by new files": lambda watched: watched.files.make(watched.record),
}


@pytest.mark.parametrize("state", STATES)
def test_removed_files_are_not_a_bypass(watched, state):
    run(watched, 20, 900 * MIB)
    STATES[state](watched)
    assert watched.look(3) == []
    assert watched.ender.asked == []
    found = watched.watch.state()
    assert watched.allocation in found.fault
    assert "start it again" in found.fault
    assert found.shown == {(watched.allocation, watched.uuid): 900 * MIB}
    assert watched.watch.stale() == {watched.allocation}


@pytest.mark.parametrize("state", STATES)
def test_limit_applies_by_driver_memory_without_files(watched, state):
    run(watched, 20, 6000 * MIB)
    run(watched, 21, 6000 * MIB)
    STATES[state](watched)
    assert watched.look(2) == [MEMORY]


def test_restarted_container_is_judged_normally(watched):
    run(watched, 20, 900 * MIB)
    watched.look(2)
    del watched.card.running[watched.uuid][20]
    watched.run(21, 900 * MIB)
    assert watched.look(2) == [NO_SLOT]
    assert (watched.watch.state().fault, watched.watch.stale()) == ("", frozenset())


@pytest.mark.parametrize("known", [True, False])
def test_unaccounted_memory_is_a_metric_and_a_note(watched, known):
    """The memory of processes in unknown containers, and of containers whose allocation has no record, becomes a metric
    for each GPU and a note in the status.
    """
    if known:
        watched.kind = ""  # The folder of this allocation has no record.
        watched.run(20, 900 * MIB)
    else:
        watched.proc.add(20, group="/docker/other")
        watched.card.running[watched.uuid] = {20: 900 * MIB}
    watched.look(2)
    state = watched.watch.state()
    assert state.unaccounted == {watched.uuid: 900 * MIB}
    (note,) = watch_setup.notes(state)
    assert watched.uuid in note and "900 MiB" in note
    watched.card.running.clear()
    watched.look(1)
    assert watched.watch.state().unaccounted == {watched.uuid: 0}
    assert watch_setup.notes(watched.watch.state()) == []


def test_memory_of_host_programs_is_reported(watched):
    """Programs of the host are not terminated and do not count as unknown, but no limit counts their memory, so the
    status reports it. NVIDIA's MPS server is ignored.
    """
    for pid in (20, 21):
        watched.proc.add(pid, mnt="mnt:[1]", pid="pid:[2]")
    watched.proc.add(22, mnt="mnt:[1]", pid="pid:[2]", name="nvidia-cuda-mps-server")
    watched.card.running[watched.uuid] = {20: 300 * MIB, 21: 600 * MIB, 22: 30 * MIB}
    assert watched.look(2) == []
    state = watched.watch.state()
    assert state.unaccounted == {watched.uuid: 0}
    assert state.host_bytes == {watched.uuid: 900 * MIB}
    (note,) = watch_setup.notes(state)
    assert "900 MiB" in note and note.index("python 21") < note.index("python 20")
    watched.card.fault = "is lost"
    watched.look()
    assert watched.watch.state().host_bytes == {watched.uuid: 900 * MIB}
    watched.card.fault = ""
    watched.card.running.clear()
    watched.look()
    assert watched.watch.state().host_bytes == {watched.uuid: 0}


def test_missing_file_check_of_the_watcher_is_reported(watched):
    run(watched, 20, 900 * MIB)
    STATES["all files removed"](watched)
    watched.look()
    (note,) = watch_setup.notes(watched.watch.state())
    assert watched.allocation in note


def test_status_shows_findings_of_the_watcher(watched):
    watched.mode = watch.REPORT
    watched.run(20, 900 * MIB)
    watched.look(2)
    (note,) = watch_setup.notes(watched.watch.state())
    assert "1 container" in note and "vgpuctl watch" in note
    watched.kind = "lease"  # This lease belongs to an isolation check, which bypasses the limits on purpose.
    watched.look(2)
    assert watch_setup.notes(watched.watch.state()) == []


@pytest.mark.parametrize("ledger", ["gone", "overwritten"])
def test_container_with_an_unreadable_ledger_is_listed(watched, ledger):
    path = watched.folder / "rw" / "ledger"
    path.unlink()
    if ledger == "overwritten":
        path.write_bytes(b"x" * 100)
    watched.run(20, 900 * MIB)
    watched.look()
    rows = usage.of_all([watched.record], watched.files, dict)
    (row,) = usage.Violations().seen(rows, watched.watch.state())
    assert (row.allocation, row.memory_used, row.processes) == (watched.allocation, 0, 0)
    assert row.memory_limit > 0
    assert row.memory_driver == 900 * MIB


# columns: a line from the memory map (/proc/<pid>/maps) of a process that maps a file on the tmpfs 0:50, whether this
# file was removed
MAPS = [
    ("7f0000000000-7f0000051000 rw-s 00000000 00:32 4                          /dev/vgpu/0/ledger (deleted)", True),
    ("7f0000000000-7f0000051000 rw-s 00000000 00:32 4                          /ledger", False),
]


@pytest.mark.parametrize(("line", "removed"), MAPS)
def test_container_without_mounts_is_known_by_its_mapped_files(watched, line, removed):
    """If a folder is removed on the host, the kernel also removes the mounts of it in every container. The container is
    then recognised by the files that its processes still have mapped.
    """
    watched.proc.add(20, group=CONTAINER)
    (watched.processes.proc / "20" / "maps").write_text(
        "7f1000000000-7f1000001000 r--p 00000000 fe:00 77 /usr/lib/libc.so.6\nno line of this kind\n" + line + "\n"
    )
    watched.card.running[watched.uuid] = {20: 900 * MIB}
    assert watched.look(2) == ([] if removed else [NO_SLOT])
    state = watched.watch.state()
    assert state.shown == {(watched.allocation, watched.uuid): 900 * MIB}
    assert (state.unplaced, state.unaccounted) == ({watched.uuid: 0}, {watched.uuid: 0})
    assert watched.watch.stale() == ({watched.allocation} if removed else frozenset())


def test_maps_of_another_file_system_are_ignored(watched):
    watched.proc.add(20, group="/docker/other")
    (watched.processes.proc / "20" / "maps").write_text("7f00-7f01 rw-s 00000000 00:99 4 /ledger (deleted)\n")
    watched.card.running[watched.uuid] = {20: 900 * MIB}
    watched.look(2)
    assert watched.watch.state().unplaced == {watched.uuid: 1}


def test_finding_names_a_slice_used_by_cdi_name(watched):
    slice_id = f"{watched.uuid}::12"
    name = watched.files.static_name(slice_id)
    watched.files.make(replace(watched.record, id=name, kind="static", slice_ids=()))
    state = replace(watched.watch.state(), programs={(name, watched.uuid): ()})
    (row,) = usage.of_static(watched.files, state)
    assert (row.kind, row.slice_ids) == ("static", (slice_id,))
