# SPDX-License-Identifier: Apache-2.0
"""CDI specifications for whole GPUs and for slices, so that a container gets one without a runtime's hook.

``vgpu.fleet/gpu=<uuid>``, of a GPU or a MIG device, is the name for the kubelet; ``vgpu.fleet/slice=<uuid>::<n>`` is
for people: ``podman run --device vgpu.fleet/slice=GPU-…::0 …``. ``nvidia.com/gpu=<uuid|index|all>`` is written only
where nobody else provides it, for two files that define one device make it unusable.
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

# The newest that podman 4.3 (container-device-interface 0.5) reads; hostPath of a device node came with it.
CDI_VERSION = "0.5.0"
GPU_KIND, SLICE_KIND, NVIDIA_KIND = "vgpu.fleet/gpu", "vgpu.fleet/slice", "nvidia.com/gpu"
# How the names of the files of claims begin (dra/claim_files.py).
OF_CLAIMS = "vgpu-claim-"
READ_ONLY = ["ro", "nosuid", "nodev", "bind"]
READ_WRITE = ["rw", "nosuid", "nodev", "bind"]
# void keeps the hook of an NVIDIA runtime from adding GPUs of its own.
VOID = "NVIDIA_VISIBLE_DEVICES=void"
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES=compute,utility"


def mount(inside: str, host: str, read_only: bool) -> dict[str, Any]:
    return {"containerPath": inside, "hostPath": host, "options": list(READ_ONLY if read_only else READ_WRITE)}


def common_edits(files: DriverFiles, dev_root: Path) -> dict[str, Any]:
    """What every container with a GPU gets."""
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
    """The node of one GPU; none on a host whose driver has none (a simulated one)."""
    path = f"/dev/nvidia{gpu.minor}"
    return [node(path, dev_root)] if is_node(dev_root / path.lstrip("/")) else []


def mig_nodes(gpu: Gpu, mig: MigDevice, proc: Path, dev_root: Path) -> list[dict[str, Any]]:
    """The nodes of a MIG device: its GPU's, and those of its GPU and compute instance, whose minor numbers the driver
    tells below ``proc``. Raises OSError where it tells none, or a node is missing.
    """
    folder = proc / "driver/nvidia/capabilities" / f"gpu{gpu.minor}" / "mig"
    nodes = gpu_nodes(gpu, dev_root)
    if not nodes and not folder.is_dir():
        return []  # a simulated host
    instance = folder / f"gi{mig.gpu_instance}"
    for access in (instance / "access", instance / f"ci{mig.compute_instance}" / "access"):
        minor = re.search(r"^DeviceFileMinor:\s*(\d+)\s*$", access.read_text(), re.MULTILINE)
        if minor is None:
            raise OSError(f"{access} names no DeviceFileMinor")
        path = f"/dev/nvidia-caps/nvidia-cap{minor[1]}"
        if not is_node(dev_root / path.lstrip("/")):
            raise OSError(f"{dev_root / path.lstrip('/')} does not exist; nvidia-modprobe makes it")
        nodes.append(node(path, dev_root))
    return nodes


def mig_devices(gpus: Iterable[Gpu], proc: Path, dev_root: Path) -> list[tuple[str, dict[str, Any]]]:
    """MIG devices by UUID; one whose nodes are not known is left out; Allocate says why."""
    named = []
    for gpu in gpus:
        for mig in gpu.mig:
            try:
                named.append((mig.uuid, {"deviceNodes": mig_nodes(gpu, mig, proc, dev_root)}))
            except OSError as fault:
                log.debug("%s cannot be handed over by CDI: %s", mig.uuid, fault)
    return named


def specification(kind: str, common: dict[str, Any], devices: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    return {
        "cdiVersion": CDI_VERSION,
        "kind": kind,
        "devices": [{"name": name, "containerEdits": _filled(edits)} for name, edits in devices],
        "containerEdits": _filled(common),
    }


def _filled(edits: dict[str, Any]) -> dict[str, Any]:
    """Without empty lists; a device may not have no edit at all."""
    return {key: value for key, value in edits.items() if value} or {"env": [VOID]}


def gpu_devices(gpus: Sequence[Gpu], dev_root: Path, by_index: bool) -> list[tuple[str, dict[str, Any]]]:
    """Devices by UUID, and, for NVIDIA's kind, by index and ``all``."""
    named = [(gpu.uuid, {"deviceNodes": gpu_nodes(gpu, dev_root)}) for gpu in gpus]
    if by_index:
        named += [(str(gpu.index), {"deviceNodes": gpu_nodes(gpu, dev_root)}) for gpu in gpus]
        named.append(("all", {"deviceNodes": [one for gpu in gpus for one in gpu_nodes(gpu, dev_root)]}))
    return named


def with_hooks(
    devices: list[tuple[str, dict[str, Any]]], hooks: list[dict[str, Any]]
) -> list[tuple[str, dict[str, Any]]]:
    """The devices, with hooks for the containers that get them. MIG devices are left out by the caller."""
    return [(name, {**edits, "hooks": hooks} if hooks else edits) for name, edits in devices]


def file_name(kind: str) -> str:
    """A name of our own: NVIDIA's tools write nvidia.yaml and others."""
    return "vgpu-" + kind.replace("/", "-") + ".json"


def provided_elsewhere(kind: str, folders: Iterable[Path]) -> str:
    """The file of another program that defines ``kind``, empty where there is none."""
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
    """Writes a specification by a rename; True where it changed. ``name``: of the file, where a kind has several.
    Raises OSError.
    """
    path = folder / (name or file_name(spec["kind"]))
    text = json.dumps(spec, indent=1, sort_keys=True) + "\n"
    with contextlib.suppress(OSError):
        if path.read_text() == text:
            return False
    folder.mkdir(parents=True, exist_ok=True)
    # A reader takes every .json and .yaml of the folder, so the unfinished file has neither ending.
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text)
    os.chmod(fresh, 0o644)
    os.replace(fresh, path)
    return True


def remove(folder: Path) -> None:
    for kind in (GPU_KIND, SLICE_KIND, NVIDIA_KIND):
        (folder / file_name(kind)).unlink(missing_ok=True)


def leave(folder: Path) -> None:
    """Removes what this program left: its files, and the folder where nobody else has one there."""
    remove(folder)
    for one in folder.glob(f"{OF_CLAIMS}*.json"):
        one.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
