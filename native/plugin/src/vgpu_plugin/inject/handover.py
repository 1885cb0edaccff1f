# SPDX-License-Identifier: Apache-2.0
"""How a container gets its GPUs: environment, mounts, CDI devices, device nodes (NVIDIA's deviceListStrategy).

``auto`` goes by what the host declares, in ``choose``; everything else is pure.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import Refused
from ..node.gpus import Gpu
from . import cdi

ENVVAR, VOLUME_MOUNTS = "envvar", "volume-mounts"
CDI_ANNOTATIONS, CDI_CRI = "cdi-annotations", "cdi-cri"
RUNTIME_CONFIG = "etc/nvidia-container-runtime/config.toml"
VISIBLE_AS_MOUNTS = "/var/run/nvidia-container-devices"
ANNOTATION_PREFIX = "cdi.k8s.io/"
# The kubelet passes CDI devices of a plugin on since 1.29 without being asked (feature DevicePluginCDIDevices).
CDI_KUBELET = (1, 29)
# Where a container finds the pipes of its MPS daemon, as NVIDIA's plugin has it.
MPS_ROOT = "/mps"
# Flag of node.yaml → variable that makes NVIDIA's runtime add those devices.
FEATURES = (("gdrcopyEnabled", "NVIDIA_GDRCOPY"), ("gdsEnabled", "NVIDIA_GDS"), ("mofedEnabled", "NVIDIA_MOFED"))


@dataclass
class Parts:
    """What one strategy or several add to an Allocate answer."""

    envs: dict[str, str] = field(default_factory=dict)
    mounts: list[tuple[str, str, bool]] = field(default_factory=list)
    devices: list[tuple[str, str, str]] = field(default_factory=list)
    cdi_devices: list[str] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HandOver:
    """The configured way, with ``auto`` resolved."""

    strategies: tuple[str, ...]
    id_strategy: str = "uuid"
    pass_device_specs: bool = False
    annotation_prefix: str = ANNOTATION_PREFIX
    dev_root: Path = Path("/")
    # Why these, for people.
    reason: str = ""
    # Of ``auto`` without CDI: the host whose NVIDIA runtime is asked at every allocation. Its options may change while
    # this program runs, and a runtime that reads another way than we write starts containers without a GPU.
    follow: Path | None = None

    def parts(self, gpus: list[Gpu], allocation: str, ids: list[str], uuids: list[str]) -> Parts:
        """``ids``: how the runtime knows the devices, by UUID or index; CDI devices are named by their ``uuids``."""
        strategies = self.strategies
        if self.follow is not None:
            strategies = (VOLUME_MOUNTS if accepts_mounts(self.follow) else ENVVAR,)
        out = Parts()
        qualified = [f"{cdi.GPU_KIND}={uuid}" for uuid in uuids]
        if ENVVAR in strategies:
            out.envs["NVIDIA_VISIBLE_DEVICES"] = ",".join(ids)
        if VOLUME_MOUNTS in strategies:
            out.envs["NVIDIA_VISIBLE_DEVICES"] = VISIBLE_AS_MOUNTS
            out.mounts += [(f"{VISIBLE_AS_MOUNTS}/{one}", "/dev/null", False) for one in ids]
        if CDI_ANNOTATIONS in strategies:
            out.annotations[f"{self.annotation_prefix}vgpu-device-plugin_{allocation}"] = ",".join(qualified)
        if CDI_CRI in strategies:
            out.cdi_devices += qualified
        if self.pass_device_specs:
            names_of_nodes = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"]
            names_of_nodes += [f"nvidia{gpu.minor}" for gpu in gpus]
            for name in names_of_nodes:
                host = self.dev_root / "dev" / name
                if host.exists():
                    out.devices.append((f"/dev/{name}", str(host), "rw"))
        return out

    @property
    def by_cdi(self) -> bool:
        return CDI_CRI in self.strategies or CDI_ANNOTATIONS in self.strategies


def choose(root: Path) -> tuple[str, str]:
    """The strategy that ``auto`` means on this host, with the reason.

    cdi-cri where the kubelet and the runtime below it both pass CDI devices on; volume-mounts where NVIDIA's runtime is
    configured to accept them; else envvar, which every NVIDIA runtime reads. A runtime that does not accept the way
    chosen starts the container without a GPU, so only what is declared counts.
    """
    kubelet = kubelet_version(root)
    runtime = cri_with_cdi(root)
    if kubelet >= CDI_KUBELET and runtime:
        return CDI_CRI, f"kubelet {kubelet[0]}.{kubelet[1]}; {runtime}"
    if accepts_mounts(root):
        return VOLUME_MOUNTS, f"{root / RUNTIME_CONFIG} accepts volume mounts"
    return ENVVAR, "no CDI declared by kubelet and CRI runtime, and no volume mounts by the NVIDIA runtime"


def accepts_mounts(root: Path) -> bool:
    """Whether the NVIDIA runtime of the host takes mounts as a request for GPUs."""
    accepts = r"^\s*accept-nvidia-visible-devices-as-volume-mounts\s*=\s*true\b"
    return re.search(accepts, _text(f"{root}/{RUNTIME_CONFIG}"), re.MULTILINE) is not None


def cri_with_cdi(root: Path) -> str:
    """Which CRI runtime's configuration has CDI on, empty where none has: containerd by its enable_cdi, which version 3
    of its file (containerd 2) has on unless it says false; CRI-O always.
    """
    path = root / "etc/containerd/config.toml"
    text = _text(path)
    said = re.findall(r"^\s*enable_cdi\s*=\s*(true|false)\b", text, re.MULTILINE)
    if said[-1:] == ["true"] or (not said and re.search(r"^\s*version\s*=\s*3\b", text, re.MULTILINE)):
        return f"{path} has CDI on"
    return "CRI-O is configured" if (root / "etc/crio/crio.conf").exists() else ""


def kubelet_version(root: Path) -> tuple[int, int]:
    """Major and minor of the host's kubelet, (0, 0) where there is none that tells."""
    for folder in ("usr/bin", "usr/local/bin"):
        program = root / folder / "kubelet"
        if not program.is_file():
            continue
        try:
            done = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        found = re.search(r"v(\d+)\.(\d+)\.", done.stdout)
        if found:
            return int(found.group(1)), int(found.group(2))
    return 0, 0


def _text(path: str | Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def features(config: dict[str, Any]) -> dict[str, str]:
    """What makes NVIDIA's runtime add other devices, as flags and imex of node.yaml ask for."""
    envs = {name: "enabled" for flag, name in FEATURES if (config.get("flags") or {}).get(flag)}
    if channels := (config.get("imex") or {}).get("channelIDs"):
        envs["NVIDIA_IMEX_CHANNELS"] = ",".join(str(one) for one in channels)
    return envs


def mps_environment(resource: str) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": f"{MPS_ROOT}/{resource}/pipe"}


def mps_mounts(root: Path, resource: str, host_root: Path = Path("/")) -> list[tuple[str, str, bool]]:
    """The pipes of the resource's control daemon, and the shared memory that its clients and server use.

    The pipes read-only: a client connects to sockets there and makes no file. Where it could, root of one container
    would put a socket of its own in the daemon's place for all others.
    """
    pipe = root / resource / "pipe"
    if not (host_root / str(pipe).lstrip("/")).is_dir():
        raise Refused(f"{pipe} does not exist: the MPS control daemon of {resource} does not run on this node")
    return [(f"{MPS_ROOT}/{resource}/pipe", str(pipe), True), ("/dev/shm", str(root / "shm"), False)]
