# SPDX-License-Identifier: Apache-2.0
"""Tests the MIG geometry of a host, which says into which MIG devices each GPU is split. A systemd unit applies the
geometry at boot. The tests cover check mode, apply, a repeated run, a reboot, and the removal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_mig_geometry import A100, LOOK, OFF, ROOT, Host, needs_root

pytestmark = needs_root

# A program that creates or removes the MIG geometry of a host by mig_host.py. It prints the planned changes, the
# commands and the diff.
RUN = """\
import json, sys
sys.path.insert(0, sys.argv[1])
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import mig_host, mig_nvml
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Answer
wanted = json.loads(sys.argv[2])
calls = []
def run(argv):
    calls.append(" ".join(argv))
    return Answer(0, "enabled" if wanted["enabled"] else "disabled", "")
host = mig_host.MigHost("/var/lib/mig.json", wanted["check"], wanted["root"], run)
try:
    if wanted["state"] == "present":
        host.present(mig_nvml.Mig, wanted["geometry"])
    else:
        host.absent(mig_nvml.Mig)
    host.restart(["vgpu-device-plugin.service"])
    print(json.dumps({"plan": host.plan, "calls": calls, "diff": host.diff()}))
except Exception as fault:
    print(json.dumps({"error": str(fault)}))
"""


class Machine:
    """A simulated host with a folder as its root file system. A reboot clears the driver's state."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        self.host = Host(folder, A100)
        self.enabled = False

    def bring(self, geometry: dict[str, int], state: str = "present", check: bool = False) -> dict[str, Any]:
        wanted = json.dumps(
            {"geometry": geometry, "state": state, "check": check, "root": str(self.root), "enabled": self.enabled}
        )
        command = [sys.executable, "-c", RUN, str(ROOT / ".build" / "collections"), wanted]
        done = subprocess.run(command, env=self.host.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        self.enabled = "systemctl enable vgpu-mig.service" in found.get("calls", []) or self.enabled
        return found

    def reboot(self) -> None:
        self.host.state.unlink()

    def boot_program(self) -> subprocess.CompletedProcess[str]:
        """Runs the program that the systemd unit starts."""
        return subprocess.run(
            [sys.executable, *self.words()],
            env=self.host.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def words(self) -> list[str]:
        """Returns the arguments that the unit's command passes to Python. Each path is changed to a path in this root
        folder."""
        unit = (self.root / "etc/systemd/system/vgpu-mig.service").read_text()
        (line,) = (one for one in unit.splitlines() if one.startswith("ExecStart="))
        return [str(self.root) + one if one.startswith("/") else one for one in line.split()[1:]]

    def look(self) -> Any:
        return self.host.nvml("look(0)", setup=LOOK)[0]

    def files(self) -> list[str]:
        return sorted(str(one.relative_to(self.root)) for one in self.root.rglob("*") if one.is_file())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


HALVES = [1, ["3g.20gb", "3g.20gb"]]


def test_geometry_is_created_kept_and_removed(machine: Machine) -> None:
    predicted = machine.bring({"3g.20gb": 2}, check=True)
    assert (machine.look(), machine.files()) == (OFF, [])
    done = machine.bring({"3g.20gb": 2})
    assert done["plan"] == predicted["plan"]
    assert "enable vgpu-mig.service" in done["plan"]
    assert done["calls"][-1] == "systemctl try-restart vgpu-device-plugin.service"
    assert "no MIG" in done["diff"][0]["before"]
    assert "2 x 3g.20gb" in done["diff"][0]["after"]
    assert machine.look() == HALVES
    again = machine.bring({"3g.20gb": 2})
    looks = (" is-", " show ")
    assert (again["plan"], [call for call in again["calls"] if not any(one in call for one in looks)]) == ([], [])
    machine.bring({}, state="absent")
    assert (machine.look(), machine.files()) == (OFF, [])
    assert not (machine.root / "usr/local/lib/vgpu-mig").exists()
    assert machine.bring({}, state="absent")["plan"] == []


def test_original_geometry_is_restored(machine: Machine) -> None:
    machine.host.nvml("nvmlDeviceSetMigMode(gpu(0), 1)")
    for geometry in ({"7g.40gb": 1}, {"1g.5gb": 7}):
        machine.bring(geometry)
    machine.bring({}, state="absent")
    assert machine.look() == OFF, "MIG was on without an instance, so there was no geometry to restore"


def test_geometry_of_another_tool_stays(machine: Machine) -> None:
    make = "nvmlGpuInstanceCreateComputeInstance(nvmlDeviceCreateGpuInstance(gpu(0), 9), 2) and 0"
    machine.host.nvml("nvmlDeviceSetMigMode(gpu(0), 1)", make)
    assert machine.look() == [1, ["3g.20gb"]]
    machine.bring({"1g.5gb": 7})
    machine.bring({}, state="absent")
    assert machine.look() == [1, ["3g.20gb"]]


def test_unit_creates_the_geometry_again_after_a_reboot(machine: Machine) -> None:
    machine.bring({"3g.20gb": 2})
    machine.reboot()
    assert machine.look() == OFF
    done = machine.boot_program()
    assert (done.returncode, machine.look()) == (0, HALVES), done.stderr
    assert "create 3g.20gb" in done.stdout
    again = machine.boot_program()
    assert (again.returncode, again.stdout) == (0, "the GPUs have their geometry\n")


def test_unit_reports_an_impossible_geometry(machine: Machine) -> None:
    machine.bring({"3g.20gb": 2})
    path = machine.root / "etc/vgpu/mig.json"
    path.write_text(path.read_text().replace("3g.20gb", "9g.80gb"))
    done = machine.boot_program()
    assert done.returncode == 1
    assert "has no MIG profile 9g.80gb" in done.stderr
    assert machine.look() == HALVES


def test_empty_geometry_is_refused(machine: Machine) -> None:
    assert "name at least one profile" in machine.bring({})["error"]
