# SPDX-License-Identifier: Apache-2.0
"""The scheduler's configuration file with names of resources, defaults and policies. It is JSON or YAML, and any key
may be left out.

resourceNames: {count: nvidia.com/gpu, memory: nvidia.com/gpumem}
defaultMemoryMiB: 5000        # 0: all memory of the GPU
tooManyGpus: refuse          # for a pod with more GPUs than any node has: refuse | wait
runtimeHandlers: [kata-qemu]  # handlers whose pods may have slices, in addition to runc, crun and nvidia
claims: false                 # whether pods with the label vgpu.fleet/allocation: dra get claims
plain: whole                  # meaning of a GPU count without a size: whole | slice | default
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml
from vgpu_plugin._shared.config.kinds import Bool, Choice, Finding, Int, ListOf, Record, Text
from vgpu_plugin._shared.config.variables import RESOURCE
from vgpu_plugin._shared.pods.preferences import BINPACK, SPREAD, TOPOLOGY
from vgpu_plugin._shared.pods.requests import Config
from vgpu_plugin._shared.pods.resources import MAX_GPUS, MAX_MIB

# Values of ``tooManyGpus``: what happens to a pod that requests more distinct GPUs than any node has.
REFUSE, WAIT = "refuse", "wait"
NAMES = {
    "count": "gpu",
    "memory": "memory",
    "memoryPercentage": "memory_percentage",
    "cores": "cores",
    "priority": "priority",
}
FIELDS = {
    "defaultMemoryMiB": "default_memory_mib",
    "defaultCores": "default_cores",
    "defaultCount": "default_count",
    "memoryFactor": "memory_factor",
    "plain": "plain",
    "gpuMemUnit": "gpu_mem_unit",
}
POLICY = Choice(BINPACK, SPREAD, TOPOLOGY)
SCHEMA = Record(
    {
        "resourceNames": Record(dict.fromkeys(NAMES, RESOURCE)),
        "defaultMemoryMiB": Int(0, MAX_MIB),
        "defaultCores": Int(0, 100),
        "defaultCount": Int(0, MAX_GPUS),
        "memoryFactor": Int(1, 1024),
        "plain": Choice("whole", "slice", "default"),
        "gpuMemUnit": Choice("ack", "strict"),
        "nodePolicy": POLICY,
        "gpuPolicy": POLICY,
        "tooManyGpus": Choice(REFUSE, WAIT),
        "claims": Bool(),
        "runtimeClass": Text("a name of a RuntimeClass", r"^([a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?)?\Z"),
        # The pattern that the API server accepts for a handler of a RuntimeClass.
        "runtimeHandlers": ListOf(Text("a handler of a RuntimeClass", r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")),
    }
)


class SettingsError(ValueError):
    """Raised if the file is invalid. The text names each invalid key."""


class SchedulerSettings(NamedTuple):
    config: Config = Config()
    node_policy: str = BINPACK
    gpu_policy: str = SPREAD
    runtime_class: str = ""
    runtime_handlers: tuple[str, ...] = ()
    too_many: str = REFUSE
    claims: bool = False


def load(path: Path) -> SchedulerSettings:
    """Reads the configuration file. Raises SettingsError."""
    try:
        document = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as fault:
        raise SettingsError(f"{path}: {fault}") from None
    return read(document, str(path))


def read(document: Any, where: str) -> SchedulerSettings:
    findings: list[Finding] = []
    clean = SCHEMA.read(document, "", findings)
    if findings:
        raise SettingsError("; ".join(f"{where}: {finding}" for finding in findings))
    names = {NAMES[key]: value for key, value in (clean.get("resourceNames") or {}).items()}
    fields = {FIELDS[key]: value for key, value in clean.items() if key in FIELDS}
    config = Config(**names, **fields)
    if len({config.gpu, config.memory, config.memory_percentage, config.cores, config.priority}) < 5:
        raise SettingsError(f"{where}: resourceNames: two resources have the same name")
    return SchedulerSettings(
        config,
        clean.get("nodePolicy", BINPACK),
        clean.get("gpuPolicy", SPREAD),
        clean.get("runtimeClass", ""),
        tuple(clean.get("runtimeHandlers") or ()),
        clean.get("tooManyGpus", REFUSE),
        clean.get("claims", False),
    )
