# SPDX-License-Identifier: Apache-2.0
"""All that matters of a host, read at once: the structure that the plan compares with what the group wants."""

from __future__ import annotations

import json
import os
from typing import Any, Sequence

from ..config import node_config as configs
from ..driver import facts as driver_facts
from ..engines import containerd_text, docker_api, docker_variants, kubelet_engine
from ..gpu import mig_nvml, nvml
from ..host.host import Host
from ..kube import version as kube_version
from ..library import versions
from . import conflicting_on_host

KUBELETS = ("/usr/bin/kubelet", "/usr/local/bin/kubelet")
VGPUCTL = "/usr/local/bin/vgpuctl"
PROOF = "/var/lib/vgpu/proof.json"


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
    """The state of a host. Reads only, and a part that is absent is None or empty, never a failure."""
    found, kube = nvml.read(), kubelet(host)
    return {
        "os": host.os_release(),
        "node": host.node_name(),
        "gpus": found.pop("gpus"),
        "nvml": found,
        "pci_gpus": host.pci_gpus(),
        "nvswitches": driver_facts.nvswitches(host),
        "driver": driver_facts.read(host),
        "packages": host.packages(packages),
        "held": host.held(),
        "files": {path: host.file(path) for path in files},
        "texts": {path: host.text(path) for path in texts},
        "units": host.units(units),
        "docker": {
            "config_text": host.text(docker_config),
            "info": docker_api.info(host.path(docker_api.SOCKET)),
            "kinds": docker_variants.find(host),
        },
        "containerd": containerd(host, containerd_config),
        "vcuda": versions.library(host, library_root),
        "plugin": {
            "current": versions.version_of(host.link(os.path.join(plugin_root, "current"))),
            "versions": versions.folders(host, plugin_root),
            "status": plugin_status(host),
            "conflicting_plugins": conflicting_on_host.find(host),
        },
        "kubelet": kube,
        "kubelet_engine": kubelet_engine.read(host, kube),
        "node_config": {"text": host.text(node_config), "named": named_configs(host, node_config)},
        "mig": mig_nvml.read() if mig else None,
        "proof": proof(host),
    }


def kubelet(host: Host) -> tuple[int, int] | None:
    """Major and minor of the host's kubelet; None where there is none, or one that does not tell."""
    for path in KUBELETS:
        if os.access(host.path(path), os.X_OK):
            return kube_version.of_text(host.run([host.path(path), "--version"]).out)
    return None


def named_configs(host: Host, path: str) -> dict[str, str | None]:
    """The texts of the configurations that a node label may choose, by name."""
    suffix, folder = configs.CONFIG_SUFFIX, configs.configs_folder(path)
    return {
        name[: -len(suffix)]: host.text(os.path.join(folder, name))
        for name in host.names(folder)
        if name.endswith(suffix)
    }


def containerd(host: Host, path: str) -> dict[str, Any]:
    """The text of containerd's file, and of a file of our own in the folder that it imports."""
    text = host.text(path)
    folder = containerd_text.imported_folder(text) if text is not None else None
    return {
        "config_text": text,
        "drop_in_text": host.text(os.path.join(folder, containerd_text.DROP_IN)) if folder else None,
    }


def plugin_status(host: Host) -> dict[str, Any] | None:
    """What the running device plugin says of itself, None where none answers."""
    return _ask_plugin(host, "status", "--json")


def plugin_usage(host: Host) -> list[dict[str, Any]]:
    """What each limited container holds and uses, GPU by GPU; empty where no device plugin answers."""
    usages = (_ask_plugin(host, "top", "--once", "--json") or {}).get("usages")
    return usages if isinstance(usages, list) else []


def plugin_watch(host: Host) -> dict[str, Any] | None:
    """What the watcher of the device plugin names; None where there is none."""
    return _ask_plugin(host, "watch", "--json")


def _ask_plugin(host: Host, *arguments: str) -> dict[str, Any] | None:
    if host.file(VGPUCTL) is None:
        return None
    answer = host.run([host.path(VGPUCTL), *arguments])
    if answer.rc != 0:
        return None
    try:
        told = json.loads(answer.out)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def proof(host: Host) -> str | None:
    """The fingerprint of what isolation was last proven for, None where it never was."""
    try:
        kept = json.loads(host.text(PROOF) or "")
    except ValueError:
        return None
    return str(kept["fingerprint"]) if isinstance(kept, dict) and kept.get("fingerprint") else None
