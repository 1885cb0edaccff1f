# SPDX-License-Identifier: Apache-2.0
"""Runs the role container_runtime on the real containerd of Debian 12 (1.6) and 13 (1.7): with users' configuration
files, with a daemon that refuses a file, and with site.yml on a node without docker. containerd itself reports the
active settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomllib
from conftest import Node, play
from test_docker import ROLE, Run
from test_docker import run as run_on

HOSTS = ["gpu-t4-1", "gpu-v100-1"]
# The containerd version of each Debian release.
VERSIONS = {"12": "1.6.", "13": "1.7."}
PATH = "/etc/containerd/config.toml"
CRI = "io.containerd.grpc.v1.cri"
ENGINE = {"container_runtime_engine": "containerd"}
COMMENTED = """\
# ask the platform team before you touch this: größe
version = 2
oom_score = -500   # last to go

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "registry.example/pause:3.9"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc" # ours
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = true
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plays")


def run(node: Node, folder: Path, role: str = ROLE, *options: str, **variables: Any) -> Run:
    return run_on(folder, role, *options, host=node.name, **variables)


@pytest.fixture(scope="module", params=HOSTS)
def node(request: pytest.FixtureRequest, nodes: dict[str, Node], folder: Path) -> Node:
    """A host with containerd and NVIDIA's runtime, whose configuration file the role has not changed."""
    node = nodes[request.param]
    ready = run(node, folder, "vgpu.fleet.nvidia_docker")
    assert ready.code == 0, ready.output
    node.shell("DEBIAN_FRONTEND=noninteractive apt-get -qq install -y containerd >/dev/null")
    release = node.shell(". /etc/os-release; echo $VERSION_ID").strip()
    if release in VERSIONS:
        assert node.run("containerd", "--version").split()[2].startswith(VERSIONS[release])
    return node


def lay_out(node: Node, text: str | None) -> None:
    node.shell(f"rm -f /var/lib/vgpu/baseline/containerd.json; test -f /root/theirs || cp {PATH} /root/theirs")
    if text is None:
        node.run("cp", "/root/theirs", PATH)
    else:
        node.write(PATH, text)
    node.shell("systemctl reset-failed containerd; systemctl restart containerd")


def facts(node: Node) -> str:
    return node.shell(f"stat -c '%F %a %u:%g' {PATH}; base64 -w0 {PATH}")


def pid(node: Node) -> str:
    return node.run("systemctl", "show", "containerd.service", "--property=MainPID", "--value").strip()


def in_force(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(node.run("containerd", "config", "dump"))["plugins"][CRI]
    return found


@pytest.mark.parametrize(
    "text", [None, COMMENTED, "version = 2\n"], ids=["package default", "comments and foreign keys", "version only"]
)
def test_check_apply_repeat_undo(node: Node, folder: Path, text: str | None) -> None:
    lay_out(node, text)
    before, daemon, lines = facts(node), pid(node), node.read(PATH).splitlines()

    foretold = run(node, folder, ROLE, "--check", "--diff", **ENGINE)
    assert (foretold.code, foretold.changed, facts(node)) == (0, True, before), foretold.output
    assert "default_runtime_name" in foretold.output

    applied = run(node, folder, **ENGINE)
    assert (applied.code, applied.changed) == (0, True), applied.output
    found = in_force(node)
    assert found["containerd"]["default_runtime_name"] == "nvidia"
    options = found["containerd"]["runtimes"]["nvidia"]["options"]
    assert options["BinaryName"] == "/usr/bin/nvidia-container-runtime"
    if text == COMMENTED:
        assert options["SystemdCgroup"] is True
        assert (found["sandbox_image"], found["cni"]["bin_dir"]) == ("registry.example/pause:3.9", "/usr/lib/cni")
    assert pid(node) != daemon
    gone = [line for line in lines if line not in node.read(PATH).splitlines()]
    assert [line.split("=")[0].strip() for line in gone] in ([], ["default_runtime_name"])

    again = run(node, folder, **ENGINE)
    assert (again.code, again.changed) == (0, False), again.output

    undone = run(node, folder, container_runtime_state="absent", **ENGINE)
    assert undone.code == 0, undone.output
    assert facts(node) == before
    # Without the role containerd has another default runtime, so the checks above can tell the difference.
    assert in_force(node)["containerd"]["default_runtime_name"] == "runc"


# columns: text of config.toml, variables of the role; expected words in the message
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("version = 2\n[plugins\n", {}, "line 2"),
    ("version = 3\n", {}, "leave its runtimes out without a word"),
    ('version = 2\ndisabled_plugins = ["cri"]\n', {}, "disabled_plugins"),
    ("version = 2\n", {"container_runtime_runtimes": {"nvidia": {"path": "/usr/bin/no-such"}}}, "/usr/bin/no-such"),
    ("version = 2\n", {"container_runtime_restart": "never"}, "restart is never"),
]


@pytest.mark.parametrize("text, variables, words", REFUSED, ids=[row[2] for row in REFUSED])
def test_refused_before_anything_is_changed(
    node: Node, folder: Path, text: str, variables: dict[str, Any], words: str
) -> None:
    lay_out(node, "version = 2\n")
    node.write(PATH, text)
    before, daemon = facts(node), pid(node)
    refused = run(node, folder, **ENGINE, **variables)
    assert refused.code != 0, refused.output
    assert words in refused.said
    assert "Traceback" not in refused.output
    assert (facts(node), pid(node)) == (before, daemon)


def test_the_former_file_returns_if_the_daemon_does_not_start(node: Node, folder: Path) -> None:
    lay_out(node, None)
    before = facts(node)
    # This containerd answers `config dump` but cannot start, so only the restart shows the fault.
    drop_in = "/etc/systemd/system/containerd.service.d/theirs.conf"
    node.run("mkdir", "-p", drop_in.rpartition("/")[0])
    node.write(drop_in, f"[Service]\nExecStartPre=/bin/sh -c '! grep -q nvidia {PATH}'\nRestart=no\n")
    node.run("systemctl", "daemon-reload")
    try:
        failed = run(node, folder, **ENGINE)
        assert failed.code != 0
        assert "the former file is back, and containerd runs with it" in failed.said
        assert facts(node) == before
        assert node.run("systemctl", "is-active", "containerd").strip() == "active"
    finally:
        node.shell(f"rm {drop_in}; systemctl daemon-reload")


def test_site_sets_up_a_node_without_docker(node: Node) -> None:
    lay_out(node, None)
    words = ["--limit", node.name, "-e", "container_runtime_engine=containerd", "-e", "verify_isolation_image="]
    done = play(*words)
    assert done.returncode == 0, done.stdout
    assert in_force(node)["containerd"]["default_runtime_name"] == "nvidia"
    assert node.run("dpkg-query", "-W", "-f", "${db:Status-Status}", "docker.io", check=False) != "installed"
    again = play(*words)
    assert again.returncode == 0, again.stdout
    assert re.search(rf"^{node.name}\s+: .*changed=0 ", again.stdout, re.MULTILINE), again.stdout
