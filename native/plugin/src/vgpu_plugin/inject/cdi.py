# SPDX-License-Identifier: Apache-2.0
"""Writes CDI (Container Device Interface) specifications for whole GPUs and for slices (parts of GPUs), so that a
container gets its GPU without NVIDIA's runtime hook.

The kubelet uses the devices ``vgpu.fleet/gpu=<uuid>``, with the UUID of a GPU or MIG device. Users of podman or docker
name ``vgpu.fleet/slice=<uuid>::<n>``: ``podman run --device vgpu.fleet/slice=GPU-…::0 …``.

The kind ``nvidia.com/gpu=<uuid|index|all>`` is written only if no other program provides it, because a device that two
files define is unusable.
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

# The newest CDI version that podman 4.3 (container-device-interface 0.5) can read. It is also the first version with
# hostPath for device nodes.
CDI_VERSION = "0.5.0"
GPU_KIND, SLICE_KIND, NVIDIA_KIND = "vgpu.fleet/gpu", "vgpu.fleet/slice", "nvidia.com/gpu"
# Name prefix of the CDI files of claims (dra/claim_files.py).
OF_CLAIMS = "vgpu-claim-"
READ_ONLY = ["ro", "nosuid", "nodev", "bind"]
READ_WRITE = ["rw", "nosuid", "nodev", "bind"]
# If NVIDIA's runtime hook finds the value `void`, it adds no GPUs, so the container gets only those of the CDI file.
VOID = "NVIDIA_VISIBLE_DEVICES=void"
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES=compute,utility"


def mount(inside: str, host: str, read_only: bool) -> dict[str, Any]:
    return {"containerPath": inside, "hostPath": host, "options": list(READ_ONLY if read_only else READ_WRITE)}


def common_edits(files: DriverFiles, dev_root: Path) -> dict[str, Any]:
    """Returns the CDI edits that every container with a GPU gets: the driver's libraries, programs and common device
    nodes.
    """
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
    """Returns the device node of one GPU. A host with a simulated driver has no device nodes, so the list is empty
    there.
    """
    path = f"/dev/nvidia{gpu.minor}"
    return [node(path, dev_root)] if is_node(dev_root / path.lstrip("/")) else []


def mig_nodes(gpu: Gpu, mig: MigDevice, proc: Path, dev_root: Path) -> list[dict[str, Any]]:
    """Returns the device nodes of a MIG device: those of its GPU, of its GPU instance and of its compute instance. The
    driver reports the minor numbers in files below ``proc``. Raises OSError if a number or a node is missing.
    """
    folder = proc / "driver/nvidia/capabilities" / f"gpu{gpu.minor}" / "mig"
    nodes = gpu_nodes(gpu, dev_root)
    if not nodes and not folder.is_dir():
        return []  # The driver is simulated and has no device nodes.
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
    """Returns (UUID, edits) of each MIG device. A device whose nodes are missing is left out here. If a pod requests
    it, Allocate reports the reason.
    """
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
    """Returns the edits without empty lists. If nothing is left, returns an edit without effect, because CDI requires
    at least one.
    """
    return {key: value for key, value in edits.items() if value} or {"env": [VOID]}


def gpu_devices(gpus: Sequence[Gpu], dev_root: Path, by_index: bool) -> list[tuple[str, dict[str, Any]]]:
    """Returns (name, edits) of each GPU. The names are the UUIDs. If ``by_index`` is true, the indexes and the name
    ``all`` are added, which NVIDIA's kind needs.
    """
    named = [(gpu.uuid, {"deviceNodes": gpu_nodes(gpu, dev_root)}) for gpu in gpus]
    if by_index:
        named += [(str(gpu.index), {"deviceNodes": gpu_nodes(gpu, dev_root)}) for gpu in gpus]
        named.append(("all", {"deviceNodes": [one for gpu in gpus for one in gpu_nodes(gpu, dev_root)]}))
    return named


def with_hooks(
    devices: list[tuple[str, dict[str, Any]]], hooks: list[dict[str, Any]]
) -> list[tuple[str, dict[str, Any]]]:
    """Returns the devices with these hooks added. The hooks run for each container that gets one of the devices. MIG
    devices need no hook, so the caller leaves them out.
    """
    return [(name, {**edits, "hooks": hooks} if hooks else edits) for name, edits in devices]


def file_name(kind: str) -> str:
    """Returns the name of the CDI file for a kind. It differs from the names that NVIDIA's tools use, such as
    nvidia.yaml, so none of their files is overwritten.
    """
    return "vgpu-" + kind.replace("/", "-") + ".json"


def provided_elsewhere(kind: str, folders: Iterable[Path]) -> str:
    """Returns the file of another program that defines ``kind``, or an empty string if there is none."""
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
    """Writes a specification in one step, by a rename. Returns True if the content of the file changed. ``name`` is the
    file name; it is needed if a kind has several files. Raises OSError.
    """
    path = folder / (name or file_name(spec["kind"]))
    text = json.dumps(spec, indent=1, sort_keys=True) + "\n"
    with contextlib.suppress(OSError):
        if path.read_text() == text:
            return False
    folder.mkdir(parents=True, exist_ok=True)
    # The temporary file has another suffix, because container engines read every .json and .yaml file in the folder.
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text)
    os.chmod(fresh, 0o644)
    os.replace(fresh, path)
    return True


def remove(folder: Path) -> None:
    for kind in (GPU_KIND, SLICE_KIND, NVIDIA_KIND):
        (folder / file_name(kind)).unlink(missing_ok=True)


def leave(folder: Path) -> None:
    """Removes this program's CDI files, and removes the folder if it is then empty."""
    remove(folder)
    for one in folder.glob(f"{OF_CLAIMS}*.json"):
        one.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
