# SPDX-License-Identifier: Apache-2.0
"""Collects the desired state of a host from the variables of the roles in the play and from the ``vgpu_*`` variables.

If ``<role>_state`` is not defined, the role is not in the play and has no desired state.
"""

from __future__ import annotations

from typing import Any

from ..config import node_config
from ..config import variables as schema
from ..config.options import INTERNAL
from ..driver import choice as driver_choice
from ..driver import host_files
from ..engines import daemon_json, engine_auto, engine_packages
from ..gpu import mig_unit, mps, time_slice
from ..packages.pins import name_of
from . import plugin_python

# The roles in the order in which they run. Each role depends on the roles before it.
ROLES = ("nvidia_driver", "nvidia_docker", "container_runtime", "vcuda", "mig", "mps", "time_slicing", "device_plugin")
# The roles that can hold their packages at their version.
HOLDERS = ("nvidia_driver", "nvidia_docker")

# The variables of each role that the plan reads, without the role's prefix, with their defaults.
INPUTS: dict[str, dict[str, Any]] = {
    "nvidia_driver": {
        **driver_choice.DEFAULTS,
        "kernel_module": "none",
        "key": "",
        "reboot": "never",
        "record": "",
        "setup_record": "",
    },
    "nvidia_docker": {
        "package": "nvidia-container-toolkit",
        "packages": [],
        "hold": False,
        "record": "",
        "config": {},
        "config_path": "/etc/nvidia-container-runtime/config.toml",
        "config_record": "",
    },
    "container_runtime": engine_packages.DEFAULTS,
    "vcuda": {
        "version": "",
        "root": node_config.LIBRARY_ROOT,
        "arbiter_unit": "vgpu-arbiter.service",
        "arbiter_unit_path": "/etc/systemd/system/vgpu-arbiter.service",
        "arbiter_unit_text": "",
    },
    "mig": {"geometry": {}, "boot": True, "python": plugin_python.AUTO, "record": ""},
    "mps": {"replicas": 2, "root": mps.ROOT, "resource": mps.RESOURCE, "exclusive": True},
    "time_slicing": {"slice": "default"},
    "device_plugin": {
        "version": "",
        "root": "/opt/vgpu/plugin",
        "unit": "vgpu-device-plugin.service",
        "unit_path": "/etc/systemd/system/vgpu-device-plugin.service",
        "unit_text": "",
        "config_path": node_config.PATH,
        "kubeconfig": "",
        "conflicting_plugins": "refuse",
        "conflicting_plugins_remove": [],
        "deploy": "systemd",
        "daemonset_path": "/etc/vgpu/daemonset.json",
        "daemonset_text": "",
        "python": plugin_python.AUTO,
        "packages": [plugin_python.AUTO],
        "packages_record": "",
        "prebuilt": "",
        "cache": "",
    },
}


def variable(role: str, name: str) -> str:
    """Returns the whole name of an input of a role."""
    full = f"{role}_{name}"
    return f"__{full}" if full in INTERNAL else full


def collect(variables: dict[str, Any]) -> dict[str, Any]:
    """Returns the desired state of a host. ``variables``: the host's ``vgpu_*`` variables and role variables.

    Raises node_config.ConfigError if the ``vgpu_*`` variables are not valid.
    """
    settings = schema.read(variables, [])
    roles = {}
    for role in ROLES:
        if variables.get(role + "_state") is None:
            continue
        # Sharing modes other than ``vcuda`` need no library, so the role vcuda is left out; an installed library stays
        # for the containers that use it. But ``vgpu_memory_enforcement: driver`` needs the role, because the role also
        # installs the hook that sets the driver's limits.
        unused = settings["vgpu_sharing"] != "vcuda" and settings["vgpu_memory_enforcement"] != "driver"
        if role == "vcuda" and unused and variables["vcuda_state"] == "present":
            continue
        part = {name: variables.get(variable(role, name), default) for name, default in INPUTS[role].items()}
        part["state"] = variables[role + "_state"]
        roles[role] = part
    root = roles["vcuda"]["root"] if "vcuda" in roles else node_config.LIBRARY_ROOT
    return {
        "roles": roles,
        "sharing": settings["vgpu_sharing"],
        "verify": settings["vgpu_verify"],
        "node_config": node_config.from_vars(variables, root),
        "node_configs": node_config.named_from_vars(variables, root),
    }


def reads(desired: dict[str, Any]) -> dict[str, Any]:
    """Returns the options for the module host_state. They name the parts of the host that must be read for the
    comparison with this desired state.
    """
    roles = desired["roles"]
    # The packages of the device plugin's Python depend on the host's system, which is not known yet. So read those of
    # all systems.
    asked = [plugin_python.may_need(part["packages"]) for role, part in roles.items() if role == "device_plugin"]
    asked += [part.get("packages") or [] for role, part in roles.items() if role != "device_plugin"]
    packages = [name_of(package) for names in asked for package in names]
    options: dict[str, Any] = {"packages": packages, "units": [], "files": [], "texts": []}
    options["files"] += [record for part in roles.values() for record in records(part)]
    # These records name the packages that the roles held, which they release if they are no longer to hold them.
    options["texts"] += [roles[name]["record"] for name in HOLDERS if roles.get(name, {}).get("record")]
    if "nvidia_driver" in roles:
        if driver_choice.touches_host(roles["nvidia_driver"]):
            options["units"] += driver_choice.UNITS
            options["files"] += host_files.FILES
            if roles["nvidia_driver"]["setup_record"]:
                options["texts"].append(roles["nvidia_driver"]["setup_record"])
        if not roles["nvidia_driver"]["packages"]:
            # The choice of the driver's packages may depend on all packages that match these patterns.
            options["packages"] += driver_choice.PACKAGE_PATTERNS
    # With sharing mode ``vcuda``, the plan checks the container toolkit's file even if the role sets no key in it.
    if "nvidia_docker" in roles and (roles["nvidia_docker"]["config"] or desired["sharing"] == "vcuda"):
        options["texts"].append(roles["nvidia_docker"]["config_path"])
    if "container_runtime" in roles:
        part = roles["container_runtime"]
        options["units"] += [engine_packages.DOCKER_UNIT, *engine_auto.units(part["engine"])]
        options["files"].append(daemon_json.PENDING)
        options["docker_config"] = part["docker_config"]
        options["texts"] += [part["docker_record"]] if part["docker_record"] else []
        options["packages"] += [name_of(package) for package in engine_packages.names(part)]
        options["files"] += engine_auto.files(part["engine"])
        options["containerd_config"] = part["containerd_config"]
    if "vcuda" in roles:
        part = roles["vcuda"]
        options["library_root"] = part["root"]
        options["units"].append(part["arbiter_unit"])
        options["files"].append(part["arbiter_unit_path"])
    if roles.get("mig", {}).get("state") == "present":
        options["mig"] = True
        options["files"] += list(mig_unit.files({}))
        options["units"].append(mig_unit.UNIT)
    if "mps" in roles:
        options["files"] += [mps.UNIT_PATH, mps.START_PATH]
        options["units"].append(mps.UNIT)
    if "time_slicing" in roles:
        options["files"].append(time_slice.UNIT_PATH)
        options["units"].append(time_slice.UNIT)
    if "device_plugin" in roles:
        part = roles["device_plugin"]
        options["units"].append(part["unit"])
        options["files"] += [part["unit_path"], part["daemonset_path"]]
        options["plugin_root"] = part["root"]
        options["node_config"] = part["config_path"]
    for name in ("packages", "units"):
        options[name] = sorted(set(options[name]))
    return options


def records(part: dict[str, Any]) -> list[str]:
    """Returns the paths of the records by which a role can revert its changes. A record exists as long as there is
    something to revert.
    """
    names = ("record", "setup_record", "packages_record", "docker_record", "config_record", "containerd_record")
    return [part[name] for name in names if part.get(name)]
