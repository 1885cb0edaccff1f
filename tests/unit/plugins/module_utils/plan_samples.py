# SPDX-License-Identifier: Apache-2.0
"""Sample data for the tests of the plan (the changes that a run would make): a converged host (which needs no change),
a bare host, and functions that make plans for hosts that differ from them.
"""

from __future__ import annotations

import copy

from ansible_collections.vgpu.fleet.plugins.module_utils.config import node_config
from ansible_collections.vgpu.fleet.plugins.module_utils.host.digest import fingerprint, sha256
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import desired, plan

VARIABLES = {
    "vgpu_split_count": 3,
    "nvidia_driver_state": "present",
    "nvidia_driver_packages": ["nvidia-smi", "libcuda1"],
    "nvidia_driver_kernel_module": "none",
    "nvidia_docker_state": "present",
    "nvidia_docker_packages": ["nvidia-docker2=*"],
    "__nvidia_docker_record": "/var/lib/vgpu/baseline/nvidia_docker.json",
    "container_runtime_state": "present",
    "container_runtime_packages": ["docker.io"],
    "__container_runtime_docker_settings": {
        "default-runtime": "nvidia",
        "runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime"}},
    },
    "vcuda_state": "present",
    "vcuda_version": "0.1.0-new",
    "__vcuda_arbiter_unit_text": "[Service]\n",
    "device_plugin_state": "present",
    "device_plugin_version": "0.1.0-plug",
    "__device_plugin_unit_text": "[Unit]\n",
}
NODE_YAML = node_config.dump(node_config.from_vars({"vgpu_split_count": 3}))
DAEMON_JSON = """\
{"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime"}}}
"""
RUNNING = {
    "present": True,
    "enabled": True,
    "active": True,
    "failed": False,
    "stale": False,
    "started": 1000.0,
    "argv": ["/usr/sbin/dockerd", "-H", "fd://"],
}
# the state of a host for which the plan is empty
CONVERGED = {
    "os": {"id": "debian", "id_like": "", "name": "Debian GNU/Linux 12 (bookworm)", "root": "true"},
    "gpus": [
        {"index": 0, "uuid": "GPU-a", "model": "Tesla V100-SXM2-16GB", "memory_mib": 16160},
        {"index": 1, "uuid": "GPU-b", "model": "Tesla V100-SXM2-16GB", "memory_mib": 16160},
    ],
    "nvml": {"ok": True, "error": "", "lost": [], "driver_version": "535.261.03"},
    "pci_gpus": [],
    "driver": {"loaded_version": None, "nouveau": False},
    "packages": {"nvidia-smi": "535.261.03-1", "libcuda1": "535.261.03-1", "nvidia-docker2": "2.14", "docker.io": "20"},
    "files": {
        "/etc/systemd/system/vgpu-device-plugin.service": {"sha256": sha256("[Unit]\n"), "mtime": 900.0},
        "/etc/systemd/system/vgpu-arbiter.service": {"sha256": sha256("[Service]\n"), "mtime": 900.0},
    },
    "units": {
        "docker.service": dict(RUNNING),
        "vgpu-device-plugin.service": dict(RUNNING),
        "vgpu-arbiter.service": dict(RUNNING, exe="/usr/local/lib/vgpu/0.1.0-new/vgpu-arbiter"),
    },
    "docker": {
        "config_text": DAEMON_JSON,
        "info": {
            "DefaultRuntime": "nvidia",
            "Runtimes": {"runc": {"path": "runc"}, "nvidia": {"path": "/usr/bin/nvidia-container-runtime"}},
            "LiveRestoreEnabled": False,
            "ContainersRunning": 0,
        },
        "kinds": {"snap": False, "podman": False, "rootless": []},
    },
    "containerd": {"config_text": None, "drop_in_text": None},
    "vcuda": {
        "current": "0.1.0-new",
        "real_root": "/usr/local/lib/vgpu",
        "versions": ["0.1.0-new", "0.1.0-old"],
        "whole": ["0.1.0-new", "0.1.0-old"],
        "closed": [],
        "unused": [],
    },
    "plugin": {
        "current": "0.1.0-plug",
        "versions": ["0.1.0-plug"],
        "status": {"version": "0.1.0-plug", "config_sha256": sha256(NODE_YAML)},
    },
    "node_config": {"text": NODE_YAML},
}
CONVERGED["proof"] = fingerprint(CONVERGED["plugin"]["status"], CONVERGED["gpus"], "535.261.03")
BARE = {
    "proof": None,
    "gpus": [],
    "nvml": {"ok": False, "error": "not installed", "lost": [], "driver_version": None},
    "packages": {},
    "files": {},
    "units": {},
    "docker": {"config_text": None, "info": None, "kinds": {"snap": False, "podman": False, "rootless": []}},
    "vcuda": {
        "current": None,
        "real_root": "/usr/local/lib/vgpu",
        "versions": [],
        "whole": [],
        "closed": [],
        "unused": [],
    },
    "plugin": {"current": None, "versions": [], "status": None},
    "node_config": {"text": None},
}


def changed(document, changes):
    """Returns a copy of ``document`` with new values. Each key of ``changes`` is a path: a text with dots, or a tuple
    if a key itself contains dots."""
    document = copy.deepcopy(document)
    for place, value in changes.items():
        *path, last = place if isinstance(place, tuple) else place.split(".")
        inner = document
        for key in path:
            inner = inner[key]
        inner[last] = value
    return document


def made(variables=None, state=None):
    return plan.make_plan(desired.collect({**VARIABLES, **(variables or {})}), changed(CONVERGED, state or {}))


UNIT = ("units", "vgpu-device-plugin.service")
DOCKER = ("units", "docker.service")
SILENT = {"nvml.ok": False, "nvml.error": "no driver", "gpus": [], "pci_gpus": [{"address": "0000:01:00.0"}]}
