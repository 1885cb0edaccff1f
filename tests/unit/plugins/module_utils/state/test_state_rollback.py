# SPDX-License-Identifier: Apache-2.0
"""Tests the rollback point, a record of the versions and configuration to which a failed upgrade of a host returns. It
must also be right after an upgrade that was killed when the new versions were already active.
"""

from __future__ import annotations

import hashlib
import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import nvml
from ansible_collections.vgpu.fleet.plugins.module_utils.host import digest
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Answer, Host
from ansible_collections.vgpu.fleet.plugins.module_utils.state import rollback, running_plugin
from doubles.host import host, write

LIBRARY, PLUGIN, CONFIG = "/usr/local/lib/vgpu", "/opt/vgpu/plugin", "/etc/vgpu/node.yaml"
NAMED = "/etc/vgpu/configs/big.yaml"
UNIT = "/etc/systemd/system/vgpu-device-plugin.service"
DAEMON_SET = "/etc/vgpu/daemonset.json"
ARBITER = "/etc/systemd/system/vgpu-arbiter.service"
GPUS = [{"uuid": "GPU-a"}]


class Machine:
    """A simulated host on which two versions are installed. The test sets the active version, the configuration and the
    proof (a fingerprint of the state for which the isolation check last passed)."""

    def __init__(self, root):
        self.root, self.host = root, Host(str(root), run=self.run)
        self.status = {"version": "1", "config_sha256": "one", "library": "1"}
        self.write("/usr/local/bin/vgpuctl", "program")
        for version in ("1", "2"):
            self.write(f"{LIBRARY}/{version}/libvgpu.so", version)
            listed = {"libvgpu.so": hashlib.sha256(version.encode()).hexdigest()}
            self.write(f"{LIBRARY}/{version}/manifest.json", json.dumps({"files": listed}))
            self.write(f"{PLUGIN}/{version}/.complete", "")
        self.switch("1")

    def run(self, argv):
        return Answer(0, json.dumps(self.status), "") if argv[0].endswith("vgpuctl") else Answer(127, "", "")

    def write(self, path, text):
        write(self.root, path, text)

    def switch(self, version):
        for folder in (LIBRARY, PLUGIN):
            link = self.root / folder.lstrip("/") / "current"
            link.unlink(missing_ok=True)
            link.symlink_to(version)
        self.write(CONFIG, f"config {version}")
        self.write(NAMED, f"named {version}")
        self.write(UNIT, f"unit {version}")
        self.write(DAEMON_SET, f"daemonset {version}")
        self.status = {"version": version, "config_sha256": version, "library": version}

    def prove(self):
        runs = digest.fingerprint(self.status, GPUS, "535")
        self.write(running_plugin.PROOF, json.dumps({"fingerprint": runs}))

    def persist(self, check=False):
        return rollback.persist(self.host, LIBRARY, PLUGIN, CONFIG, [UNIT, ARBITER], check, DAEMON_SET)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(nvml, "read", lambda: {"gpus": GPUS, "driver_version": "535"})
    return Machine(tmp_path)


FIRST = {
    "library": "1",
    "plugin": "1",
    "node_config": "config 1",
    "configs": {NAMED: "named 1"},
    "units": {UNIT: "unit 1", ARBITER: None},
    "daemonset": {DAEMON_SET: "daemonset 1"},
}


def test_current_versions_are_the_rollback_point(machine):
    machine.prove()
    assert machine.persist(check=True) == (FIRST, False)
    assert rollback.kept(machine.host) is None, "check mode records nothing"
    assert machine.persist() == (FIRST, False)
    assert rollback.kept(machine.host) == FIRST
    assert rollback.delete(machine.host, check_mode=True) is True
    assert rollback.delete(machine.host) is True
    assert rollback.delete(machine.host) is False


def test_killed_upgrade_does_not_replace_the_rollback_point(machine):
    machine.prove()
    machine.persist()
    machine.switch("2")
    assert machine.persist() == (FIRST, True)
    assert machine.persist() == (FIRST, True)


# columns: what happens after the killed upgrade; expected: whether the next upgrade still uses the first rollback point
AFTER = [
    (lambda machine: None, True),
    # A later run finished and proved the upgrade, so a later upgrade must return to the versions that run now.
    (lambda machine: machine.prove(), False),
    # The version to return to is damaged, or no longer on the host.
    (lambda machine: machine.write(f"{LIBRARY}/1/libvgpu.so", "damaged"), False),
    (lambda machine: (machine.root / PLUGIN.lstrip("/") / "1").rename(machine.root / "gone"), False),
    (lambda machine: machine.write(rollback.PATH, "torn {"), False),
    (lambda machine: machine.write(rollback.PATH, "{}"), False),
]


@pytest.mark.parametrize(("after", "counts"), AFTER)
def test_rollback_point_counts_until_a_newer_proof_or_a_lost_version(machine, after, counts):
    machine.prove()
    machine.persist()
    machine.switch("2")
    after(machine)
    point, resumed = machine.persist()
    assert (point["plugin"], resumed) == (("1", True) if counts else ("2", False))


def test_first_version_has_no_rollback_point(tmp_path, monkeypatch):
    monkeypatch.setattr(nvml, "read", lambda: {"gpus": [], "driver_version": None})
    bare = host(tmp_path)
    point, resumed = rollback.persist(bare, LIBRARY, PLUGIN, CONFIG, [UNIT], daemonset=DAEMON_SET)
    there = {"library": None, "plugin": None, "node_config": None, "configs": {}, "units": {UNIT: None}}
    assert point == {**there, "daemonset": {DAEMON_SET: None}}
    assert resumed is False


def test_rollback_point_keeps_only_valid_named_configurations(machine):
    machine.write("/etc/vgpu/configs/.half.yaml", "half")
    machine.write("/etc/vgpu/configs/notes.txt", "theirs")
    machine.write("/etc/vgpu/configs/small.yaml", "small")
    assert machine.persist()[0]["configs"] == {NAMED: "named 1", "/etc/vgpu/configs/small.yaml": "small"}


def test_record_without_named_configurations_keeps_those_of_the_host(machine):
    machine.prove()
    machine.persist()
    older = {key: value for key, value in FIRST.items() if key not in ("configs", "daemonset")}
    machine.write(rollback.PATH, json.dumps(older))
    machine.switch("2")
    point, resumed = machine.persist()
    assert (point, resumed) == ({**FIRST, "configs": None, "daemonset": {}}, True)
