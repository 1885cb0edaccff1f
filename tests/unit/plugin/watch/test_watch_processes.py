# SPDX-License-Identifier: Apache-2.0
"""Which processes are on a GPU, by lists of a driver that is a double, and whose each is, on a /proc laid out in a
folder.
"""

from __future__ import annotations

from typing import Any

import pynvml
import pytest
from doubles.nvml import Pynvml
from doubles.proc import CONTAINER, HOST_MNT, HOST_PID, Proc
from vgpu_plugin.node.gpus import GpuError, Nvml
from vgpu_plugin.watch.processes import Process, Processes

POD_UID = "11111111-2222-3333-4444-555555555555"
DEVICES = {"0:50": "aaaa", "0:51": "bbbb"}
# What is added to a /proc where process 20 of a container with allocation aaaa runs; whose process 30 is then.
OWNERS: list[tuple[str, dict[str, Any], set[str] | None]] = [
    ("the ledger is mounted", {"mounts": "0:50=/ledger"}, {"aaaa"}),
    ("its file was made anew since", {"mounts": "0:50=/ledger//deleted"}, {"aaaa"}),
    ("in the host's pid namespace, the ledger mounted", {"pid": HOST_PID, "mounts": "0:51=/ledger"}, {"bbbb"}),
    ("a process of the host", {"mnt": HOST_MNT, "pid": HOST_PID, "mounts": "0:50=/ledger", "group": CONTAINER}, None),
    ("a service with mounts of its own", {"pid": HOST_PID, "mounts": "0:50=/ 0:51=/", "group": CONTAINER}, None),
    ("a container without a slice", {"group": "/docker/other"}, None),
    ("the node's folders in a container (a monitor)", {"mounts": "0:50=/ 0:51=/", "group": "/docker/m"}, None),
    ("chroot in the container", {"group": CONTAINER}, {"aaaa"}),
    ("and a group below its own", {"group": CONTAINER + "/own", "pid": "pid:[99]"}, {"aaaa"}),
    ("a group whose name only begins so", {"group": CONTAINER + "2"}, None),
    ("all of a pod hides", {"group": f"/kubepods/burstable/pod{POD_UID}/77"}, {"bbbb"}),
    ("by systemd's driver", {"group": f"/x.slice/kubepods-pod{POD_UID.replace('-', '_')}.slice/c.scope"}, {"bbbb"}),
    ("a pod with two slices", {"group": "/kubepods/pod99999999-2222-3333-4444-555555555555/1"}, None),
    ("no group", {"group": "/"}, None),
]
PODS = {
    POD_UID: frozenset({"bbbb"}),
    "99999999-2222-3333-4444-555555555555": frozenset({"aaaa", "bbbb"}),
}


@pytest.mark.parametrize(("about", "what", "owner"), OWNERS, ids=[row[0] for row in OWNERS])
def test_whose_a_process_is(tmp_path, about, what, owner):
    proc = Proc(tmp_path)
    proc.add(20, mounts="0:50=/ledger", group=CONTAINER)
    proc.add(30, **what)
    found = Processes(tmp_path).of([30, 4711], DEVICES, lambda: PODS)
    assert found == ({30: frozenset(owner)} if owner else {})


def test_group_is_known_for_as_long_as_the_allocation(tmp_path):
    proc = Proc(tmp_path)
    proc.add(20, mounts="0:50=/ledger", group=CONTAINER)
    proc.add(30, group=CONTAINER)
    processes = Processes(tmp_path)
    assert processes.of([20], DEVICES) == {20: frozenset({"aaaa"})}
    proc.end(20)  # the one that showed its mounts
    assert processes.of([30], DEVICES) == {30: frozenset({"aaaa"})}
    assert processes.of([30], {"0:51": "bbbb"}) == {}
    assert processes.of([30], DEVICES) == {}


def test_who_cannot_see_the_host_believes_mounts_alone(tmp_path):
    """Without the host's namespaces nobody can tell its processes from those that hide."""
    proc = Proc(tmp_path)
    proc.end(1)
    proc.add(20, mounts="0:50=/ledger", group=CONTAINER)
    proc.add(30, group=CONTAINER)
    assert Processes(tmp_path).of([20, 30], DEVICES) == {20: frozenset({"aaaa"})}


def test_namespaces_of_the_program_itself_are_the_host(tmp_path):
    proc = Proc(tmp_path)
    proc.end(1)
    proc.add("self", mnt=HOST_MNT, pid=HOST_PID)
    proc.add(20, mounts="0:50=/ledger", group=CONTAINER)
    proc.add(30, group=CONTAINER)
    proc.add(40, mnt=HOST_MNT, pid=HOST_PID, mounts="0:50=/ledger", group=CONTAINER)
    assert Processes(tmp_path).of([30, 40], DEVICES) == {30: frozenset({"aaaa"})}


def test_all_processes_are_looked_at_once_in_a_while_for_a_stranger(tmp_path):
    proc, now, looks = Proc(tmp_path), [100.0], []
    proc.add(30, group="/docker/other")
    processes = Processes(tmp_path, lambda: now[0])
    every = processes._all
    processes._all = lambda: looks.append(1) or every()
    for second, count in ((100, 1), (110, 1), (129, 1), (130, 2)):
        now[0] = float(second)
        assert processes.of([30], DEVICES) == {}
        assert len(looks) == count
    proc.add(31, mounts="0:50=/ledger", group="/docker/other")  # its container has one after all
    now[0] = 161.0
    assert processes.of([30], DEVICES) == {30: frozenset({"aaaa"})}


@pytest.mark.parametrize("gone", [{"state": "Z"}, {"state": "X"}, {"memory": ""}])
def test_process_that_is_about_to_go_is_none(tmp_path, gone):
    proc = Proc(tmp_path)
    proc.add(20)
    proc.add(30, **gone)
    processes = Processes(tmp_path)
    assert processes.process(20) == Process(20, 5, "python", (77, 20))
    assert processes.process(30) is None
    assert processes.process(31) is None


def test_name_of_a_process_stays_on_its_line(tmp_path):
    proc = Proc(tmp_path)
    proc.add(30, name="a\x1b[31m b", inner="7")
    assert Processes(tmp_path).process(30) == Process(30, 5, "a?[31m b", (77, 7))


HYBRID = "12:memory:/docker/{0}\n11:pids:/docker/{0}\n1:name=systemd:/docker/{0}\n0::/system.slice/containerd.service\n"


def test_a_group_of_the_daemon_is_no_container(tmp_path):
    """On a hybrid host version 2 names the daemon's own group for every container of it."""
    proc = Proc(tmp_path)
    proc.add(20, mounts="0:50=/ledger", groups=HYBRID.format("mine"))
    proc.add(30, groups=HYBRID.format("other"))
    proc.add(31, groups=HYBRID.format("mine"))
    mine = frozenset({"aaaa"})
    assert Processes(tmp_path).of([20, 30, 31], DEVICES) == {20: mine, 31: mine}


def test_the_root_group_is_none_from_below_either(tmp_path):
    """As a pod with a namespace of control groups sees a container without a group of its own."""
    proc = Proc(tmp_path)
    proc.add(20, mounts="0:50=/ledger", group="/../../..")
    proc.add(30, group="/../../../docker/other")
    assert Processes(tmp_path).of([20, 30], DEVICES) == {20: frozenset({"aaaa"})}


UNSUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
LISTED = [
    # about, compute, graphics, what is listed; None: it is a fault
    ("compute alone", [(7, 100)], [], {7: 100}),
    ("Vulkan alone, which goes round the library", [], [(8, 300)], {8: 300}),
    ("both at once, which the driver lists twice with one figure", [(7, 500)], [(7, 500)], {7: 500}),
    ("its figure grew between the lists", [(7, 500)], [(7, 600)], {7: 600}),
    ("told in one list alone", [(7, None)], [(7, 500)], {7: 500}),
    ("told in none", [(7, None)], [(7, None)], {7: None}),
    ("two instances of a card", [(7, 100), (7, 50)], [], {7: 150}),
    ("a driver without graphics", [(7, 100)], UNSUPPORTED, {7: 100}),
    ("a card that is lost meanwhile", [(7, 100)], LOST, None),
    ("a card that is lost", LOST, [], None),
]


@pytest.mark.parametrize(("about", "compute", "graphics", "wanted"), LISTED, ids=[one[0] for one in LISTED])
def test_processes_of_graphics_are_looked_at_too(about, compute, graphics, wanted):
    source = Nvml.__new__(Nvml)
    source._nvml = Pynvml(compute, graphics)
    if wanted is None:
        with pytest.raises(GpuError, match="NVML does not list the processes"):
            source.processes("GPU-1")
    else:
        assert source.processes("GPU-1") == wanted
