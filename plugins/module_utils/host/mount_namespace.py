# SPDX-License-Identifier: Apache-2.0
"""Runs a program as in a container, on hosts without a container runtime. The program gets its own mount namespace, in
which files are bind-mounted at chosen paths. /dev is a new tmpfs with exactly the mount points of a container, so that
a check can test whether a program can move a folder in /dev. Nothing is written on the host. If a mount point is
missing, its folder is covered by a tmpfs in the new namespace, and the other entries of the folder are bind-mounted
into that tmpfs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import tempfile
import time
from typing import Any, Callable, NamedTuple, Sequence

CLONE_NEWNS = 0x00020000
MS_RDONLY, MS_NOSUID, MS_NODEV = 0x1, 0x2, 0x4
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000

# Device nodes that every container has. The device nodes of the program's GPUs are added.
DEVICE_NODES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_FOLDERS = ("shm", "pts", "mqueue")
GPU_CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")

# Seconds between two polls of a running program. The interval is short, because the program may free its memory after
# milliseconds.
LOOK_S = 0.001


class NamespaceError(Exception):
    """The namespace could not be prepared; the text names the path."""


class Mount(NamedTuple):
    container_path: str
    host_path: str
    read_only: bool


class Outcome(NamedTuple):
    """Holds the result of a program. ``rc``: its exit status, or the negative number of the signal that ended it."""

    rc: int
    out: str
    err: str
    timed_out: bool


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


class Namespace:
    """Makes the mounts in the mount namespace of the calling process, which is a child process between fork
    and exec.
    """

    def __init__(self) -> None:
        self._libc = _libc()

    def enter(self) -> None:
        if self._libc.unshare(CLONE_NEWNS) != 0:
            number = ctypes.get_errno()
            raise NamespaceError(f"the mount namespace cannot be created: {os.strerror(number)}; it needs root")
        self._mount("none", "/", None, MS_REC | MS_PRIVATE)

    def _mount(self, source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        encoded = [None if one is None else os.fsencode(one) for one in (source, target, kind, data)]
        rc = self._libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
        if rc != 0:
            number = ctypes.get_errno()
            raise NamespaceError(f"cannot mount {source} on {target}: {os.strerror(number)}")

    def _bind(self, descriptor: int, target: str, flags: int = 0) -> None:
        """Bind-mounts the file of a descriptor. It uses the descriptor, because another mount may already cover the
        file's path.
        """
        self._mount(f"/proc/self/fd/{descriptor}", target, None, MS_BIND | flags)

    def tmpfs(self, folder: str, mode: int = 0o755) -> None:
        self._mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"mode={mode:o}")

    def _open_up(self, folder: str) -> None:
        """Makes it possible to create files in a folder without a change of the host. It mounts a tmpfs over the folder
        and bind-mounts all entries of the folder into the tmpfs.
        """
        entries = []
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            entries.append((name, os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)))
        self.tmpfs(folder, stat.S_IMODE(os.stat(folder).st_mode))
        for name, descriptor in entries:
            path = os.path.join(folder, name)
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISLNK(mode):
                os.symlink(os.readlink(b"", dir_fd=descriptor), os.fsencode(path))
            else:
                _mount_point(path, stat.S_ISDIR(mode))
                self._bind(descriptor, path, MS_REC)
            os.close(descriptor)

    def _make_target(self, path: str, is_folder: bool) -> None:
        """Creates a mount point at ``path``."""
        if os.path.lexists(path):
            return
        parent = os.path.dirname(path)
        if not os.path.isdir(parent):
            self._make_target(parent, True)
        elif not self._is_opened(parent):
            self._open_up(parent)
        _mount_point(path, is_folder)

    def _is_opened(self, folder: str) -> bool:
        """Returns whether a folder lies on a tmpfs of this namespace, where new names do not change the host."""
        return os.stat(folder).st_dev in self._own_devices

    _own_devices: frozenset[int] = frozenset()

    def lay_out(self, mounts: Sequence[Mount], device_paths: Sequence[str]) -> None:
        """Makes all mounts, and a /dev that has only the named device nodes. Opens all source files before the first
        mount, because a mount may cover them.
        """
        host_devices = _mounted_devices()
        sources = []
        for mount in mounts:
            try:
                sources.append(os.open(mount.host_path, os.O_PATH | os.O_CLOEXEC))
            except OSError as fault:
                raise NamespaceError(f"mount source {mount.host_path}: {fault.strerror}") from None
        self._device_folder(device_paths)
        for mount, descriptor in zip(mounts, sources):
            self._own_devices = frozenset(_mounted_devices() - host_devices)
            is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            self._make_target(mount.container_path, is_folder)
            self._bind(descriptor, mount.container_path)
            if mount.read_only:
                self._mount("none", mount.container_path, None, MS_BIND | MS_REMOUNT | MS_RDONLY)
            os.close(descriptor)

    def _device_folder(self, device_paths: Sequence[str]) -> None:
        names = [f"/dev/{name}" for name in DEVICE_NODES + DEVICE_FOLDERS] + list(device_paths)
        found = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in names if os.path.exists(path)]
        self.tmpfs("/dev")
        for path, descriptor in found:
            is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if not os.path.lexists(path):
                _mount_point(path, is_folder)
                self._bind(descriptor, path, MS_REC if is_folder else 0)
            os.close(descriptor)
        for name, target in (("fd", "/proc/self/fd"), ("stdout", "fd/1"), ("stderr", "fd/2"), ("stdin", "fd/0")):
            os.symlink(target, f"/dev/{name}")


def _mounted_devices() -> set[int]:
    """Returns the device numbers of all mounts of this namespace."""
    out = set()
    with open("/proc/self/mountinfo", encoding="utf-8") as stream:
        for line in stream:
            major, _colon, minor = line.split()[2].partition(":")
            out.add(os.makedev(int(major), int(minor)))
    return out


def _mount_point(path: str, is_folder: bool) -> None:
    if is_folder:
        os.mkdir(path, 0o755)
    else:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


def gpu_nodes(minors: Sequence[int]) -> list[str]:
    """Returns the device nodes that a container with these GPUs gets."""
    return [f"/dev/{name}" for name in GPU_CONTROL_NODES] + [f"/dev/nvidia{minor}" for minor in minors]


def run(
    argv: Sequence[str],
    mounts: Sequence[Mount],
    device_paths: Sequence[str],
    environment: dict[str, str],
    timeout: float,
    before_start: Callable[[int], None],
    while_running: Callable[[int], None],
) -> Outcome:
    """Runs ``argv`` in a namespace. ``before_start`` gets the pid when the namespace is prepared and before the program
    starts. ``while_running`` gets the pid every LOOK_S seconds until the program ends. Raises NamespaceError.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        ready_r, ready_w = os.pipe()
        go_r, go_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready_r)
            os.close(go_w)
            _child(argv, mounts, device_paths, environment, out.fileno(), err.fileno(), ready_w, go_r)
        os.close(ready_w)
        os.close(go_r)
        try:
            with os.fdopen(ready_r, "rb") as channel:
                fault = channel.read().decode("utf-8", "replace")
            if fault != "ready":
                os.waitpid(pid, 0)
                pid = 0
                raise NamespaceError(fault or "the process ended before its namespace was prepared")
            before_start(pid)
            os.write(go_w, b"g")
            status, timed_out = _wait(pid, timeout, while_running)
            pid = 0
        finally:
            os.close(go_w)
            if pid:
                _kill(pid)
                os.waitpid(pid, 0)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "replace"))
        rc = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return Outcome(rc, texts[0], texts[1], timed_out)


def _wait(pid: int, timeout: float, while_running: Callable[[int], None]) -> tuple[int, bool]:
    deadline = time.monotonic() + timeout
    timed_out = False
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status, timed_out
        if not timed_out and time.monotonic() > deadline:
            timed_out = True
            _kill(pid)
        while_running(pid)
        time.sleep(LOOK_S)


def _kill(pid: int) -> None:
    """Kills the program and its children. They are one process group, which the program leads."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)


def _child(
    argv: Sequence[str],
    mounts: Sequence[Mount],
    device_paths: Sequence[str],
    environment: dict[str, str],
    out: int,
    err: int,
    ready: int,
    go: int,
) -> None:
    """Runs the program and never returns.

    Reports a failure before exec through the pipe, a failure of exec on stderr.
    """
    try:
        os.setsid()
        os.umask(0o022)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        namespace = Namespace()
        namespace.enter()
        namespace.lay_out(mounts, device_paths)
        os.chdir("/")
        os.write(ready, b"ready")
    except (NamespaceError, OSError) as fault:
        os.write(ready, str(fault).encode("utf-8"))
        os._exit(126)
    os.close(ready)
    try:
        if os.read(go, 1) != b"g":
            os._exit(126)  # The parent process is gone.
        os.execvpe(argv[0], list(argv), environment)
    except OSError as fault:
        os.write(2, f"{argv[0]}: {fault.strerror}\n".encode())
        os._exit(127)
