# SPDX-License-Identifier: Apache-2.0
"""Reads the state of a host in one pass, in the structure that the plan compares with the desired state."""

from __future__ import annotations

import os
from typing import Any, Sequence

from ..config import node_config as configs
from ..driver import facts as driver_facts
from ..engines import containerd_text, daemon_json, docker_api, docker_variants, kubelet_engine, oci_runtime
from ..gpu import mig_nvml, nvml
from ..host.host import Host
from ..kube import version as kube_version
from ..library import versions
from . import baseline, conflicting_on_host, running_plugin


def read(
    host: Host,
    packages: Sequence[str] = (),
    files: Sequence[str] = (),
    units: Sequence[str] = (),
    texts: Sequence[str] = (),
    docker_config: str = "/etc/docker/daemon.json",
    node_config: str = "/etc/vgpu/node.yaml",
    library_root: str = "/usr/local/lib/vgpu",
    plugin_root: str = "/opt/vgpu/plugin",
    containerd_config: str = "/etc/containerd/config.toml",
    mig: bool = False,
) -> dict[str, Any]:
    """Returns the state of a host and changes nothing. A part that the host does not have is None or empty, and never a
    failure.
    """
    found, kube = nvml.read(), kube_version.of_host(host)
    unit_states, docker_text = host.units(units), host.text(docker_config)
    argv = (unit_states.get("docker.service") or {}).get("argv") or []
    docker_socket = host.path(daemon_json.socket_of(docker_text, argv))
    docker_info = docker_api.info(docker_socket)
    kubelet, in_containerd = kubelet_engine.read(host, kube), containerd(host, containerd_config)
    return {
        "os": host.os_release(),
        "node": host.node_name(),
        "memory_mib": host.memory_mib(),
        "gpus": found.pop("gpus"),
        "nvml": found,
        "pci_gpus": host.pci_gpus(),
        "nvswitches": driver_facts.nvswitches(host),
        "driver": driver_facts.read(host),
        "packages": host.packages(packages),
        "held": host.held(),
        "files": {path: host.file(path) for path in files},
        "texts": {path: host.text(path) for path in texts},
        "units": unit_states,
        "docker": {
            "config_text": docker_text,
            "info": docker_info,
            "containers": running(docker_socket, docker_info),
            "kinds": docker_variants.find(host),
        },
        "containerd": in_containerd,
        "vcuda": versions.library(host, library_root),
        "plugin": {
            "current": versions.version_of(host.link(os.path.join(plugin_root, "current"))),
            "versions": versions.folders(host, plugin_root),
            "status": running_plugin.status(host),
            "conflicting_plugins": conflicting_on_host.find(host),
        },
        "kubelet": kube,
        "kubelet_engine": kubelet,
        "oci_runtime": oci_runtime.read(host, kubelet, docker_info, in_containerd["config_text"]),
        "node_config": {"text": host.text(node_config), "named": named_configs(host, node_config)},
        "mig": mig_nvml.read() if mig else None,
        "proof": running_plugin.proof(host),
        "records": baseline.read(host),
    }


def running(socket: str, info: dict[str, Any] | None) -> list[str]:
    """Returns the names of docker's running containers. Queries docker only if its ``info`` reports running
    containers.
    """
    return docker_api.containers(socket) or [] if (info or {}).get("ContainersRunning") else []


def named_configs(host: Host, path: str) -> dict[str, str | None]:
    """Returns the texts of the configurations that a node label may choose, by name."""
    suffix, folder = configs.CONFIG_SUFFIX, configs.configs_folder(path)
    return {
        name[: -len(suffix)]: host.text(os.path.join(folder, name))
        for name in host.names(folder)
        if name.endswith(suffix)
    }


def containerd(host: Host, path: str) -> dict[str, Any]:
    """Returns the text of containerd's file, and of the collection's file in the folder that containerd imports."""
    text = host.text(path)
    folder = containerd_text.imported_folder(text) if text is not None else None
    return {
        "config_text": text,
        "drop_in_text": host.text(os.path.join(folder, containerd_text.DROP_IN)) if folder else None,
    }
