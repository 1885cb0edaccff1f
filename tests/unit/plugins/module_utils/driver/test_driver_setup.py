# SPDX-License-Identifier: Apache-2.0
"""Tests the setup of the driver after its packages are installed (files, initramfs, modules, services) on a simulated
kernel and systemd: check mode, a first and a repeated run, an interrupted run, and the removal.
"""

from __future__ import annotations

import os
import time

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.driver.setup import Desired, SetupError
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Answer
from doubles.host import IDLE, Killed
from driver_samples import BLACKLIST, CONF, DESIRED, GRIDD, PERSISTENCED, RECORD, TOKEN, DriverHost


def test_setup_and_removal_restore_the_host(tmp_path):
    machine = DriverHost(tmp_path)
    before, units = machine.files(), dict(machine.units)
    predicted = machine.setup(check=True)
    assert (machine.files(), machine.calls) == (before, [])
    run = machine.setup()
    assert (
        run.plan
        == predicted.plan
        == [
            f"write {BLACKLIST}",
            "rebuild the initramfs",
            "load the kernel modules",
            "enable and start nvidia-persistenced.service",
        ]
    )
    assert machine.calls == [
        "update-initramfs -u -k all",
        "modprobe nvidia",
        "modprobe nvidia_uvm",
        "systemctl enable --now nvidia-persistenced.service",
    ]
    assert (run.reboot, (tmp_path / BLACKLIST[1:]).read_text()) == ("", "blacklist nouveau\n")
    assert machine.setup().plan == []
    gone = machine.setup("absent", check=True)
    assert machine.setup("absent").plan == gone.plan
    assert (machine.files(), machine.units) == (before, units)
    assert machine.setup("absent").plan == []


def test_absent_restores_the_former_file(tmp_path):
    machine = DriverHost(tmp_path, gpu=False)
    machine.write(BLACKLIST[1:], "# theirs\n")
    machine.setup()
    machine.setup(desired=DESIRED._replace(files={BLACKLIST: "blacklist nouveau\noptions x\n"}))
    machine.setup("absent")
    assert (tmp_path / BLACKLIST[1:]).read_text() == "# theirs\n"


MEMACCT = "/etc/modprobe.d/vgpu-memacct.conf"
# columns: former text of the file (None: no file), whether the first run that no longer has the file is killed before
# it rebuilds the initramfs
EMPTIED = [(None, False), (None, True), ("# theirs\n", False), ("# theirs\n", True)]


@pytest.mark.parametrize(("former", "killed"), EMPTIED)
def test_module_options_that_are_no_longer_desired_are_reverted(tmp_path, former, killed):
    machine = DriverHost(tmp_path)
    if former:
        machine.write(MEMACCT[1:], former)
    machine.setup(desired=DESIRED._replace(files={**DESIRED.files, MEMACCT: "options nvidia x\n"}))
    machine.setup(desired=Desired({}, record=RECORD))
    assert (tmp_path / MEMACCT[1:]).read_text() == "options nvidia x\n", (
        "a run without kernel modules keeps the options"
    )
    machine.calls.clear()
    if killed:
        machine.killed_at = "update-initramfs -u -k all"
        with pytest.raises(Killed):
            machine.setup()
        machine.killed_at, machine.dead = "", False
    verb = "change" if former else "remove"
    expected = [*([] if killed else [f"{verb} {MEMACCT}"]), "rebuild the initramfs"]
    assert machine.setup(check=True).plan == machine.setup().plan == expected
    assert machine.calls[-1] == "update-initramfs -u -k all"
    assert (tmp_path / MEMACCT[1:]).exists() is bool(former)
    # The file that another user writes later stays.
    machine.write(MEMACCT[1:], "# theirs later\n")
    assert machine.setup().plan == []
    machine.setup("absent")
    assert (tmp_path / MEMACCT[1:]).read_text() == "# theirs later\n"


def test_absent_leaves_a_former_service_running(tmp_path):
    machine = DriverHost(tmp_path)
    machine.units["nvidia-persistenced.service"] = [True, True, True]
    machine.setup()
    machine.setup("absent")
    assert machine.units["nvidia-persistenced.service"] == [True, True, True]


# columns: call that fails, its error output; expected words of the message
FAULTS = [
    ("modprobe nvidia", "modprobe: ERROR: Key was rejected by service", "enrol it with mokutil --import"),
    ("modprobe nvidia", "modprobe: FATAL: Module nvidia not found", "check dkms status and dmesg"),
    ("update-initramfs -u -k all", "No space left on device", "rebuild the initramfs failed"),
]


@pytest.mark.parametrize(("call", "said", "words"), FAULTS)
def test_failed_step_is_named_and_a_second_run_completes_it(tmp_path, call, said, words):
    machine = DriverHost(tmp_path)
    before = machine.files()
    machine.fails[call] = Answer(1, "", said)
    with pytest.raises(SetupError, match=words) as caught:
        machine.setup()
    assert said in str(caught.value)
    machine.fails.clear()
    machine.setup()
    assert (tmp_path / BLACKLIST[1:]).read_text() == "blacklist nouveau\n"
    assert machine.units["nvidia-persistenced.service"] == [True, True, True]
    assert machine.setup().plan == []
    machine.setup("absent")
    assert machine.files() == before


def test_killed_removal_rebuilds_the_initramfs_in_the_next_run(tmp_path):
    machine = DriverHost(tmp_path)
    before = machine.files()
    machine.setup()
    machine.calls.clear()
    machine.killed_at = "update-initramfs -u -k all"
    with pytest.raises(Killed):
        machine.setup("absent")
    assert not (tmp_path / BLACKLIST[1:]).exists(), "the run was killed after it removed the file"
    machine.killed_at, machine.dead = "", False
    machine.calls.clear()
    assert machine.setup("absent", check=True).plan[0] == "rebuild the initramfs"
    machine.setup("absent")
    assert machine.calls[0] == "update-initramfs -u -k all"
    assert machine.files() == before
    machine.calls.clear()
    assert (machine.setup("absent").plan, machine.calls) == ([], [])


def test_a_host_without_grubby_gets_the_argument_to_add(tmp_path):
    machine = DriverHost(tmp_path)
    run = machine.setup(desired=DESIRED._replace(kernel_arguments=["modprobe.blacklist=nouveau"]))
    assert "add modprobe.blacklist=nouveau to the kernel's arguments" in run.warnings[0]


def test_kernel_arguments_through_grubby(tmp_path):
    machine = DriverHost(tmp_path)
    machine.fails["grubby"] = Answer(0, "", "")
    run = machine.setup(desired=DESIRED._replace(kernel_arguments=["modprobe.blacklist=nouveau"]))
    assert "add modprobe.blacklist=nouveau to the kernel's arguments" in run.plan
    assert "grubby --update-kernel=ALL --args=modprobe.blacklist=nouveau" in machine.calls
    machine.setup("absent")
    assert "grubby --update-kernel=ALL --remove-args=modprobe.blacklist=nouveau" in machine.calls


# columns: the file of nvidia-gridd that changes after the service started; expected path in the planned restart ("": no
# restart)
REREAD = [("conf", CONF), ("token", TOKEN), ("", "")]


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize(("what", "path"), REREAD)
def test_service_restarts_after_a_file_changed(tmp_path, what, path, killed):
    machine = DriverHost(tmp_path, gpu=False)
    machine.units = {GRIDD: [True, True, True]}
    desired = Desired(files={CONF: "FeatureType=4\n"}, services=[GRIDD], rereads={GRIDD: [CONF, TOKEN]}, record=RECORD)
    machine.write(TOKEN[1:], "first")
    machine.setup(desired=desired)
    machine.started[GRIDD] = time.time() + 60
    assert machine.setup(desired=desired).plan == []
    if what == "conf":
        desired = desired._replace(files={CONF: "FeatureType=1\n"})
    elif what:
        machine.write(TOKEN[1:], "second")
        os.utime(tmp_path / CONF[1:], (1, 1))
    if what:
        machine.started[GRIDD] = time.time() - 60
    line = f"restart {GRIDD}, which has not read {path}"
    predicted = machine.setup(check=True, desired=desired).plan
    machine.calls.clear()
    if killed and what:
        machine.killed_at = f"systemctl restart {GRIDD}"
        with pytest.raises(Killed):
            machine.setup(desired=desired)
        machine.killed_at, machine.dead = "", False
    run = machine.setup(desired=desired)
    assert (line in run.plan, line in predicted, f"systemctl restart {GRIDD}" in machine.calls) == (bool(what),) * 3
    assert machine.setup(desired=desired).plan == []


DROP_IN = f"/etc/systemd/system/{PERSISTENCED}.d/vgpu.conf"


@pytest.mark.parametrize("theirs", [False, True])
@pytest.mark.parametrize("killed", ["", "systemctl daemon-reload"])
def test_drop_in_of_a_service_is_applied_and_removed_completely(tmp_path, killed, theirs):
    machine = DriverHost(tmp_path)
    machine.units[PERSISTENCED] = [True, True, True]
    machine.started[PERSISTENCED] = time.time() - 60
    machine.load("535.2", IDLE)
    if theirs:
        machine.write(DROP_IN[1:].replace("vgpu", "theirs"), "[Service]\n")
    before, folders = machine.files(), sorted(map(str, tmp_path.rglob("*.d")))
    desired = DESIRED._replace(files={DROP_IN: "[Service]\nExecStart=\n"}, rereads={PERSISTENCED: [DROP_IN]})
    read = f"let systemd read the unit files of {PERSISTENCED}"
    plan = [f"write {DROP_IN}", read, f"restart {PERSISTENCED}, which has not read {DROP_IN}"]
    for state in ("present", "absent"):
        assert machine.setup(state, check=True, desired=desired).plan[:2] == (
            plan[:2] if state == "present" else [f"remove {DROP_IN}", read]
        )
        machine.unread = True
        if killed:
            machine.killed_at = killed
            with pytest.raises(Killed):
                machine.setup(state, desired=desired)
            machine.killed_at, machine.dead = "", False
        machine.calls.clear()
        run = machine.setup(state, desired=desired)
        assert read in run.plan
        assert machine.calls == ["systemctl daemon-reload", machine.calls[-1]], (
            "the initramfs does not contain the drop-in, so it is not rebuilt"
        )
        assert PERSISTENCED in machine.calls[-1] and "restart" in machine.calls[-1]
        if state == "present":
            assert machine.setup(desired=desired).plan == []
    assert (machine.files(), sorted(map(str, tmp_path.rglob("*.d")))) == (before, folders)
    assert machine.setup("absent", desired=desired).plan == []
