# SPDX-License-Identifier: Apache-2.0
"""Runs programs in a leased slice (share of a GPU) with docker, with podman or in a mount namespace. A program gets
only the mounts, devices and variables with which the device plugin answers an Allocate call. engines.py chooses the
engine and the container's image; containerd.py runs programs with containerd.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from typing import Any, Callable, Sequence

from ..host import run_id
from ..host.mount_namespace import LOOK_S, Mount, NamespaceError, Outcome, gpu_nodes, run
from .observer import namespace_of

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LABEL = "vgpu.isolation"
# Seconds to wait for one reply of an engine. An engine without a reply in this time counts as hanging.
ASK_S = 60.0
# Seconds to wait until a started container has a pid.
START_S = 60.0
# Seconds until a killed process is gone and has released its GPU memory.
GONE_S = 10.0
# Script of the container's shell: it waits until the host has inspected the container, then execs the program.
SHELL = "/bin/sh"
WAIT_FOR_GO = 'read -r go && [ "$go" = go ] && exec "$0" "$@"'
# Maps each client to the likely cause and the next step if its engine does not answer.
NEXT_STEPS = {
    "docker": "does docker's daemon hang? see: systemctl status docker",
    "ctr": "does containerd hang? see: systemctl status containerd",
    "podman": "it has no daemon; does another podman hold its lock? see: pgrep -a podman",
}


class RunnerError(Exception):
    """A program could not be started in the slice; the text says what is missing."""


class EngineHangs(RunnerError):
    """An engine did not answer in time; the next call would wait as long again. ``program``: its client."""

    def __init__(self, program: str, message: str) -> None:
        self.program = program
        super().__init__(message)


def _nothing(_pid: int) -> None:
    return


class NamespaceRunner:
    """Runs programs in a mount namespace of the host, without a container runtime."""

    name = "namespace"
    # Seconds that the last run took in addition to its program: before the program began and after it had ended.
    overhead_s = 0.0

    def __init__(self, mounts: Sequence[Mount], minors: Sequence[int], environment: dict[str, str]) -> None:
        self._mounts = list(mounts)
        self._devices = gpu_nodes(minors)
        self._environment = dict({"PATH": PATH, "HOME": "/"}, **environment)

    def run(
        self,
        argv: Sequence[str],
        timeout: float,
        before_start: Callable[[int], None] = _nothing,
        while_running: Callable[[int], None] = _nothing,
    ) -> Outcome:
        try:
            return run(argv, self._mounts, self._devices, self._environment, timeout, before_start, while_running)
        except NamespaceError as fault:
            raise RunnerError(str(fault)) from None


class EngineRunner:
    """Runs programs in a container of an engine: the container starts a shell that waits, the host inspects the
    container, then the shell executes the program.
    """

    name = "engine"
    overhead_s = 0.0
    # Pid and mount namespace of the container's first process during a run.
    _first = (0, "")

    def _create(self, argv: Sequence[str]) -> str:
        """Creates the container and returns its name. No program of the container runs yet."""
        raise NotImplementedError

    def _start(self, container: str, argv: Sequence[str]) -> list[str]:
        """Returns the command that starts the container, forwards its streams and ends with its exit status."""
        raise NotImplementedError

    def _pid_now(self, container: str) -> int:
        """Returns the host's pid of the container's first process, 0 if it does not exist yet."""
        raise NotImplementedError

    def _kill(self, container: str) -> None:
        raise NotImplementedError

    def _remove(self, container: str) -> None:
        """Removes the container, whether it runs or not. Reports no fault, because the container may already
        be gone.
        """
        raise NotImplementedError

    def run(
        self,
        argv: Sequence[str],
        timeout: float,
        before_start: Callable[[int], None] = _nothing,
        while_running: Callable[[int], None] = _nothing,
    ) -> Outcome:
        begun, ran = time.monotonic(), 0.0
        container = self._create(argv)
        try:
            outcome, ran = self._run(container, argv, timeout, before_start, while_running)
            return outcome
        finally:
            self._remove(container)
            self._end()
            if ran:
                self.overhead_s = time.monotonic() - begun - ran

    def _run(
        self,
        container: str,
        argv: Sequence[str],
        timeout: float,
        before_start: Callable[[int], None],
        while_running: Callable[[int], None],
    ) -> tuple[Outcome, float]:
        """Returns the outcome, and the seconds for which the program ran."""
        seconds = 0.0
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            attached: Any = subprocess.Popen(
                self._start(container, argv), stdin=subprocess.PIPE, stdout=out, stderr=err
            )
            try:
                pid = self._pid(container, attached)
                if pid:
                    self._first = (pid, namespace_of(pid))
                    before_start(pid)
                seconds = time.monotonic()
                try:
                    attached.stdin.write(b"go\n")
                    attached.stdin.close()
                except BrokenPipeError:
                    pid = 0  # The container did not start; the engine's message is on the client's stderr.
                timed_out = self._wait(container, attached, pid, timeout, while_running)
                seconds = time.monotonic() - seconds
            finally:
                if attached.poll() is None:
                    attached.kill()
                    attached.wait()
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read().decode("utf-8", "replace"))
        if not pid:
            raise RunnerError(f"{self.name} start: {' '.join(texts[1].split())}; the image needs {SHELL} and glibc")
        return Outcome(attached.returncode, texts[0], texts[1], timed_out), seconds

    def _wait(
        self, container: str, attached: Any, pid: int, timeout: float, while_running: Callable[[int], None]
    ) -> bool:
        """Waits until the engine's client program ends; returns whether it exceeded its time. Raises RunnerError if the
        client still runs after its container was killed.
        """
        deadline = time.monotonic() + timeout
        timed_out = False
        while attached.poll() is None:
            if not timed_out and time.monotonic() > deadline:
                timed_out = True
                self._kill(container)
                deadline = time.monotonic() + ASK_S
            elif timed_out and time.monotonic() > deadline:
                raise RunnerError(f"{self.name} kill did not end the container {container} within {ASK_S:.0f} s")
            if pid:
                while_running(pid)
            time.sleep(LOOK_S)
        return timed_out

    def _end(self) -> None:
        """If a hanging engine did not end the container, kills the container's first process, which ends all its
        processes. This must happen before the slice is released, because a pod must not get a slice whose memory is
        still in use. The mount namespace identifies the process, because its pid may have been reused.
        """
        (pid, inside), self._first = self._first, (0, "")
        if not inside or inside == namespace_of(os.getpid()) or namespace_of(pid) != inside:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + GONE_S
        while namespace_of(pid) == inside and time.monotonic() < deadline:
            time.sleep(0.02)

    def _pid(self, container: str, attached: Any) -> int:
        """Returns the host's pid of the container's shell, which waits for the start signal; 0 if it did not start."""
        deadline = time.monotonic() + START_S
        while attached.poll() is None:
            pid = self._pid_now(container)
            if pid:
                return pid
            if time.monotonic() > deadline:
                raise RunnerError(f"{self.name} start: the container {container} had no process within {START_S:.0f} s")
            time.sleep(0.02)
        return 0


class DockerRunner(EngineRunner):
    """Runs a container of a local image; never pulls an image. The container gets its GPU by docker's runtime
    ``nvidia``, or by CDI.
    """

    name = "docker"
    # The runtime that injects the GPU, used if the daemon knows it.
    runtime = "nvidia"

    def __init__(
        self,
        docker: str,
        image: str,
        mounts: Sequence[Mount],
        environment: dict[str, str],
        devices: Sequence[dict[str, Any]] = (),
        cdi_devices: Sequence[str] = (),
    ) -> None:
        self._docker = docker
        self._image = image
        self._options = ["--network", "none", "--pull", "never", "--label", f"{LABEL}={run_id.own()}"]
        for name, value in sorted(environment.items()):
            self._options += ["--env", f"{name}={value}"]
        for mount in mounts:
            access = ",readonly" if mount.read_only else ""
            self._options += ["--mount", f"type=bind,source={mount.host_path},target={mount.container_path}{access}"]
        for device in devices:
            spec = "{host_path}:{container_path}:{permissions}".format(**device)
            self._options += ["--device", spec]
        for name in cdi_devices:
            self._options += ["--device", name]
        if self.runtime and self.runtime in self._ask("info", "--format", "{{json .Runtimes}}"):
            self._options += ["--runtime", self.runtime]

    def _ask(self, *arguments: str) -> str:
        done = ask_engine(self._docker, *arguments)
        if done.returncode != 0:
            raise RunnerError(f"{self.name} {arguments[0]}: {done.stderr.strip()}")
        return done.stdout.strip()

    def _tell(self, *arguments: str) -> None:
        """Makes a call and ignores its failure, because the container may already be gone, and because another call
        reports a hanging daemon.
        """
        try:
            ask_engine(self._docker, *arguments)
        except RunnerError:
            return

    def _create(self, argv: Sequence[str]) -> str:
        command = ["create", "--interactive", *self._options, "--entrypoint", SHELL, self._image, "-c", WAIT_FOR_GO]
        return self._ask(*command, *argv)

    def _start(self, container: str, argv: Sequence[str]) -> list[str]:
        return [self._docker, "start", "--attach", "--interactive", container]

    def _pid_now(self, container: str) -> int:
        answer = self._ask("inspect", "--format", "{{.State.Pid}}", container)
        if not answer.isdigit():
            raise RunnerError(f"{self.name} inspect answered {answer!r}, expected the pid of the container")
        return int(answer)

    def _kill(self, container: str) -> None:
        self._tell("kill", container)

    def _remove(self, container: str) -> None:
        self._tell("rm", "--force", container)


class PodmanRunner(DockerRunner):
    """Runs a container of a local image with podman, which passes GPUs by CDI alone."""

    name = "podman"
    runtime = ""

    def __init__(
        self,
        docker: str,
        image: str,
        mounts: Sequence[Mount],
        environment: dict[str, str],
        devices: Sequence[dict[str, Any]] = (),
        cdi_devices: Sequence[str] = (),
    ) -> None:
        super().__init__(docker, image, mounts, environment, devices, cdi_devices)
        # Switch off SELinux labels for the container. Its root, the test program and the library are files of the host,
        # which do not have the label of container files.
        self._options += ["--security-opt", "label=disable"]

    def _remove(self, container: str) -> None:
        self._tell("rm", "--force", "--time", "0", container)


def ask_engine(program: str, *arguments: str, given: bytes | None = None) -> Any:
    """Calls an engine's client; returns the result of subprocess.run, with text. Raises EngineHangs if the engine does
    not answer, RunnerError if the client cannot be run.
    """
    try:
        done = subprocess.run([program, *arguments], input=given, capture_output=True, timeout=ASK_S, check=False)
    except subprocess.TimeoutExpired:
        name = os.path.basename(program)
        step = NEXT_STEPS.get(name, "does the engine hang?")
        said = f"{_command(name, arguments)} did not answer within {ASK_S:.0f} s; {step}"
        raise EngineHangs(program, said) from None
    except OSError as fault:
        raise RunnerError(f"{program} cannot be run: {fault.strerror}") from None
    texts = [one.decode("utf-8", "replace") for one in (done.stdout, done.stderr)]
    return subprocess.CompletedProcess(done.args, done.returncode, texts[0], texts[1])


def _command(name: str, arguments: Sequence[str]) -> str:
    """Returns the client and its command, without options, for use in a message."""
    words = list(arguments)
    while words and words[0].startswith("-"):
        words = words[2:]
    command = words[:1] + [one for one in words[1:2] if not one.startswith("-")]
    return " ".join([name, *command])


def image_at_hand(program: str, image: str) -> str:
    """Returns an empty text if a container of a local image can be run, else the reason. Raises RunnerError."""
    name = os.path.basename(program)
    if not image:
        return "no image is named"
    if not os.path.exists(program):
        return f"{program} does not exist"
    done = ask_engine(program, "image", "inspect", image)
    if done.returncode != 0:
        return f"{name} has no local image {image}: {done.stderr.strip()}"
    try:
        return "" if json.loads(done.stdout or "[]") else f"{name} has no local image {image}"
    except ValueError:
        return f"{name} image inspect answered no JSON: {done.stdout.strip()[:100]!r}"
