# SPDX-License-Identifier: Apache-2.0
"""Simulates a reboot with the real device plugin: /run and every mount are gone, the driver starts again, and the boot
id is new. The kubelet starts with its checkpoint (its file of allocated devices) and its folder on disk, in which
sockets of dead programs remain.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from vgpu_kubelet_double import podresources
from vgpu_kubelet_double.manager import CHECKPOINT, Manager, PodError

from .conftest import RESOURCE, SOURCES, RealNode, until

sys.path.insert(0, str(SOURCES[0]))
from vgpu_plugin._shared.abi import files as abi_files

pytestmark = pytest.mark.slow

PROFILE = "driver_version = 535.261.03\ncuda_version = 12.2\n[gpu]\nmodel = V100-16GB\ncount = 2\n"
SLICES = 6
SHARE, LEDGER = "/dev/vgpu/0", "/dev/vgpu/0/ledger"
# A program that runs the device plugin with another path of the boot id and a grace period of 3 s instead of a minute.
PROGRAM = """\
import sys
from pathlib import Path
from vgpu_plugin import daemon
from vgpu_plugin.allocation import collector
from vgpu_plugin.node import clock
clock._BOOT_ID = Path(sys.argv.pop(1))
collector.GRACE_S, daemon.HOUSEKEEPING_S = 3.0, 0.2
from vgpu_plugin.main import main
sys.exit(main())
"""


@dataclass
class Machine:
    node: RealNode
    boot: int = 0
    lister: grpc.Server | None = None

    @property
    def records(self) -> Path:
        return self.node.folder / "state/allocations.json"

    def halt(self) -> None:
        """Simulates a power cut: no program shuts down in order, and all files in memory are gone."""
        node = self.node
        node.end(kill=True)
        self.stop_kubelet()
        for mount in reversed(node.mounts()):
            subprocess.run(["umount", mount], check=True)
        shutil.rmtree(node.folder / "run")
        Path(node.environment["GPUSIM_STATE"]).unlink(missing_ok=True)

    def start_kubelet(self) -> None:
        kubelet = self.node.kubelet = Manager(self.node.kubelet.folder)
        kubelet.start()
        self.lister = podresources.serve(kubelet, self.node.folder / "pod-resources/kubelet.sock")

    def stop_kubelet(self) -> None:
        if self.lister is not None:
            self.lister.stop(grace=0).wait()
        self.node.kubelet.stop()

    def boot_up(self, first: str = "kubelet") -> None:
        self.boot += 1
        (self.node.folder / "boot_id").write_text(f"boot-{self.boot}\n")
        if first == "plugin":
            self.node.start(wait=False)
            until(self.node.socket.exists, "the socket of the plugin")
        self.start_kubelet()
        if first == "kubelet":
            self.node.start(wait=False)
        until(self.node.offered, "the slices at the kubelet")

    def allocations(self, kind: str = "kubelet") -> dict[str, list[str]]:
        found = self.node.vgpuctl("status")["allocations"]
        return {one["id"]: one["slice_ids"] for one in found if one["kind"] == kind}


@pytest.fixture
def machine(node):
    node.end()
    node.kubelet.stop()
    (node.folder / "kubelet" / CHECKPOINT).unlink()
    (node.folder / "host.profile").write_text(PROFILE)
    Path(node.environment["GPUSIM_STATE"]).unlink(missing_ok=True)
    node.program = [sys.executable, "-c", PROGRAM, str(node.folder / "boot_id")]
    out = Machine(node)
    out.boot_up()
    assert len(node.kubelet.endpoints[RESOURCE].devices) == SLICES
    yield out
    out.stop_kubelet()  # The fixture of the node stops only the first kubelet, so the test stops this second one.


def host_path(pod: dict, inside: str) -> Path:
    return next(Path(one["host_path"]) for one in pod["answer"]["mounts"] if one["container_path"] == inside)


def limits_of(pod: dict) -> dict:
    return abi_files.parse_limits((host_path(pod, SHARE) / "limits").read_bytes())


# The device plugin does not sync its records to disk, so a power cut may lose some of them. columns: state of the
# records after the power cut; the program that starts first
ROWS = [
    ("whole", "kubelet"),
    ("whole", "plugin"),
    ("gone", "plugin"),
    ("without the last record", "kubelet"),
    ("torn", "kubelet"),
]


@pytest.mark.parametrize(("records", "first"), ROWS)
def test_pods_keep_their_slices_after_a_reboot(machine, records, first):
    node = machine.node
    pods = {name: node.kubelet.run_pod(name, init_container=name == "both") for name in ("stays", "both", "deleted")}
    lease = node.vgpuctl("lease")
    older = machine.records.read_bytes()
    pods["last"] = node.kubelet.run_pod("last")
    before = {name: limits_of(pod) for name, pod in pods.items()}
    # There is one allocation for each of the four pods, and one for the init container.
    assert len(machine.allocations()) == 5
    machine.halt()
    if records == "gone":
        machine.records.unlink()
    elif records == "torn":
        machine.records.write_bytes(machine.records.read_bytes()[:200])
    elif records == "without the last record":
        machine.records.write_bytes(older)
    node.kubelet.delete_pod("deleted")  # A user deleted the pod through the API while the node was off.
    assert not any(host_path(pod, SHARE).exists() for pod in pods.values())
    machine.boot_up(first)

    # The reboot ended the lease, a slice (part of a GPU) for a program on the host. All slices are advertised, and the
    # slices in the kubelet's checkpoint stay with their pods.
    assert machine.allocations("lease") == {}
    assert lease["ids"][0] in node.kubelet.endpoints[RESOURCE].healthy()
    assert node.kubelet.state()["resources"][RESOURCE]["allocatable"] == SLICES
    for name in ("stays", "both", "last"):
        again = node.kubelet.restart_container(name)
        assert (again["ids"], again["answer"]) == (pods[name]["ids"], pods[name]["answer"])
        for mount in again["answer"]["mounts"]:
            assert Path(mount["host_path"]).exists(), (name, mount)
        assert limits_of(again) == before[name], name
        assert abi_files.parse_ledger(host_path(again, LEDGER).read_bytes())["slots"] == []
    kept = {host_path(pods[name], SHARE).parent.name for name in ("stays", "both", "last")}
    # Only the deleted pod's allocation ends.
    until(lambda: len(machine.allocations()) == 4, "the end of the deleted pod's allocation")
    assert kept <= set(machine.allocations())
    assert len(node.allocation_mounts()) == 4

    # Three slices are free: three pods get one slice each, and a fourth pod waits.
    held = [one for name in ("stays", "both", "last") for one in pods[name]["ids"]]
    later = [node.kubelet.run_pod(f"later-{n}") for n in range(3)]
    assert len({*held, *(one["ids"][0] for one in later)}) == SLICES
    with pytest.raises(PodError, match="Insufficient"):
        node.kubelet.run_pod("too-many")
    assert len(node.allocation_mounts()) == 7


def test_second_reboot_before_any_start_keeps_the_allocation(machine):
    node = machine.node
    pod = node.kubelet.run_pod("stays")
    before = limits_of(pod)
    for first in ("kubelet", "plugin"):
        machine.halt()
        machine.boot_up(first)
    assert list(machine.allocations().values()) == [pod["ids"]]
    assert limits_of(node.kubelet.restart_container("stays")) == before


def test_no_container_starts_before_the_plugin_is_back(machine):
    """Negative control: without the device plugin the allocation's files are missing, so no container can start."""
    node = machine.node
    pod = node.kubelet.run_pod("stays")
    machine.halt()
    machine.start_kubelet()
    with pytest.raises(PodError, match="no plugin is registered"):
        node.kubelet.restart_container("stays")
    assert not host_path(pod, SHARE).exists()
    node.start()
    node.kubelet.restart_container("stays")
    assert limits_of(pod)["allocation"] == host_path(pod, SHARE).parent.name


def test_lease_outlives_a_restart_and_not_a_reboot(machine):
    """A restarted plugin reads the lease from the same records twice: with the former boot id the lease stays, and with
    a new boot id it has ended."""
    node = machine.node
    lease = node.vgpuctl("lease")["allocation"]
    node.end(kill=True)
    node.start()
    assert list(machine.allocations("lease")) == [lease]
    kept = json.loads(machine.records.read_text())["allocations"]
    assert [one["boot_id"] for one in kept] == ["boot-1"]
    machine.halt()
    machine.boot_up()
    assert machine.allocations("lease") == {}
