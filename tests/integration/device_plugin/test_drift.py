# SPDX-License-Identifier: Apache-2.0
"""Tests the module vgpu_capacity_info, which compares what the group variables, the device plugin, the kubelet, the
ledgers and the driver say about a host. Each test breaks one part of a host on purpose, and the module must report
exactly this part: as a difference, or as a note if it disappears without action. The device plugin and the ledgers
(files in which containers count their memory) are real; the driver is simulated.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys

import pytest

from .conftest import ROOT, SOURCES, SPLIT, until

sys.path.insert(0, str(ROOT / ".build" / "collections"))
from ansible_collections.vgpu.fleet.plugins.module_utils.abi import files as abi_files

pytestmark = pytest.mark.slow

MIB = 1 << 20
F_OFD_SETLK = 37
# Runs the module's core on a host that is simulated in a folder.
LOOK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from ansible_collections.vgpu.fleet.plugins.module_utils.capacity import capacity
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Host
seen = capacity.observe(Host(sys.argv[2]), "/etc/node.yaml", "/kubelet", True, sys.argv[3])
print(json.dumps(capacity.compare(seen)))
"""


@pytest.fixture
def look(node):
    """Returns a function that returns the lists (differences, notes) that vgpu_capacity_info reports for the node."""
    root = node.folder / "root"
    program = root / "usr/local/bin/vgpuctl"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec "{node.vgpuctl_program}" --socket "{node.socket}" "$@"\n')
    program.chmod(0o755)
    (root / "etc").mkdir()
    (root / "etc" / "node.yaml").symlink_to(node.folder / "node.yaml")
    (root / "kubelet").symlink_to(node.folder / "kubelet")

    def ask(wanted: str = "") -> tuple[list[dict], list[dict]]:
        done = subprocess.run(
            [sys.executable, "-c", LOOK, str(ROOT / ".build" / "collections"), str(root), wanted],
            env=node.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["missing"] == {}, found["missing"]
        return found["drift"], found["notes"]

    return ask


def test_consistent_host_has_no_difference_or_note(node, look):
    assert look() == ([], [])
    node.kubelet.run_pod("one")
    assert look() == ([], [])


def test_slice_in_excess_of_the_plugin_is_a_difference(node, look):
    greedy = node.folder / "greedy"
    greedy.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:0] = {[str(one) for one in SOURCES]!r}\n"
        "from vgpu_plugin.offer import settings\n"
        "honest = settings.make_slices\n"
        "def make(gpus, config):\n"
        "    made = honest(gpus, config)\n"
        "    return [*made, made[-1]._replace(id=made[-1].uuid + '::99')]\n"
        "settings.make_slices = make\n"
        "from vgpu_plugin.main import main\nsys.exit(main())\n"
    )
    node.end()
    node.program = [sys.executable, str(greedy)]
    node.start()
    drift, _notes = look()
    assert {one["what"] for one in drift} == {"slice", "advertised"}
    assert all("::99" in one["where"] + one["found"] for one in drift), drift
    assert (
        node.kubelet.state()["resources"]["nvidia.com/gpu"]["allocatable"] == SPLIT + 1
    )  # The kubelet counts the additional slice.


def test_stale_ledger_is_a_difference(node, look):
    """A slot of a live process in the ledger charges 900 MiB that the driver does not report."""
    pod = node.kubelet.run_pod("one")
    path = next(one["host_path"] for one in pod["answer"]["mounts"] if one["container_path"] == "/dev/vgpu/0/ledger")
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.pwrite(descriptor, struct.pack("<Q", 900 * MIB), abi_files.fields.LEDGER_SLOT_OFFSET)
        assert look() == ([], [])  # The slot of a dead process is not locked, so it charges nothing.
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, abi_files.fields.LEDGER_ALIVE_BASE, 1, 0)
        fcntl.fcntl(descriptor, F_OFD_SETLK, lock)
        ((one,), _notes) = look()
    finally:
        os.close(descriptor)
    assert (one["what"], one["found"]) == ("ledger", "900 MiB charged")
    assert pod["ids"][0].split("::")[0] in one["where"]


def test_split_that_differs_from_the_group_variables(node, look):
    wanted = json.loads((node.folder / "node.yaml").read_text())
    wanted["sharing"]["vcuda"]["splitCount"] = SPLIT + 1
    ((one,), _notes) = look(json.dumps(wanted))
    assert one["where"].endswith("sharing.vcuda.splitCount")
    assert (one["expected"], one["found"]) == (str(SPLIT + 1), str(SPLIT))


def test_older_mapped_library_of_a_container_is_a_note(node, look):
    node.kubelet.run_pod("one")
    current = node.folder / "lib" / "current"
    older = current.resolve().name
    shutil.copytree(current.resolve(), node.folder / "lib" / "0.2.0-bbbbbbbbbbbb")
    current.unlink()
    current.symlink_to("0.2.0-bbbbbbbbbbbb")
    drift, (note,) = look()
    assert drift == []
    assert (note["what"], note["expected"], note["found"]) == (
        "library",
        "0.2.0-bbbbbbbbbbbb",
        f"{older}, still mapped",
    )


def test_allocation_without_a_container_is_a_difference(node, look):
    """The kubelet has deleted a pod, but the device plugin still has the pod's allocation."""
    node.kubelet.run_pod("one")
    path = node.folder / "kubelet" / "kubelet_internal_checkpoint"
    kept = json.loads(path.read_text())
    assert len(kept["Data"]["PodDeviceEntries"]) == 1
    kept["Data"]["PodDeviceEntries"] = []
    path.write_text(json.dumps(kept))
    ((one,), _notes) = look()
    assert (one["what"], one["found"]) == ("allocation", "none")


def test_process_that_bypasses_the_library_is_a_difference(node, look):
    from .test_watch import Slice

    slice_ = Slice(node, node.kubelet.run_pod("one")["answer"])
    slice_.probe("bypass-namespace")
    try:
        until(lambda: node.vgpuctl("watch")["findings"], "a finding that names the process")
        ((one,), _notes) = look()
    finally:
        for process in slice_.running:
            subprocess.run(["kill", "-KILL", "--", f"-{process.pid}"], check=True)
            process.communicate()
    assert one["what"] == "process"
    assert "without a live slot" in one["found"]
