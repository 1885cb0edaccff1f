# SPDX-License-Identifier: Apache-2.0
"""Tests that running containers are found by their containerd-shim processes, also if dockerd does not respond. Also
tests which commands a restart of docker runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import docker_host
from ansible_collections.vgpu.fleet.plugins.module_utils.engines.docker_host import DockerHost, DockerHostError

ID = "4f1c" * 16
# Command lines of containerd-shim processes: SHIM as a current containerd starts them, OLD as an old containerd does.
SHIM = "/usr/bin/containerd-shim-runc-v2 -namespace {} -id {} -address /run/containerd/containerd.sock"
OLD = "containerd-shim -namespace moby -workdir /var/lib/containerd/io.containerd.runtime.v1.linux/moby/{} -address /x"
# columns: command lines of the host's processes; expected container ids
HOSTS = [
    ([], []),
    (["/usr/bin/dockerd -H fd://", "/sbin/init"], []),
    ([SHIM.format("moby", ID), "sleep 100"], [ID[:12]]),
    ([SHIM.format("moby", "b" * 64), SHIM.format("moby", "a" * 64)], ["a" * 12, "b" * 12]),
    ([OLD.format(ID)], [ID[:12]]),
    # This host has no container of docker: the first process is the shim of a Kubernetes container, the second is a
    # grep.
    ([SHIM.format("k8s.io", ID), f"grep {SHIM.format('moby', ID)}"], []),
]


@pytest.mark.parametrize(("programs", "containers"), HOSTS)
@pytest.mark.parametrize("answers", [True, False])
def test_containers_of_a_daemon_that_does_not_answer(
    tmp_path: Path, programs: list[str], containers: list[str], answers: bool
) -> None:
    for pid, line in enumerate(programs, 100):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(line.replace(" ", "\0").encode() + b"\0")
    # Two folders of /proc must be skipped: 99 has no command line, because its process has just ended, and self has no
    # pid as its name.
    (tmp_path / "99").mkdir()
    (tmp_path / "self").mkdir()
    host = DockerHost(socket=lambda argv: str(tmp_path / "no socket"), proc=str(tmp_path))
    assert host.containers(answers) == containers


RESET = "systemctl reset-failed docker.service"
RESTART = "systemctl restart docker.service"
STOP = "systemctl stop docker.service docker.socket"
LOST = "failed to load listeners: no sockets found via socket activation: make sure the service was started by systemd"
OTHER = "unable to configure the Docker daemon with file /etc/docker/daemon.json"
# columns: the last message in docker's journal at each restart that fails; expected commands; whether docker runs
RESTARTS = [
    ([], [RESET, RESTART], True),
    ([OTHER], [RESET, RESTART], False),
    ([LOST], [RESET, RESTART, STOP, RESET, RESTART], True),
    ([LOST, LOST], [RESET, RESTART, STOP, RESET, RESTART], False),
]


@pytest.mark.parametrize(("faults", "commands", "runs"), RESTARTS)
def test_a_restart_opens_lost_sockets_again(
    monkeypatch: pytest.MonkeyPatch, faults: list[str], commands: list[str], runs: bool
) -> None:
    left, called = list(faults), []
    journal: list[str] = []

    def run(arguments: list[str], timeout: float = 120.0) -> tuple[int, str]:
        line = " ".join(arguments)
        if arguments[0] == "journalctl":
            return 0, "\n".join(journal)
        called.append(line)
        if line == RESTART and left:
            journal.append(left.pop(0))
            return 1, "Job for docker.service failed"
        return 0, ""

    monkeypatch.setattr(docker_host, "run", run)
    if runs:
        DockerHost().restart()
    else:
        with pytest.raises(DockerHostError, match=faults[-1]):
            DockerHost().restart()
    assert called == commands


DAEMON = "/usr/bin/dockerd -H fd:// --containerd=/run/containerd/containerd.sock"
# columns: command line of the service's main process (None: there is none); expected command line of the daemon
MAIN_PROCESSES = [
    (None, []),
    ("", []),
    (DAEMON, DAEMON.split()),
    ("/opt/docker/dockerd-current --debug", ["/opt/docker/dockerd-current", "--debug"]),
    ("/usr/lib/systemd/systemd-executor --deserialize 35 --log-level info --log-target journal", []),
]


@pytest.mark.parametrize(("line", "argv"), MAIN_PROCESSES)
def test_command_line_is_only_the_daemons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str | None, argv: list[str]
) -> None:
    if line is not None:
        (tmp_path / "4711").mkdir()
        (tmp_path / "4711" / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in line.split()))
    host = DockerHost(proc=str(tmp_path))
    monkeypatch.setattr(host, "unit", lambda: {"MainPID": "4711"})
    assert host.argv() == argv
