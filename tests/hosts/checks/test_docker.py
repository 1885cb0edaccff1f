# SPDX-License-Identifier: Apache-2.0
"""Runs the role container_runtime on a real dockerd, with users' daemon.json files and with daemons that refuse a
setting. With each file the role runs in check mode, then twice to apply its change, and then to undo it. Docker itself
reports the daemon's settings; the tests compare the files byte for byte.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import INVENTORY, ROOT, Node, environment, play_command
from simhosts.hardware import IMAGE_NAME

HOST = "gpu-t4-1"
PATH = "/etc/docker/daemon.json"
DROP_IN = "/etc/systemd/system/docker.service.d/theirs.conf"
# Without these keys the daemon needs netfilter modules, which a container cannot load.
NEEDED = '"bridge": "none", "iptables": false'
ROLE = "vgpu.fleet.container_runtime"


@dataclass(frozen=True)
class Run:
    """One run of the role."""

    code: int
    output: str

    @property
    def said(self) -> str:
        return " ".join(self.output.split())

    @property
    def changed(self) -> bool:
        return "changed=0 " not in self.output.splitlines()[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plays")


@pytest.fixture(scope="module")
def node(nodes: dict[str, Node], folder: Path) -> Node:
    """A host with docker and NVIDIA's runtime, whose daemon.json has no key of the role."""
    node = nodes[HOST]
    ready = run(folder, "vgpu.fleet.nvidia_docker")
    assert ready.code == 0, ready.output
    node.shell("DEBIAN_FRONTEND=noninteractive apt-get -qq install -y docker.io >/dev/null")
    return node


def run(folder: Path, role: str = ROLE, *options: str, host: str = HOST, **variables: Any) -> Run:
    play = [{"hosts": host, "gather_facts": False, "tasks": [{"ansible.builtin.import_role": {"name": role}}]}]
    (folder / "play.yml").write_text(yaml.safe_dump(play))
    (folder / "vars.json").write_text(json.dumps(variables))
    command = [*play_command("site.yml", INVENTORY)]
    command[1] = str(folder / "play.yml")
    done = subprocess.run(
        [*command, "--extra-vars", f"@{folder / 'vars.json'}", *options],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Run(done.returncode, done.stdout.strip())


def lay_out(node: Node, text: str | None) -> None:
    """Writes a user's daemon.json and starts docker with it."""
    node.shell(
        f"rm -rf {PATH} /srv/docker.json {DROP_IN} /var/lib/vgpu/baseline/daemon.json /run/vgpu-docker-daemon.pending"
    )
    if text is not None:
        node.write(PATH, text)
    restart(node)


def restart(node: Node) -> None:
    node.shell("systemctl daemon-reload; systemctl reset-failed docker.service docker.socket; systemctl restart docker")


def facts(node: Node, path: str = PATH) -> str:
    """Returns two lines: kind, mode, owner and name of a file, and its content in base64."""
    return node.shell(f"stat -c '%F %a %u:%g %N' {path}; base64 -w0 {path}")


def default_runtime(node: Node) -> str:
    return node.run("docker", "info", "--format", "{{.DefaultRuntime}}").strip()


def pid(node: Node) -> str:
    return node.run("systemctl", "show", "docker.service", "--property=MainPID", "--value").strip()


FOREIGN = """\
{
\t"log-opts": {"max-size": "10m", "labels": "größe,日本"},
\t"bridge":   "none",   "iptables": false,
\t"max-concurrent-downloads": 3,
\t"registry-mirrors": ["https://mirror.example/"],
\t"labels": ["place=a<b>&c"],
\t"runtimes": {"other": {"path": "/usr/bin/env", "runtimeArgs": ["-i"]}}
}
"""
# columns: the case, text of daemon.json, command that changes the file's kind or owner; expected keys and values
FILES: list[tuple[str, str | None, str, dict[str, Any]]] = [
    ("plain", "{" + NEEDED + "}\n", "", {"bridge": "none", "iptables": False}),
    ("foreign keys, tabs and unicode", FOREIGN, "", {**json.loads(FOREIGN)}),
    ("no final newline", "{" + NEEDED + "}", "", {"bridge": "none"}),
    (
        "a symbolic link",
        "{" + NEEDED + "}\n",
        f"mv {PATH} /srv/docker.json && ln -s /srv/docker.json {PATH}",
        {"bridge": "none"},
    ),
    ("another owner and mode", "{" + NEEDED + "}\n", f"chown 1000:100 {PATH}; chmod 600 {PATH}", {"bridge": "none"}),
]


@pytest.mark.parametrize("name, text, special, stays", FILES, ids=[row[0] for row in FILES])
def test_check_apply_repeat_undo(
    node: Node, folder: Path, name: str, text: str | None, special: str, stays: dict[str, Any]
) -> None:
    lay_out(node, text)
    if special:
        node.shell(special)
    before, daemon = facts(node), pid(node)

    foretold = run(folder, ROLE, "--check", "--diff")
    assert (foretold.code, foretold.changed, facts(node)) == (0, True, before), foretold.output
    assert "default-runtime" in foretold.output

    applied = run(folder)
    assert (applied.code, applied.changed) == (0, True), applied.output
    assert default_runtime(node) == "nvidia"
    # Adding a runtime needs only a reload: the daemon's process is the same.
    assert pid(node) == daemon
    written = json.loads(node.read(PATH))
    for key, value in stays.items():
        if isinstance(value, dict):
            assert {one: written[key].get(one) for one in value} == value
        else:
            assert written[key] == value
    assert list(written)[: len(json.loads(text or "{}"))] == list(json.loads(text or "{}")), (
        "expected the keys in the order of the former file"
    )
    # The role must not change the file's kind, mode and owner, which are in the first line of facts().
    assert facts(node).splitlines()[0] == before.splitlines()[0]

    again = run(folder)
    assert (again.code, again.changed) == (0, False), again.output

    undone = run(folder, container_runtime_state="absent")
    assert undone.code == 0, undone.output
    assert facts(node) == before
    assert default_runtime(node) == "runc"


@pytest.mark.parametrize("text", [None, "", "\n", "\ufeff{}"], ids=["no file", "empty", "blank", "byte order mark"])
def test_role_configures_docker_if_the_file_has_no_keys(node: Node, folder: Path, text: str | None) -> None:
    """The file is missing or has no keys. Docker cannot start with it on these hosts (see NEEDED), so docker is started
    with another file before. docker 20.10 cannot start with a byte order mark, so the role writes none."""
    lay_out(node, "{" + NEEDED + "}\n")
    node.shell(f"rm {PATH}")
    if text is not None:
        node.write(PATH, text)
    extra = {"bridge": "none", "iptables": False}
    applied = run(folder, container_runtime_docker_extra=extra)
    assert applied.code == 0, applied.output
    assert default_runtime(node) == "nvidia"
    assert json.loads(node.read(PATH))["bridge"] == "none"


# columns: the case, text of daemon.json, options of dockerd in its unit, variables of the role; expected words in the
# message. In each case the role must neither change the file nor stop the daemon.
REFUSED: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("invalid JSON", "{" + NEEDED + ',\n  "log-driver": "local"\n  "debug": true}\n', "", {}, "line 3, column 3"),
    ("a comment", "{" + NEEDED + "\n  // ours\n}\n", "", {}, "JSON has no comments"),
    ("a list instead of an object", "[]\n", "", {}, "expected an object in braces"),
    (
        "-H in the unit and hosts in the file",
        "{" + NEEDED + "}\n",
        "-H fd:// --containerd=/run/containerd/containerd.sock",
        {"container_runtime_docker_extra": {"hosts": ["tcp://127.0.0.1:2375"]}, "container_runtime_restart": "always"},
        "hosts",
    ),
    (
        "default-runtime in the unit",
        "{" + NEEDED + "}\n",
        "-H fd:// --containerd=/run/containerd/containerd.sock --default-runtime=runc",
        {},
        "default-runtime",
    ),
    (
        "an undefined default runtime",
        "{" + NEEDED + "}\n",
        "",
        {"container_runtime_default_runtime": "nvidai"},
        "nvidai",
    ),
    (
        "a runtime whose program is missing",
        "{" + NEEDED + "}\n",
        "",
        {"container_runtime_runtimes": {"nvidia": {"path": "/usr/bin/no-such-runtime"}}},
        "/usr/bin/no-such-runtime",
    ),
]


@pytest.mark.parametrize("name, text, flags, variables, words", REFUSED, ids=[row[0] for row in REFUSED])
def test_refused_before_anything_is_changed(
    node: Node, folder: Path, name: str, text: str, flags: str, variables: dict[str, Any], words: str
) -> None:
    lay_out(node, "{" + NEEDED + "}\n")
    if flags:
        node.run("mkdir", "-p", DROP_IN.rpartition("/")[0])
        node.write(DROP_IN, f"[Service]\nExecStart=\nExecStart=/usr/sbin/dockerd {flags}\n")
        restart(node)
    node.write(PATH, text)
    before, daemon = facts(node), pid(node)
    refused = run(folder, **variables)
    assert refused.code != 0, refused.output
    assert words in refused.said
    assert "Traceback" not in refused.output
    assert (facts(node), pid(node)) == (before, daemon)
    assert default_runtime(node) == "runc"


def test_the_former_file_returns_if_the_daemon_does_not_start(node: Node, folder: Path) -> None:
    lay_out(node, "{" + NEEDED + "}\n")
    before = facts(node)
    # No check before the start can detect an invalid storage driver.
    extra = {"container_runtime_docker_extra": {"storage-driver": "nonsense"}, "container_runtime_restart": "always"}
    failed = run(folder, **extra)
    assert failed.code != 0
    assert "the former file is back; docker runs with it" in failed.said
    assert facts(node) == before
    assert node.run("systemctl", "is-active", "docker.service").strip() == "active"
    assert default_runtime(node) == "runc"
    healed = run(folder)
    assert healed.code == 0, healed.output
    assert default_runtime(node) == "nvidia"


@pytest.fixture
def theirs(node: Node) -> Iterator[str]:
    """A running container of another user."""
    lay_out(node, "{" + NEEDED + "}\n")
    node.run("systemctl", "start", "vgpu-demo-image.service")
    node.run("docker", "run", "--detach", "--name", "theirs", IMAGE_NAME, "sleep", "100000")
    yield "theirs"
    node.run("docker", "rm", "--force", "theirs", check=False)


def running(node: Node) -> bool:
    return node.run("docker", "inspect", "--format", "{{.State.Status}}", "theirs").strip() == "running"


def test_the_restart_policy_decides_whether_docker_restarts(node: Node, folder: Path, theirs: str) -> None:
    needs_restart = {"container_runtime_docker_extra": {"log-driver": "local"}}
    before, daemon = facts(node), pid(node)

    for policy, words in (("if_idle", theirs), ("never", "restart is never")):
        refused = run(folder, container_runtime_restart=policy, **needs_restart)
        assert refused.code != 0
        assert words in refused.said
        assert (facts(node), pid(node), running(node)) == (before, daemon, True)

    allowed = run(folder, container_runtime_restart="always", **needs_restart)
    assert allowed.code == 0, allowed.output
    assert pid(node) != daemon
    assert not running(node)


def test_containers_of_a_hanging_daemon_prevent_a_restart(node: Node, folder: Path, theirs: str) -> None:
    """With live-restore, containers continue to run while the daemon does not respond, and a restart would kill them.
    The role finds these containers by their processes."""
    before, daemon = facts(node), pid(node)
    identity = node.run("docker", "inspect", "--format", "{{.Id}}", theirs).strip()
    node.run("kill", "-STOP", daemon)
    try:
        refused = run(folder)
    finally:
        node.run("kill", "-CONT", daemon)
    assert refused.code != 0
    assert (
        f"(keys: of a daemon that does not answer) and would stop the running containers {identity[:12]}"
        in refused.said
    )
    assert (facts(node), pid(node), running(node)) == (before, daemon, True)


def test_live_restore_keeps_containers_over_a_restart(node: Node, folder: Path, theirs: str) -> None:
    # A reload activates live-restore, so containers survive the restart that follows.
    prepared = run(folder, container_runtime_docker_extra={"live-restore": True})
    assert prepared.code == 0, prepared.output
    daemon = pid(node)
    done = run(folder, container_runtime_docker_extra={"live-restore": True, "log-driver": "local"})
    assert done.code == 0, done.output
    assert pid(node) != daemon
    assert running(node)
