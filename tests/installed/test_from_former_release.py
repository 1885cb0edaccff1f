# SPDX-License-Identifier: Apache-2.0
"""Upgrades a host that the former release installed from a checkout, while a pod runs on it. The former inventory is
first refused and then rewritten to the new names. The tests depend on each other."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import former
import pytest
import yaml
from conftest import Node
from controller import GROUP, HOST, ROOT, Controller
from simhosts.slice import docker_command

pytestmark = pytest.mark.skipif(not former.has_history(), reason=former.NO_HISTORY)

SPLIT = {"vgpu_split_count": 7}
# Variables of the former release, and the variables of this release that replace them.
OLD = {"nvidia_docker_environment": {"NO_PROXY": "*"}, "device_plugin_rivals_remove": []}
NEW = {"vgpu_package_environment": {"NO_PROXY": "*"}, "device_plugin_conflicting_plugins_remove": []}
POD = "work"


@pytest.fixture(scope="module")
def former_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpacks the former release and returns the collections path. Its playbooks need the compilers of this machine."""
    folder = tmp_path_factory.mktemp("former")
    tree = folder / "ansible_collections" / "vgpu" / "fleet"
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", former.COMMIT], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    return folder


def play_former(folder: Path, playbook: str, variables: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Runs a playbook of the former release with these group variables."""
    tree = folder / "ansible_collections" / "vgpu" / "fleet"
    (folder / "hosts.yml").write_text(yaml.safe_dump({"gpu_nodes": {"hosts": {HOST: {}}, "vars": variables}}))
    return subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            *("-i", str(folder / "hosts.yml")),
            str(tree / "playbooks" / playbook),
        ],
        cwd=folder,
        env={**os.environ, "ANSIBLE_CONFIG": str(tree / "ansible.cfg"), "ANSIBLE_COLLECTIONS_PATH": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def pod(node: Node, former_release: Path) -> str:
    """Installs the former release on the host and starts a pod there; returns when the pod's container started."""
    done = play_former(former_release, "site.yml", {**GROUP, **SPLIT, **OLD})
    assert done.returncode == 0, done.stdout
    answer = json.loads(node.shell(f"vgpu-kubelet-double run-pod --name {POD} --json --count 1"))["answer"]
    node.shell(shlex.join(docker_command(answer, ["sleep", "infinity"], "--detach", "--name", POD)))
    return started(node)


def started(node: Node) -> str:
    return node.shell("docker inspect --format '{{.State.Running}} {{.State.StartedAt}} {{.State.Pid}}' " + POD)


def test_former_names_are_refused_with_the_new_names(controller: Controller, node: Node, pod: str) -> None:
    before = node.snapshot()
    played = controller.play("upgrade", **SPLIT, **OLD)
    assert played.code != 0, played.output
    # The default callback prints the message as JSON.
    output = " ".join(played.output.replace("\\", "").split())
    for old, new in zip(OLD, NEW, strict=True):
        assert f'"{old}" is no longer a variable; set "{new}" in its place' in output, played.output
    assert node.snapshot() == before


def test_upgrade_leaves_the_pod_running(controller: Controller, node: Node, pod: str) -> None:
    played = controller.play("upgrade", **SPLIT, **NEW)
    assert played.code == 0, played.output
    assert started(node) == pod
    assert node.slices() == 7 * 2
    again = controller.play("site", **SPLIT, **NEW)
    assert (again.code, again.counters["changed"]) == (0, 0), again.output


def test_new_pod_gets_the_files_of_this_release(node: Node, pod: str) -> None:
    answer = json.loads(node.shell("vgpu-kubelet-double run-pod --name next --json --count 1"))["answer"]
    node.shell("vgpu-kubelet-double delete-pod --name next")
    assert "/dev/vgpu/lib" in [mount["container_path"] for mount in answer["mounts"]]
    assert started(node) == pod


def test_teardown_removes_what_both_releases_installed(controller: Controller, node: Node, pod: str) -> None:
    node.shell(f"docker rm --force {POD}; vgpu-kubelet-double delete-pod --name {POD}")
    played = controller.play("teardown", **SPLIT, **NEW)
    assert played.code == 0, played.output
    assert node.shell("ls -d /usr/local/lib/vgpu /opt/vgpu/plugin /etc/vgpu 2>/dev/null || true") == ""
