# SPDX-License-Identifier: Apache-2.0
"""Tests how the isolation check runs its probe (a program that tries to exceed the limits of a slice, a part of a GPU)
in a container of docker: start, time limit, removal, and the messages if docker hangs. A small program replaces the
docker client.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import runner as isolation_runner

IMAGE = "localhost/debian:12"


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Returns a function that writes a docker client. Each command of this client runs the given Python text, and the
    client writes its commands into the file ``calls``."""
    monkeypatch.setattr(isolation_runner, "ASK_S", 0.5)
    monkeypatch.setattr(isolation_runner, "START_S", 0.5)

    def make(**commands: str) -> str:
        program = tmp_path / "docker"
        defaults = {"info": "print('{}')", "create": "print('c1')", "image": "print('[{}]')"}
        table = {**defaults, **commands}
        program.write_text(
            f"#!{sys.executable} -S\nimport sys, time\n"
            f"open({str(tmp_path / 'calls')!r}, 'a').write(sys.argv[1] + '\\n')\n"
            f"exec({table!r}.get(sys.argv[1], ''))\n"
        )
        program.chmod(0o755)
        return str(program)

    return make


HANG = "time.sleep(600)"
# columns: behaviour of `docker image`; expected words of the reason why the image cannot be used ("": it can be used)
AT_HAND = [
    ("print('[{}]')", ""),
    ("print('[]')", f"docker has no local image {IMAGE}"),
    ("print('no JSON')", "answered no JSON"),
    ("sys.exit('No such image')", "No such image"),
]


@pytest.mark.parametrize(("image", "reason"), AT_HAND)
def test_missing_local_image_has_a_reason(docker, image, reason):
    found = isolation_runner.image_at_hand(docker(image=image), IMAGE)
    assert reason in found
    assert bool(found) == bool(reason)


HANGS = [
    # columns: name of the client, its arguments; expected pattern of the message
    ("docker", ["image", "inspect", IMAGE], "docker image inspect .*daemon.* systemctl status docker$"),
    ("docker", ["create", "--interactive"], "docker create did not"),
    ("ctr", ["--namespace", "ours", "tasks", "list"], "ctr tasks list .*containerd.* systemctl status containerd$"),
    ("podman", ["ps", "--all"], "podman ps did not .*no daemon"),
    ("my-docker", ["info"], "my-docker info did not .* hang"),
]


@pytest.mark.parametrize(("name", "words", "said"), HANGS, ids=[f"{one[0]} {one[1][0]}" for one in HANGS])
def test_message_of_a_hung_engine_names_its_service(docker, tmp_path, name, words, said):
    program = tmp_path / name
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    with pytest.raises(isolation_runner.EngineHangs, match=said) as fault:
        isolation_runner.ask_engine(str(program), *words)
    assert fault.value.program == str(program)
    assert "--namespace" not in str(fault.value)


STARTS = [
    # columns: label, behaviour of docker's commands; expected words of the message
    ("daemon that hangs at info", {"info": HANG}, "docker info did not answer within"),
    ("daemon that hangs at create", {"create": HANG}, "docker create did not answer within"),
    ("container without a pid", {"start": HANG, "inspect": "print(0)"}, "no process within"),
    ("daemon that hangs at inspect", {"start": HANG, "inspect": HANG}, "docker inspect did not answer within"),
    ("inspect whose output is not a number", {"start": HANG, "inspect": "print('x')"}, "docker inspect answered 'x'"),
    ("container that does not start", {"start": "sys.exit('no such shell')", "inspect": "print(0)"}, "no such shell"),
]


@pytest.mark.parametrize(("about", "commands", "sentence"), STARTS, ids=[one[0] for one in STARTS])
def test_docker_that_does_not_answer(docker, tmp_path, about, commands, sentence):
    program = docker(**commands)
    with pytest.raises(isolation_runner.RunnerError, match=sentence):
        isolation_runner.DockerRunner(program, IMAGE, [], {}).run(["true"], 60.0)
    calls = (tmp_path / "calls").read_text().split()
    assert ("rm" in calls) == ("create" in calls and commands.get("create") != HANG)
    assert not children()


def test_hung_removal_keeps_the_result(docker):
    inspect = f"print({os.getpid()})"
    runner = isolation_runner.DockerRunner(
        docker(start="print(sys.stdin.readline())", inspect=inspect, rm=HANG), IMAGE, [], {}
    )
    outcome = runner.run(["true"], 60.0)
    assert (outcome.rc, outcome.out.strip(), outcome.timed_out) == (0, "go", False)
    # The wait for the removal counts as overhead, so a check with a time limit starts fewer runs.
    assert runner.overhead_s > isolation_runner.ASK_S


# A simulated `docker start` that leaves a process, which no command to the docker daemon ends.
LIVES = """
import os
pid = os.fork()
if pid == 0:
    os.setsid()
    os.execvp('sleep', ['sleep', '600'])
with open({path!r} + '.new', 'w') as out:
    out.write(str(pid))
os.rename({path!r} + '.new', {path!r})
time.sleep(600)
"""


@pytest.mark.parametrize("theirs", [False, True], ids=["process of the slice", "process of another namespace"])
def test_program_that_the_daemon_does_not_end(docker, tmp_path, monkeypatch, theirs):
    """A process that survives the removal of its container still uses the slice. It is killed, but only if its
    namespace proves that it belongs to the container."""
    path = str(tmp_path / "pid")
    program = docker(
        start=LIVES.format(path=path),
        inspect=f"import os; print(open({path!r}).read() if os.path.exists({path!r}) else 0)",
    )
    monkeypatch.setattr(isolation_runner, "ASK_S", 3.0)
    monkeypatch.setattr(isolation_runner, "START_S", 60.0)
    asked = []

    def namespace_of(pid: int) -> str:
        if pid == os.getpid():
            return "mnt:[host]"
        asked.append(pid)
        return "" if is_gone(pid) else "mnt:[other]" if theirs and len(asked) > 1 else "mnt:[container]"

    monkeypatch.setattr(isolation_runner, "namespace_of", namespace_of)
    runner = isolation_runner.DockerRunner(program, IMAGE, [], {})
    with pytest.raises(isolation_runner.RunnerError, match="kill did not end the container c1"):
        runner.run(["true"], 0.1)
    pid = int((tmp_path / "pid").read_text())
    gone = is_gone(pid)
    if not gone:
        os.kill(pid, signal.SIGKILL)
    assert gone == (not theirs)


def is_gone(pid: int) -> bool:
    """Returns whether a process has exited. A zombie counts as exited, because it uses no memory any more."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stream:
            return stream.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def children() -> str:
    """Returns the command lines of this process's children that contain "docker", including zombies."""
    done = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True, check=False
    )
    return "\n".join(line for line in done.stdout.splitlines() if "docker" in line)
