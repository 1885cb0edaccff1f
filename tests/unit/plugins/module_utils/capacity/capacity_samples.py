# SPDX-License-Identifier: Apache-2.0
"""Sample data for the tests of capacity: a host with two T4 GPUs of two slices (parts of a GPU) each. The
configuration, the device plugin and the kubelet of this host agree.
"""

from __future__ import annotations

import copy
import json

from ansible_collections.vgpu.fleet.plugins.module_utils.capacity import capacity
from ansible_collections.vgpu.fleet.plugins.module_utils.config import node_config
from ansible_collections.vgpu.fleet.plugins.module_utils.host.digest import sha256

CONFIG = node_config.dump(node_config.from_vars({"vgpu_split_count": 2, "vgpu_cores_scaling": 1}))
GPUS = [
    {"index": n, "uuid": uuid, "model": "Tesla T4", "memory_mib": 15360, "used_mib": 0}
    for n, uuid in enumerate(("GPU-a", "GPU-b"))
]
IDS = ["GPU-a::0", "GPU-a::1", "GPU-b::0", "GPU-b::1"]


def checkpoint(ids, resource="nvidia.com/gpu"):
    return json.dumps({"Data": {"PodDeviceEntries": [], "RegisteredDevices": {resource: ids}}, "Checksum": 1})


def slices(**spoiled):
    made = [
        {"id": one, "uuid": one[:5], "memory_mib": 7680, "sm_percent": 50, "health": "Healthy", "in_use": False}
        for one in IDS
    ]
    made[1].update(spoiled)
    return made


AGREEING = {
    "nvml": {"ok": True, "error": "", "gpus": GPUS, "lost": []},
    "config_text": CONFIG,
    "config_path": "/etc/vgpu/node.yaml",
    "kubelet": True,
    "kubelet_fault": "",
    "checkpoint_text": checkpoint(IDS),
    "time": 1_800_000_000.0,
    "plugin": {
        "config_sha256": sha256(CONFIG),
        "library": "0.1.0-x",
        "registered": True,
        "kubelet_error": "",
        "slices": slices(),
        "allocations": [],
    },
}


def compared(**spoiled):
    return capacity.compare({**copy.deepcopy(AGREEING), **spoiled})


def plugin(**spoiled):
    return {**copy.deepcopy(AGREEING["plugin"]), **spoiled}
