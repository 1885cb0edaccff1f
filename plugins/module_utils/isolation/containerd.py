# SPDX-License-Identifier: Apache-2.0
"""Runs programs in a leased slice (share of a GPU) as a container of containerd, through the client ctr. The container
needs no image, because its root is a folder.
"""

from __future__ import annotations

import contextlib
import glob
import os
from typing import Any, Sequence

from ..host import run_id
from ..host.mount_namespace import Mount
from .runner import LABEL, PATH, SHELL, WAIT_FOR_GO, EngineRunner, RunnerError, ask_engine

# The containerd namespace of this check; the namespaces of docker and the kubelet stay untouched.
NAMESPACE = "vgpu-isolation"
PREFIX = "vgpu-isolation-"
# Folders that containerd, its shim and runc make for a namespace and leave after its last container.
EMPTY_FOLDERS = (
    f"/sys/fs/cgroup/{NAMESPACE}",
    f"/sys/fs/cgroup/*/{NAMESPACE}",
    f"/run/containerd/runc/{NAMESPACE}",
    f"/run/containerd/io.containerd.runtime.v2.task/{NAMESPACE}",
    f"/var/lib/containerd/io.containerd.runtime.v2.task/{NAMESPACE}",
)
# Number of words in each line of ctr's list of tasks: name, pid, state.
TASK_WORDS = 3


class ContainerdRunner(EngineRunner):
    """Runs programs in a container of containerd. ``root``: a folder with the container's root file system, made by
    image.py. ``runtime``: the program that injects the GPU; ctr starts it in place of runc.
    """

    name = "containerd"
    _made = 0

    def __init__(self, ctr: str, root: str, runtime: str, mounts: Sequence[Mount], environment: dict[str, str]) -> None:
        self._ctr = [ctr, "--namespace", NAMESPACE]
        self._root = root
        # Allow new privileges, as docker does, so that a setuid program gets its owner's rights. Otherwise the probe
        # could not test whether a setuid program bypasses the library.
        self._options = ["--rm", "--rootfs", "--allow-new-privs", "--runc-binary", runtime, "--label", f"{LABEL}=1"]
        for name, value in sorted(dict({"PATH": PATH, "HOME": "/"}, **environment).items()):
            self._options += ["--env", f"{name}={value}"]
        for mount in mounts:
            # ctr splits the argument of --mount at commas and has no quoting.
            if "," in mount.host_path + mount.container_path:
                raise RunnerError(f"ctr cannot mount {mount.host_path}: there is a comma in its path")
            access = "ro" if mount.read_only else "rw"
            self._options += [
                "--mount",
                f"type=bind,src={mount.host_path},dst={mount.container_path},options=rbind:{access}",
            ]

    def _say(self, *arguments: str) -> Any:
        return ask_engine(self._ctr[0], *self._ctr[1:], *arguments)

    def _tell(self, *arguments: str) -> None:
        try:
            self._say(*arguments)
        except RunnerError:
            return

    def _create(self, argv: Sequence[str]) -> str:
        ContainerdRunner._made += 1
        return f"{PREFIX}{run_id.own()}-{ContainerdRunner._made}"

    def _start(self, container: str, argv: Sequence[str]) -> list[str]:
        return [*self._ctr, "run", *self._options, self._root, container, SHELL, "-c", WAIT_FOR_GO, *argv]

    def _pid_now(self, container: str) -> int:
        for line in self._say("tasks", "list").stdout.splitlines():
            words = line.split()
            if len(words) == TASK_WORDS and words[0] == container and words[2] == "RUNNING":
                return int(words[1])
        return 0

    def _kill(self, container: str) -> None:
        self._tell("tasks", "kill", "--signal", "SIGKILL", container)

    def _remove(self, container: str) -> None:
        """Removes the container if containerd still lists it. Usually it does not, because an ended container was
        removed by --rm.
        """
        try:
            known = self._say("containers", "list", "--quiet").stdout.split()
        except RunnerError:
            return
        if container in known:
            self._tell("tasks", "delete", "--force", container)
            self._tell("containers", "delete", container)


def remove_traces(ctr: str, over: str = "") -> bool:
    """Removes the containers of this run and of killed runs, and the namespace NAMESPACE if no run uses it. ``over``:
    the id of a run that the caller knows to have ended. Returns False if containerd did not list its containers; other
    faults are not reported.
    """
    ask = [ctr, "--namespace", NAMESPACE]
    try:
        listed = ask_engine(*ask, "containers", "list", "--quiet")
        for container in listed.stdout.split():
            mark = container[len(PREFIX) :].split("-")[0] if container.startswith(PREFIX) else ""
            if mark in (run_id.own(), over or None) or run_id.has_ended(mark):
                ask_engine(*ask, "tasks", "delete", "--force", container)
                ask_engine(*ask, "containers", "delete", container)
        ask_engine(ctr, "namespaces", "remove", NAMESPACE)
        return bool(listed.returncode == 0)
    except RunnerError:
        return False
    finally:
        for pattern in EMPTY_FOLDERS:
            for folder in glob.glob(pattern):
                with contextlib.suppress(OSError):  # Another process may still use the namespace.
                    os.rmdir(folder)
