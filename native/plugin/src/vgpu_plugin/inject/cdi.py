# SPDX-License-Identifier: Apache-2.0
"""CDI specifications for whole GPUs and slices, so that a container gets its GPU without a runtime's hook.

The kubelet uses ``vgpu.fleet/gpu=<uuid>`` (of a GPU or MIG device). People use ``vgpu.fleet/slice=<uuid>::<n>``:
``podman run --device vgpu.fleet/slice=GPU-…::0 …``. ``nvidia.com/gpu=<uuid|index|all>`` is written only if no other
program provides it, because a device that two files define is unusable.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..node.gpus import Gpu, MigDevice
from .driver_files import DriverFiles, is_node, library_folders

log = logging.getLogger(__name__)

# The newest version that podman 4.3 (container-device-interface 0.5) reads; it introduced hostPath of device nodes.
CDI_VERSION = "0.5.0"
GPU_KIND, SLICE_KIND, NVIDIA_KIND = "vgpu.fleet/gpu", "vgpu.fleet/slice", "nvidia.com/gpu"
# Name prefix of the files of claims (dra/claim_files.py).
OF_CLAIMS = "vgpu-claim-"
READ_ONLY = ["ro", "nosuid", "nodev", "bind"]
READ_WRITE = ["rw", "nosuid", "nodev", "bind"]
# void prevents the hook of an NVIDIA runtime from adding GPUs.
VOID = "NVIDIA_VISIBLE_DEVICES=void"
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES=compute,utility"


def mount(inside: str, host: str, read_only: bool) -> dict[str, Any]:
    return {"containerPath": inside, "hostPath": host, "options": list(READ_ONLY if read_only else READ_WRITE)}


def common_edits(files: DriverFiles, dev_root: Path) -> dict[str, Any]:
    """Returns the edits that every container with a GPU gets."""
    mounts = [
        mount(f"{folder}/{name}", host, True) for name, host in files.libraries for folder in library_folders()
    ] + [mount(f"/usr/bin/{os.path.basename(one)}", one, True) for one in files.programs]
    return {
        "env": [VOID, CAPABILITIES],
        "deviceNodes": [node(path, dev_root) for path in files.nodes],
        "mounts": mounts,
    }


def node(path: str, dev_root: Path) -> dict[str, Any]:
    host = str(dev_root / path.lstrip("/"))
    return {"path": path} if host == path else {"path": path, "hostPath": host}


def gpu_nodes(gpu: Gpu, dev_root: Path) -> list[dict[str, Any]]:
    """Returns the device node of one GPU; empty on a simulated host, whose driver has none."""
    path = f"/dev/nvidia{gpu.minor}"
    return [node(path, dev_root)] if is_node(dev_root / path.lstrip("/")) else []


def mig_nodes(gpu: Gpu, mig: MigDevice, proc: Path, dev_root: Path) -> list[dict[str, Any]]:
    """Returns the device nodes of a MIG device: those of its GPU, its GPU instance and its compute instance. The driver
    reports the minor numbers below ``proc``. Raises OSError if a number or a node is missing.
    """
    folder = proc / "driver/nvidia/capabilities" / f"gpu{gpu.minor}" / "mig"
    nodes = gpu_nodes(gpu, dev_root)
    if not nodes and not folder.is_dir():
        return []  # a simulated host has no device nodes
    instance = folder / f"gi{mig.gpu_instance}"
    for access in (instance / "access", instance / f"ci{mig.compute_instance}" / "access"):
        minor = re.search(r"^DeviceFileMinor:\s*(\d+)\s*$", access.read_text(), re.MULTILINE)
        if minor is None:
            raise OSError(f"{access} names no DeviceFileMinor")
        path = f"/dev/nvidia-caps/nvidia-cap{minor[1]}"
        if not is_node(dev_root / path.lstrip("/")):
            raise OSError(f"{dev_root / path.lstrip('/')} does not exist; nvidia-modprobe creates it")
        nodes.append(node(path, dev_root))
    return nodes


def mig_devices(gpus: Iterable[Gpu], proc: Path, dev_root: Path) -> list[tuple[str, dict[str, Any]]]:
    """Returns MIG devices by UUID; a device with unknown nodes is left out, and Allocate reports why."""
    named = []
    for gpu in gpus:
        for mig in gpu.mig:
            try:
                named.append((mig.uuid, {"deviceNodes": mig_nodes(gpu, mig, proc, dev_root)}))
            except OSError as fault:
                log.debug("%s cannot be given to a container by CDI: %s", mig.uuid, fault)
    return named


def specification(kind: str, common: dict[str, Any], devices: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    return {
        "cdiVersion": CDI_VERSION,
        "kind": kind,
        "devices": [{"name": name, "containerEdits": _filled(edits)} for name, edits in devices],
        "containerEdits": _filled(common),
    }


def _filled(edits: dict[str, Any]) -> dict[str, Any]:
    """Removes empty lists; a device must have at least one edit."""
    return {key: value for key, value in edits.items() if value} or {"env": [VOID]}


def gpu_devices(gpus: Sequence[Gpu], dev_root: Path, by_index: bool) -> list[tuple[str, dict[str, Any]]]:
    """Returns devices by UUID, and for NVIDIA's kind also by index and ``all``."""
    named = [(gpu.uuid, {"deviceNodes": gpu_nodes(gpu, dev_root)}) for gpu in gpus]
    if by_index:
        named += [(str(gpu.index), {"deviceNodes": gpu_nodes(gpu, dev_root)}) for gpu in gpus]
        named.append(("all", {"deviceNodes": [one for gpu in gpus for one in gpu_nodes(gpu, dev_root)]}))
    return named


def with_hooks(
    devices: list[tuple[str, dict[str, Any]]], hooks: list[dict[str, Any]]
) -> list[tuple[str, dict[str, Any]]]:
    """Adds hooks for the containers that get the devices. The caller leaves out MIG devices."""
    return [(name, {**edits, "hooks": hooks} if hooks else edits) for name, edits in devices]


def file_name(kind: str) -> str:
    """Returns the file name for a kind; NVIDIA's tools use other names, such as nvidia.yaml."""
    return "vgpu-" + kind.replace("/", "-") + ".json"


def provided_elsewhere(kind: str, folders: Iterable[Path]) -> str:
    """Returns the file of another program that defines ``kind``; empty if there is none."""
    pattern = re.compile(r'^\s*"?kind"?\s*:\s*"?' + re.escape(kind) + r'"?\s*,?\s*$', re.MULTILINE)
    for folder in folders:
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(folder)):
                if name.endswith((".json", ".yaml", ".yml")) and not name.startswith("vgpu-"):
                    text = (folder / name).read_text(errors="replace")
                    compact = f'"kind":"{kind}"' in re.sub(r"\s", "", text) if name.endswith(".json") else False
                    if compact or pattern.search(text):
                        return str(folder / name)
    return ""


def write(folder: Path, spec: dict[str, Any], name: str = "") -> bool:
    """Writes a specification by a rename. Returns True if it changed. ``name``: file name, for a kind with several
    files. Raises OSError.
    """
    path = folder / (name or file_name(spec["kind"]))
    text = json.dumps(spec, indent=1, sort_keys=True) + "\n"
    with contextlib.suppress(OSError):
        if path.read_text() == text:
            return False
    folder.mkdir(parents=True, exist_ok=True)
    # Readers take every .json and .yaml file of the folder, so the temporary file has another suffix.
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text)
    os.chmod(fresh, 0o644)
    os.replace(fresh, path)
    return True


def remove(folder: Path) -> None:
    for kind in (GPU_KIND, SLICE_KIND, NVIDIA_KIND):
        (folder / file_name(kind)).unlink(missing_ok=True)


def leave(folder: Path) -> None:
    """Removes this program's files, and the folder if it is then empty."""
    remove(folder)
    for one in folder.glob(f"{OF_CLAIMS}*.json"):
        one.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
