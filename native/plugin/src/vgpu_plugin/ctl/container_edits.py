# SPDX-License-Identifier: Apache-2.0
"""Builds what a docker or podman container needs for a lease (slices of GPUs that are reserved for it): mounts,
environment, devices and a label. From the label the plugin learns whether the container still exists. The result is
printed as options of the engine's command, or as a service of docker compose.

An engine with CDI support gets the GPU by its CDI name. For another engine, the edits in the CDI file are converted to
mounts and devices, so neither NVIDIA's runtime nor a setting of the engine is needed.

The only I/O is reading the CDI file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..allocation.engine_lists import LABEL
from ..inject import cdi


class EditsError(Exception):
    """Raised if a container cannot get its GPU. The text says why, and what to do."""


@dataclass(frozen=True)
class Edits:
    """Changes to a container. ``mounts`` are (path in the container, path on the host, read-only), ``devices`` are
    (path in the container, path on the host), and ``names`` are names of CDI devices.
    """

    label: str
    envs: Mapping[str, str]
    mounts: tuple[tuple[str, str, bool], ...]
    devices: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """Returns options for docker run and podman run. They contain --mount and not --volume, because docker creates
        a folder for a missing source of --volume.
        """
        out = ["--label", self.label]
        for name, value in sorted(self.envs.items()):
            out += ["--env", f"{name}={value}"]
        for inside, host, read_only in self.mounts:
            out += ["--mount", f"type=bind,source={host},target={inside}{',readonly' if read_only else ''}"]
        for inside, host in self.devices:
            out += ["--device", f"{host}:{inside}"]
        for name in self.names:
            out += ["--device", name]
        return out

    def service(self, forbids_folders: bool) -> dict[str, Any]:
        """Returns a service for docker compose. If ``forbids_folders`` is true, the service tells compose to create no
        folder for a missing source of a mount.
        """
        bind = {"bind": {"create_host_path": False}} if forbids_folders else {}
        name, _equals, value = self.label.partition("=")
        return {
            "labels": {name: value},
            "environment": dict(sorted(self.envs.items())),
            "volumes": [
                {"type": "bind", "source": host, "target": inside, "read_only": read_only, **bind}
                for inside, host, read_only in self.mounts
            ],
            "devices": [*(f"{host}:{inside}" for inside, host in self.devices), *self.names],
        }


def of_lease(lease: Mapping[str, Any], devices: Sequence[str], by_cdi: bool, cdi_folder: Path) -> Edits:
    """Returns the edits for a lease. ``lease`` is the lease in the form that vgpuctl prints, and ``devices`` are the
    UUIDs of its GPUs or MIG devices. Raises EditsError.
    """
    # A mount of /dev/null is left out, because it is only a signal to NVIDIA's runtime, which is not used here.
    mounts = [
        (one["container_path"], one["host_path"], bool(one["read_only"]))
        for one in lease["mounts"]
        if one["host_path"] != "/dev/null"
    ]
    envs = {**lease["envs"], **_environment([cdi.VOID])}
    label = f"{LABEL}={lease['allocation']}"
    common, edits = _from_file(cdi_folder / cdi.file_name(cdi.GPU_KIND), devices)
    if by_cdi:
        return Edits(label, envs, tuple(mounts), (), tuple(f"{cdi.GPU_KIND}={one}" for one in devices))
    nodes: dict[str, str] = {}
    for one in [common, *edits]:
        envs = {**_environment(one.get("env", [])), **envs}
        mounts += [(row["containerPath"], row["hostPath"], "ro" in row["options"]) for row in one.get("mounts", [])]
        nodes.update({row["path"]: row.get("hostPath", row["path"]) for row in one.get("deviceNodes", [])})
    return Edits(label, envs, tuple(mounts), tuple(nodes.items()))


def _environment(words: Iterable[str]) -> dict[str, str]:
    return {name: value for name, _equals, value in (one.partition("=") for one in words)}


def _from_file(path: Path, devices: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the edits in the CDI file: those for all containers, and those of each device. Raises EditsError."""
    try:
        found = json.loads(path.read_text())
        named = {one["name"]: one["containerEdits"] for one in found["devices"]}
        return found["containerEdits"], [named[one] for one in devices]
    except FileNotFoundError:
        raise EditsError(
            f"{path} does not exist: the plugin found no libcuda.so.1 of the driver on this host, or writes no CDI "
            "files; see: journalctl -u vgpu-device-plugin"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise EditsError(f"{path} does not define the devices {', '.join(devices)}: {fault!r}") from None
