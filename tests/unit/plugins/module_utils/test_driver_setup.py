# SPDX-License-Identifier: Apache-2.0
"""The driver's host side on a folder laid out as a host, with a double of its programs: check, apply, repeat, undo."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.driver_setup import Setup, SetupError, Wish
from ansible_collections.vgpu.fleet.plugins.module_utils.hardware import Answer, Host

BLACKLIST = "/etc/modprobe.d/vgpu-nouveau.conf"
RECORD = "/var/lib/vgpu/baseline/setup.json"
WISH = Wish(
    files={BLACKLIST: "blacklist nouveau\n"},
    initramfs=["update-initramfs", "-u", "-k", "all"],
    modules=["nvidia", "nvidia_uvm"],
    services=["nvidia-persistenced.service"],
    record=RECORD,
)
IDLE = "nvidia_uvm 4 0 - Live 0x0\nnvidia 2 1 nvidia_uvm, Live 0x0\n"
BUSY = "nvidia_uvm 4 0 - Live 0x0\nnvidia 2 3 nvidia_uvm, Live 0x0\n"
VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue\n"


BOOT = time.time() - time.monotonic()
GRIDD, CONF, TOKEN = "nvidia-gridd.service", "/etc/nvidia/gridd.conf", "/etc/nvidia/token.tok"


class Killed(BaseException):
    """SIGKILL. What the run has in a ``finally`` is met by the same death."""


class Machine:
    """A host whose kernel and systemd follow the commands that it is given."""

    def __init__(self, root: Path, gpu: bool = True) -> None:
        self.root = root
        self.calls: list[str] = []
        self.fails: dict[str, Answer] = {}
        self.killed_at, self.dead = "", False  # the run ends when this command starts, and runs no other
        self.units = {"nvidia-persistenced.service": [True, False, False]}  # present, enabled, active
        self.started: dict[str, float] = {}  # on the clock of files
        self.unread = False  # systemd has not read a unit file that was changed
        self.disk = "535.2"
        if gpu:
            for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("device", "0x1eb8")):
                self.write(f"sys/bus/pci/devices/0000:01:00.0/{name}", text)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def load(self, version: str, modules: str) -> None:
        self.write("proc/driver/nvidia/version", VERSION.format(version))
        self.write("proc/modules", modules)

    def run(self, argv) -> Answer:
        line = " ".join(argv)
        if argv[0] == "systemctl" and argv[1] == "show":
            return Answer(0, "\n\n".join(self.shown(name) for name in argv[argv.index("-p") + 2 :]), "")
        if argv[0] == "modinfo":
            return Answer(0, self.disk + "\n", "") if self.disk and argv[-1] == "nvidia" else Answer(1, "", "not found")
        if argv[0] == "mokutil":
            return Answer(127, "", "")
        self.calls.append(line)
        if self.dead or line == self.killed_at:
            self.dead = True
            raise Killed(line)
        if line in self.fails:
            return self.fails[line]
        if line == "systemctl daemon-reload":
            self.unread = False
        if argv[0] == "systemctl":
            for name in (word for word in argv[2:] if word in self.units):
                self.systemctl(name, argv)
        if argv[0] == "rmmod":
            text = (self.root / "proc/modules").read_text()
            self.write("proc/modules", "".join(x for x in text.splitlines(True) if not x.startswith(argv[1] + " ")))
        if argv[0] == "modprobe":
            self.load(self.disk, IDLE)
        if argv[0] == "grubby":
            return Answer(127, "", "no grubby") if "grubby" not in self.fails else Answer(0, 'args="quiet"\n', "")
        return Answer(0, "", "")

    def systemctl(self, name: str, argv) -> None:
        state = self.units[name]
        if argv[1] in ("enable", "disable"):
            state[1] = argv[1] == "enable"
        if argv[1] in ("start", "stop", "restart") or "--now" in argv or (argv[1] == "try-restart" and state[2]):
            assert not (self.unread and argv[1] != "stop"), "started with a unit file that systemd has not read"
            state[2] = argv[1] in ("start", "enable", "restart", "try-restart")
            self.started[name] = time.time() + 60

    def shown(self, name: str) -> str:
        present, enabled, active = self.units.get(name, [False, False, False])
        fields = {
            "Id": name,
            "LoadState": "loaded" if present else "not-found",
            "ActiveState": "active" if active else "inactive",
            "UnitFileState": "enabled" if enabled else "disabled",
            "NeedDaemonReload": "yes" if self.unread else "no",
            "MainPID": "0",
            "ExecMainStartTimestampMonotonic": str(int((self.started.get(name, BOOT) - BOOT) * 1e6)),
        }
        return "\n".join(f"{key}={value}" for key, value in fields.items())

    def files(self) -> dict[str, str]:
        return {str(one): one.read_text() for one in self.root.rglob("*") if one.is_file() and "proc" not in one.parts}

    def setup(self, state: str = "present", check: bool = False, wish: Wish = WISH) -> Setup:
        run = Setup(wish, Host(str(self.root), run=self.run), check)
        getattr(run, state)()
        return run


def test_there_and_back(tmp_path):
    machine = Machine(tmp_path)
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


def test_a_file_that_was_there_comes_back(tmp_path):
    machine = Machine(tmp_path, gpu=False)
    machine.write(BLACKLIST[1:], "# theirs\n")
    machine.setup()
    machine.setup(wish=WISH._replace(files={BLACKLIST: "blacklist nouveau\noptions x\n"}))
    machine.setup("absent")
    assert (tmp_path / BLACKLIST[1:]).read_text() == "# theirs\n"


def test_a_service_that_ran_before_is_left_running(tmp_path):
    machine = Machine(tmp_path)
    machine.units["nvidia-persistenced.service"] = [True, True, True]
    machine.setup()
    machine.setup("absent")
    assert machine.units["nvidia-persistenced.service"] == [True, True, True]


# loaded, modules, on disk -> lines of the plan about modules, words of the reason to reboot
KERNELS = [
    ("535.2", IDLE, "535.2", [], ""),
    ("535.1", IDLE, "535.2", ["reload the kernel modules, from 535.1 to 535.2"], ""),
    ("535.1", BUSY, "535.2", [], "loaded and in use"),
    (None, "nouveau 1 2 - Live\n", "535.2", [], "nouveau holds the GPUs"),
    ("535.1", IDLE, "", [], ""),  # the package is gone: nothing to load
]


@pytest.mark.parametrize("loaded, modules, disk, lines, reboot", KERNELS)
def test_modules_come_into_force_or_a_reboot_is_asked_for(tmp_path, loaded, modules, disk, lines, reboot):
    machine = Machine(tmp_path)
    machine.units["nvidia-persistenced.service"] = [True, True, True]
    machine.disk = disk
    if loaded:
        machine.load(loaded, modules)
    else:
        machine.write("proc/modules", modules)
    run = machine.setup()
    assert [line for line in run.plan if "modules" in line] == lines
    assert (reboot in run.reboot) if reboot else not run.reboot
    assert machine.units["nvidia-persistenced.service"] == [True, True, True], "what was stopped runs again"
    version = (tmp_path / "proc/driver/nvidia/version").read_text() if loaded else ""
    assert ("535.2" in version) == (bool(loaded) and disk == "535.2" and not reboot)


def test_what_holds_the_driver_is_stopped_before_its_modules_go(tmp_path):
    machine = Machine(tmp_path)
    machine.units["nvidia-persistenced.service"] = [True, True, True]
    machine.load("535.1", IDLE)
    machine.setup()
    stop, start = "systemctl stop nvidia-persistenced.service", "systemctl start nvidia-persistenced.service"
    swap = ["rmmod nvidia_uvm", "rmmod nvidia", "modprobe nvidia", "modprobe nvidia_uvm"]
    assert machine.calls[1:] == [stop, *swap, start]


PERSISTENCED, FABRIC = "nvidia-persistenced.service", "nvidia-fabricmanager.service"
# Control group of the process that has the driver open -> calls, words of the reason to reboot.
OPENERS = [
    (
        "0::/system.slice/nvidia-persistenced.service",
        [
            f"systemctl stop {PERSISTENCED} {FABRIC}",
            "rmmod nvidia_uvm",
            "rmmod nvidia",
            "modprobe nvidia",
            "modprobe nvidia_uvm",
            f"systemctl start {PERSISTENCED} {FABRIC}",
        ],
        "",
    ),
    # Work of somebody: a fabric manager that is stopped would end it.
    ("0::/kubepods/pod1", [], "driver 535.1 is loaded and in use by python3 (41)"),
]


@pytest.mark.parametrize("group, calls, reboot", OPENERS)
def test_nothing_is_stopped_where_somebody_works(tmp_path, group, calls, reboot):
    machine = Machine(tmp_path)
    machine.units = {PERSISTENCED: [True, True, True], FABRIC: [True, True, True]}
    machine.load("535.1", BUSY)
    machine.write("proc/41/comm", "python3\n")
    machine.write("proc/41/cgroup", group + "\n")
    (tmp_path / "proc/41/fd").mkdir()
    (tmp_path / "proc/41/fd/3").symlink_to("/dev/nvidiactl")
    inner = machine.run

    def run(argv):
        if list(argv[:2]) == ["systemctl", "stop"]:
            (tmp_path / "proc/41/fd/3").unlink()
            machine.load("535.1", IDLE)
        return inner(argv)

    machine.run = run
    wish = WISH._replace(files={}, initramfs=[])
    predicted = machine.setup(check=True, wish=wish)
    done = machine.setup(wish=wish)
    assert (machine.calls, done.reboot) == (calls, reboot)
    assert (predicted.plan, predicted.reboot) == (done.plan, done.reboot)


# what fails beside the module that stays -> words of a warning
KEPT = [([], ""), (["modprobe nvidia", f"systemctl start {PERSISTENCED}"], "did not start again")]


@pytest.mark.parametrize("fails, warned", KEPT)
def test_a_module_that_the_kernel_keeps_asks_for_a_reboot(tmp_path, fails, warned):
    machine = Machine(tmp_path)
    machine.units[PERSISTENCED] = [True, True, True]
    machine.load("535.1", IDLE)
    machine.fails = {call: Answer(1, "", "version mismatch") for call in ["rmmod nvidia", *fails]}
    run = machine.setup()
    assert run.reboot == "the kernel does not let go of the module nvidia of driver 535.1"
    assert warned in "".join(run.warnings) and bool(run.warnings) is bool(warned)
    assert machine.calls[-3:] == ["modprobe nvidia", "modprobe nvidia_uvm", f"systemctl start {PERSISTENCED}"]


# modules beside those of the driver, which of them does not load again -> what is loaded in the end, words of a warning
GPUDIRECT = [
    (["nvidia_peermem"], "", ["nvidia", "nvidia_uvm", "nvidia_peermem"], ""),
    (["nvidia_peermem", "gdrdrv"], "", ["nvidia", "nvidia_uvm", "gdrdrv", "nvidia_peermem"], ""),
    (["gdrdrv"], "gdrdrv", ["nvidia", "nvidia_uvm", "gdrdrv"], "gdrdrv was loaded beside driver 535.1"),
]


@pytest.mark.parametrize("others, fails, loads, words", GPUDIRECT)
def test_modules_of_other_people_come_back_after_a_reload(tmp_path, others, fails, loads, words):
    machine = Machine(tmp_path)
    machine.load("535.1", "".join(f"{name} 4 0 - Live 0x0\n" for name in others) + IDLE)
    machine.fails = {f"modprobe {fails}": Answer(1, "", "disagrees about version of symbol")} if fails else {}
    run = machine.setup()
    assert [call.split()[1] for call in machine.calls if call.startswith("modprobe ")] == loads
    assert words in "".join(run.warnings) and bool(run.warnings) is bool(words)
    assert run.reboot == ""


# what fails, with which words, words of the message
FAULTS = [
    ("modprobe nvidia", "modprobe: ERROR: Key was rejected by service", "enrol it with mokutil --import"),
    ("modprobe nvidia", "modprobe: FATAL: Module nvidia not found", "look at dkms status and dmesg"),
    ("update-initramfs -u -k all", "No space left on device", "rebuild the initramfs failed"),
]


@pytest.mark.parametrize("call, said, words", FAULTS)
def test_a_step_that_fails_names_itself_and_a_second_run_heals(tmp_path, call, said, words):
    machine = Machine(tmp_path)
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


def test_a_way_back_that_was_killed_before_the_initramfs_rebuilds_it(tmp_path):
    machine = Machine(tmp_path)
    before = machine.files()
    machine.setup()
    machine.calls.clear()
    machine.killed_at = "update-initramfs -u -k all"
    with pytest.raises(Killed):
        machine.setup("absent")
    assert not (tmp_path / BLACKLIST[1:]).exists(), "killed after the file went"
    machine.killed_at, machine.dead = "", False
    machine.calls.clear()
    assert machine.setup("absent", check=True).plan[0] == "rebuild the initramfs"
    machine.setup("absent")
    assert machine.calls[0] == "update-initramfs -u -k all"
    assert machine.files() == before
    machine.calls.clear()
    assert (machine.setup("absent").plan, machine.calls) == ([], [])


DCGM = "nvidia-dcgm.service"


@pytest.mark.parametrize("state", ["present", "absent"])
@pytest.mark.parametrize("moment", ["rmmod nvidia", "modprobe nvidia", f"systemctl start {DCGM}"])
def test_what_a_killed_reload_had_stopped_is_started_by_the_next_run(tmp_path, moment, state):
    machine = Machine(tmp_path)
    machine.units = {DCGM: [True, True, True]}
    wish = WISH._replace(services=[], files={}, initramfs=[])
    machine.load("535.1", IDLE)
    machine.killed_at = moment
    with pytest.raises(Killed):
        machine.setup(wish=wish)
    assert machine.units[DCGM][2] is False, "the kill left it stopped; the test has nothing to show"
    machine.killed_at, machine.dead = "", False
    line = f"start {DCGM}, which a run that was cut off had stopped"
    assert line in machine.setup(state, check=True, wish=wish).plan
    assert machine.units[DCGM][2] is False, "check mode starts nothing"
    assert line in machine.setup(state, wish=wish).plan
    assert machine.units[DCGM] == [True, True, True]
    assert line not in machine.setup(state, wish=wish).plan


def test_a_host_without_grubby_is_told_what_to_add(tmp_path):
    machine = Machine(tmp_path)
    run = machine.setup(wish=WISH._replace(kernel_arguments=["modprobe.blacklist=nouveau"]))
    assert "add modprobe.blacklist=nouveau to the kernel's arguments" in run.warnings[0]


def test_kernel_arguments_through_grubby(tmp_path):
    machine = Machine(tmp_path)
    machine.fails["grubby"] = Answer(0, "", "")
    run = machine.setup(wish=WISH._replace(kernel_arguments=["modprobe.blacklist=nouveau"]))
    assert "add modprobe.blacklist=nouveau to the kernel's arguments" in run.plan
    assert "grubby --update-kernel=ALL --args=modprobe.blacklist=nouveau" in machine.calls
    machine.setup("absent")
    assert "grubby --update-kernel=ALL --remove-args=modprobe.blacklist=nouveau" in machine.calls


def test_a_host_without_gpu_loads_nothing(tmp_path):
    assert "load the kernel modules" not in Machine(tmp_path, gpu=False).setup().plan


# What changes after the service started (its file by the run, its token by somebody, nothing), what it has not read.
REREAD = [("conf", CONF), ("token", TOKEN), ("", "")]


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("what, path", REREAD)
def test_a_service_reads_again_what_changed(tmp_path, what, path, killed):
    machine = Machine(tmp_path, gpu=False)
    machine.units = {GRIDD: [True, True, True]}
    wish = Wish(files={CONF: "FeatureType=4\n"}, services=[GRIDD], rereads={GRIDD: [CONF, TOKEN]}, record=RECORD)
    machine.write(TOKEN[1:], "first")
    machine.setup(wish=wish)
    machine.started[GRIDD] = time.time() + 60
    assert machine.setup(wish=wish).plan == []
    if what == "conf":
        wish = wish._replace(files={CONF: "FeatureType=1\n"})
    elif what:
        machine.write(TOKEN[1:], "second")
        os.utime(tmp_path / CONF[1:], (1, 1))
    if what:
        machine.started[GRIDD] = time.time() - 60
    line = f"restart {GRIDD}, which has not read {path}"
    predicted = machine.setup(check=True, wish=wish).plan
    machine.calls.clear()
    if killed and what:
        machine.killed_at = f"systemctl restart {GRIDD}"
        with pytest.raises(Killed):
            machine.setup(wish=wish)
        machine.killed_at, machine.dead = "", False
    run = machine.setup(wish=wish)
    assert (line in run.plan, line in predicted, f"systemctl restart {GRIDD}" in machine.calls) == (bool(what),) * 3
    assert machine.setup(wish=wish).plan == []


DROP_IN = f"/etc/systemd/system/{PERSISTENCED}.d/vgpu.conf"


@pytest.mark.parametrize("theirs", [False, True])
@pytest.mark.parametrize("killed", ["", "systemctl daemon-reload"])
def test_a_drop_in_of_a_service_comes_into_force_and_goes_without_a_trace(tmp_path, killed, theirs):
    machine = Machine(tmp_path)
    machine.units[PERSISTENCED] = [True, True, True]
    machine.started[PERSISTENCED] = time.time() - 60
    machine.load("535.2", IDLE)
    if theirs:
        machine.write(DROP_IN[1:].replace("vgpu", "theirs"), "[Service]\n")
    before, folders = machine.files(), sorted(map(str, tmp_path.rglob("*.d")))
    wish = WISH._replace(files={DROP_IN: "[Service]\nExecStart=\n"}, rereads={PERSISTENCED: [DROP_IN]})
    read = f"let systemd read the unit files of {PERSISTENCED}"
    plan = [f"write {DROP_IN}", read, f"restart {PERSISTENCED}, which has not read {DROP_IN}"]
    for state in ("present", "absent"):
        assert machine.setup(state, check=True, wish=wish).plan[:2] == (
            plan[:2] if state == "present" else [f"remove {DROP_IN}", read]
        )
        machine.unread = True
        if killed:
            machine.killed_at = killed
            with pytest.raises(Killed):
                machine.setup(state, wish=wish)
            machine.killed_at, machine.dead = "", False
        machine.calls.clear()
        run = machine.setup(state, wish=wish)
        assert read in run.plan
        assert machine.calls == ["systemctl daemon-reload", machine.calls[-1]], (
            "and no initramfs, for it has none of it"
        )
        assert PERSISTENCED in machine.calls[-1] and "restart" in machine.calls[-1]
        if state == "present":
            assert machine.setup(wish=wish).plan == []
    assert (machine.files(), sorted(map(str, tmp_path.rglob("*.d")))) == (before, folders)
    assert machine.setup("absent", wish=wish).plan == []
