# SPDX-License-Identifier: Apache-2.0
"""node.yaml: NVIDIA's device-plugin configuration file v1 plus ``sharing.vcuda``, read strictly.

The file is written as JSON, which is YAML, so that a node reads it with the standard library alone.
"""

from __future__ import annotations

import json
from typing import Any, Sequence

from . import schema
from .kinds import Bool, Choice, Either, Finding, Int, ListOf, Record, Scaling, Text, error, errors

PATH = "/etc/vgpu/node.yaml"
LIBRARY_ROOT = "/usr/local/lib/vgpu"
RESOURCE_NAME = "nvidia.com/gpu"

ABSOLUTE = Text("an absolute path", r"^/")
STRATEGY = Choice("auto", "envvar", "volume-mounts", "cdi-annotations", "cdi-cri")

DEVICE_EXCEPTION = Record(
    dict({schema.camel(name): kind for name, kind in schema.PER_GPU.items()}, match=schema.MATCH), required=("match",)
)

VCUDA = Record(
    {
        "libraryRoot": ABSOLUTE,
        "resourceName": schema.RESOURCE,
        "splitCount": schema.PER_GPU["split_count"],
        "memoryScaling": Scaling(),
        "coresScaling": Scaling(),
        "sliceSizing": schema.VARIABLES["vgpu_slice_sizing"].kind,
        "multiSlice": schema.VARIABLES["vgpu_multi_slice"].kind,
        "countContext": Bool(),
        "corePolicy": schema.VARIABLES["vgpu_core_policy"].kind,
        "disableCoreLimit": Bool(),
        "oomKiller": Bool(),
        "logLevel": schema.VARIABLES["vgpu_log_level"].kind,
        "legacyPreferred": Bool(),
        "devices": ListOf(DEVICE_EXCEPTION),
    }
)

REPLICAS = Record(
    {
        "renameByDefault": Bool(),
        "failRequestsGreaterThanOne": Bool(),
        "resources": ListOf(
            Record({"name": schema.RESOURCE, "replicas": Int(2, schema.MAX_SPLIT)}, required=("name", "replicas"))
        ),
    }
)

PATTERNS = ListOf(Record({"pattern": Text(), "name": Text()}, required=("pattern", "name")))

FILE = Record(
    {
        "version": Choice("v1"),
        "flags": Record(
            {
                "migStrategy": schema.VARIABLES["vgpu_mig_strategy"].kind,
                "failOnInitError": Bool(),
                "mpsRoot": Text(),
                "nvidiaDriverRoot": ABSOLUTE,
                "nvidiaDevRoot": ABSOLUTE,
                "gdrcopyEnabled": Bool(),
                "gdsEnabled": Bool(),
                "mofedEnabled": Bool(),
                "deviceDiscoveryStrategy": Choice("auto", "nvml", "tegra"),
                "plugin": Record(
                    {
                        "passDeviceSpecs": Bool(),
                        "deviceListStrategy": Either(STRATEGY, ListOf(STRATEGY)),
                        "deviceIDStrategy": Choice("uuid", "index"),
                        "cdiAnnotationPrefix": Text(),
                        "nvidiaCTKPath": ABSOLUTE,
                        "containerDriverRoot": ABSOLUTE,
                        "sharedDevicesAllocationPolicy": Choice("distributed", "packed"),
                    }
                ),
                "gfd": Record(
                    {
                        "oneshot": Bool(),
                        "noTimestamp": Bool(),
                        "sleepInterval": Either(Text(), Int(0, 2**62)),
                        "outputFile": Text(),
                        "machineTypeFile": Text(),
                    }
                ),
            }
        ),
        "resources": Record({"gpus": PATTERNS, "mig": PATTERNS}),
        "sharing": Record({"timeSlicing": REPLICAS, "mps": REPLICAS, "vcuda": VCUDA}),
        "imex": Record({"channelIDs": ListOf(Int(0, 0)), "required": Bool()}),
    },
    required=("version",),
)


class ConfigError(ValueError):
    """A configuration that cannot be used; ``findings`` holds every fault, the text is all of them."""

    def __init__(self, origin: str, findings: Sequence[Finding]) -> None:
        self.origin, self.findings = origin, list(findings)
        super().__init__("; ".join(f"{origin}: {finding}" for finding in findings))


def from_vars(variables: dict[str, Any], library_root: str = LIBRARY_ROOT) -> dict[str, Any]:
    """node.yaml as a host's ``vgpu_*`` variables want it. Raises ConfigError on any fault in them."""
    findings: list[Finding] = []
    clean = schema.read(variables, findings)
    if not errors(findings):
        findings += schema.unavailable(clean)
    if errors(findings):
        raise ConfigError("variables", errors(findings))
    config: dict[str, Any] = {"version": "v1", "flags": {}, "sharing": {}}
    shared = clean["vgpu_sharing"] == "vcuda"
    for name, variable in schema.VARIABLES.items():
        place = variable.node[:1] if variable.node[:1] == ("flags",) else variable.node[:2]
        if clean[name] is not None and (place == ("flags",) or (shared and place == schema.VCUDA)):
            _set(config, variable.node, clean[name])
    if shared:
        vcuda = config["sharing"]["vcuda"]
        vcuda["libraryRoot"] = library_root
        vcuda["resourceName"] = clean["vgpu_resource_names"].get("count", RESOURCE_NAME)
        vcuda["devices"] = [_exception(item) for item in clean["vgpu_devices"]]
    return config


def read(config: Any, findings: list[Finding]) -> Any:
    """The clean form of a node.yaml that was parsed; every fault goes to ``findings``."""
    clean = FILE.read(config, "", findings)
    sharing = clean.get("sharing") if isinstance(clean, dict) else None
    if isinstance(sharing, dict) and len(sharing) > 1:
        both = " and ".join("sharing." + key for key in sorted(sharing))
        findings.append(error("sharing", f"{both} exclude each other; keep one"))
    return clean


def validate(config: Any) -> list[Finding]:
    """Every fault of a node.yaml that was parsed; an unknown key names the nearest valid one."""
    findings: list[Finding] = []
    read(config, findings)
    return findings


def load(text: str, origin: str = PATH) -> dict[str, Any]:
    """The configuration of a file's text. Raises ConfigError naming the file, the key and what was expected."""
    try:
        config = json.loads(text, parse_float=str)  # a scaling keeps the digits of its text
    except ValueError as fault:
        raise ConfigError(origin, [error("text", f"not valid JSON: {fault}")]) from None
    findings: list[Finding] = []
    clean = read(config, findings)
    if errors(findings):
        raise ConfigError(origin, errors(findings))
    return clean


def dump(config: dict[str, Any]) -> str:
    """The text of the file: stable, so that equal configurations are equal bytes."""
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def resource_name(config: dict[str, Any]) -> str:
    """The resource under which the slices of this node are advertised."""
    return ((config.get("sharing") or {}).get("vcuda") or {}).get("resourceName") or RESOURCE_NAME


def _set(config: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        config = config.setdefault(key, {})
    config[path[-1]] = value


def _exception(item: dict[str, Any]) -> dict[str, Any]:
    return {schema.camel(key): value for key, value in item.items()}
