# SPDX-License-Identifier: Apache-2.0
"""Controls docker on this host through one small interface: its unit, its command line, its API, reload and restart.

Queries go directly to the engine's socket (docker_api): Debian 13 has the docker command in a separate package, and
some versions of the command exit 0 while the daemon is down. Only ``restart`` may start a stopped daemon. A connection
to the socket would start the daemon through systemd's socket unit, so the socket is queried only while the service is
active.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import Any, Callable

from ..host import host as hardware
from . import docker_api

# dockerd's message if its socket unit is active and has no open socket. Seen on Ubuntu 24.04 after docker.io was
# removed and installed again.
SOCKETS_LOST = "no sockets found via socket activation"


class DockerHostError(Exception):
    """The daemon refused or failed."""


def run(arguments: list[str], timeout: float = 120.0) -> tuple[int, str]:
    try:
        done = subprocess.run(
            arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError:
        return 127, f"no program {arguments[0]}"
    except subprocess.TimeoutExpired:
        return 124, f"{arguments[0]} did not end within {timeout:.0f} s"
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


class DockerHost:
    """Controls docker on the real host; tests replace this object by another one."""

    def __init__(
        self, service: str = "docker", socket: Callable[[list[str]], str] = lambda argv: "", proc: str = "/proc"
    ) -> None:
        """``socket``: returns the path of the daemon's socket for the daemon's command line."""
        self.service, self.socket, self.proc = service, socket, proc

    def unit(self) -> dict[str, str]:
        """Returns systemd's LoadState, ActiveState, SubState, UnitFileState, MainPID and Result of the service; empty
        without systemd.
        """
        wanted = "LoadState,ActiveState,SubState,UnitFileState,MainPID,Result"
        code, text = run(["systemctl", "show", self.service + ".service", "--property", wanted])
        return dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line) if code == 0 else {}

    def facts(self) -> dict[str, bool]:
        """Returns the service's state by the names that the plan uses: present, masked, enabled, active, failed."""
        return hardware.unit_facts(self.unit())

    def active(self) -> bool:
        return self.facts()["active"]

    def enable(self) -> None:
        self.systemctl("enable")

    def argv(self) -> list[str]:
        """Returns the command line of the running daemon process, in which systemd has expanded the unit's variables.
        Empty if no daemon runs, or if systemd 255 or newer is still starting it: until then the process is
        systemd-executor, whose options are not the daemon's.
        """
        pid = self.unit().get("MainPID", "0")
        try:
            with open(os.path.join(self.proc, str(int(pid)), "cmdline"), "rb") as stream:
                words = [word.decode("utf-8", "replace") for word in stream.read().split(b"\0")[:-1]]
        except (OSError, ValueError):
            return []
        return words if words and "dockerd" in os.path.basename(words[0]) else []

    def info(self, timeout: float = docker_api.ANSWER_S) -> dict[str, Any] | None:
        """Returns the result of ``docker info``, or None if the daemon does not answer within ``timeout`` seconds."""
        return docker_api.info(self.socket(self.argv()), timeout) if self.active() else None

    def containers(self, answers: bool = True) -> list[str]:
        """Returns the names of the running containers. If the daemon does not answer, returns the ids that its shim
        processes show.
        """
        named = docker_api.containers(self.socket(self.argv())) if answers else None
        return shims(self.proc) if named is None else named

    def is_program(self, path: str) -> bool:
        return shutil.which(path, path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/usr/bin") is not None

    def validate(self, path: str, argv: list[str]) -> str | None:
        """Returns the error of ``dockerd --validate`` for a file. Returns None if there is no error, or if dockerd
        lacks the option (20.10).
        """
        program = shutil.which("dockerd", path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        if program is None:
            return None
        flags = without_config_file(argv[1:])
        # Without docker-proxy in PATH the check would fail even for a correct file.
        proxy = (
            [] if shutil.which("docker-proxy") or "--userland-proxy" in " ".join(flags) else ["--userland-proxy=false"]
        )
        code, text = run([program, "--validate", "--config-file", path, *flags, *proxy])
        if code == 0 or "unknown flag: --validate" in text:
            return None
        return text.splitlines()[-1] if text else f"exit status {code}"

    def reload(self) -> None:
        self.systemctl("reload")

    def restart(self) -> None:
        """Restarts the service. Stops and starts it together with its socket unit if systemd has lost the sockets."""
        self.forget_failures()
        try:
            self.systemctl("restart")
        except DockerHostError as fault:
            if SOCKETS_LOST not in str(fault):
                raise
            # The socket unit opens its sockets only when it starts, and systemd starts it only if the service is
            # stopped.
            run(["systemctl", "stop", self.service + ".service", self.service + ".socket"])
            self.forget_failures()
            self.systemctl("restart")

    def forget_failures(self) -> None:
        """Clears the unit's failure counter. systemd does not start a unit that failed several times in a minute."""
        run(["systemctl", "reset-failed", self.service + ".service"])

    def systemctl(self, verb: str) -> None:
        code, text = run(["systemctl", verb, self.service + ".service"])
        if code != 0:
            raise DockerHostError(
                f"systemctl {verb} {self.service}: exit status {code}: {text}\n{self.journal()}".strip()
            )

    def journal(self) -> str:
        """Returns up to eight of the daemon's last messages, without those of level info."""
        code, text = run(["journalctl", "-u", self.service + ".service", "-n", "40", "--no-pager", "-o", "cat"])
        lines = [line for line in text.splitlines() if code == 0 and ("level=" not in line or "level=info" not in line)]
        return "\n".join(lines[-8:])

    def wait(self, condition: Callable[[dict[str, Any]], bool], timeout: float) -> dict[str, Any]:
        """Returns the daemon's info once it meets the condition. Raises DockerHostError if that
        takes too long or the daemon failed.
        """
        end = time.monotonic() + timeout
        seen = None
        while True:
            info = self.info(max(1.0, end - time.monotonic()))
            if info is not None and condition(info):
                return info
            seen = info or seen
            if self.facts()["failed"] or time.monotonic() >= end:
                what = "answers, but has not applied the file" if seen else "does not answer"
                raise DockerHostError(f"the daemon {what} after {timeout:.0f} s\n{self.journal()}".strip())
            time.sleep(0.25)


def shims(proc: str = "/proc") -> list[str]:
    """Returns the first twelve digits of each docker container's id, from the shim processes, which run independently
    of the daemon. Their command line names docker's containerd namespace, moby. Before containerd 1.3 the id is in the
    path of the work folder.
    """
    found = []
    for pid in filter(str.isdigit, os.listdir(proc)):
        try:
            with open(os.path.join(proc, pid, "cmdline"), "rb") as stream:
                words = stream.read().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        options = dict(zip(words[1:], words[2:]))
        if os.path.basename(words[0]).startswith("containerd-shim") and options.get("-namespace") == "moby":
            found.append((options.get("-id") or os.path.basename(options.get("-workdir", "unknown")))[:12])
    return sorted(found)


def without_config_file(flags: list[str]) -> list[str]:
    kept, skip = [], False
    for flag in flags:
        if skip:
            skip = False
        elif flag == "--config-file":
            skip = True
        elif not flag.startswith("--config-file="):
            kept.append(flag)
    return kept
