# SPDX-License-Identifier: Apache-2.0
"""Tests the process lists of the watcher, which looks for processes that bypass the library. A double of the driver
lists the processes on a GPU, and a fake /proc shows the container of each process. A mounted ledger (the file in which
a container counts its memory) identifies a container.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pynvml
import pytest
from doubles.nvml import Pynvml
from doubles.proc import CONTAINER, HOST_MNT, HOST_PID, Proc
from vgpu_plugin.node.gpus import GpuError
from vgpu_plugin.node.nvml import Nvml
from vgpu_plugin.watch import mounts
from vgpu_plugin.watch.processes import LONGEST_OF_OTHERS, MOST_OF_OTHERS, Process, Processes

from ..samples import until

POD_UID = "11111111-2222-3333-4444-555555555555"
DEVICES = {"0:50": "aaaa", "0:51": "bbbb"}
# columns: the case, the /proc entry of process 30; the expected allocations of process 30 (None means none). Process 20
# belongs to allocation aaaa.
OWNERS: list[tuple[str, dict[str, Any], set[str] | None]] = [
    ("ledger mounted", {"mounts": "0:50=/ledger"}, {"aaaa"}),
    ("ledger mounted and replaced on the host", {"mounts": "0:50=/ledger//deleted"}, {"aaaa"}),
    ("ledger mounted, host's pid namespace", {"pid": HOST_PID, "mounts": "0:51=/ledger"}, {"bbbb"}),
    ("process of the host", {"mnt": HOST_MNT, "pid": HOST_PID, "mounts": "0:50=/ledger", "group": CONTAINER}, None),
    ("host service with its own mounts", {"pid": HOST_PID, "mounts": "0:50=/ 0:51=/", "group": CONTAINER}, None),
    ("container without a slice", {"group": "/docker/other"}, None),
    ("monitor container with the node's folders mounted", {"mounts": "0:50=/ 0:51=/", "group": "/docker/m"}, None),
    ("chroot, container's control group", {"group": CONTAINER}, {"aaaa"}),
    ("chroot, control group below the container's", {"group": CONTAINER + "/own", "pid": "pid:[99]"}, {"aaaa"}),
    ("control group with the container's name as a prefix", {"group": CONTAINER + "2"}, None),
    ("chroot in all processes of a pod", {"group": f"/kubepods/burstable/pod{POD_UID}/77"}, {"bbbb"}),
    (
        "chroot in all processes of a pod, systemd cgroup driver",
        {"group": f"/x.slice/kubepods-pod{POD_UID.replace('-', '_')}.slice/c.scope"},
        {"bbbb"},
    ),
    ("chroot, pod with two slices", {"group": "/kubepods/pod99999999-2222-3333-4444-555555555555/1"}, None),
    ("root control group", {"group": "/"}, None),
    ("chroot, pod in the host's pid namespace", {"pid": HOST_PID, "group": f"/kubepods/pod{POD_UID}/77"}, {"bbbb"}),
    ("unknown container in the host's pid namespace", {"pid": HOST_PID, "group": "/docker/" + "0a" * 32}, None),
]
# The cases in which process 30 belongs neither to a known container nor to the host.
STRANGERS = (
    "container without a slice",
    "monitor container with the node's folders mounted",
    "control group with the container's name as a prefix",
    "chroot, pod with two slices",
    "root control group",
    "unknown container in the host's pid namespace",
)
PODS = {
    POD_UID: frozenset({"bbbb"}),
    "99999999-2222-3333-4444-555555555555": frozenset({"aaaa", "bbbb"}),
}


@pytest.mark.parametrize(("about", "what", "owner"), OWNERS, ids=[row[0] for row in OWNERS])
def test_allocation_of_a_process(tmp_path, about, what, owner):
    proc = Proc(tmp_path)
    proc.add(20, mounts="0:50=/ledger", group=CONTAINER)
    proc.add(30, **what)
    found = Processes(tmp_path).place([30, 4711], DEVICES, lambda: PODS)
    assert found.owners == ({30: frozenset(owner)} if owner else {})
    assert found.strangers == ({30} if about in STRANGERS else set())
    assert found.gone == {4711}


def test_group_is_remembered_while_the_allocation_exists(tmp_path):
    proc = Proc(tmp_path)
    proc.add(20, mounts="0:50=/ledger", group=CONTAINER)
    proc.add(30, group=CONTAINER)
    processes = Processes(tmp_path)
    assert processes.of([20], DEVICES) == {20: frozenset({"aaaa"})}
    proc.end(20)  # Ends the only process that showed the ledger's mount.
    assert processes.of([30], DEVICES) == {30: frozenset({"aaaa"})}
    assert processes.of([30], {"0:51": "bbbb"}) == {}
    assert processes.of([30], DEVICES) == {}


def test_only_mounts_count_without_the_hosts_namespaces(tmp_path):
    """If the host's namespaces are unknown, a process of the host looks like a process that hides its mounts. So only
    mounts identify a container.
    """
    proc = Proc(tmp_path)
    proc.end(1)
    proc.add(20, mounts="0:50=/ledger", group=CONTAINER)
    proc.add(30, group=CONTAINER)
    assert Processes(tmp_path).of([20, 30], DEVICES) == {20: frozenset({"aaaa"})}


def test_programs_own_namespaces_count_as_the_host(tmp_path):
    proc = Proc(tmp_path)
    proc.end(1)
    proc.add("self", mnt=HOST_MNT, pid=HOST_PID)
    proc.add(20, mounts="0:50=/ledger", group=CONTAINER)
    proc.add(30, group=CONTAINER)
    proc.add(40, mnt=HOST_MNT, pid=HOST_PID, mounts="0:50=/ledger", group=CONTAINER)
    assert Processes(tmp_path).of([30, 40], DEVICES) == {30: frozenset({"aaaa"})}


def test_unknown_process_causes_an_occasional_scan_of_all_processes(tmp_path):
    proc, now, looks = Proc(tmp_path), [100.0], []
    proc.add(30, group="/docker/other")
    processes = Processes(tmp_path, lambda: now[0])
    every = processes._all
    processes._all = lambda: looks.append(1) or every()
    for second, count in ((100, 1), (110, 1), (129, 1), (130, 2)):
        now[0] = float(second)
        assert processes.of([30], DEVICES) == {}
        assert len(looks) == count
    # A new process shows that the group belongs to a known container after all.
    proc.add(31, mounts="0:50=/ledger", group="/docker/other")
    now[0] = 161.0
    assert processes.of([30], DEVICES) == {30: frozenset({"aaaa"})}


CROWD = 200
# columns: the case; control group of the container; function that returns the subgroup of process n; expected number of
# groups whose mount lists are read
CROWDED = [
    ("one group", "/docker/" + "0a" * 32, lambda n: "", 1),
    ("a subgroup for each process", "/docker/" + "0a" * 32, lambda n: f"/{n}", 1),
    ("a subgroup for each process of a pod", f"/kubepods/pod{POD_UID}/" + "0a" * 32, lambda n: f"/{n}", 1),
    ("nested containers", "/docker/" + "0a" * 32, lambda n: f"/docker/{n:064x}", 1),
    ("containers of a pod with unknown names", f"/kubepods/pod{POD_UID}", lambda n: f"/{n}", 1),
]


@pytest.mark.parametrize(("about", "group", "below", "groups"), CROWDED, ids=[row[0] for row in CROWDED])
def test_many_long_mount_lists_do_not_block_the_watcher(tmp_path, monkeypatch, about, group, below, groups):
    """Each process of a tenant may have as many mounts as the kernel allows. Reading them must not keep the watcher
    from checking all other processes.
    """
    proc, read = Proc(tmp_path), []
    long = "".join(f"{n} 22 0:66 /x /m/{n} rw - tmpfs tmpfs rw\n" for n in range(100, 30_000))
    for n in range(CROWD):
        proc.add(1000 + n, group=group + below(n))
        path = tmp_path / str(1000 + n) / "mountinfo"
        path.unlink()
        if n:
            os.link(tmp_path / "1000" / "mountinfo", path)
        else:
            path.write_text(long)
    proc.add(5000, mounts="0:50=/ledger", group=CONTAINER)
    proc.add(5001, group=CONTAINER)
    whole = mounts.read

    def counted(path, most=0):
        data = whole(path, most)
        if 1000 <= int(Path(path).parent.name) < 1000 + CROWD:
            read.append(len(data))
        return data

    monkeypatch.setattr(mounts, "read", counted)
    place = Processes(tmp_path).place([1000, 5001], DEVICES, dict)
    # Process 1000 is missing here, so it is reported as a process of an unknown container.
    assert place.owners == {5001: frozenset({"aaaa"})}
    assert place.strangers == {1000}
    # The first read is of process 1000 itself, which is on the GPU, so it is not counted.
    assert sum(read[1:]) <= groups * (MOST_OF_OTHERS + LONGEST_OF_OTHERS + (1 << 16))


def test_one_visible_ledger_identifies_the_whole_group(tmp_path):
    """One process with a visible ledger mount identifies all processes of its control group, even if it has many
    mounts. This project's mounts are made before the container's first process runs, so they come first in its mount
    list.
    """
    proc = Proc(tmp_path)
    proc.add(30, group=CONTAINER)
    for n in range(CROWD):
        proc.add(1000 + n, group=CONTAINER)
    proc.add(1000 + CROWD, group=CONTAINER, mounts="0:50=/ledger")
    with open(tmp_path / str(1000 + CROWD) / "mountinfo", "a") as stream:
        stream.writelines(f"{n} 22 0:66 /x /m/{n} rw - tmpfs tmpfs rw\n" for n in range(100, 30_000))
    assert Processes(tmp_path).of([30], DEVICES) == {30: frozenset({"aaaa"})}


@pytest.mark.parametrize("gone", [{"state": "Z"}, {"state": "X"}, {"memory": ""}])
def test_ending_process_is_ignored(tmp_path, gone):
    proc = Proc(tmp_path)
    proc.add(20)
    proc.add(30, **gone)
    processes = Processes(tmp_path)
    assert processes.process(20) == Process(20, 5, "python", (77, 20))
    assert processes.process(30) is None
    assert processes.process(31) is None


GONE = {"state": "Z", "memory": ""}


def ended_leader(proc: Proc, number: int, *tasks: dict[str, Any]) -> None:
    """Makes a process whose first thread has ended, so /proc shows neither its memory nor its mount namespace."""
    proc.add(number, group=CONTAINER, inner="7", **GONE)
    for at, task in enumerate(tasks):
        proc.add(number, task=number + at, **{"inner": "7", "group": CONTAINER, **task})
    for folder in (proc.root / str(number), *(proc.root / str(number) / "task").glob("*")):
        if "VmSize" not in (folder / "status").read_text():
            (folder / "ns" / "mnt").unlink()
            (folder / "mountinfo").unlink()


# columns: the case, the process's threads; whether the process is expected to be found
LEADERS: list[tuple[str, list[dict[str, Any]], bool]] = [
    ("second thread runs", [GONE, {"mounts": "0:50=/ledger"}], True),
    ("only third thread runs", [GONE, GONE, {"mounts": "0:50=/ledger"}], True),
    ("no second thread", [GONE], False),
    ("threads unreadable", [], False),
]


@pytest.mark.parametrize(("about", "tasks", "found"), LEADERS, ids=[one[0] for one in LEADERS])
def test_process_whose_first_thread_has_ended(tmp_path, about, tasks, found):
    proc = Proc(tmp_path)
    ended_leader(proc, 30, *tasks)
    processes = Processes(tmp_path)
    assert processes.process(30) == (Process(30, 5, "python", (77, 7)) if found else None)
    assert processes.of([30], DEVICES) == ({30: frozenset({"aaaa"})} if found else {})


# A program that prints the device number of the file system of its argument and then ends its first thread, while its
# second thread continues.
ENDS_ITS_FIRST_THREAD = """
import ctypes, os, sys, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
device = os.stat(sys.argv[1]).st_dev
print(f"{os.major(device)}:{os.minor(device)}", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
# A shell command that mounts a ledger on a tmpfs, as in a container, in the process's own mount namespace, and then
# runs the program.
CONTAINED = (
    'mount -t tmpfs t "$1" && touch "$1/ledger" "$1/at" && mount --bind "$1/ledger" "$1/at" && exec "$2" -c "$3" "$1"'
)


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
def test_real_process_whose_first_thread_has_ended(tmp_path):
    words = ["sh", str(tmp_path), sys.executable, ENDS_ITS_FIRST_THREAD]
    command = ["unshare", "--mount", "sh", "-c", CONTAINED, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as one:
        try:
            assert one.stdout is not None
            device = one.stdout.readline().strip()
            status = Path(f"/proc/{one.pid}/status")
            until(lambda: "zombie" in status.read_text(), "the first thread's end")
            found = Processes().process(one.pid)
            mine = Processes().process(os.getpid())
            assert found is not None
            assert mine is not None
            assert found.own == (mine.own[0], one.pid)
            assert Processes().of([one.pid], {device: "aaaa"}) == {one.pid: frozenset({"aaaa"})}
        finally:
            one.kill()


def test_control_characters_in_a_process_name_are_replaced(tmp_path):
    proc = Proc(tmp_path)
    proc.add(30, name="a\x1b[31m b", inner="7")
    assert Processes(tmp_path).process(30) == Process(30, 5, "a?[31m b", (77, 7))


HYBRID = "12:memory:/docker/{0}\n11:pids:/docker/{0}\n1:name=systemd:/docker/{0}\n0::/system.slice/containerd.service\n"


def test_daemons_group_is_not_a_container(tmp_path):
    """On a host with both cgroup versions, the version 2 entry names the container daemon's own group for each of its
    containers, so that entry does not identify a container.
    """
    proc = Proc(tmp_path)
    proc.add(20, mounts="0:50=/ledger", groups=HYBRID.format("mine"))
    proc.add(30, groups=HYBRID.format("other"))
    proc.add(31, groups=HYBRID.format("mine"))
    mine = frozenset({"aaaa"})
    assert Processes(tmp_path).of([20, 30, 31], DEVICES) == {20: mine, 31: mine}


def test_root_group_is_not_a_container_in_a_cgroup_namespace(tmp_path):
    """In a pod with its own cgroup namespace, the watcher sees the path /../../.. for a container that has no group of
    its own.
    """
    proc = Proc(tmp_path)
    proc.add(20, mounts="0:50=/ledger", group="/../../..")
    proc.add(30, group="/../../../docker/other")
    assert Processes(tmp_path).of([20, 30], DEVICES) == {20: frozenset({"aaaa"})}


UNSUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
LISTED = [
    # columns: the case, the driver's list of compute processes, its list of graphics processes; the expected pid →
    # bytes (None means an error)
    ("compute only", [(7, 100)], [], {7: 100}),
    ("Vulkan only, which bypasses the library", [], [(8, 300)], {8: 300}),
    ("compute and graphics, listed twice with the same memory", [(7, 500)], [(7, 500)], {7: 500}),
    ("memory grew between the two lists", [(7, 500)], [(7, 600)], {7: 600}),
    ("memory known in one list only", [(7, None)], [(7, 500)], {7: 500}),
    ("memory known in neither list", [(7, None)], [(7, None)], {7: None}),
    ("two instances of one GPU", [(7, 100), (7, 50)], [], {7: 150}),
    ("driver without graphics lists", [(7, 100)], UNSUPPORTED, {7: 100}),
    ("GPU lost between the two lists", [(7, 100)], LOST, None),
    ("GPU lost", LOST, [], None),
]


@pytest.mark.parametrize(("about", "compute", "graphics", "wanted"), LISTED, ids=[one[0] for one in LISTED])
def test_graphics_processes_are_listed(about, compute, graphics, wanted):
    source = Nvml.__new__(Nvml)
    source._nvml = Pynvml(compute, graphics)
    if wanted is None:
        with pytest.raises(GpuError, match="NVML does not list the processes"):
            source.processes("GPU-1")
    else:
        assert source.processes("GPU-1") == wanted
