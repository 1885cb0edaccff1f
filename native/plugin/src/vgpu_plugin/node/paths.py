# SPDX-License-Identifier: Apache-2.0
"""Where everything lies on a node. Every path is a parameter, so that tests lay out a node in a folder."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from .._shared.config import node_config

# What a container sees (contract 1 of the design); never configurable, because libvgpu.so has them built in. /dev is a
# mount of every container's own: no image has a link there, and nobody can rename it. What lies in it can be renamed,
# but for mounts: so the folder of all others is one too.
CONTAINER_ROOT = "/dev/vgpu"
CONTAINER_LIBRARY_FOLDER = f"{CONTAINER_ROOT}/lib"
CONTAINER_LIBRARY = f"{CONTAINER_LIBRARY_FOLDER}/libvgpu.so"
CONTAINER_PRELOAD = "/etc/ld.so.preload"
CONTAINER_SHARE = f"{CONTAINER_ROOT}/0"
CONTAINER_LIMITS = f"{CONTAINER_SHARE}/limits"
CONTAINER_LEDGER = f"{CONTAINER_SHARE}/ledger"
CONTAINER_TENANT = f"{CONTAINER_SHARE}/tenant"
CONTAINER_GPU_PAGE = f"{CONTAINER_SHARE}/gpu-"
# Of a container that the driver alone limits: a file that says whose it is, for the hook.
CONTAINER_ALLOCATION = "/dev/vgpu-allocation"

# What a container sees that was admitted before the folders were mounted: one file each. The kubelet keeps such an
# answer for every restart of the container, docker for as long as the container exists.
OLD_LIBRARY = "/usr/local/lib/vgpu/libvgpu.so"
OLD_LIMITS = "/etc/vgpu/limits"
OLD_LEDGER = "/run/vgpu/ledger"
OLD_TENANT = "/run/vgpu/tenant"
OLD_GPU_PAGE = "/run/vgpu/gpu-"

LONGEST_SOCKET_PATH = 107


@dataclass(frozen=True)
class Paths:
    config: Path = Path("/etc/vgpu/node.yaml")
    kubelet_dir: Path = Path("/var/lib/kubelet/device-plugins")
    run_dir: Path = Path("/run/vgpu")
    state_dir: Path = Path("/var/lib/vgpu")
    sys_root: Path = Path("/sys")
    # Where version 2 of control groups is mounted; on hybrid hosts not here.
    cgroup_root: Path = Path("/sys/fs/cgroup")
    # Where configurations of runtimes lie: the host's root folder, elsewhere in a DaemonSet.
    host_root: Path = Path("/")
    # None: no CDI files are written.
    cdi_dir: Path | None = Path("/var/run/cdi")
    cdi_dirs_of_others: tuple[Path, ...] = (Path("/etc/cdi"),)
    # Where named configurations lie; None: next to node.yaml.
    configs_dir: Path | None = None
    # Whether this program is in a container, and the host's folders are to be seen below host_root alone.
    in_container: bool = False

    @property
    def seen_root(self) -> Path:
        """Where this program sees the host's root folder, for what has the same name for both else."""
        return self.host_root if self.in_container else Path("/")

    @property
    def configs(self) -> Path:
        return self.configs_dir or self.config.parent / node_config.CONFIGS

    @property
    def config_name(self) -> Path:
        """The named configuration that was active last."""
        return self.state_dir / "config-name"

    @property
    def last_offer(self) -> Path:
        """The pieces that were offered last."""
        return self.state_dir / "offered.json"

    @property
    def pod_resources(self) -> Path:
        """The kubelet's PodResources service lies next to the folder of device plugins."""
        return self.kubelet_dir.parent / "pod-resources" / "kubelet.sock"

    @property
    def plugins_registry(self) -> Path:
        """Where the kubelet looks for the sockets of drivers' plugins."""
        return self.kubelet_dir.parent / "plugins_registry"

    def driver_folder(self, driver: str) -> Path:
        return self.kubelet_dir.parent / "plugins" / driver

    @property
    def kubelet_config(self) -> Path:
        """Where kubeadm puts it; the kubelet's folder has the host's name here."""
        return self.seen_root / str(self.kubelet_dir.parent / "config.yaml").lstrip("/")

    @property
    def admin_socket(self) -> Path:
        return self.run_dir / "plugin.sock"

    @property
    def allocations(self) -> Path:
        return self.run_dir / "allocations"

    @property
    def records(self) -> Path:
        return self.state_dir / "allocations.json"

    @property
    def lock(self) -> Path:
        return self.state_dir / "plugin.lock"

    @property
    def kubelet_socket(self) -> Path:
        return self.kubelet_dir / "kubelet.sock"

    @property
    def checkpoint(self) -> Path:
        return self.kubelet_dir / "kubelet_internal_checkpoint"

    def endpoint(self, resource: str) -> Path:
        """Our socket in the kubelet's folder, one for each resource. A resource's name may have 317 characters, the
        path of a socket 107 bytes (unix(7)): a name that is too long becomes its digest.
        """
        named = self.kubelet_dir / f"vgpu-{resource.replace('/', '_')}.sock"
        if len(os.fsencode(named)) <= LONGEST_SOCKET_PATH:
            return named
        return self.kubelet_dir / f"vgpu-{hashlib.sha256(resource.encode()).hexdigest()[:16]}.sock"
