# SPDX-License-Identifier: Apache-2.0
"""Finds other device plugins that advertise a host's GPUs to the kubelet. It finds them by their sockets, and reports
their processes and static pods. Two plugins conflict because the kubelet keeps only the plugin that registered a
resource last. So they replace each other at every restart, and a pod can get a whole card although it was promised a
slice (share of a GPU).
"""

from __future__ import annotations

import os
import re
import socket
from typing import Any, Sequence

from ..host.host import Host

KUBELET_DIR = "/var/lib/kubelet/device-plugins"
MANIFESTS = "/etc/kubernetes/manifests"
# NVIDIA's plugin and its forks: one socket for each resource nvidia.com/<name>.
NVIDIA_SOCKET = re.compile(r"^nvidia-(.+)\.sock\Z")
NVIDIA = "nvidia.com/"
# Plugins that use other resource names: maps the name of the socket to the name of the plugin.
OTHERS = {"aliyungpushare.sock": "gpushare", "vcore.sock": "gpu-manager", "vmemory.sock": "gpu-manager"}
# Names of the plugins' processes, as in /proc/<pid>/comm, which holds at most 15 characters.
PROGRAMS = ("nvidia-device-plugin", "gpushare-device-plugin", "gpu-manager", "volcano-vgpu-device-plugin")
IMAGE = re.compile(r"^\s*(?:-\s*)?image:\s*[\"']?(\S*(?:device-plugin|gpu-manager|gpushare|hami|vgpu)[^\s\"']*)", re.M)


def find(host: Host, kubelet_dir: str = KUBELET_DIR) -> list[dict[str, Any]]:
    """Returns ``[{"socket", "resource", "owner"}]`` of the plugins that answer on their sockets. ``resource``: None if
    the plugin's resource names do not begin with nvidia.com. Changes nothing.
    """
    found = []
    for name in host.names(kubelet_dir):
        match = NVIDIA_SOCKET.match(name)
        if not match and name not in OTHERS:
            continue
        path = os.path.join(kubelet_dir, name)
        # A killed plugin leaves its socket behind, so the socket alone does not prove that a plugin runs.
        if _answers(host.path(path)):
            resource = NVIDIA + match.group(1) if match else None
            found.append({"socket": path, "resource": resource, "owner": OTHERS.get(name, "")})
    if found:
        owners = "; ".join([*_processes(host), *_static_pods(host)])
        found = [dict(one, owner=one["owner"] or owners) for one in found]
    return found


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(5.0)
        try:
            client.connect(path)
        except OSError:
            return False
    return True


def _processes(host: Host) -> list[str]:
    """Lists the running programs of conflicting device plugins, with how each was started."""
    out = []
    for pid in host.names("/proc"):
        comm = (host.text(f"/proc/{pid}/comm") or "").strip() if pid.isdigit() else ""
        program = next((one for one in PROGRAMS if comm and one[:15] == comm), None)
        if program:
            in_pod = "kubepods" in (host.text(f"/proc/{pid}/cgroup") or "")
            out.append(f"{program}, pid {pid}" + (", in a pod" if in_pod else ""))
    return out


def _static_pods(host: Host) -> list[str]:
    out = []
    for name in host.names(MANIFESTS):
        path = os.path.join(MANIFESTS, name)
        images = IMAGE.findall(host.text(path) or "")
        out += [f"static pod {path} with image {image}" for image in images]
    return out


def findings(found: Sequence[dict[str, Any]], resources: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns (errors, warnings): an error for a plugin that advertises a resource name of vgpu.fleet, a warning for a
    plugin that advertises the same GPUs under other names.
    """
    errors, warnings = [], []
    for one in found:
        who = " ({})".format(one["owner"]) if one["owner"] else ""
        if one["resource"] in resources:
            errors.append(
                "another device plugin advertises {}{} on the socket {}; the kubelet keeps only the plugin that "
                "registers last. Remove the other plugin: delete its DaemonSet or static pod, or set "
                "devicePlugin.enabled=false of the GPU operator; or set "
                "device_plugin_conflicting_plugins: ignore".format(one["resource"], who, one["socket"])
            )
        else:
            text = (
                "another device plugin{} answers on the socket {}; vgpu.fleet does not count its allocations of these "
                "GPUs"
            )
            warnings.append(text.format(who, one["socket"]))
    return errors, warnings
