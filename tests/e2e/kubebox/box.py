# SPDX-License-Identifier: Apache-2.0
"""Runs a command in the box: mount, PID, network and IPC namespaces in which a node can run on this machine.

Everything that a node writes (/etc, /run, /var/lib, /usr/local, /dev, kernel settings) stays in the box. All processes
end with the box's first process. Only control groups outlive the box; the process outside removes them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

# Folder of the box's own files, on a tmpfs that ends with the box. The rest of the host's /run is hidden.
RUN = Path("/run/kubebox")
WRITABLE = ("/etc", "/usr/local", "/var/lib", "/var/log", "/opt")
API_ADDRESS, NODE_ADDRESS = "10.96.0.1", "10.99.0.1"
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_PREFIX = "kubebox-"
CGROUP_VARIABLE = "KUBEBOX_CGROUP"
# The kubelet would set these kernel settings for the whole machine. In the box they are plain files.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "fuse", "kmsg", "console")


def run_in(command: list[str], environment: dict[str, str]) -> int:
    """Runs a command in a new box and returns its exit status. Needs root."""
    if os.geteuid() != 0:
        raise PermissionError("the box needs root: it mounts, and starts containers")
    sweep()
    group = f"{CGROUP_PREFIX}{os.getpid()}"
    inner = [sys.executable, "-m", "kubebox.box", *command]
    unshare = ["unshare", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), environment.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [*unshare, "--propagation", "private", "--", *inner],
        env={**environment, CGROUP_VARIABLE: group, "PYTHONPATH": path.rstrip(os.pathsep)},
    )
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # The terminal sends Ctrl-C to the processes in the box too; they clean up and end.
    finally:
        process.kill()
        process.wait()
        remove_cgroups(group)


# ---- control groups


def hierarchies() -> list[Path]:
    """Returns the mount points in which the box makes a control group. Version 1 of control groups has one mount point
    per controller."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    found = [one for one in sorted(CGROUPS.iterdir()) if one.is_dir() and not one.is_symlink()]
    return [one for one in found if one.name != "unified" and (one / "cgroup.procs").exists()]


def make_cgroups(group: str) -> None:
    """Creates the node's control group; the kubelet creates its group kubepods below it."""
    for place in hierarchies():
        if place == CGROUPS:
            wanted = " ".join(f"+{one}" for one in (place / "cgroup.controllers").read_text().split())
            for folder in (place, place / group):
                folder.mkdir(exist_ok=True)
                with contextlib.suppress(
                    OSError
                ):  # In a container whose root group has processes, controllers cannot be enabled.
                    (folder / "cgroup.subtree_control").write_text(wanted)
            continue
        (place / group).mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):  # A cpuset group with empty cpus or mems accepts no process.
            if (place / name).exists():
                (place / group / name).write_text((place / name).read_text())


def everywhere() -> list[Path]:
    """Returns all mount points that may have groups of the box. If the host uses version 1 of control groups, version 2
    may be mounted next to it, as `unified`."""
    unified = CGROUPS / "unified"
    return [*hierarchies(), *([unified] if unified.is_dir() else [])]


def remove_cgroups(group: str) -> None:
    for place in everywhere():
        for folder, _folders, _files in os.walk(place / group, topdown=False):
            for _attempt in range(50):  # A killed process leaves its group a moment later, so the removal is repeated.
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
                    break
                time.sleep(0.02)


def sweep() -> None:
    """Removes control groups of boxes whose starting process was killed before it could remove them."""
    for place in everywhere():
        for one in place.glob(f"{CGROUP_PREFIX}*"):
            number = one.name[len(CGROUP_PREFIX) :]
            if number.isdigit() and not Path("/proc", number).exists():
                remove_cgroups(one.name)


# ---- inside the box


def mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"the box cannot mount {' '.join(words)}: {done.stderr.strip()}")


def furnish() -> None:
    """Sets up mounts, devices and addresses of the box, in its first process."""
    mount("-t", "tmpfs", "-o", "mode=755", "kubebox", "/run")
    RUN.mkdir()
    for folder in ("lock", "user", "netns"):
        (Path("/run") / folder).mkdir()
    for folder in WRITABLE:
        over = RUN / "over" / folder.strip("/").replace("/", "-")
        for part in ("upper", "work"):
            (over / part).mkdir(parents=True)
        options = f"lowerdir={folder},upperdir={over / 'upper'},workdir={over / 'work'}"
        mount("-t", "overlay", "-o", options, "overlay", folder)
    furnish_dev()
    for name, value in KERNEL_SETTINGS.items():
        stand_in = RUN / "sysctl" / name.replace("/", ".")
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(value + "\n")
        if Path("/proc/sys", name).exists():
            mount("--bind", str(stand_in), f"/proc/sys/{name}")
    # Containers may ask for mount propagation from the host, which needs shared mounts.
    mount("--make-rshared", "/")
    for command in (
        ["link", "set", "lo", "up"],
        ["address", "add", f"{API_ADDRESS}/32", "dev", "lo"],
        ["address", "add", f"{NODE_ADDRESS}/32", "dev", "lo"],
    ):
        subprocess.run(["ip", *command], check=True)
    Path("/proc/sys/kernel/hostname").write_text("kubebox")


def furnish_dev() -> None:
    """Mounts a separate /dev, so that the device nodes of simulated GPUs exist only in the box."""
    fresh = RUN / "dev"
    fresh.mkdir()
    mount("-t", "tmpfs", "-o", "mode=755", "dev", str(fresh))
    for name in DEVICES:
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(f"/dev/{name}")
            if stat.S_ISCHR(status.st_mode):
                os.mknod(fresh / name, status.st_mode, status.st_rdev)
                os.chmod(fresh / name, stat.S_IMODE(status.st_mode))
    for name in ("pts", "shm"):
        (fresh / name).mkdir()
    mount("--bind", "/dev/pts", str(fresh / "pts"))
    mount("-t", "tmpfs", "-o", "mode=1777", "shm", str(fresh / "shm"))
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (fresh / name).symlink_to(target)
    mount("--move", str(fresh), "/dev")


def main(command: list[str]) -> int:
    """First process of the box: sets it up, runs the command, reaps orphans, and exits when the command exits."""
    furnish()
    make_cgroups(os.environ[CGROUP_VARIABLE])
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: os.kill(child.pid, got))
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
