# SPDX-License-Identifier: Apache-2.0
"""Plans a rehearsal, a run of the playbooks on simulated hosts that replace the hosts of an inventory. The plan has the
GPUs and variables of the simulated hosts. It replaces some variables, so that a rehearsal reaches no real host, cluster
or network. The functions do no I/O and are used on the controller only.
"""

from __future__ import annotations

import json
import re
from typing import Any, Iterable, Mapping

from ansible_collections.vgpu.fleet.plugins.module_utils.config.kinds import nearest

# The models of the simulated driver (native/gpusim/core/models.c).
MODELS = ("T4", "V100-16GB", "A100-40GB", "A100-80GB", "H100-80GB", "H200", "GTX-1080-Ti")
VARIABLE = "rehearse_gpus"
MOST_GPUS = 16
# A host name that podman and the kernel accept.
NAME = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9.]{0,61}[A-Za-z0-9])?\Z")
# Prefixes of the variables by which hosts count as different in a rehearsal.
TELLING = ("vgpu_", VARIABLE)
CONNECTION = "containers.podman.podman"
IMAGE = "vgpu-demo/base:latest"


def container(project: str, host: str) -> str:
    """Returns the name that tests/hosts/hostctl gives to a simulated host's container."""
    return f"vgpu-{project}-{host}"


def replaced(project: str, host: str, cache: str) -> dict[str, Any]:
    """Returns the variables of a rehearsed host that override the inventory's variables."""
    return {
        "ansible_connection": CONNECTION,
        "ansible_host": container(project, host),
        "ansible_user": "root",
        "ansible_become": False,
        "ansible_python_interpreter": "/usr/bin/python3",
        # A simulated host is a container without its own kernel and without a network, so packages come from a
        # repository in its files.
        "nvidia_driver_kernel_module": "none",
        "nvidia_driver_source": "distribution",
        "nvidia_driver_branch": "",
        "nvidia_driver_version": "",
        "nvidia_driver_repository": {},
        "nvidia_driver_reboot": "never",
        "nvidia_docker_repository": {"uris": ["file:/opt/vgpu-demo/apt"], "suites": ["./"], "trusted": True},
        "nvidia_docker_package_version": "",
        "nvidia_docker_toolkit_version": "",
        # Builds run on the controller, and no role calls an API server.
        "vcuda_build_host": "localhost",
        "vcuda_archive": "",
        "vcuda_cache": cache,
        "device_plugin_cache": cache,
        "device_plugin_deploy": "systemd",
        "device_plugin_kubeconfig": "",
        "device_plugin_api_kubeconfig": "",
        "device_plugin_conflicting_plugins_remove": [],
        "verify_kubeconfig": "",
        "upgrade_kubeconfig": "",
        "vgpu_kubeconfig": "",
        "verify_isolation_image": IMAGE,
        # The isolation check gets no time limit, so that even on a busy controller it tries every bypass (a way past
        # the library's limits).
        "verify_isolation_duration": 0,
    }


def profile(gpus: Any, where: str) -> tuple[str, list[str]]:
    """Returns the simulated driver's profile for a list of ``{model, count}``, and every fault in the list."""
    if not isinstance(gpus, (list, tuple)) or not gpus:
        known = ", ".join(MODELS)
        return "", [
            f"{where}: {VARIABLE}: expected a list such as [{{model: T4, count: 2}}], of {known}; found {gpus!r}"
        ]
    faults, sections, total = [], [], 0
    for n, one in enumerate(gpus):
        path = f"{where}: {VARIABLE}[{n}]"
        if not isinstance(one, Mapping) or set(one) - {"model", "count"} or "model" not in one:
            faults.append(f"{path}: expected model and count, found {one!r}")
            continue
        model = next((name for name in MODELS if name.lower() == str(one["model"]).lower()), None)
        if model is None:
            meant = nearest(str(one["model"]), list(MODELS))
            hint = f"did you mean {meant}?" if meant else f"the simulated driver has {', '.join(MODELS)}"
            faults.append(f"{path}.model: unknown model {one['model']!r}; {hint}")
            continue
        count = one.get("count", 1)
        if isinstance(count, bool) or not str(count).isdigit() or not 1 <= int(count) <= MOST_GPUS:
            faults.append(f"{path}.count: expected a whole number from 1 to {MOST_GPUS}, found {count!r}")
            continue
        total += int(count)
        sections.append(f"[gpu]\nmodel = {model}\ncount = {int(count)}\n")
    if total > MOST_GPUS:
        faults.append(f"{where}: {VARIABLE}: {total} GPUs on one host, the simulated driver has at most {MOST_GPUS}")
    # hostctl replaces driver_version by the version that the host's nvidia-smi reports.
    return "driver_version = 535\ncuda_version = 12.2\ndevice_nodes = require\n\n" + "\n".join(sections), faults


def plan(hosts: Mapping[str, Mapping[str, Any]], project: str, cache: str, every: bool = False) -> dict[str, Any]:
    """Returns the rehearsed hosts: ``{hosts: [{name, container, profile, variables, stands_for}], faults}``.

    ``hosts`` maps a name to ``{groups, variables}``. One rehearsed host represents all hosts with the same groups and
    variables, unless ``every`` is set.
    """
    faults: list[str] = []
    chosen: dict[str, dict[str, Any]] = {}
    for name in sorted(hosts):
        variables = hosts[name]["variables"]
        text, wrong = profile(variables.get(VARIABLE), f"host {name}")
        if not NAME.match(name):
            wrong.append(f"host {name}: a simulated host cannot have this name; letters, digits, dots and dashes alone")
        faults += wrong
        telling = {key: value for key, value in variables.items() if str(key).startswith(TELLING)}
        key = name if every else json.dumps([sorted(hosts[name]["groups"]), telling], sort_keys=True, default=str)
        if key in chosen:
            chosen[key]["stands_for"].append(name)
        elif not wrong:
            chosen[key] = {
                "name": name,
                "container": container(project, name),
                "profile": text,
                "variables": replaced(project, name, cache),
                "stands_for": [name],
            }
    return {"hosts": list(chosen.values()), "faults": faults}


def leaks(inventory: Mapping[str, Any], names: Iterable[str], project: str) -> list[str]:
    """Returns a sentence for each host variable that could make a rehearsal reach a real host, cluster or network.

    ``inventory``: parsed output of ``ansible-inventory --list``.
    """
    known = (inventory.get("_meta") or {}).get("hostvars") or {}
    found = []
    for name in names:
        have = known.get(name) or {}
        for key, value in replaced(project, name, "").items():
            if not key.endswith("_cache") and have.get(key) != value:
                found.append(f"host {name}: {key}: expected {value!r}, found {have.get(key)!r}")
    return found
