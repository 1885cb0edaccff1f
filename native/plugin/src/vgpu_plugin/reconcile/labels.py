# SPDX-License-Identifier: Apache-2.0
"""The labels about the node's GPUs, with the names that NVIDIA's gpu-feature-discovery uses, and the feature file from
which node-feature-discovery sets them on the node.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from .._shared.config import sharing
from .._shared.config.sharing import MIG, MPS, NONE, TIME_SLICING, Piece
from ..node.gpus import Driver, Gpu

PREFIX = "nvidia.com/"
# This label says what enforces the memory limits on the node: `driver-dmem`, `driver-misc`, `library` or `none`.
ENFORCEMENT = "vgpu.fleet/memory-enforcement"
FILE = Path("/etc/kubernetes/node-feature-discovery/features.d/gfd")
MACHINE_FILE = Path("/sys/class/dmi/id/product_name")
# Major compute capability → name of the GPU family. Ada and Turing are missing here, because each has the same major
# number as another family; the function ``family`` looks at the minor number for them.
FAMILIES = {
    3: "kepler",
    5: "maxwell",
    6: "pascal",
    7: "volta",
    8: "ampere",
    9: "hopper",
    10: "blackwell",
    12: "blackwell",
    13: "rubin",
}


def family(compute: tuple[int, int]) -> str:
    if compute == (7, 5):
        return "turing"
    if compute == (8, 9):
        return "ada-lovelace"
    return FAMILIES.get(compute[0], "undefined")


def value(text: str) -> str:
    """Converts a text to a valid label value: letters, digits, dash, underscore and dot, at most 63 characters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text.strip())[:63].strip("-._")


def labels(
    gpus: Sequence[Gpu], pieces: Sequence[Piece], driver: Driver, machine: str, strategy: str, timestamp: int | None
) -> dict[str, str]:
    """Returns all labels; empty values are left out."""
    out: dict[str, object] = {"gfd.timestamp": timestamp if timestamp is not None else ""}
    parts = [*driver.version.split("."), "", ""][:3]
    out.update(dict(zip(("cuda.driver.major", "cuda.driver.minor", "cuda.driver.rev"), parts, strict=True)))
    names = ("cuda.driver-version.major", "cuda.driver-version.minor", "cuda.driver-version.revision")
    out.update(dict(zip(names, parts, strict=True)))
    out["cuda.driver-version.full"] = driver.version
    major, minor = driver.cuda
    out.update({"cuda.runtime.major": major, "cuda.runtime.minor": minor})
    out.update({"cuda.runtime-version.major": major, "cuda.runtime-version.minor": minor})
    out["cuda.runtime-version.full"] = f"{major}.{minor}"
    out["gpu.machine"] = value(machine)
    if gpus:
        out["gpu.present"] = "true"
    out["gpu.count"] = len(gpus)
    out["mig.capable"] = _said(any(gpu.mig_enabled or _can_mig(gpu) for gpu in gpus))
    able = all(driver.compute.get(gpu.uuid, (0, 0)) >= (3, 5) and not gpu.mig_enabled for gpu in gpus)
    out["mps.capable"] = _said(able)
    if strategy != "none":
        out["mig.strategy"] = strategy
    out["vgpu.present"] = "false"
    whole = [piece for piece in pieces if piece.device == piece.uuid]
    if gpus:
        out.update(_of_gpus(gpus, whole, driver))
    out.update(_of_mig(gpus, [piece for piece in pieces if piece.device != piece.uuid], strategy))
    return {PREFIX + name: str(one) for name, one in out.items() if one not in ("", None)}


def _said(fact: bool) -> str:
    return str(fact).lower()


# Names of the models that have MIG. Other models of the same compute capability do not have it, so the names are
# compared.
MIG_MODELS = ("A100", "A30", "H100", "H200", "H20", "H800", "A800", "B200", "B300", "GB200", "GH200")


def _can_mig(gpu: Gpu) -> bool:
    return bool(set(re.findall(r"[A-Z]+[0-9]+", gpu.model)) & set(MIG_MODELS))


def _of_gpus(gpus: Sequence[Gpu], pieces: Sequence[Piece], driver: Driver) -> dict[str, object]:
    """Returns the labels about whole GPUs. On a node with several models they describe the first GPU, as
    gpu-feature-discovery does.
    """
    first = next((gpu for gpu in gpus if not gpu.mig_enabled), gpus[0])
    mine = [piece for piece in pieces if piece.uuid == first.uuid]
    mode = mine[0].mode if mine else NONE
    shared = bool(mine) and mode not in (NONE, MIG)
    renamed = bool(mine) and mine[0].resource != sharing.WHOLE
    product = value(first.model) + ("-SHARED" if shared and not renamed else "")
    compute = driver.compute.get(first.uuid, (0, 0))
    return {
        "gpu.product": product,
        "gpu.memory": first.memory_mib,
        "gpu.family": family(compute),
        "gpu.compute.major": compute[0],
        "gpu.compute.minor": compute[1],
        "gpu.mode": "compute",
        # The count is 0 on a node whose GPUs are all split into MIG devices.
        "gpu.replicas": len(mine) if mine else 0,
        "gpu.sharing-strategy": mode if mode in (TIME_SLICING, MPS) else ("vcuda" if shared else NONE),
    }


def _of_mig(gpus: Sequence[Gpu], pieces: Sequence[Piece], strategy: str) -> dict[str, object]:
    out: dict[str, object] = {}
    devices = {one.uuid: (gpu, one) for gpu in gpus for one in gpu.mig}
    profiles = sorted({devices[piece.device][1].profile for piece in pieces})
    for profile in profiles:
        mine = [piece for piece in pieces if devices[piece.device][1].profile == profile]
        gpu, device = devices[mine[0].device]
        name = "gpu." if strategy == "single" else f"mig-{profile.replace('+', '.')}."
        count = len({piece.device for piece in mine})
        replicas = len(mine) // count
        shared = mine[0].mode in (TIME_SLICING, MPS)
        suffix = "-SHARED" if shared and not mine[0].resource.endswith(".shared") else ""
        out[name + "product"] = f"{value(gpu.model)}-MIG-{profile.replace('+', '.')}{suffix}"
        out[name + "count"] = count
        out[name + "replicas"] = replicas
        out[name + "sharing-strategy"] = mine[0].mode if shared else NONE
        for attribute, number in device.attributes:
            out[name + attribute] = number
    if strategy == "single" and len(profiles) > 1:
        out["gpu.product"] = f"{value(gpus[0].model)}-MIG-INVALID"
        out["gpu.count"] = out["gpu.replicas"] = out["gpu.memory"] = 0
    return out


def machine_type(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip() or "unknown"
    except OSError:
        return "unknown"


def write(path: Path, found: dict[str, str]) -> bool:
    """Writes the feature file by a rename. Returns True if it changed, ignoring the timestamp. Raises OSError."""
    lines = [f"{name}={one}" for name, one in sorted(found.items())]

    def settled(rows: list[str]) -> list[str]:
        return [row for row in rows if not row.startswith(PREFIX + "gfd.timestamp=")]

    try:
        if settled(path.read_text().splitlines()) == settled(lines):
            return False
    except OSError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    # node-feature-discovery reads every file of the folder whose name does not begin with a dot.
    fresh = path.with_name("." + path.name + ".new")
    fresh.write_text("\n".join(lines) + "\n")
    os.chmod(fresh, 0o644)
    os.replace(fresh, path)
    return True


def leave(path: Path) -> None:
    """Removes the feature file and folders that are then empty; node-feature-discovery then removes the labels."""
    path.unlink(missing_ok=True)
    for folder in path.parents[:3]:
        try:
            folder.rmdir()
        except OSError:
            return


def now() -> int:
    return int(time.time())
