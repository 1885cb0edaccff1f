# SPDX-License-Identifier: Apache-2.0
"""Decides how a container gets its GPUs: by an environment variable, mounts, CDI devices or device nodes. NVIDIA's
setting deviceListStrategy names the strategy. If it is ``auto``, ``choose`` reads the host's configuration and selects
one.
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
# The first kubelet that passes a plugin's CDI devices to the runtime by default (feature gate DevicePluginCDIDevices).
CDI_KUBELET = (1, 29)
# Folder in a container with the pipes of the MPS daemon that it uses. NVIDIA's plugin uses the same path.
MPS_ROOT = "/mps"
# Flag of node.yaml → environment variable that makes NVIDIA's runtime add the devices of that feature.
FEATURES = (("gdrcopyEnabled", "NVIDIA_GDRCOPY"), ("gdsEnabled", "NVIDIA_GDS"), ("mofedEnabled", "NVIDIA_MOFED"))


@dataclass
class Parts:
    """The parts of an Allocate response that one or several strategies add."""

    envs: dict[str, str] = field(default_factory=dict)
    mounts: list[tuple[str, str, bool]] = field(default_factory=list)
    devices: list[tuple[str, str, str]] = field(default_factory=list)
    cdi_devices: list[str] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HandOver:
    """The strategies to use. They are configured, or chosen for this host if the setting is ``auto``."""

    strategies: tuple[str, ...]
    id_strategy: str = "uuid"
    pass_device_specs: bool = False
    annotation_prefix: str = ANNOTATION_PREFIX
    dev_root: Path = Path("/")
    # A text for people that says why these strategies are used.
    reason: str = ""
    # The root folder in which the configuration of NVIDIA's runtime is read at every allocation. It is set only if the
    # setting is ``auto`` and the host has no CDI. The configuration may change while this program runs, and with the
    # wrong strategy a container would start without a GPU.
    follow: Path | None = None

    def parts(self, gpus: list[Gpu], allocation: str, ids: list[str], uuids: list[str]) -> Parts:
        """Returns what these strategies add to a response. ``ids`` are the device names for NVIDIA's runtime (UUIDs or
        indexes). CDI devices are always named by ``uuids``.
        """
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
    """Returns the strategy that ``auto`` selects on this host, and the reason.

    If both the kubelet and its container runtime pass on CDI devices, it is ``cdi-cri``. Otherwise, if NVIDIA's runtime
    is configured to accept volume mounts, it is ``volume-mounts``. Otherwise it is ``envvar``, which works with every
    NVIDIA runtime. Only features that the configuration declares are used, because with a strategy that the runtime
    does not accept, a container would start without a GPU.
    """
    kubelet = kubelet_version(root)
    runtime = cri_with_cdi(root)
    if kubelet >= CDI_KUBELET and runtime:
        return CDI_CRI, f"kubelet {kubelet[0]}.{kubelet[1]}; {runtime}"
    if accepts_mounts(root):
        return VOLUME_MOUNTS, f"{root / RUNTIME_CONFIG} accepts volume mounts"
    return ENVVAR, "kubelet and CRI runtime declare no CDI, and the NVIDIA runtime accepts no volume mounts"


def accepts_mounts(root: Path) -> bool:
    """Returns whether the host's NVIDIA runtime accepts volume mounts as a request for GPUs."""
    accepts = r"^\s*accept-nvidia-visible-devices-as-volume-mounts\s*=\s*true\b"
    return re.search(accepts, _text(f"{root}/{RUNTIME_CONFIG}"), re.MULTILINE) is not None


def cri_with_cdi(root: Path) -> str:
    """Returns the name of a CRI runtime that has CDI enabled, or an empty string if there is none. For containerd the
    option enable_cdi decides. Without the option, CDI is enabled in version 3 of its configuration file (containerd 2).
    CRI-O always has CDI enabled.
    """
    path = root / "etc/containerd/config.toml"
    text = _text(path)
    said = re.findall(r"^\s*enable_cdi\s*=\s*(true|false)\b", text, re.MULTILINE)
    if said[-1:] == ["true"] or (not said and re.search(r"^\s*version\s*=\s*3\b", text, re.MULTILINE)):
        return f"{path} has CDI enabled"
    return "CRI-O is configured" if (root / "etc/crio/crio.conf").exists() else ""


def kubelet_version(root: Path) -> tuple[int, int]:
    """Returns major and minor version of the host's kubelet, or (0, 0) if the version is unknown."""
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
    """Returns environment variables that make NVIDIA's runtime add further devices. The keys flags and imex of
    node.yaml select these devices.
    """
    envs = {name: "enabled" for flag, name in FEATURES if (config.get("flags") or {}).get(flag)}
    if channels := (config.get("imex") or {}).get("channelIDs"):
        envs["NVIDIA_IMEX_CHANNELS"] = ",".join(str(one) for one in channels)
    return envs


def mps_environment(resource: str) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": f"{MPS_ROOT}/{resource}/pipe"}


def mps_mounts(root: Path, resource: str, host_root: Path = Path("/")) -> list[tuple[str, str, bool]]:
    """Returns the mounts for a client of MPS: the pipes of its control daemon, and the memory that clients and server
    share.

    The pipes are mounted read-only, because a client only connects to the sockets there. If they were writable, root in
    one container could replace the daemon's socket for all other containers.
    """
    pipe = root / resource / "pipe"
    if not (host_root / str(pipe).lstrip("/")).is_dir():
        raise Refused(f"{pipe} does not exist: the MPS control daemon of {resource} does not run on this node")
    return [(f"{MPS_ROOT}/{resource}/pipe", str(pipe), True), ("/dev/shm", str(root / "shm"), False)]
