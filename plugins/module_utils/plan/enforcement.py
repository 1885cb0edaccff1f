# SPDX-License-Identifier: Apache-2.0
"""Predicts what will enforce memory limits on a host, the driver or the library, and why. The plan shows the result. If
the user requests enforcement by the driver and the host cannot do that, the result is an error. The rule is in
gpu/enforcement.py. One fact comes from the running device plugin: its probe sets a limit by the driver at each start
and reads the limit back.
"""

from __future__ import annotations

import re
from typing import Any

from ..driver import support
from ..gpu import enforcement as rule
from ..gpu.enforcement import DRIVER, Facts, Verdict
from .modes import gpus_after_mig
from .part import PRESENT

# The first versions of the kubelet, docker and containerd that pass devices to containers by CDI.
CDI_KUBELET, CDI_DOCKER, CDI_CONTAINERD = (1, 29), (25, 0), (1, 7)
CONTAINERD_PACKAGES = ("containerd.io", "containerd")
NOT_YET = "the device plugin probes the driver's limits when it starts"


def verdict(desired: dict[str, Any], state: dict[str, Any]) -> Verdict | None:
    """Returns what will enforce the limits and why; None if no device plugin is to run."""
    if (desired["roles"].get("device_plugin") or {}).get("state") != PRESENT:
        return None
    requested = desired["node_config"].get("flags", {}).get("plugin", {}).get("memoryEnforcement", rule.AUTO)
    vcuda = (desired["node_config"].get("sharing") or {}).get("vcuda") or {}
    host = facts(desired, state)
    found = rule.decide(requested, host, desired["sharing"], bool(vcuda.get("countContext", True)))
    if found.why == rule.NOT_TRIED:
        return found._replace(why=NOT_YET + host.parts())
    return found._replace(why=found.why + host.parts()) if found.by_driver else found


def faults(desired: dict[str, Any], found: Verdict | None) -> list[str]:
    """Returns errors that stop the run. Returns an error if the user allows only the driver to enforce limits and the
    driver is known to be unable to.
    """
    requested = desired["node_config"].get("flags", {}).get("plugin", {}).get("memoryEnforcement", rule.AUTO)
    if found is None or requested != DRIVER or found.by_driver or found.why.startswith(NOT_YET):
        return []
    way_out = "remove this cause, or set vgpu_memory_enforcement: auto"
    return [f"device_plugin: vgpu_memory_enforcement is driver, and {found.why}; {way_out}"]


def facts(desired: dict[str, Any], state: dict[str, Any]) -> Facts:
    driver, starts = state.get("driver") or {}, state.get("oci_runtime") or {}
    return Facts(
        branch=_branch(desired, state),
        modules="proprietary" if driver.get("open_module") is False else "",
        cards=[
            f"the {one.name} GPU at {address}"
            for address, one in support.generations(state.get("pci_gpus") or [])
            if one.last and one.last < rule.FIRST_BRANCH
        ],
        mig=[str(one.get("uuid")) for one in gpus_after_mig(desired, state) if one.get("mig_enabled")],
        memacct_mode=_memacct_mode(str(driver.get("registry") or "")),
        cgroup2=bool(driver.get("cgroup2", True)),
        handover=handover(state),
        probed=_probed(state),
        controllers=driver.get("controllers"),
        engine=str(starts.get("engine") or ""),
        runtime=str(starts.get("runtime") or ""),
    )


def _branch(desired: dict[str, Any], state: dict[str, Any]) -> int:
    """Returns the branch of the driver that the host is to have; 0 if it is not known yet."""
    wanted = desired["roles"].get("nvidia_driver") or {}
    named = str(wanted.get("branch") or "") if wanted.get("state") == PRESENT else ""
    if named.isdigit():
        return int(named)
    return support.branch_of(str(state["nvml"].get("driver_version") or "")) or 0


def _memacct_mode(registry: str) -> str:
    """Returns the value of RmMemacctMode in NVreg_RegistryDwords; empty if it is not set."""
    found = re.search(r"RmMemacctMode=(\d+)", registry)
    return found.group(1) if found else ""


def handover(state: dict[str, Any]) -> str:
    """Returns why the engine that starts containers on this host cannot run the hook that sets the driver's limits.
    Empty if the engine can, or if this is unknown.
    """
    packages = state.get("packages") or {}
    if state.get("kubelet_engine"):
        kubelet = tuple(state.get("kubelet") or ())
        if kubelet and kubelet < CDI_KUBELET:
            return f"kubelet {'.'.join(map(str, kubelet))} passes no CDI devices to containers; 1.29 does"
        for name in CONTAINERD_PACKAGES:
            version = numbers(str(packages.get(name) or ""))
            if version and version < CDI_CONTAINERD:
                return f"containerd {'.'.join(map(str, version))} has no CDI; 1.7 has it"
        return ""
    version = numbers(str(((state.get("docker") or {}).get("info") or {}).get("ServerVersion") or ""))
    return f"docker {'.'.join(map(str, version))} has no CDI; 25.0 has it" if version and version < CDI_DOCKER else ""


def numbers(text: str) -> tuple[int, ...]:
    found = re.match(r"(?:\d+:)?(\d+)\.(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else ()


def _probed(state: dict[str, Any]) -> tuple[str, str] | None:
    """Returns the result of the running plugin's probe; None if the plugin made no probe."""
    status = (state.get("plugin") or {}).get("status") or {}
    active, why = str(status.get("memory_enforcement") or ""), str(status.get("memory_enforcement_reason") or "")
    if active.startswith(DRIVER + "-"):
        return active.partition("-")[2], ""
    return ("", why.partition(": ")[2]) if status.get("memory_enforcement_probed") and why else None
