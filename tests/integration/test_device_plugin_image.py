# SPDX-License-Identifier: Apache-2.0
"""Tests that the role device_plugin builds its image on the controller with a real podman, copies it to a node and
loads it there. The node is this machine with a separate image store. A stand-in for sudo logs which commands ran as
root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("podman") or not shutil.which("mmdebstrap"),
        reason="needs root, podman and mmdebstrap: `make test` installs them",
    ),
]
TAG = "localhost/vgpu-device-plugin:test-of-the-role"
# Ansible calls this script as sudo: options, then the shell and its command.
SUDO = '#!/bin/sh\nwhile [ "$1" != /bin/sh ]; do shift; done\nexport VGPU_SUDO=1\nexec "$@"\n'
LOGGED = '#!/bin/sh\necho "{who} ${{VGPU_SUDO:-0}} $*" >>{log}\nexec podman {options} "$@"\n'


class Node:
    """A node with its own image store on this machine, and a log of every call of an engine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        # `podman system reset` also deletes the folder of podman's state, which the store records at its first use.
        # At its default path that folder has the machine's own state, and podman would lose every running container,
        # including simulated hosts. A reset also deletes root's networks, which belong to no store, so the test's
        # networks have a separate folder.
        self.store = ["--root", f"{folder}/store", "--runroot", f"{folder}/run", "--tmpdir", f"{folder}/tmp"]
        self.store += ["--network-config-dir", f"{folder}/networks"]
        self.engine = self.program("engine", LOGGED.format(who="node", log=self.log, options=" ".join(self.store)))
        # image.py finds podman by its name.
        self.builder = self.program("podman-here", LOGGED.format(who="controller", log=self.log, options=""))
        self.sudo = self.program("sudo", SUDO)
        self.log.touch()

    def program(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    def asked(self) -> set[tuple[str, str, str]]:
        """Returns (the engine's owner, "1" if root, verb) of all calls since the last call of this function."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        self.log.write_text("")
        return {(words[0], words[1], words[2]) for words in lines}

    def image(self) -> dict:
        words = ["podman", *self.store, "image", "inspect", TAG]
        return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)[0]


@pytest.fixture
def node():
    # podman refuses a run folder of more than 50 characters.
    folder = Path(tempfile.mkdtemp(prefix="vgpu-", dir="/tmp"))
    made = Node(folder)
    yield made
    subprocess.run(["podman", "image", "rm", "--force", TAG], capture_output=True, check=False)
    subprocess.run(["podman", *made.store, "system", "reset", "--force"], capture_output=True, check=False)
    shutil.rmtree(folder, ignore_errors=True)


def nameless() -> set[str]:
    words = ["podman", "images", "--all", "--filter", "dangling=true", "--quiet", "--no-trunc"]
    return set(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())


def bring(place, node: Node, version: str):
    place.hosts({"some": ["one"]})
    # The tests run as root already, so Ansible would not call sudo by default.
    place.write("ansible.cfg", "[privilege_escalation]\nbecome_allow_same_user = true\n")
    given = {
        "__device_plugin_look": {"arch": os.uname().machine, "python": sys.executable},
        "device_plugin_version": version,
        "device_plugin_cache": str(place.folder / "cache"),
        "device_plugin_image": TAG,
        "device_plugin_image_builder": node.builder,
        "__device_plugin_image_list": [node.engine, "image", "ls", "-q", TAG],
        "__device_plugin_image_load": [node.engine, "load", "-q", "-i"],
        "ansible_become_exe": node.sudo,
    }
    role = {"name": "vgpu.fleet.device_plugin", "tasks_from": "image"}
    step = {"name": "Bring", "ansible.builtin.import_role": role, "vars": given}
    # As in site.yml, every task runs as root unless the task itself sets another user.
    return place.play([{"name": "Image", "hosts": "all", "gather_facts": False, "become": True, "tasks": [step]}])


def test_role_builds_copies_and_loads_its_image(place, node) -> None:
    before = nameless()
    first = bring(place, node, "1.0-a")
    assert first.code == 0, first.output
    asked = node.asked()
    assert {one for one in asked if one[0] == "node"} == {("node", "1", "image"), ("node", "1", "load")}
    # On the controller no command runs as root: the image is in the user's own podman.
    assert {one[1] for one in asked if one[0] == "controller"} == {"0"}
    assert ("controller", "0", "build") in asked
    former = node.image()["Id"]
    assert not Path("/var/lib/vgpu-incoming").exists(), "expected no archive of the image on the node"

    again = bring(place, node, "1.0-a")
    assert again.code == 0 and "changed=0 " in again.output, again.output
    assert node.asked() == {("node", "1", "image")}

    # A node without the image gets the existing file: nothing is built.
    subprocess.run(["podman", *node.store, "image", "rm", TAG], capture_output=True, check=True)
    lost = bring(place, node, "1.0-a")
    assert lost.code == 0, lost.output
    assert node.asked() == {("node", "1", "image"), ("node", "1", "load")}
    assert node.image()["Id"] == former

    # The new image gets the name of the former image. The controller removes the former image, which has no name now.
    subprocess.run(["podman", *node.store, "image", "rm", TAG], capture_output=True, check=True)
    other = bring(place, node, "1.0-b")
    assert other.code == 0, other.output
    assert node.image()["Id"] != former
    assert nameless() <= before
    mounted = subprocess.run(["podman", *node.store, "image", "mount", TAG], capture_output=True, text=True, check=True)
    current = Path(mounted.stdout.strip()) / "opt/vgpu/plugin/current"
    assert os.readlink(current) == "1.0-b"
    assert (current / "bin/vgpu-device-plugin").exists()
    subprocess.run(["podman", *node.store, "image", "unmount", TAG], capture_output=True, check=True)
