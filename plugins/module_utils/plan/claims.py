# SPDX-License-Identifier: Apache-2.0
"""Checks whether pods on a host can get GPUs by claims (vgpu_allocation: dra, Dynamic Resource Allocation), and writes
the line on claims for the plan. Only the host's own state is checked. Later the device plugin tests by a dry run
whether the API server stores all fields of a ResourceSlice; if not, the plugin publishes nothing. No I/O.
"""

from __future__ import annotations

import re
from typing import Any

from ..config import named_configs, node_config
from .enforcement import CONTAINERD_PACKAGES, handover, numbers

# OLDEST: first Kubernetes version with v1 of claims. BY_DEFAULT: first version in which claims on shares of a device
# are enabled by default.
OLDEST, BY_DEFAULT = (1, 34), (1, 36)
GATE = "DRAConsumableCapacity"
# The first containerd that passes CDI devices to containers by default.
CDI_BY_ITSELF = (2, 0)
ENABLE_CDI = re.compile(r"^\s*enable_cdi\s*=\s*(true|false)\b", re.MULTILINE)
DOCKER = (
    "the kubelet of this host starts containers by docker; only a cri-dockerd of 2026 or newer passes claims to "
    "containers, and this is untested"
)


def line(desired: dict[str, Any]) -> str:
    """Returns the plan's line on claims; empty in the usual case, in which pods get GPUs by the device plugin."""
    if not node_config.by_claims(desired["node_config"]):
        return ""
    return "pods get GPUs by claims (Dynamic Resource Allocation) of class vgpu; no device plugin is registered"


def faults(desired: dict[str, Any], wanted: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """Returns errors that stop the run. ``wanted``: the desired state of the role device_plugin."""
    if not node_config.by_claims(desired["node_config"]):
        return _left(state, "vgpu_allocation is device-plugin") if _had_claims(state) else []
    found = []
    kubelet = tuple(state.get("kubelet") or ())
    if not kubelet and not state.get("kubelet_engine"):
        found.append(
            "this host has no kubelet, and claims need one; install it, or set vgpu_allocation to device-plugin"
        )
    if kubelet and kubelet < OLDEST:
        version, oldest = (".".join(map(str, one)) for one in (kubelet, OLDEST))
        found.append(
            f"the kubelet of this host is Kubernetes {version}; expected {oldest} or newer. Upgrade the kubelet first"
        )
    if wanted["deploy"] != "systemd":
        found.append("device_plugin_deploy is daemonset, which does not support claims; set it to systemd")
    elif not wanted["kubeconfig"]:
        found.append(
            "the device plugin reads claims from the API server; set device_plugin_kubeconfig to the kubelet's "
            "own kubeconfig"
        )
    engine = handover(state) or _containerd(state)
    found += [f"{engine}; containers get the devices of claims only by CDI"] if engine else []
    return [f"vgpu_allocation is dra, and {one}" for one in found]


def _had_claims(state: dict[str, Any]) -> bool:
    """Returns whether node.yaml on the host configures claims."""
    try:
        return node_config.by_claims(node_config.load(state["node_config"]["text"] or ""))
    except node_config.ConfigError:
        return False


def faults_of_absence(state: dict[str, Any]) -> list[str]:
    """Returns errors for the role device_plugin with state ``absent``."""
    return _left(state, "device_plugin_state is absent")


def _left(state: dict[str, Any], why: str) -> list[str]:
    claims = named_configs.claims(state)
    if not claims:
        return []
    return [
        f"{why}, and containers have {', '.join(claims)} on this node; without the driver of claims, their pods would "
        "never end. Drain the node first, as upgrade.yml does for a driver: kubectl drain --ignore-daemonsets, then "
        "run this again"
    ]


def warnings(desired: dict[str, Any], state: dict[str, Any]) -> list[str]:
    if not node_config.by_claims(desired["node_config"]):
        return []
    found = []
    kubelet = tuple(state.get("kubelet") or ())
    if kubelet and OLDEST <= kubelet < BY_DEFAULT:
        found.append(
            f"Kubernetes {'.'.join(map(str, kubelet))} allows shares of a device only with the feature gate {GATE}, "
            "which is off by default; if API server and scheduler do not enable it, the plugin publishes no devices"
        )
    if (state.get("kubelet_engine") or {}).get("engine") == "docker":
        found.append(DOCKER)
    holders = 0 if _had_claims(state) else len(named_configs.held(state))
    if holders:
        found.append(
            f"containers with slices from the device plugin: {holders}; their GPUs take no claims until these "
            "containers end"
        )
    return found


def _containerd(state: dict[str, Any]) -> str:
    """Returns why the containerd of this host's kubelet passes no CDI devices to containers. Empty if it passes them,
    or if that is unknown.
    """
    if (state.get("kubelet_engine") or {}).get("engine") != "containerd":
        return ""
    said = ENABLE_CDI.findall((state.get("containerd") or {}).get("config_text") or "")
    known = [numbers(str((state.get("packages") or {}).get(name) or "")) for name in CONTAINERD_PACKAGES]
    version = next((one for one in known if one), ())
    if said[-1:] == ["false"]:
        return "containerd's configuration says enable_cdi = false"
    if version and version < CDI_BY_ITSELF and said[-1:] != ["true"]:
        shown = ".".join(map(str, version))
        return (
            f"containerd {shown} needs enable_cdi = true for the CRI plugin in its configuration; 2.0 has it by default"
        )
    return ""
