# SPDX-License-Identifier: Apache-2.0
"""Runs a container in one slice (part of a GPU) of a simulated host by hand. The container gets exactly the mounts and
variables of the device plugin's response to the kubelet's Allocate call."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from .hardware import IMAGE_NAME
from .podman import Host, PodmanError, podman


class SliceError(Exception):
    """No container could be started in a slice; the text says why."""


@contextlib.contextmanager
def leased(host: Host) -> Iterator[dict[str, Any]]:
    """Reserves a free slice by a lease, so that no other container gets it; ends the lease afterwards."""
    try:
        lease = json.loads(podman("exec", host.container, "vgpuctl", "lease", "--json"))
    except PodmanError as error:
        raise SliceError(f"{host.name}: vgpuctl lease: {error}; see vgpuctl status there") from error
    try:
        yield lease
    finally:
        podman("exec", host.container, "vgpuctl", "release", lease["allocation"])


def docker_command(lease: dict[str, Any], command: list[str], *options: str) -> list[str]:
    """Returns the docker command that applies an Allocate response as a kubelet's runtime does."""
    words = ["docker", "run", "--rm", *options]
    for name, value in sorted(lease.get("envs", {}).items()):
        words += ["--env", f"{name}={value}"]
    for mount in lease.get("mounts", []):
        mode = "ro" if mount["read_only"] else "rw"
        words += ["--volume", f"{mount['host_path']}:{mount['container_path']}:{mode}"]
    for device in lease.get("devices", []):
        words += ["--device", f"{device['host_path']}:{device['container_path']}:{device.get('permissions', 'rw')}"]
    for device in lease.get("cdi_devices", []):
        words += ["--device", device if isinstance(device, str) else device["name"]]
    return [*words, IMAGE_NAME, *command]


def run(host: Host, lease: dict[str, Any], command: list[str], *options: str) -> str:
    """Runs a command in a container of the leased slice and returns its output."""
    return podman("exec", host.container, *docker_command(lease, command, *options))
