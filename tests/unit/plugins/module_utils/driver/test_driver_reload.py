# SPDX-License-Identifier: Apache-2.0
"""Tests, on a simulated kernel, what happens to the driver's modules after an installation: they are loaded, reloaded
if no process uses them, or left for a reboot.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.driver.setup import SetupError
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Answer
from doubles.host import BUSY, IDLE, Killed
from driver_samples import DESIRED, FABRIC, PERSISTENCED, DriverHost

# columns: version of the loaded modules (None: not loaded), text of /proc/modules, version of the modules on disk;
# expected lines of the plan about modules, words of the reason to reboot ("": no reboot)
KERNELS = [
    ("535.2", IDLE, "535.2", [], ""),
    ("535.1", IDLE, "535.2", ["reload the kernel modules, from 535.1 to 535.2"], ""),
    ("535.1", BUSY, "535.2", [], "loaded and in use"),
    (None, "nouveau 1 2 - Live\n", "535.2", [], "nouveau uses the GPUs"),
    ("535.1", IDLE, "", [], ""),  # the package was removed, so there is no module to load
]


@pytest.mark.parametrize(("loaded", "modules", "disk", "lines", "reboot"), KERNELS)
def test_modules_are_reloaded_or_a_reboot_is_requested(tmp_path, loaded, modules, disk, lines, reboot):
    machine = DriverHost(tmp_path)
    machine.units["nvidia-persistenced.service"] = [True, True, True]
    machine.disk = disk
    if loaded:
        machine.load(loaded, modules)
    else:
        machine.write("proc/modules", modules)
    run = machine.setup()
    assert [line for line in run.plan if "modules" in line] == lines
    assert (reboot in run.reboot) if reboot else not run.reboot
    assert machine.units["nvidia-persistenced.service"] == [True, True, True], "the stopped service runs again"
    version = (tmp_path / "proc/driver/nvidia/version").read_text() if loaded else ""
    assert ("535.2" in version) == (bool(loaded) and disk == "535.2" and not reboot)


def test_services_of_the_driver_stop_before_the_modules_are_removed(tmp_path):
    machine = DriverHost(tmp_path)
    machine.units["nvidia-persistenced.service"] = [True, True, True]
    machine.load("535.1", IDLE)
    machine.setup()
    stop, start = "systemctl stop nvidia-persistenced.service", "systemctl start nvidia-persistenced.service"
    swap = ["rmmod nvidia_uvm", "rmmod nvidia", "modprobe nvidia", "modprobe nvidia_uvm"]
    assert machine.calls[1:] == [stop, *swap, start]


# columns: control group of the process that has the driver open; expected calls, words of the reason to reboot
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
    # The process belongs to a pod, and stopping the fabric manager would end its work on the GPU. So nothing is
    # stopped.
    ("0::/kubepods/pod1", [], "driver 535.1 is loaded and in use by python3 (41)"),
]


@pytest.mark.parametrize(("group", "calls", "reboot"), OPENERS)
def test_reload_stops_services_only_if_no_other_process_uses_the_driver(tmp_path, group, calls, reboot):
    machine = DriverHost(tmp_path)
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
    desired = DESIRED._replace(files={}, initramfs=[])
    predicted = machine.setup(check=True, desired=desired)
    done = machine.setup(desired=desired)
    assert (machine.calls, done.reboot) == (calls, reboot)
    assert (predicted.plan, predicted.reboot) == (done.plan, done.reboot)


# columns: commands that fail in addition to the removal of the module; expected words of a warning ("": none)
KEPT = [([], ""), (["modprobe nvidia", f"systemctl start {PERSISTENCED}"], "did not start again")]


@pytest.mark.parametrize(("fails", "warned"), KEPT)
def test_module_that_cannot_be_removed_requests_a_reboot(tmp_path, fails, warned):
    machine = DriverHost(tmp_path)
    machine.units[PERSISTENCED] = [True, True, True]
    machine.load("535.1", IDLE)
    machine.fails = {call: Answer(1, "", "version mismatch") for call in ["rmmod nvidia", *fails]}
    run = machine.setup()
    assert run.reboot == "the kernel cannot unload the module nvidia of driver 535.1"
    assert warned in "".join(run.warnings) and bool(run.warnings) is bool(warned)
    assert machine.calls[-3:] == ["modprobe nvidia", "modprobe nvidia_uvm", f"systemctl start {PERSISTENCED}"]


@pytest.mark.parametrize("starts", [True, False])
def test_a_module_that_does_not_load_is_reported_and_stopped_services_start(tmp_path, starts):
    machine = DriverHost(tmp_path)
    machine.units[PERSISTENCED] = [True, True, True]
    machine.load("535.1", IDLE)
    machine.fails = {"modprobe nvidia": Answer(1, "", "Key was rejected by service")}
    if not starts:
        machine.fails[f"systemctl start {PERSISTENCED}"] = Answer(1, "", "Job failed")
    with pytest.raises(SetupError, match=r"loading the kernel module nvidia failed.*enrol it with mokutil"):
        machine.setup()
    assert machine.calls[-1] == f"systemctl start {PERSISTENCED}" and machine.units[PERSISTENCED][2] is starts
    machine.fails = {}
    assert any("an interrupted run had stopped" in line for line in machine.setup().plan) is not starts
    assert machine.units[PERSISTENCED] == [True, True, True]


# columns: NVIDIA's unit that writes CDI files (present, enabled, active), whether its restart fails; whether a restart
# is expected, words of a warning
CDI = "nvidia-cdi-refresh.service"
CDI_UNITS = [
    ([True, True, False], False, True, ""),
    ([True, True, False], True, True, "CDI files may name the former driver"),
    ([True, False, False], False, False, ""),
    ([False, False, False], False, False, ""),
]


@pytest.mark.parametrize(("unit", "fails", "runs", "words"), CDI_UNITS)
def test_cdi_files_are_written_again_after_a_reload(tmp_path, unit, fails, runs, words):
    machine = DriverHost(tmp_path)
    machine.units = {CDI: unit}
    machine.load("535.1", IDLE)
    machine.fails = {f"systemctl restart {CDI}": Answer(1, "", "no driver")} if fails else {}
    run = machine.setup(desired=DESIRED._replace(services=[]))
    assert machine.calls[-1:] == ([f"systemctl restart {CDI}"] if runs else ["modprobe nvidia_uvm"])
    assert words in "".join(run.warnings) and bool(run.warnings) is bool(words)


# columns: third-party modules that depend on the driver, the one of them that fails to load again; expected loaded
# modules, words of a warning
GPUDIRECT = [
    (["nvidia_peermem"], "", ["nvidia", "nvidia_uvm", "nvidia_peermem"], ""),
    (["nvidia_peermem", "gdrdrv"], "", ["nvidia", "nvidia_uvm", "gdrdrv", "nvidia_peermem"], ""),
    (["gdrdrv"], "gdrdrv", ["nvidia", "nvidia_uvm", "gdrdrv"], "gdrdrv was loaded with driver 535.1"),
]


@pytest.mark.parametrize(("others", "fails", "loads", "words"), GPUDIRECT)
def test_third_party_modules_are_loaded_again_after_a_reload(tmp_path, others, fails, loads, words):
    machine = DriverHost(tmp_path)
    machine.load("535.1", "".join(f"{name} 4 0 - Live 0x0\n" for name in others) + IDLE)
    machine.fails = {f"modprobe {fails}": Answer(1, "", "disagrees about version of symbol")} if fails else {}
    run = machine.setup()
    assert [call.split()[1] for call in machine.calls if call.startswith("modprobe ")] == loads
    assert words in "".join(run.warnings) and bool(run.warnings) is bool(words)
    assert run.reboot == ""


DCGM = "nvidia-dcgm.service"


@pytest.mark.parametrize("state", ["present", "absent"])
@pytest.mark.parametrize("moment", ["rmmod nvidia", "modprobe nvidia", f"systemctl start {DCGM}"])
def test_next_run_starts_services_stopped_by_a_killed_reload(tmp_path, moment, state):
    machine = DriverHost(tmp_path)
    machine.units = {DCGM: [True, True, True]}
    desired = DESIRED._replace(services=[], files={}, initramfs=[])
    machine.load("535.1", IDLE)
    machine.killed_at = moment
    with pytest.raises(Killed):
        machine.setup(desired=desired)
    assert machine.units[DCGM][2] is False, "the killed run must leave the service stopped"
    machine.killed_at, machine.dead = "", False
    line = f"start {DCGM}, which an interrupted run had stopped"
    assert line in machine.setup(state, check=True, desired=desired).plan
    assert machine.units[DCGM][2] is False, "check mode starts nothing"
    assert line in machine.setup(state, desired=desired).plan
    assert machine.units[DCGM] == [True, True, True]
    assert line not in machine.setup(state, desired=desired).plan


def test_a_host_without_gpu_loads_nothing(tmp_path):
    assert "load the kernel modules" not in DriverHost(tmp_path, gpu=False).setup().plan
