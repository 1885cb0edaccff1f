# SPDX-License-Identifier: Apache-2.0
"""Finds kinds of docker that /etc/docker/daemon.json does not configure: a snap, a user's rootless daemon, podman under
the command name docker. On such a host the role would write daemon.json and report success, without any effect.
"""

from __future__ import annotations

from typing import Any

from ..host.host import Host

SNAP_FOLDERS = ("/snap/docker/current", "/var/snap/docker/current")
PODMAN_PACKAGE = "/usr/share/doc/podman-docker"


def find(host: Host) -> dict[str, Any]:
    """Returns ``{"snap": bool, "podman": bool, "rootless": [user or uid]}`` from the host's files."""
    rootless = {uid for uid in host.names("/run/user") if "docker.sock" in host.names(f"/run/user/{uid}")}
    named = {
        user
        for user in host.names("/home")
        if host.file(f"/home/{user}/.config/systemd/user/docker.service") is not None
    }
    # The same daemon may be found twice: the path of its socket has the user's number, and the path of its unit has the
    # user's name.
    numbers = _uids(host)
    return {
        "snap": any(host.names(folder) for folder in SNAP_FOLDERS),
        "podman": bool(host.names(PODMAN_PACKAGE)),
        "rootless": sorted(named | {numbers.get(uid, uid) for uid in rootless}),
    }


def _uids(host: Host) -> dict[str, str]:
    rows = [line.split(":") for line in (host.text("/etc/passwd") or "").splitlines()]
    return {row[2]: row[0] for row in rows if len(row) > 2}


def findings(kinds: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns errors that stop the host, and warnings."""
    faults, notes = [], []
    if kinds["snap"]:
        faults.append(
            "docker is installed as a snap, which reads its own daemon.json and does not see the host's nvidia "
            "runtime; remove it with: snap remove docker, or remove the role container_runtime from the play"
        )
    if kinds["podman"]:
        faults.append(
            "the command docker is podman under another name (package podman-docker), so no daemon can be configured; "
            "remove that package, or remove the role container_runtime from the play"
        )
    if kinds["rootless"]:
        users = ", ".join(kinds["rootless"])
        notes.append(
            f"docker runs rootless for the users {users}; this role does not change their own daemon.json in "
            "~/.config/docker, so their containers get no GPU slices"
        )
    return faults, notes
