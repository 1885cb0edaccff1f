# SPDX-License-Identifier: Apache-2.0
"""Computes the devices that a node advertises under a configuration: every replica of every GPU with its resource name,
in each sharing mode. The device plugin advertises these replicas, and the modules compare them with the node's state. A
GPU is ``{index, uuid, model, memory_mib, mig_enabled, mig: [{index, uuid, profile, memory_mib}]}``; the configuration
is node.yaml as ``node_config`` reads it. If several entries for one resource match a device, the first entry wins.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Sequence

from . import slices
from .kinds import Finding, error, warning
from .variables import mig_resource

PREFIX = "nvidia.com/"
WHOLE = PREFIX + "gpu"
VCUDA, TIME_SLICING, MPS, MIG, NONE = "vcuda", "time-slicing", "mps", "mig", "none"
SHARED_BY_NVIDIA = (TIME_SLICING, MPS)
SECTIONS = (("timeSlicing", TIME_SLICING), ("mps", MPS))


class Piece(NamedTuple):
    """Describes one replica. ``id``: the device id that the kubelet allocates; ``device``: UUID of the GPU or MIG
    device that the container gets; ``uuid``: UUID of the GPU. Without a limit ``memory_mib`` is the device's memory and
    ``sm_percent`` is 100.
    """

    id: str
    uuid: str
    memory_mib: int
    sm_percent: int
    resource: str
    mode: str
    device: str


class Device(NamedTuple):
    """Describes a whole GPU or a MIG device before it is shared."""

    uuid: str
    gpu: dict[str, Any]
    resource: str
    memory_mib: int
    reference: str
    is_mig: bool


def normal_name(name: str) -> str:
    """Returns a resource's name as the kubelet registers it: adds NVIDIA's prefix to a name without a prefix."""
    return name if "/" in name else PREFIX + name


def pieces_for(gpus: Sequence[dict[str, Any]], config: dict[str, Any]) -> tuple[list[Piece], list[Finding]]:
    """Returns every replica in the order of the GPUs, and the findings about the configuration on these GPUs. If a
    finding is an error, only the replicas that could be made are returned.
    """
    findings: list[Finding] = list(slices.findings_for([gpu for gpu in gpus if not _taken_by_mig(gpu, config)], config))
    devices = _devices(gpus, config, findings)
    chosen = _choose(devices, config, findings)
    pieces: list[Piece] = []
    for device in devices:
        entry = chosen.get(device.uuid)
        share = None if device.is_mig else slices.share_of(device.gpu, config)
        if entry is not None:
            pieces += _replicas(device, *entry)
        elif share is not None:
            pieces += _limited(device, share, config)
        else:
            mode = MIG if device.is_mig else NONE
            pieces.append(_piece(device, device.uuid, device.memory_mib, 100, device.resource, mode))
    return pieces, findings


def _piece(device: Device, identity: str, memory: int, sm_percent: int, resource: str, mode: str) -> Piece:
    return Piece(identity, str(device.gpu["uuid"]), memory, sm_percent, resource, mode, device.uuid)


def _limited(device: Device, share: slices.Share, config: dict[str, Any]) -> list[Piece]:
    resource = normal_name((slices.vcuda_of(config) or {}).get("resourceName") or device.resource)
    try:
        memory, sm_percent = slices.size_of(device.gpu, share)
    except slices.SliceError:
        return []  # No finding here, because findings_for has already reported this fault.
    numbers = range(share.split_count)
    return [_piece(device, f"{device.uuid}::{n}", memory, sm_percent, resource, VCUDA) for n in numbers]


def _replicas(device: Device, mode: str, section: dict[str, Any], entry: dict[str, Any]) -> list[Piece]:
    """Returns the replicas that one entry of the configuration makes of a device. Time-slicing limits nothing, so each
    replica has the whole device; the MPS daemon limits each client to an equal part of memory and threads.
    """
    count = int(entry["replicas"])
    resource = normal_name(entry["name"])
    if entry.get("rename"):
        resource = normal_name(entry["rename"])
    elif section.get("renameByDefault"):
        resource += ".shared"
    memory = device.memory_mib // count if mode == MPS else device.memory_mib
    share = max(1, 100 // count) if mode == MPS else 100
    return [_piece(device, f"{device.uuid}::{n}", memory, share, resource, mode) for n in range(count)]


# ---- whole GPUs and MIG devices


def mig_strategy(config: dict[str, Any]) -> str:
    return str((config.get("flags") or {}).get("migStrategy") or "none")


def _taken_by_mig(gpu: dict[str, Any], config: dict[str, Any]) -> bool:
    return mig_strategy(config) != "none" and bool(gpu.get("mig_enabled"))


def _devices(gpus: Sequence[dict[str, Any]], config: dict[str, Any], findings: list[Finding]) -> list[Device]:
    strategy = mig_strategy(config)
    out: list[Device] = []
    for gpu in gpus:
        if not _taken_by_mig(gpu, config):
            if gpu.get("mig_enabled") and slices.vcuda_of(config) is not None:
                where = f"{_name(gpu)} is in MIG mode"
                findings.append(error("sharing.vcuda", where + "; set flags.migStrategy, or turn MIG mode off"))
            resource = _resource(config, "gpus", str(gpu.get("model") or ""), WHOLE)
            out.append(Device(str(gpu["uuid"]), gpu, resource, int(gpu["memory_mib"]), str(gpu["index"]), False))
            continue
        made = gpu.get("mig") or []
        if not made:
            findings.append(error("flags.migStrategy", f"{_name(gpu)} is in MIG mode and has no MIG device"))
        for one in made:
            profile = str(one["profile"])
            plain = WHOLE if strategy == "single" else mig_resource(profile)
            resource = _resource(config, "mig", profile, plain)
            reference = "{}:{}".format(gpu["index"], one["index"])
            out.append(Device(str(one["uuid"]), gpu, resource, int(one["memory_mib"]), reference, True))
    if strategy == "single":
        _check_single(gpus, findings)
    return out


def _check_single(gpus: Sequence[dict[str, Any]], findings: list[Finding]) -> None:
    """Checks the strategy ``single``: every GPU must be in MIG mode with one common profile, because all MIG devices
    have the same resource name.
    """
    enabled = [gpu for gpu in gpus if gpu.get("mig_enabled")]
    if enabled and len(enabled) < len(gpus):
        others = ", ".join(_name(gpu) for gpu in gpus if not gpu.get("mig_enabled"))
        findings.append(
            error(
                "flags.migStrategy",
                (f"the strategy single needs every GPU in MIG mode; found without MIG mode: {others}"),
            )
        )
    profiles = sorted({str(one["profile"]) for gpu in enabled for one in gpu.get("mig") or []})
    if len(profiles) > 1:
        found = ", ".join(profiles)
        findings.append(
            error(
                "flags.migStrategy", f"the strategy single needs one MIG profile on all GPUs, found {found}; use mixed"
            )
        )


def _resource(config: dict[str, Any], kind: str, text: str, plain: str) -> str:
    """Returns the name from the first matching pattern of ``resources``, else the plain resource name."""
    for one in (config.get("resources") or {}).get(kind) or []:
        if re.match("^" + ".*".join(re.escape(part) for part in str(one["pattern"]).split("*")) + r"\Z", text):
            return normal_name(str(one["name"]))
    return plain


# ---- the choice of the entry for each device


def _choose(
    devices: Sequence[Device], config: dict[str, Any], findings: list[Finding]
) -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Maps each device UUID to (mode, section, entry)."""
    chosen: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {}
    places: dict[str, str] = {}
    named: dict[str, str] = {}
    sharing = config.get("sharing") or {}
    for key, mode in SECTIONS:
        section = sharing.get(key) or {}
        for n, entry in enumerate(section.get("resources") or []):
            where = f"sharing.{key}.resources[{n}]"
            of_name = [one for one in devices if one.resource == normal_name(entry["name"])]
            if not of_name:
                have = ", ".join(sorted({one.resource for one in devices})) or "none"
                findings.append(
                    warning(
                        where,
                        (f"no device of this host has the resource {entry['name']} ({have}); this entry has no effect"),
                    )
                )
            for device in _selected(entry.get("devices", "all"), of_name, set(chosen), where, findings):
                if device.uuid in chosen:
                    if _is_named(entry) and device.uuid in named:
                        message = f"{named[device.uuid]} already shares device {device.reference}; name the device once"
                        findings.append(error(where + ".devices", message))
                    elif chosen[device.uuid][0] != mode and not _is_named(entry):
                        message = (
                            f"{places[device.uuid]} already shares device {device.reference}; list the devices of "
                            "each entry"
                        )
                        findings.append(error(where, message))
                    continue
                if device.is_mig and mode == MPS:
                    findings.append(error(where, f"MPS does not share MIG devices ({device.reference})"))
                    continue
                chosen[device.uuid], places[device.uuid] = (mode, section, entry), where
                if _is_named(entry):
                    named[device.uuid] = where
    return chosen


def _is_named(entry: dict[str, Any]) -> bool:
    return isinstance(entry.get("devices"), list)


def _selected(
    wanted: Any, devices: Sequence[Device], taken: set[str], where: str, findings: list[Finding]
) -> list[Device]:
    """Returns the devices of an entry: all, the first N that no other entry uses, or the named devices."""
    if wanted == "all":
        return list(devices)
    if isinstance(wanted, int):
        free = [one for one in devices if one.uuid not in taken]
        if devices and wanted > len(free):
            findings.append(error(where + ".devices", f"expected {wanted} devices, found {len(free)} free ones"))
        return free[:wanted]
    out = []
    for reference in wanted:
        found = [one for one in devices if str(reference) in (one.reference, one.uuid)]
        if not found and devices:
            have = ", ".join(f"{one.reference} ({one.uuid})" for one in devices)
            findings.append(error(where + ".devices", f"no device {reference} on this host; the host has {have}"))
        out += found
    return out


def section_of(mode: str, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the section of ``sharing`` in node.yaml that configures this mode; empty if there is none."""
    key = {TIME_SLICING: "timeSlicing", MPS: "mps", VCUDA: "vcuda"}.get(mode, "")
    return (config.get("sharing") or {}).get(key) or {}


def refuses_several(mode: str, config: dict[str, Any]) -> bool:
    """Returns the value of failRequestsGreaterThanOne (whether a container may not request two replicas). If it is not
    set, the default is that of NVIDIA's plugin: false for time-slicing and true for MPS.
    """
    said = section_of(mode, config).get("failRequestsGreaterThanOne")
    return mode == MPS if said is None else bool(said)


def resources_of(pieces: Sequence[Piece], config: dict[str, Any]) -> list[str]:
    """Returns every resource name of the node in order. A node without replicas still has its plain resource."""
    return list(dict.fromkeys(piece.resource for piece in pieces)) or [plain_resource(config)]


def plain_resource(config: dict[str, Any]) -> str:
    """Returns the default resource name of whole GPUs."""
    return normal_name((slices.vcuda_of(config) or {}).get("resourceName") or WHOLE)


def _name(gpu: dict[str, Any]) -> str:
    return "GPU {} ({})".format(gpu["index"], gpu["uuid"])
