# SPDX-License-Identifier: Apache-2.0
"""Finds the engine and the runtime that start a host's containers. The runtime matters because the driver can limit a
container's GPU memory only by the controllers dmem or misc of control groups. runc enables every controller for a
container; crun enables neither of these two.
"""

from __future__ import annotations

import re
from typing import Any

from ..host.host import Host
from ..text import toml_text
from . import containerd_text

RUNC, CRUN = "runc", "crun"
FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/usr/libexec/crio")
TOOLKIT = "/etc/nvidia-container-runtime/config.toml"
CRIO, CRIO_FOLDER = "/etc/crio/crio.conf", "/etc/crio/crio.conf.d"
PODMAN = ("/etc/containers/containers.conf", "/usr/share/containers/containers.conf")
KEY = r"""^\s*%s\s*=\s*["']([^"'\s]+)["']"""


def read(
    host: Host, kubelet: dict[str, Any] | None, docker: dict[str, Any] | None, containerd: str | None
) -> dict[str, str]:
    """Returns ``{"engine", "runtime"}``, each empty if unknown. ``kubelet``, ``docker``, ``containerd``: the kubelet's
    engine, docker's info and the text of containerd's file, as host_state has them.
    """
    engine = str((kubelet or {}).get("engine") or "")
    if not engine:
        engine = "docker" if docker else "podman" if _there(host, "podman") else "containerd" if containerd else ""
    if engine == "docker":
        name = str((docker or {}).get("DefaultRuntime") or "")
    elif engine == "crio":
        name = _crio(host) or _first(host, CRUN, RUNC)
    elif engine == "podman":
        texts = (host.text(path) or "" for path in PODMAN)
        name = next((found for found in (_last(text, "runtime") for text in texts) if found), "")
        name = name or _first(host, CRUN, RUNC)
    elif engine:
        # Read no file for k3s and rke2. Both include their own runc, and write their containerd file again at each
        # start.
        name = _containerd(containerd) if engine == "containerd" and containerd else RUNC
    else:
        name = ""
    return {"engine": engine, "runtime": _below(host, name)}


def _below(host: Host, name: str) -> str:
    """Returns the name of the runtime program that finally starts containers. NVIDIA's runtime calls another runtime:
    the first runtime in NVIDIA's configuration file that exists on the host.
    """
    if "nvidia" not in name:
        return name.rpartition("/")[2]
    found = re.search(r"^\s*runtimes\s*=\s*\[([^\]]*)\]", host.text(TOOLKIT) or "", re.MULTILINE)
    names = re.findall(r"""["']([^"']+)["']""", found[1]) if found else []
    return next((one.rpartition("/")[2] for one in names or [RUNC, CRUN] if _there(host, one)), "")


def _containerd(text: str) -> str:
    try:
        table = containerd_text.SECTIONS[containerd_text.version_of(text)] + ".containerd"
    except containerd_text.ConfigError:
        return ""
    name = _plain(toml_text.get(text, f"{table}.default_runtime_name")) or RUNC
    return _plain(toml_text.get(text, f"{table}.runtimes.{name}.options.BinaryName")) or name


def _plain(written: str | None) -> str:
    return (written or "").strip("\"'")


def _crio(host: Host) -> str:
    """Returns the runtime that CRI-O's files name; the last file that names a runtime counts."""
    paths = [CRIO, *(f"{CRIO_FOLDER}/{name}" for name in sorted(host.names(CRIO_FOLDER)))]
    found = [_last(host.text(path) or "", "default_runtime") for path in paths]
    return next((one for one in reversed(found) if one), "")


def _last(text: str, key: str) -> str:
    found = re.findall(KEY % key, text, re.MULTILINE)
    return str(found[-1]) if found else ""


def _first(host: Host, *names: str) -> str:
    return next((one for one in names if _there(host, one)), "")


def _there(host: Host, name: str) -> bool:
    paths = [name] if name.startswith("/") else [f"{folder}/{name}" for folder in FOLDERS]
    return any(host.file(one) is not None for one in paths)
