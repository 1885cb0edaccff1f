# SPDX-License-Identifier: Apache-2.0
"""The paths of all files on a node and in containers. The paths on the node are parameters, so that tests can create a
node in a folder.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from .._shared.config import node_config

# Paths in a container. They cannot be configured, because libvgpu.so contains them. They are in /dev, because /dev is a
# mount of each container: an image can have no link there, and a container cannot rename /dev. A container can rename
# entries inside /dev unless they are mounts, so the folder CONTAINER_ROOT is a mount too.
CONTAINER_ROOT = "/dev/vgpu"
CONTAINER_LIBRARY_FOLDER = f"{CONTAINER_ROOT}/lib"
CONTAINER_LIBRARY = f"{CONTAINER_LIBRARY_FOLDER}/libvgpu.so"
CONTAINER_PRELOAD = "/etc/ld.so.preload"
CONTAINER_SHARE = f"{CONTAINER_ROOT}/0"
CONTAINER_LIMITS = f"{CONTAINER_SHARE}/limits"
CONTAINER_LEDGER = f"{CONTAINER_SHARE}/ledger"
CONTAINER_TENANT = f"{CONTAINER_SHARE}/tenant"
CONTAINER_GPU_PAGE = f"{CONTAINER_SHARE}/gpu-"
# This file is mounted into a container whose memory only the driver limits. From it the CDI hook, which sets the
# driver's memory limit when the container starts, learns which allocation (set of GPU slices) the container has.
CONTAINER_ALLOCATION = "/dev/vgpu-allocation"

# Paths in a container that was admitted by an older version, which mounted single files. Such containers still exist.
# The kubelet uses its saved response for every restart of a container, and docker keeps the mounts as long as the
# container exists.
OLD_LIBRARY = "/usr/local/lib/vgpu/libvgpu.so"
OLD_LIMITS = "/etc/vgpu/limits"
OLD_LEDGER = "/run/vgpu/ledger"
OLD_TENANT = "/run/vgpu/tenant"
OLD_GPU_PAGE = "/run/vgpu/gpu-"

LONGEST_SOCKET_PATH = 107
# Name of the kubelet's checkpoint, in its folder of device plugins. The file still exists after the kubelet has
# stopped.
CHECKPOINT = "kubelet_internal_checkpoint"


@dataclass(frozen=True)
class Paths:
    config: Path = Path("/etc/vgpu/node.yaml")
    kubelet_dir: Path = Path("/var/lib/kubelet/device-plugins")
    run_dir: Path = Path("/run/vgpu")
    state_dir: Path = Path("/var/lib/vgpu")
    sys_root: Path = Path("/sys")
    # Mount point of version 2 of control groups. On a host with both versions it is another folder than this default.
    cgroup_root: Path = Path("/sys/fs/cgroup")
    # The host's root folder, below which the configuration files of container runtimes are read. In a DaemonSet it is
    # another path than /.
    host_root: Path = Path("/")
    # Folder for CDI files. If it is None, no CDI files are written.
    cdi_dir: Path | None = Path("/var/run/cdi")
    cdi_dirs_of_others: tuple[Path, ...] = (Path("/etc/cdi"),)
    # Folder of the named configurations. If it is None, they are in a folder next to node.yaml.
    configs_dir: Path | None = None
    # True if this program runs in a container, so that it sees the host's folders only below host_root.
    in_container: bool = False

    @property
    def seen_root(self) -> Path:
        """The host's root folder as this program sees it. It is used for host paths that are not mounted into this
        program's container.
        """
        return self.host_root if self.in_container else Path("/")

    @property
    def configs(self) -> Path:
        return self.configs_dir or self.config.parent / node_config.CONFIGS

    @property
    def config_name(self) -> Path:
        """The file with the name of the last active configuration."""
        return self.state_dir / "config-name"

    @property
    def last_offer(self) -> Path:
        """The file with the slices that were offered last."""
        return self.state_dir / "offered.json"

    @property
    def pod_resources(self) -> Path:
        """The socket of the kubelet's PodResources service, next to the folder of device plugins."""
        return self.kubelet_dir.parent / "pod-resources" / "kubelet.sock"

    @property
    def plugins_registry(self) -> Path:
        """The folder in which the kubelet looks for the sockets of drivers and other plugins."""
        return self.kubelet_dir.parent / "plugins_registry"

    def driver_folder(self, driver: str) -> Path:
        return self.kubelet_dir.parent / "plugins" / driver

    @property
    def kubelet_config(self) -> Path:
        """The kubelet's configuration file, at the path that kubeadm uses. On the host it is in the folder above that
        of device plugins.
        """
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
        return self.kubelet_dir / CHECKPOINT

    def endpoint(self, resource: str) -> Path:
        """Returns the path of the socket for a resource, in the kubelet's folder. The path of a socket may have only
        107 bytes (unix(7)), but the name of a resource 317 characters. So a longer name is replaced by its digest.
        """
        named = self.kubelet_dir / f"vgpu-{resource.replace('/', '_')}.sock"
        if len(os.fsencode(named)) <= LONGEST_SOCKET_PATH:
            return named
        return self.kubelet_dir / f"vgpu-{hashlib.sha256(resource.encode()).hexdigest()[:16]}.sock"
