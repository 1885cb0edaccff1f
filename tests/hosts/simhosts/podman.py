# SPDX-License-Identifier: Apache-2.0
"""Runs podman with the options that simulated hosts need, and names its objects. Every object carries a label with
its project; removal selects by that label and never by a name's prefix."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WORK = ROOT / ".build" / "hosts"
LABEL = "vgpu.fleet.project"
HOST_LABEL = "vgpu.fleet.host"
BOOT_TIMEOUT = 90.0

# On cgroup v1 podman mounts the machine's systemd hierarchy over the container's hierarchy. The hosts would then share
# the cgroups of units with equal names, and a booting host would delete the cgroups of the others ("podman exec" fails
# with "cgroup.procs: no such file"). Unmounting the machine's hierarchy uncovers the container's own. On cgroup v2
# there is nothing to unmount.
INIT = "umount /sys/fs/cgroup/systemd/release_agent /sys/fs/cgroup/systemd 2>/dev/null; exec /sbin/init"


# All hosts belong to one user, and the kernel limits inotify instances by user. A finished host has 11: systemd has 7;
# containerd, dbus, arbiter and device plugin have 1 each. Beyond the limit systemd starts with failed units.
WATCHES = Path("/proc/sys/fs/inotify/max_user_instances")
WATCHES_A_HOST, WATCHES_OF_OTHERS = 11, 16

# Engines with a store of images and containers. Docker from version 29 on uses containerd's store.
STORES = ("docker", "containerd")


class PodmanError(Exception):
    """podman failed; the text is podman's own message."""


@dataclass(frozen=True)
class Host:
    """One simulated host."""

    project: str
    name: str

    @property
    def container(self) -> str:
        """Returns the container's name, which is also the host's address in the inventory."""
        return f"vgpu-{self.project}-{self.name}"

    def volumes(self, stores: Iterable[str] = STORES) -> dict[str, str]:
        """Returns the volumes of the engines' stores, by folder. Stores need volumes, because overlay does not work on
        the container's own overlay."""
        return {f"/var/lib/{store}": f"{self.container}-{store}" for store in stores}


# This file exists only with version 2 of control groups.
UNIFIED = Path("/sys/fs/cgroup/cgroup.controllers")


def containers_conf() -> Path:
    """Writes the private file that podman and the connection plugin read through CONTAINERS_CONF."""
    # Use runc, because crun cannot start a container without the right to raise limits. Set the limits, because podman
    # by default requests the kernel's maximum, which a machine without that right refuses.
    hard = [resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)]
    files, processes = (
        want if have == resource.RLIM_INFINITY else min(want, have)
        for want, have in zip((20000, 10000), hard, strict=True)
    )
    text = (
        f'[engine]\n{runtime_line()}[containers]\nlog_driver = "k8s-file"\n'
        f'default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]\n'
    )
    path = WORK / "containers.conf"
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def runtime_line() -> str:
    """Chooses runc where it is installed, else leaves podman's own choice."""
    return 'runtime = "runc"\n' if shutil.which("runc") else ""


def podman(*arguments: str, check: bool = True, stdin: bytes | None = None) -> str:
    """Runs podman and returns what it printed."""
    environment = {**os.environ, "CONTAINERS_CONF": str(containers_conf())}
    try:
        result = subprocess.run(["podman", *arguments], env=environment, input=stdin, capture_output=True, check=False)
    except FileNotFoundError:
        raise PodmanError("podman is not installed; `make demo` installs it, or: apt-get install podman runc") from None
    if check and result.returncode != 0:
        message = result.stderr.decode(errors="replace").strip() or result.stdout.decode(errors="replace").strip()
        raise PodmanError(f"podman {' '.join(arguments[:6])}: exit status {result.returncode}: {message[-1500:]}")
    return result.stdout.decode(errors="replace")


def hosts(project: str | None = None) -> list[dict[str, str]]:
    """Lists the simulated hosts: project, host, container, state and image."""
    chosen = f"label={LABEL}={project}" if project else f"label={LABEL}"
    listing = json.loads(podman("ps", "--all", "--filter", chosen, "--format", "json") or "[]")
    rows = [
        {
            "project": item["Labels"][LABEL],
            "host": item["Labels"].get(HOST_LABEL, ""),
            "container": item["Names"][0],
            "state": item["State"],
            "image": item["Image"],
        }
        for item in listing or []
    ]
    return sorted(rows, key=lambda row: row["container"])


def systemd_options() -> list[str]:
    """Returns the options for systemd as process 1, with control groups that a docker daemon inside can create.

    With control groups of version 1, podman from 4.4 on refuses a private cgroup namespace in systemd mode. So the
    options of that mode are listed one by one.
    """
    if UNIFIED.exists():
        return ["--systemd=always", "--cgroupns=private"]
    folders = [
        f"--tmpfs={folder}:rw,mode={mode}"
        for folder, mode in (("/run", "755"), ("/run/lock", "1777"), ("/tmp", "1777"))
    ]
    return ["--systemd=false", "--cgroupns=private", *folders, "--env=container=podman", "--stop-signal=SIGRTMIN+3"]


def create(host: Host, image: str, stores: Iterable[str]) -> None:
    """Creates a host's container without starting it. ``stores`` are the engines' stores (of STORES) that get a
    volume."""
    volumes = host.volumes(stores)
    for volume in volumes.values():
        # A volume may remain from an interrupted run; a new host needs an empty store.
        podman("volume", "rm", volume, check=False)
        podman("volume", "create", "--label", f"{LABEL}={host.project}", volume)
    podman(
        "create",
        *("--name", host.container, "--hostname", host.name),
        *("--label", f"{LABEL}={host.project}", "--label", f"{HOST_LABEL}={host.name}"),
        # A docker daemon runs inside; it needs mounts, cgroups and devices.
        "--privileged",
        *systemd_options(),
        # No network: several docker daemons with one docker0 and one set of netfilter rules would conflict, and
        # packages come from the image's own repository.
        *("--network", "none"),
        # The simulated driver keeps its state in /dev/shm; the default of 64 MB holds little more than the state.
        "--shm-size=256m",
        # As on a real machine, only the kernel limits the number of processes; systemd sets the limits of its units.
        "--pids-limit=-1",
        # Removal stops the host at once, because there is nothing to save. A restart passes a longer time limit.
        "--stop-timeout=1",
        *(f"--volume={volume}:{folder}" for folder, volume in volumes.items()),
        image,
        *("/bin/sh", "-c", INIT),
    )


def expect_room(count: int, allowed: int) -> None:
    """Refuses more hosts than the kernel's limit of inotify instances allows. Raises PodmanError."""
    need = count * WATCHES_A_HOST + WATCHES_OF_OTHERS
    if need > allowed:
        raise PodmanError(
            f"{WATCHES}: {count} hosts on this machine need {need} ({WATCHES_A_HOST} for each), found {allowed}. "
            f"Raise the limit: sysctl -w fs.inotify.max_user_instances={max(256, 2 * need)}"
        )


def boot(host: Host) -> float:
    """Starts the host and waits until systemd is up; returns the seconds that it took."""
    started = time.monotonic()
    podman("start", host.container)
    state = ""
    while time.monotonic() - started < BOOT_TIMEOUT:
        state = podman("exec", host.container, "systemctl", "is-system-running", check=False).strip()
        if state == "running":
            return time.monotonic() - started
        if state == "degraded":
            failed = podman("exec", host.container, "systemctl", "--failed", "--no-legend", "--plain", check=False)
            raise PodmanError(f"{host.container}: systemd runs, but these units failed:\n{failed}")
        time.sleep(0.2)
    tail = podman("logs", "--tail", "20", host.container, check=False)
    raise PodmanError(
        f"{host.container}: expected systemd 'running' after {BOOT_TIMEOUT:.0f} s, found {state or 'no answer'!r}. "
        f"See: podman exec {host.container} systemctl list-jobs\n{tail}"
    )


def remove(project: str, name: str | None = None) -> list[str]:
    """Removes the project's hosts, or only ``name``, with their volumes; returns the removed containers."""
    gone = [row["container"] for row in hosts(project) if name in (None, row["host"])]
    if gone:
        # The removal is tried twice, because podman 4.3 fails if a container exits while podman kills it.
        podman("kill", "--signal", "KILL", *gone, check=False)
        podman("rm", "--force", "--volumes", *gone, check=False)
        podman("rm", "--force", "--volumes", "--ignore", *gone)
    volumes = podman("volume", "ls", "--quiet", "--filter", f"label={LABEL}={project}").split()
    keep = {volume for row in hosts(project) for volume in Host(project, row["host"]).volumes().values()}
    for volume in volumes:
        if volume not in keep:
            podman("volume", "rm", "--force", volume)
    return gone
