# SPDX-License-Identifier: Apache-2.0
"""Makes and strictly reads node.yaml: NVIDIA's device-plugin configuration file v1 plus ``sharing.vcuda``, the section
for sharing by this collection's library.

The file is written as JSON, which is valid YAML, so that a node reads it with the standard library alone.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Sequence

from . import variables as schema
from .kinds import (
    Bool,
    Choice,
    Duration,
    Either,
    Finding,
    Int,
    Kind,
    ListOf,
    Record,
    Scaling,
    Text,
    error,
    errors,
    warning,
)

PATH = "/etc/vgpu/node.yaml"
CONFIGS, CONFIG_SUFFIX = "configs", ".yaml"
# The node label that selects a named configuration. NVIDIA's config manager uses the same label.
CONFIG_LABEL = "nvidia.com/device-plugin.config"
LIBRARY_ROOT = "/usr/local/lib/vgpu"
RESOURCE_NAME = "nvidia.com/gpu"
# Maps a value of vgpu_sharing to its section of NVIDIA's file.
REPLICATED = {"time-slicing": "timeSlicing", "mps": "mps"}
MPS_ROOT = "/run/nvidia/mps"
# Variables that are written to node.yaml only if they differ from their default. Therefore a file that a former version
# of the collection wrote stays unchanged.
NEWER = ("vgpu_memory_enforcement", "vgpu_allocation")

ABSOLUTE = Text("an absolute path", r"^/")
NVIDIA_V1 = "nvidia-v1"
STRATEGY = Choice("auto", "envvar", "volume-mounts", "cdi-annotations", "cdi-cri")

DEVICE_EXCEPTION = Record(
    dict({schema.camel(name): kind for name, kind in schema.PER_GPU.items()}, match=schema.MATCH), required=("match",)
)

VCUDA = Record(
    {
        "libraryRoot": ABSOLUTE,
        "resourceName": schema.RESOURCE,
        "priorityResource": schema.RESOURCE,
        # Names of resources by which pods request parts of GPUs, if they differ from HAMi's names. The node lists them
        # in its capacity.
        "resourceNames": Record(
            {"memory": schema.RESOURCE, "memoryPercentage": schema.RESOURCE, "cores": schema.RESOURCE}
        ),
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
        "watch": schema.VARIABLES["vgpu_watch"].kind,
        "devices": ListOf(DEVICE_EXCEPTION),
    }
)

# A resource name of at most 63 characters. A name without a domain gets NVIDIA's domain; the part after the slash is a
# DNS subdomain.
NAME = Text(
    "a resource name such as nvidia.com/gpu or gpu",
    r"^(?=.{1,63}\Z)([a-z0-9][-a-z0-9.]*/)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?\Z",
)


class _Reference(Kind):
    """Reads one device of a list in the notation of NVIDIA's file: an index, ``gpu:mig`` (two indexes), or a UUID."""

    expected = 'an index such as 0, "0:1" for a MIG device, or a UUID'
    uuid = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
    pattern = re.compile(rf"^([0-9]+(:[0-9]+)?|GPU-{uuid}|MIG-{uuid}|MIG-GPU-{uuid}/[0-9]+/[0-9]+)\Z")

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        number = isinstance(value, int) and not isinstance(value, bool)
        if not (number or isinstance(value, str)) or not self.pattern.match(str(value)):
            return self.wrong(value, path, findings)
        return str(value)


ENTRY = Record(
    {
        "name": NAME,
        "rename": NAME,
        "replicas": Int(2, schema.MAX_SPLIT),
        "devices": Either(Choice("all"), Int(1, 255), ListOf(_Reference())),
    },
    required=("name", "replicas"),
)
REPLICAS = Record(
    {"renameByDefault": Bool(), "failRequestsGreaterThanOne": Bool(), "resources": ListOf(ENTRY)},
    required=("resources",),
)

PATTERNS = ListOf(Record({"pattern": Text(), "name": NAME}, required=("pattern", "name")))

FILE = Record(
    {
        "version": Choice("v1"),
        "compat": Choice(NVIDIA_V1),
        "flags": Record(
            {
                "migStrategy": schema.VARIABLES["vgpu_mig_strategy"].kind,
                "failOnInitError": Bool(),
                "allocation": schema.VARIABLES["vgpu_allocation"].kind,
                "mpsRoot": Text(),
                "nvidiaDriverRoot": ABSOLUTE,
                "nvidiaDevRoot": ABSOLUTE,
                "gdrcopyEnabled": Bool(),
                "gdsEnabled": Bool(),
                "mofedEnabled": Bool(),
                "deviceDiscoveryStrategy": Choice("auto", "nvml", "tegra"),
                "useNodeFeatureAPI": Bool(),
                "plugin": Record(
                    {
                        "passDeviceSpecs": Bool(),
                        "deviceListStrategy": Either(STRATEGY, ListOf(STRATEGY)),
                        "deviceIDStrategy": Choice("uuid", "index"),
                        # Key with the folder of the library's files, which include the hook that sets the driver's
                        # limits. The key is set if the driver must enforce limits in a sharing mode that does not use
                        # the library.
                        "libraryRoot": ABSOLUTE,
                        "memoryEnforcement": schema.VARIABLES["vgpu_memory_enforcement"].kind,
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
                        "noCleanupOnExit": Bool(),
                        "sleepInterval": Duration(),
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
    """A configuration cannot be used; ``findings`` holds every fault, and the text lists them all."""

    def __init__(self, origin: str, findings: Sequence[Finding]) -> None:
        self.origin, self.findings = origin, list(findings)
        super().__init__("; ".join(f"{origin}: {finding}" for finding in findings))


def from_vars(variables: dict[str, Any], library_root: str = LIBRARY_ROOT) -> dict[str, Any]:
    """Makes node.yaml from a host's ``vgpu_*`` variables. Raises ConfigError on any fault in them."""
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
        if name in NEWER and clean[name] == variable.default:
            continue  # Omit a default value, so that the file equals that of a former version.
        if clean[name] is not None and (place == ("flags",) or (shared and place == schema.VCUDA)):
            _set(config, variable.node, clean[name])
    if not shared and clean["vgpu_memory_enforcement"] == "driver":
        _set(config, ("flags", "plugin", "libraryRoot"), library_root)
    if shared:
        vcuda = config["sharing"]["vcuda"]
        vcuda["libraryRoot"] = library_root
        vcuda["resourceName"] = clean["vgpu_resource_names"].get("count", RESOURCE_NAME)
        # The scheduler reads all these names except that of the GPU count. The node needs them because it reads a pod's
        # priority and lists the other resources in its capacity.
        if clean["vgpu_slice_sizing"] == "requested":
            vcuda.update(_names(clean["vgpu_resource_names"]))
        vcuda["devices"] = [_exception(item) for item in clean["vgpu_devices"]]
    elif clean["vgpu_sharing"] in REPLICATED:
        config["sharing"][REPLICATED[clean["vgpu_sharing"]]] = _replicated(clean)
        if clean["vgpu_sharing"] == "mps":
            config["flags"]["mpsRoot"] = MPS_ROOT
    elif clean["vgpu_mig_replicas"] and clean["vgpu_sharing"] == "mig":
        config["sharing"]["timeSlicing"] = _replicas_of_mig(clean)
    return config


def named_from_vars(variables: dict[str, Any], library_root: str = LIBRARY_ROOT) -> dict[str, dict[str, Any]]:
    """Makes the named configurations that a node label may choose instead of node.yaml. Raises
    ConfigError for a faulty entry.
    """
    clean = schema.read(variables, [])
    out = {}
    for name in sorted(clean["vgpu_configs"]):
        try:
            out[name] = from_vars(schema.named(clean, name), library_root)
        except ConfigError as fault:
            raise ConfigError(f"vgpu_configs.{name}", fault.findings) from None
    return out


def configs_folder(config_path: str) -> str:
    """Returns the folder of a node's named configurations, next to its node.yaml."""
    return os.path.join(os.path.dirname(config_path), CONFIGS)


def config_file(config_path: str, name: str) -> str:
    """Returns the path of a named configuration's file."""
    return os.path.join(configs_folder(config_path), name + CONFIG_SUFFIX)


def _replicated(clean: dict[str, Any]) -> dict[str, Any]:
    """Returns the section of NVIDIA's file for time-slicing or mps. The entries for exceptions (GPUs with settings of
    their own) come before the general entry, because the first match wins.
    """
    findings: list[Finding] = []
    entries: list[dict[str, Any]] = []
    for n, item in enumerate(clean["vgpu_devices"]):
        match, where = item["match"], f"vgpu_devices[{n}]"
        named = [match[key] for key in ("index", "uuid") if key in match]
        if len(named) != 1 or "model" in match:
            message = f"vgpu_sharing: {clean['vgpu_sharing']} needs either the index or the uuid of a GPU"
            findings.append(error(where + ".match", message))
        elif item.get("split_count", 2) < 2:
            findings.append(
                error(where + ".split_count", ("expected at least 2, the least number of replicas in NVIDIA's file"))
            )
        else:
            split = item.get("split_count", clean["vgpu_split_count"])
            entries.append({"name": RESOURCE_NAME, "devices": [str(named[0])], "replicas": split})
    if clean["vgpu_split_count"] < 2:
        findings.append(
            error(
                "vgpu_split_count",
                ("expected at least 2, the least number of replicas in NVIDIA's file; or use vgpu_sharing: none"),
            )
        )
    if findings:
        raise ConfigError("variables", findings)
    entries.append({"name": RESOURCE_NAME, "replicas": clean["vgpu_split_count"]})
    return _section(clean, entries)


def _replicas_of_mig(clean: dict[str, Any]) -> dict[str, Any]:
    """Returns the section for time-sliced MIG instances. Its entries name the resource of each profile, or the common
    resource of all instances.
    """
    wanted = clean["vgpu_mig_replicas"]
    if clean["vgpu_mig_strategy"] == "single":
        return _section(clean, [{"name": RESOURCE_NAME, "replicas": count} for count in wanted.values()])
    return _section(clean, [{"name": schema.mig_resource(one), "replicas": wanted[one]} for one in sorted(wanted)])


def _section(clean: dict[str, Any], entries: list[dict[str, Any]]) -> dict[str, Any]:
    section = {"renameByDefault": clean["vgpu_rename_by_default"], "resources": entries}
    # For MPS, leave out a value of false. Then the default of NVIDIA's plugin applies, which is true for MPS.
    if clean["vgpu_fail_requests_greater_than_one"] or clean["vgpu_sharing"] != "mps":
        section["failRequestsGreaterThanOne"] = clean["vgpu_fail_requests_greater_than_one"]
    return section


def read(config: Any, findings: list[Finding]) -> Any:
    """Returns the clean form of a parsed node.yaml; adds every fault to ``findings``."""
    clean = FILE.read(config, "", findings)
    sharing = clean.get("sharing") if isinstance(clean, dict) else None
    if isinstance(sharing, dict) and len(sharing) > 1:
        # Sections that apply to all remaining GPUs: vcuda, and every other section that names no devices. At most one
        # may exist.
        greedy = [key for key in sorted(sharing) if key == "vcuda" or not _names_devices(sharing[key])]
        if len(greedy) > 1:
            both = " and ".join("sharing." + key for key in greedy)
            message = f"the sections {both} exclude each other; keep one, or name the devices of each entry"
            findings.append(error("sharing", message))
    return clean


def _names(said: dict[str, str]) -> dict[str, Any]:
    """Returns the resource names that differ from HAMi's, in the form of node.yaml. The name of the GPU count is left
    out.
    """
    out: dict[str, Any] = {"priorityResource": said["priority"]} if "priority" in said else {}
    others = {schema.camel(key): said[key] for key in ("memory", "memory_percentage", "cores") if key in said}
    return {**out, "resourceNames": others} if others else out


def _names_devices(section: Any) -> bool:
    entries = (section or {}).get("resources") if isinstance(section, dict) else None
    return all(isinstance(one, dict) and one.get("devices", "all") != "all" for one in entries or [{}])


def validate(config: Any) -> list[Finding]:
    """Returns every fault of a parsed node.yaml; for an unknown key the fault names the nearest valid key."""
    findings: list[Finding] = []
    read(config, findings)
    return findings


def load(text: str, origin: str = PATH) -> dict[str, Any]:
    """Parses the text of a configuration file. Raises ConfigError with the file, the key and the expected value."""
    try:
        config = json.loads(text, parse_float=str)  # Keeps the digits of a scaling, which a float would round.
    except RecursionError:
        raise ConfigError(origin, [error("text", "nested too deeply to be a configuration")]) from None
    except ValueError as fault:
        raise ConfigError(origin, [error("text", f"not valid JSON: {fault}")]) from None
    return check(config, origin)[0]


def check(config: Any, origin: str = PATH) -> tuple[dict[str, Any], list[Finding]]:
    """Returns the clean form of a parsed configuration, with warnings. Raises ConfigError with every error.

    The check is strict, except for a file with ``compat: nvidia-v1``. Such a file is read as NVIDIA's plugin reads it.
    Every place that the strict check would refuse or read differently gives a warning.
    """
    findings: list[Finding] = []
    if isinstance(config, dict) and config.get("compat") == NVIDIA_V1:
        relaxed = _relaxed(FILE, config, "", findings)
        clean = FILE.read(dict(relaxed, version=relaxed.get("version") or "v1"), "", findings)
        if not errors(findings):
            clean = read(_as_nvidia(clean, findings), findings)
    else:
        clean = read(config, findings)
    if errors(findings):
        raise ConfigError(origin, errors(findings))
    return clean, findings


def _as_nvidia(clean: dict[str, Any], findings: list[Finding]) -> dict[str, Any]:
    """Returns what NVIDIA's plugin would read from a file. The plugin prefers mps to timeSlicing, and ignores selected
    devices and renamed resources.
    """
    sharing = clean.get("sharing") or {}
    if "mps" in sharing and "timeSlicing" in sharing:
        findings.append(warning("sharing", "mps and timeSlicing are both set; mps wins, as in NVIDIA's plugin"))
        del sharing["timeSlicing"]
    if clean.pop("resources", None):
        findings.append(warning("resources", "has no effect, as in NVIDIA's plugin"))
    for key, section in sharing.items():
        for n, entry in enumerate(section.get("resources") or []):
            for name in ("devices", "rename"):
                if entry.pop(name, "all") != "all":
                    where = f"sharing.{key}.resources[{n}].{name}"
                    findings.append(warning(where, "has no effect, as in NVIDIA's plugin"))
    return clean


def _relaxed(kind: Kind, value: Any, path: str, findings: list[Finding]) -> Any:
    """Returns a value read as leniently as NVIDIA's plugin does: keys in any letter case; unknown keys are dropped with
    a warning; null counts as unset.
    """
    if isinstance(kind, ListOf) and isinstance(value, (list, tuple)):
        return [_relaxed(kind.kind, one, f"{path}[{n}]", findings) for n, one in enumerate(value)]
    if not isinstance(kind, Record) or not isinstance(value, dict):
        return value
    keys = {key.lower(): key for key in kind.fields}
    clean = {}
    for key, item in value.items():
        known = keys.get(str(key).lower())
        where = f"{path}.{key}" if path else str(key)
        if known is None:
            findings.append(warning(where, "is unknown and has no effect, as in NVIDIA's plugin"))
        elif item is not None:
            clean[known] = _relaxed(kind.fields[known], item, where, findings)
    return clean


def dump(config: dict[str, Any]) -> str:
    """Returns the text of the file. Equal configurations give equal bytes."""
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def by_claims(config: dict[str, Any]) -> bool:
    """Returns whether pods get GPUs by claims instead of by the device plugin."""
    return bool((config.get("flags") or {}).get("allocation") == schema.CLAIMS)


def resource_name(config: dict[str, Any]) -> str:
    """Returns the resource name under which this node advertises its slices; the first if there are several."""
    sharing = config.get("sharing") or {}
    if "vcuda" in sharing:
        return sharing["vcuda"].get("resourceName") or RESOURCE_NAME
    for key in ("timeSlicing", "mps"):
        for entry in (sharing.get(key) or {}).get("resources") or []:
            name = entry.get("rename") or entry["name"]
            name = name if "/" in name else "nvidia.com/" + name
            return name + (".shared" if sharing[key].get("renameByDefault") and not entry.get("rename") else "")
    return RESOURCE_NAME


def _set(config: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        config = config.setdefault(key, {})
    config[path[-1]] = value


def _exception(item: dict[str, Any]) -> dict[str, Any]:
    return {schema.camel(key): value for key, value in item.items()}
