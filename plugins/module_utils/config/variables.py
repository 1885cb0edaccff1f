# SPDX-License-Identifier: Apache-2.0
"""Defines the table of all ``vgpu_*`` variables: type, default, range, and the key of node.yaml that it becomes.

The table is the only definition: the inventory check, node.yaml, the roles' defaults and the documentation use it. Any
other variable that starts with ``vgpu_`` is an error.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

from .kinds import (
    EXPECTED_NAMES,
    PORT,
    Bool,
    Choice,
    Finding,
    Int,
    Kind,
    ListOf,
    Mapping,
    Record,
    Scaling,
    Text,
    error,
    nearest,
    unknown,
    warning,
)

PREFIX = "vgpu_"
# The number of slots (processes) of a ledger, the file in which a container's processes record their GPU memory.
MAX_SPLIT = 1024
# Default of K (vgpu_split_count) if vgpu_slice_sizing is "requested". In this case K only bounds how many containers
# share a GPU.
REQUESTED_SPLIT = 10

RESOURCE = Text(
    "a resource name such as nvidia.com/gpu",
    r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z",
)
UUID = Text("a GPU UUID such as GPU-5d1b…", r"^GPU-[0-9A-Za-z-]+\Z")
MODEL = Text('a model such as T4 or "A100-80GB"', r"[A-Za-z0-9]")
MATCH = Record({"index": Int(0, 255), "uuid": UUID, "model": MODEL}, at_least_one=True)

# Settings that an exception in vgpu_devices may change. They are the per-GPU variables without the prefix vgpu_.
PER_GPU: dict[str, Kind] = {
    "split_count": Int(1, MAX_SPLIT),
    "memory_scaling": Scaling(),
    "cores_scaling": Scaling(),
}
EXCEPTION = Record(dict(PER_GPU, match=MATCH), required=("match",))

RESOURCE_NAMES = Record(
    {"count": RESOURCE, "memory": RESOURCE, "memory_percentage": RESOURCE, "cores": RESOURCE, "priority": RESOURCE}
)
MIG_PROFILE = Text("a MIG profile such as 1g.10gb", r"^[1-7]g\.[0-9]+gb([+-][a-z.]+)?\Z")
METRICS_LISTEN = Text(
    "an address and a port up to 65535, such as 127.0.0.1:9410, or an empty text",
    rf"^(([^\s:]*|\[[0-9a-fA-F:]+\]):{PORT})?\Z",
)
CONFIG_NAME = Text("a name of lowercase letters, digits and dashes", r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?\Z")


class Variable(NamedTuple):
    """Describes a variable. ``node``: its path in node.yaml, empty if it is not in node.yaml. A ``default`` of None
    means that the variable may stay unset.
    """

    kind: Kind
    default: Any
    node: tuple[str, ...]
    about: str


VCUDA = ("sharing", "vcuda")

VARIABLES: dict[str, Variable] = {
    "vgpu_sharing": Variable(
        Choice("vcuda", "time-slicing", "mps", "mig", "none"), "vcuda", (), "how the GPUs of a host are shared"
    ),
    "vgpu_split_count": Variable(
        PER_GPU["split_count"],
        2,
        (*VCUDA, "splitCount"),
        ("K: slices (or replicas) of each GPU; default 10 with vgpu_slice_sizing: requested"),
    ),
    "vgpu_memory_scaling": Variable(
        PER_GPU["memory_scaling"],
        "1.0",
        (*VCUDA, "memoryScaling"),
        ("S: factor of the card's memory; above 1, the slices together exceed the card"),
    ),
    "vgpu_cores_scaling": Variable(
        PER_GPU["cores_scaling"],
        None,
        (*VCUDA, "coresScaling"),
        "C: each slice may use 100*C/K % of the SMs; unset: K of that GPU, which means no limit",
    ),
    "vgpu_slice_sizing": Variable(
        Choice("equal", "requested"),
        "equal",
        (*VCUDA, "sliceSizing"),
        ("equal slices, or the sizes that pods request (needs the scheduler)"),
    ),
    "vgpu_allocation": Variable(
        Choice("device-plugin", "dra"),
        "device-plugin",
        ("flags", "allocation"),
        "how pods get GPUs; dra: by claims, from Kubernetes 1.36 on",
    ),
    "vgpu_devices": Variable(
        ListOf(EXCEPTION), [], (*VCUDA, "devices"), "exceptions by index, uuid or model; first match wins; not with mps"
    ),
    "vgpu_multi_slice": Variable(
        Choice("distinct", "merge"),
        "distinct",
        (*VCUDA, "multiSlice"),
        ("several slices of a container: on distinct GPUs, or merged on one GPU"),
    ),
    "vgpu_count_context": Variable(Bool(), True, (*VCUDA, "countContext"), "the limit covers contexts and modules too"),
    "vgpu_memory_enforcement": Variable(
        Choice("auto", "driver", "library"),
        "auto",
        ("flags", "plugin", "memoryEnforcement"),
        "what refuses memory over the limit: the driver (615 or newer) if a probe succeeds, or the library alone",
    ),
    "vgpu_core_policy": Variable(
        Choice("default", "force", "disable"), "default", (*VCUDA, "corePolicy"), "when the SM limit applies"
    ),
    "vgpu_disable_core_limit": Variable(
        Bool(), False, (*VCUDA, "disableCoreLimit"), "switches the SM limit off for the host"
    ),
    "vgpu_oom_killer": Variable(Bool(), False, (*VCUDA, "oomKiller"), "ends a process that is found over its limit"),
    "vgpu_log_level": Variable(
        Int(0, 5), 1, (*VCUDA, "logLevel"), ("log level of the library in containers: 0 (error) to 5 (trace)")
    ),
    "vgpu_handover": Variable(
        Choice("auto", "cdi-cri", "cdi-annotations", "volume-mounts", "envvar"),
        "auto",
        ("flags", "plugin", "deviceListStrategy"),
        "how a container gets its GPU; auto: in a way that kubelet and runtime declare",
    ),
    "vgpu_resource_names": Variable(RESOURCE_NAMES, {}, (), "names of the resources; count defaults to nvidia.com/gpu"),
    "vgpu_fail_on_init_error": Variable(
        Bool(), True, ("flags", "failOnInitError"), "if NVML fails, the plugin ends instead of idling"
    ),
    "vgpu_legacy_preferred": Variable(
        Bool(), False, (*VCUDA, "legacyPreferred"), "the plugin spreads slices itself, for kubelets before 1.19"
    ),
    "vgpu_watch": Variable(
        Choice("report", "end"),
        "report",
        (*VCUDA, "watch"),
        "whether a container's process that bypasses the library is only reported, or also killed",
    ),
    "vgpu_rename_by_default": Variable(
        Bool(),
        False,
        ("sharing", "timeSlicing", "renameByDefault"),
        "time-slicing, mps, vgpu_mig_replicas: adds .shared to the resource's name",
    ),
    "vgpu_fail_requests_greater_than_one": Variable(
        Bool(),
        False,
        ("sharing", "timeSlicing", "failRequestsGreaterThanOne"),
        "time-slicing, mps and vgpu_mig_replicas: refuses a container that requests two replicas",
    ),
    "vgpu_time_slice": Variable(
        Choice("default", "short", "medium", "long"), "default", (), "time-slicing: the driver's time slice"
    ),
    "vgpu_mig_strategy": Variable(
        Choice("none", "single", "mixed"), "none", ("flags", "migStrategy"), "how MIG devices are named as resources"
    ),
    "vgpu_mig_geometry": Variable(Mapping(MIG_PROFILE, Int(1, 7)), {}, (), "mig: {profile: count} of each GPU"),
    "vgpu_mig_replicas": Variable(
        Mapping(MIG_PROFILE, Int(2, MAX_SPLIT)),
        {},
        (),
        "mig: {profile: count}, how many containers share each instance by time-slicing, without limits",
    ),
    "vgpu_configs": Variable(
        Mapping(CONFIG_NAME, Mapping(Text(), Text())), {}, (), "more named configurations, chosen by a node label"
    ),
    "vgpu_verify": Variable(
        Choice("changed", "always", "never"), "changed", (), "when isolation is checked at the end of a run"
    ),
    "vgpu_kubeconfig": Variable(
        Text(), "", (), "a kubeconfig file on the controller, for all roles that call the Kubernetes API"
    ),
    "vgpu_labels": Variable(
        Bool(),
        True,
        (),
        "sets labels such as nvidia.com/gpu.product on the node, like feature discovery; needs "
        "device_plugin_kubeconfig",
    ),
    "vgpu_unhealthy_taint": Variable(
        Choice("none", "any", "all"),
        "none",
        (),
        "taints the node with NoSchedule while any or all of its GPUs are unhealthy; not with a kubelet's credentials",
    ),
    "vgpu_metrics_listen": Variable(
        METRICS_LISTEN, "127.0.0.1:9410", (), "address of a node's metrics; :9410: all addresses; empty: no metrics"
    ),
    "vgpu_kube_context": Variable(Text(), "", (), "context of vgpu_kubeconfig; empty: its current context"),
    "vgpu_package_environment": Variable(
        Mapping(Text(), Text()),
        {},
        (),
        "environment of apt, dnf and zypper, such as https_proxy and no_proxy; not stored on the host",
    ),
    "vgpu_other_names": Variable(
        ListOf(Text()), [], (), "names that resemble vgpu_ variables but belong to other products: not checked"
    ),
}
# Variables that a named configuration cannot set, because they belong to the run or to the whole cluster.
NOT_NAMED = (
    "vgpu_configs",
    "vgpu_verify",
    "vgpu_kubeconfig",
    "vgpu_kube_context",
    "vgpu_labels",
    "vgpu_unhealthy_taint",
    "vgpu_metrics_listen",
    "vgpu_package_environment",
    "vgpu_other_names",
)
# Variables whose values must not appear on a screen or in a log, because a proxy address may hold a password.
NOT_SHOWN = ("vgpu_package_environment",)


class NamedConfig(Kind):
    """Reads one entry of vgpu_configs, a mapping of variables of this table without their prefix vgpu_."""

    expected = "a mapping of variables without the prefix vgpu_"

    def record(self) -> Record:
        fields = {name[len(PREFIX) :]: variable.kind for name, variable in VARIABLES.items() if name not in NOT_NAMED}
        return Record(fields)

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        return self.record().read(value, path, findings)


VARIABLES["vgpu_configs"] = VARIABLES["vgpu_configs"]._replace(kind=Mapping(CONFIG_NAME, NamedConfig()))

# CLAIMS: the value of vgpu_allocation with which pods get GPUs by claims (Dynamic Resource Allocation). WAYS_OF_CLAIMS:
# the values of vgpu_handover that are possible with claims.
CLAIMS, WAYS_OF_CLAIMS = "dra", ("auto", "cdi-cri")
# Settings that a node label cannot choose, because they need changes on the host, which a running device plugin does
# not make.
ONLY_FOR_THE_HOST = ("mig_geometry", "mig_replicas", "time_slice", "allocation")
# Maps a host's value of vgpu_sharing to the values that its named configurations may use. These values need nothing
# that the host's own value has not already set up.
BY_LABEL = {
    "vcuda": ("vcuda", "time-slicing", "none"),
    "time-slicing": ("time-slicing", "none"),
    "none": ("none", "time-slicing"),
}
# Maps a variable to the values of vgpu_sharing with which it has an effect. The variables that belong to sharing.vcuda
# are not listed, because they always need ``vcuda``.
OTHER_MODES = {
    "vgpu_split_count": ("vcuda", "time-slicing", "mps"),
    "vgpu_devices": ("vcuda", "time-slicing"),
    "vgpu_rename_by_default": ("time-slicing", "mps", "mig"),
    "vgpu_fail_requests_greater_than_one": ("time-slicing", "mps", "mig"),
    "vgpu_time_slice": ("time-slicing",),
    "vgpu_mig_geometry": ("mig",),
    "vgpu_mig_replicas": ("mig",),
}


def mig_resource(profile: str) -> str:
    """Returns the resource name of the instances of a MIG profile under the strategy ``mixed``."""
    return "nvidia.com/mig-" + profile.replace("+", ".")


def defaults() -> dict[str, Any]:
    return {name: variable.default for name, variable in VARIABLES.items()}


def read(values: dict[str, Any], findings: list[Finding]) -> dict[str, Any]:
    """Returns the clean value of every variable: the value from ``values``, else the default. Adds faults to
    ``findings``.

    Ignores names in ``values`` that do not start with ``vgpu_``, and names in ``vgpu_other_names``.
    """
    clean = defaults()
    others = values.get("vgpu_other_names")
    for name, value in values.items():
        if not str(name).startswith(PREFIX) or (isinstance(others, (list, tuple)) and name in others):
            continue
        variable = VARIABLES.get(name)
        if variable is None:
            findings.append(unknown_variable(name))
        elif not (value is None and variable.default is None):
            clean[name] = variable.kind.read(value, name, findings)
    requested = clean["vgpu_sharing"] == "vcuda" and clean["vgpu_slice_sizing"] == "requested"
    if requested and "vgpu_split_count" not in values:
        clean["vgpu_split_count"] = REQUESTED_SPLIT
    return clean


def unknown_variable(name: str) -> Finding:
    meant = EXPECTED_NAMES.get(name) or nearest(name, list(VARIABLES))
    if meant:
        return error(name, f'unknown variable "{name}"; did you mean "{meant}"?')
    return unknown("variable", name, name, list(VARIABLES))


def unavailable(clean: dict[str, Any]) -> list[Finding]:
    """Returns findings for variables that are valid one by one, but cannot be combined or have no effect."""
    findings = _claims(clean) if clean["vgpu_allocation"] == CLAIMS else []
    for name in sorted(clean["vgpu_configs"]):
        findings += _named_faults(clean, name)
    for key in sorted(clean["vgpu_resource_names"] or {}):
        if key != "count" and clean["vgpu_slice_sizing"] != "requested":
            where, sizing = f"vgpu_resource_names.{key}", clean["vgpu_slice_sizing"]
            message = (
                f"has no effect with vgpu_slice_sizing: {sizing}; pods can request it only with "
                "vgpu_slice_sizing: requested"
            )
            findings.append(warning(where, message))
    for name, variable in VARIABLES.items():
        mode = clean["vgpu_sharing"]
        modes = OTHER_MODES.get(name) or ("vcuda" if variable.node[:2] == VCUDA else mode,)
        if (mode, name) == ("mps", "vgpu_devices") and clean[name]:
            message = "the daemon of MPS has one split for all GPUs; remove it, or choose vcuda or time-slicing"
            findings.append(error(name, message))
        elif mode not in modes and clean[name] != variable.default:
            message = f"has no effect with vgpu_sharing: {mode}; it applies to {' and '.join(modes)}"
            findings.append(warning(name, message))
    findings += oversold(clean)
    if clean["vgpu_sharing"] == "mig":
        if not clean["vgpu_mig_geometry"]:
            findings.append(error("vgpu_mig_geometry", "is empty; name a profile, such as {1g.10gb: 7}"))
        if clean["vgpu_mig_strategy"] == "none":
            message = "with none, no MIG device is advertised; choose mixed, or single if all GPUs have one profile"
            findings.append(error("vgpu_mig_strategy", message))
        for profile in sorted(set(clean["vgpu_mig_replicas"]) - set(clean["vgpu_mig_geometry"])):
            made = ", ".join(sorted(clean["vgpu_mig_geometry"]))
            message = f"vgpu_mig_geometry has no such profile; expected one of {made}"
            findings.append(error(f"vgpu_mig_replicas.{profile}", message))
    if clean["vgpu_memory_enforcement"] == "driver":
        findings += _driver_limits(clean)
    if clean["vgpu_sharing"] != "vcuda" and clean["vgpu_resource_names"]:
        message = f"is not available with vgpu_sharing: {clean['vgpu_sharing']} in this version"
        findings.append(error("vgpu_resource_names", message))
    return findings


def _claims(clean: dict[str, Any]) -> list[Finding]:
    """Returns findings for settings that claims support on no host."""
    name, found = "vgpu_allocation", []
    if clean["vgpu_sharing"] == "mps":
        message = "dra does not support MPS; set device-plugin, or choose another vgpu_sharing"
        found.append(error(name, message))
    if clean["vgpu_handover"] not in WAYS_OF_CLAIMS:
        message = f"{clean['vgpu_handover']} cannot pass claims, which need CDI; set auto"
        found.append(error("vgpu_handover", message))
    if clean["vgpu_sharing"] == "vcuda" and clean["vgpu_multi_slice"] == "merge":
        message = "merge has no effect with vgpu_allocation: dra: a container with several shares gets their sum"
        found.append(warning("vgpu_multi_slice", message))
    return found


def _driver_limits(clean: dict[str, Any]) -> list[Finding]:
    """Returns findings for settings with which the driver can enforce limits on no host."""
    name, sharing = "vgpu_memory_enforcement", clean["vgpu_sharing"]
    if sharing in ("mig", "none"):
        cause = "the memory of a MIG device is separate" if sharing == "mig" else "whole GPUs have no limit"
        return [error(name, f"driver has nothing to enforce with vgpu_sharing: {sharing}, because {cause}; set auto")]
    if sharing == "vcuda" and not clean["vgpu_count_context"]:
        message = "driver always counts contexts, and vgpu_count_context is false; set that to true, or use auto"
        return [error(name, message)]
    return []


def named(clean: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the variables of the named configuration ``name``; its own values override the host's."""
    own = {PREFIX + key: value for key, value in clean["vgpu_configs"][name].items()}
    return {**clean, **own, "vgpu_configs": {}}


def _named_faults(clean: dict[str, Any], name: str) -> list[Finding]:
    """Returns the findings for one entry of vgpu_configs, with paths of its keys."""
    own, path = clean["vgpu_configs"][name], f"vgpu_configs.{name}."
    mode, wanted = clean["vgpu_sharing"], own.get("sharing", clean["vgpu_sharing"])
    findings = [
        error(path + key, "a named configuration cannot set this; set it for the host's group")
        for key in (*ONLY_FOR_THE_HOST, *(("split_count",) if mode == "mps" else ()))
        if key in own
    ]
    allowed = BY_LABEL.get(mode, (mode,))
    if wanted not in allowed:
        message = f"{wanted} needs services that vgpu_sharing: {mode} does not install; choose {' or '.join(allowed)}"
        findings.append(error(path + "sharing", message))
    for fault in unavailable(named(clean, name)):
        key = fault.path[len(PREFIX) :]
        name_in_it = key.split(".")[0].split("[")[0]
        if fault.level == "error" or (name_in_it in own and name_in_it not in ONLY_FOR_THE_HOST):
            findings.append(fault._replace(path=path + key))
    return findings


def oversold(clean: dict[str, Any]) -> list[Finding]:
    """Returns one warning about memory scaling above 1, even if several exceptions set it."""
    if clean["vgpu_sharing"] != "vcuda":
        return []
    scaled = [path for path, _split, memory, _cores in _shares(clean) if Fraction(memory) > 1]
    message = "above 1, slices use host memory when the card is full, and access it over the bus"
    return [warning(scaled[0] + "memory_scaling", message)] if scaled else []


def _shares(clean: dict[str, Any]) -> list[tuple[str, int, str, str | None]]:
    """Returns (path of the setting, split count, memory scaling, cores scaling) of the host and of each exception."""
    names = list(PER_GPU)
    host = {name: clean[PREFIX + name] for name in names}
    shares = [(PREFIX, host)]
    for n, exception in enumerate(clean["vgpu_devices"]):
        own = {name: exception[name] for name in names if name in exception}
        if own:
            shares.append((f"vgpu_devices[{n}].", {**host, **own}))
    return [(path, *(share[name] for name in names)) for path, share in shares]


def variable_of(node_path: str) -> str | None:
    """Returns the variable from which a path of node.yaml was made, with the position inside the variable; None if
    there is no such variable. For example, ``sharing.vcuda.devices[0].splitCount`` gives
    ``vgpu_devices[0].split_count``.
    """
    for name, variable in VARIABLES.items():
        path = ".".join(variable.node)
        rest = node_path[len(path) :]
        if path and node_path.startswith(path) and (not rest or rest[0] in ".["):
            for per_gpu in PER_GPU:
                rest = rest.replace(camel(per_gpu), per_gpu)
            return name + rest
    return None


def camel(name: str) -> str:
    """Returns a name in the spelling of node.yaml: splitCount for split_count."""
    head, *tail = name.split("_")
    return head + "".join(word.capitalize() for word in tail)
