# SPDX-License-Identifier: Apache-2.0
"""Compares the slices (equal shares of a GPU) that a host should have with the slices that the device plugin made and
the kubelet knows. A difference is ``{what, where, expected, found, remedy}``; most remedies are commands.

``expected`` is computed from node.yaml and the GPUs that NVML lists. ``advertised`` comes from the kubelet's
checkpoint, or from the running device plugin if the host has no kubelet. The checkpoint outlives the kubelet, so
``advertised`` is empty if the kubelet does not answer or does not know the plugin. Only ``observe`` and ``refusal`` do
I/O.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any, Sequence

from ..config import named_configs, node_config, sharing, slices
from ..config.kinds import errors
from ..gpu import lost as lost_gpus
from ..gpu import nvml
from ..host import digest
from ..host.host import Host
from ..state import running_plugin
from . import claims, tables
from . import running as capacity_running

KUBELET_DIR = "/var/lib/kubelet/device-plugins"
CHECKPOINT = KUBELET_DIR + "/kubelet_internal_checkpoint"
UNIT = "/etc/systemd/system/vgpu-device-plugin.service"
SOCKET = KUBELET_DIR + "/kubelet.sock"
HEALTHY = "Healthy"
sentence = tables.sentence


def observe(
    host: Host,
    config_path: str = node_config.PATH,
    kubelet_dir: str = KUBELET_DIR,
    usage: bool = False,
    wanted_text: str = "",
) -> dict[str, Any]:
    """Reads the data of a host that the comparison needs. ``usage``: whether to read the running containers too, which
    takes three more calls of the plugin. ``wanted_text``: node.yaml made from the group variables; if empty, it is not
    compared.
    """
    base_path = config_path
    kubelet_socket = host.path(os.path.join(kubelet_dir, os.path.basename(SOCKET)))
    plugin = running_plugin.status(host)
    # A node label may have chosen a named configuration instead of node.yaml, so use the configuration that the running
    # program reports.
    if named_configs.active_name(config_path, plugin):
        config_path = str((plugin or {})["config_path"])
    return {
        "nvml": nvml.read(),
        "config_text": host.text(config_path),
        "config_path": config_path,
        "unit": os.path.exists(host.path(UNIT)),
        "kubelet": os.path.exists(kubelet_socket),
        "kubelet_fault": refusal(kubelet_socket),
        "checkpoint_text": host.text(os.path.join(kubelet_dir, os.path.basename(CHECKPOINT))),
        "plugin": plugin,
        "proof": running_plugin.proof(host),
        "isolation": running_plugin.last_isolation(host) if usage else None,
        "asked_usage": usage,
        "usage": running_plugin.usage(host) if usage else [],
        "slices": running_plugin.slices(host) if usage else [],
        "watch": running_plugin.watch(host) if usage else None,
        "wanted_text": wanted_text,
        "base_text": host.text(base_path) if wanted_text else None,
        "base_path": base_path,
        "time": time.time(),
    }


def refusal(path: str) -> str:
    """Returns why no program accepts connections on a socket, empty if a program does. The existence of the socket's
    file proves nothing, because a killed program leaves the file behind.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(5.0)
        try:
            client.connect(path)
        except OSError as fault:
            return f"{path}: {fault.strerror or fault}"
    return ""


def compare(seen: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of vgpu_capacity_info: expected, advertised, GPUs, and every difference with its remedy."""
    drift: list[dict[str, str]] = []
    answer: dict[str, Any] = {
        "resource": node_config.RESOURCE_NAME,
        "resources": [node_config.RESOURCE_NAME],
        "kubelet": bool(seen["kubelet"] or seen["checkpoint_text"]),
        "installed": bool(seen["config_text"] is not None or seen["plugin"] or seen.get("unit")),
        "shared": False,
        "claims": None,
        "expected": [],
        "advertised": [],
        "gpus": [],
        "lost": [],
        "library": (seen["plugin"] or {}).get("library"),
        "versions": {
            "driver": seen["nvml"].get("driver_version"),
            "plugin": (seen["plugin"] or {}).get("version"),
        },
        "usage": capacity_running.uses(seen.get("usage") or [], (seen.get("asked_usage") and seen.get("slices")) or []),
        "fingerprint": digest.fingerprint(seen["plugin"], seen["nvml"]["gpus"], seen["nvml"].get("driver_version")),
        "drift": drift,
        "notes": [],
        "plugin_warnings": [],
        "memory_enforcement": str((seen["plugin"] or {}).get("memory_enforcement_reason") or ""),
        "missing": missing(seen),
    }
    drift += capacity_running.wanted(seen.get("wanted_text"), seen.get("base_text"), seen.get("base_path") or "")
    config = _config(seen, drift)
    if config is not None:
        answer["resource"] = node_config.resource_name(config)
        answer["resources"] = [answer["resource"]]
        answer["shared"] = slices.vcuda_of(config) is not None
    if not seen["nvml"]["ok"]:
        _differ(drift, "driver", "NVML", "an answer", seen["nvml"]["error"], "look at the driver: nvidia-smi")
    else:
        answer["lost"] = lost_gpus.find(seen["nvml"]["gpus"], seen["nvml"]["lost"], seen["plugin"])
    for lost in answer["lost"]:
        # Report only this finding, because all other differences follow from it.
        _differ(drift, "GPU", lost_gpus.name(lost), "readable", lost["reason"], lost_gpus.remedy(lost))
    if config is not None and seen["nvml"]["ok"]:
        _expect(config, seen, answer)
    _compare_plugin(seen, answer, config)
    _compare_library(seen, answer)
    _compare_kubelet(seen, answer)
    if seen.get("asked_usage"):
        _compare_running(seen, answer, config)
    if not answer["installed"]:
        drift[:] = [_not_installed(seen), *[one for one in drift if one["what"] == "GPU"]]
    answer["plugin_warnings"] = _warnings(seen, answer)
    answer["proven"] = bool(answer["fingerprint"]) and seen.get("proof") == answer["fingerprint"]
    answer["isolation"] = seen.get("isolation")
    answer["ok"] = not drift
    return answer


def missing(seen: dict[str, Any]) -> dict[str, str]:
    """Maps each source that gave no data to the reason. The report omits the facts that only such a source has."""
    found = {}
    if not seen["nvml"]["ok"]:
        found["nvml"] = str(seen["nvml"]["error"])
    if seen["plugin"] is None:
        found["device plugin"] = "vgpuctl status does not answer"
    if not seen["kubelet"] and not seen["checkpoint_text"]:
        found["kubelet"] = "this host has no kubelet"
    elif seen["kubelet_fault"]:
        found["kubelet"] = str(seen["kubelet_fault"])
    if not seen.get("asked_usage"):
        found["ledgers"] = "not asked"
    elif seen["plugin"] is None:
        found["ledgers"] = "the device plugin does not answer"
    watch = seen.get("watch")
    if seen.get("asked_usage") and not watch:
        found["watcher"] = "the device plugin has no watcher, or does not answer"
    elif watch and (watch.get("fault") or not watch.get("interval_s")):
        found["watcher"] = str(watch.get("fault") or "the watcher is switched off")
    return found


def _warnings(seen: dict[str, Any], answer: dict[str, Any]) -> list[str]:
    """Returns the device plugin's warnings, except those that are reported here as a difference (a fault) or a note."""
    status = seen["plugin"] or {}
    named = [f"GPU {one['index']} is lost" for one in answer["lost"]]
    named += [str(one["uuid"]) for one in answer["lost"] if one["uuid"]] + list(status.get("waiting") or [])
    if any(one["what"] == "process" for one in answer["drift"]):
        named.append("see: vgpuctl watch")
    warnings = [str(one) for one in status.get("warnings") or []]
    return [text for text in warnings if not any(words in text for words in named)]


def _compare_running(seen: dict[str, Any], answer: dict[str, Any], config: dict[str, Any] | None) -> None:
    """Compares the running containers with their records."""
    status, usages = seen["plugin"] or {}, seen.get("usage") or []
    drift = answer["drift"]
    if seen["nvml"]["ok"]:
        drift += capacity_running.ledgers(usages, answer["gpus"])
    # With the option legacyPreferred the kubelet knows a slice under another id than the plugin. Only the plugin knows
    # which ids belong together.
    if answer["kubelet"] and not (slices.vcuda_of(config or {}) or {}).get("legacyPreferred"):
        drift += capacity_running.allocations(
            status, capacity_running.held(seen["checkpoint_text"], answer["resources"])
        )
    drift += capacity_running.watched(seen.get("watch"))
    answer["notes"] += capacity_running.older_libraries(status, capacity_running.names(usages))
    answer["notes"] += capacity_running.old_mounts(seen.get("watch"))


def _differ(drift: list[dict[str, str]], what: str, where: str, expected: Any, found: Any, remedy: str) -> None:
    drift.append(
        {"what": what, "where": where, "expected": str(expected), "found": str(found), "remedy": remedy},
    )


def _not_installed(seen: dict[str, Any]) -> dict[str, str]:
    """Returns one difference, "not installed", for a host without vgpu.fleet, because all its other differences follow
    from that.
    """
    found = f"no {seen['config_path']}, no unit of the device plugin, no answer of vgpuctl status"
    return capacity_running.entry(
        "vgpu.fleet", "on this host", "installed", f"not installed ({found})", "run site.yml for this host"
    )


def _config(seen: dict[str, Any], drift: list[dict[str, str]]) -> dict[str, Any] | None:
    path, text = seen["config_path"], seen["config_text"]
    if text is None:
        _differ(drift, "configuration", path, "a file", "none", "run site.yml for this host")
        return None
    try:
        return node_config.load(text, path)
    except node_config.ConfigError as fault:
        _differ(drift, "configuration", path, "a valid file", fault, "run site.yml for this host")
        return None


def _expect(config: dict[str, Any], seen: dict[str, Any], answer: dict[str, Any]) -> None:
    if not seen["nvml"]["gpus"]:
        remedy = "look at the driver and the PCI bus: nvidia-smi -L, lspci"
        _differ(answer["drift"], "GPU", "NVML", "at least one GPU", "none", remedy)
    pieces, findings = sharing.pieces_for(seen["nvml"]["gpus"], config)
    for fault in errors(findings):
        remedy = "correct the variables of the host's group"
        _differ(answer["drift"], "slices", fault.path, "at least one slice", fault.message, remedy)
    pieces = _until_free(pieces, seen, answer)
    answer["expected"] = [piece._asdict() for piece in pieces]
    answer["resources"] = sharing.resources_of(pieces, config)
    if node_config.by_claims(config):
        # On this host pods get GPUs by claims (Dynamic Resource Allocation), so the kubelet knows no GPU resource.
        # Compare the devices of the claims instead.
        answer.update(
            resource=capacity_running.CLAIM_DRIVER,
            resources=[],
            claims=claims.expected(seen["nvml"]["gpus"], pieces, config),
        )
    for gpu in seen["nvml"]["gpus"]:
        made = [piece for piece in pieces if piece.uuid == gpu["uuid"]]
        # If a GPU's slices are MIG devices of different sizes, the row has the figures of the first device.
        row = {key: gpu[key] for key in ("index", "uuid", "model", "memory_mib", "used_mib")}
        row.update(
            slices=len(made),
            slice_mib=made[0].memory_mib if made else 0,
            sm_percent=made[0].sm_percent if made else 0,
            mode=made[0].mode if made else None,
            **capacity_running.card(seen["plugin"], gpu["uuid"], seen["time"]),
        )
        answer["gpus"].append(row)


def _until_free(pieces: list[sharing.Piece], seen: dict[str, Any], answer: dict[str, Any]) -> list[sharing.Piece]:
    """Returns the expected slices. A GPU keeps its former split as long as slices of that split are in use. As long as
    it does, the slices of the former split are expected.
    """
    status = seen["plugin"] or {}
    for uuid in status.get("waiting") or []:
        made = [one for one in status.get("slices") or [] if one["uuid"] == uuid]
        wanted = [one for one in pieces if one.uuid == uuid]
        held = sum(bool(one.get("in_use")) for one in made)
        now = f"{len(made)} slices of the former split"
        if not held:
            remedy = "systemctl restart vgpu-device-plugin"
            _differ(answer["drift"], "split", uuid, f"{len(wanted)} slices", f"{now}, none of them in use", remedy)
            continue
        remedy = f"nothing to do: the GPU changes its split when its slices in use ({held}) are free"
        _differ(answer["notes"], "split", uuid, f"{len(wanted)} slices", now, remedy)
        before = [sharing.Piece(**{key: one[key] for key in sharing.Piece._fields}) for one in made]
        at = pieces.index(wanted[0]) if wanted else len(pieces)
        others = [one for one in pieces if one.uuid != uuid]
        pieces = others[:at] + before + others[at:]
    return pieces


def _compare_plugin(seen: dict[str, Any], answer: dict[str, Any], config: dict[str, Any] | None) -> None:
    """Compares the slices of the running program with the expected slices."""
    drift, status = answer["drift"], seen["plugin"]
    if status is None:
        remedy = "systemctl status vgpu-device-plugin; journalctl -u vgpu-device-plugin"
        _differ(drift, "device plugin", "vgpuctl status", "an answer", "none", remedy)
        return
    restart = "systemctl restart vgpu-device-plugin"
    if config is not None and status.get("config_sha256"):
        wanted = digest.sha256(seen["config_text"])
        if status["config_sha256"] != wanted:
            found = status["config_sha256"][:12]
            _differ(drift, "configuration", "running device plugin", wanted[:12], found, restart)
    unhealthy = _unhealthy(status, answer)
    for uuid, gpu in unhealthy.items():
        remedy = f"its slices come back 5 minutes after its last fault; see: vgpuctl explain {gpu['index']}"
        _differ(drift, "GPU", f"{gpu['index']} ({uuid})", "healthy", gpu["reason"], remedy)
    made = {piece["id"]: piece for piece in status.get("slices") or []}
    for wanted in answer["expected"]:
        found = made.pop(wanted["id"], None)
        if found is None:
            _differ(drift, "slice", wanted["id"], "made by the device plugin", "not made", restart)
            continue
        for key in ("memory_mib", "sm_percent"):
            if int(found[key]) != wanted[key]:
                _differ(drift, "slice " + key, wanted["id"], wanted[key], found[key], restart)
        ill = found.get("health", HEALTHY) != HEALTHY and wanted["uuid"] not in unhealthy
        if ill and wanted["id"] not in _leased(status):
            remedy = "look at the GPU: journalctl -u vgpu-device-plugin, kernel log for Xid"
            _differ(drift, "slice health", wanted["id"], HEALTHY, found["health"], remedy)
    for extra, piece in made.items():
        if config is not None and answer["expected"] and piece["uuid"] not in _lost(answer):
            _differ(drift, "slice", extra, "not to exist", "made by the device plugin", restart)


def _unhealthy(status: dict[str, Any], answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns, by UUID, the GPUs that NVML can read and that have a fault. Each such GPU gives one difference, whatever
    the number of its slices.
    """
    readable = {gpu["uuid"] for gpu in answer["gpus"]}
    found = {str(gpu["uuid"]): gpu for gpu in status.get("gpus") or [] if not gpu.get("healthy", True)}
    return {uuid: gpu for uuid, gpu in found.items() if uuid in readable}


def _lost(answer: dict[str, Any]) -> set[str]:
    return {one["uuid"] for one in answer["lost"]}


def _compare_library(seen: dict[str, Any], answer: dict[str, Any]) -> None:
    """Reports a missing library on a host whose GPUs the library shares. Without the library the device plugin refuses
    every container, while all slices stay advertised.
    """
    status = seen["plugin"]
    if answer["shared"] and status is not None and status.get("library") == "":
        found = "no complete version; the device plugin refuses every container"
        remedy = "run site.yml for this host"
        _differ(answer["drift"], "library", "device plugin", "a version of libvgpu.so", found, remedy)


def _leased(status: dict[str, Any]) -> list[str]:
    """Returns the slices that a check, a program or a container outside Kubernetes uses. The
    kubelet lists them as unhealthy.
    """
    leases = [one for one in status.get("allocations") or [] if one.get("kind") in ("lease", "exec", "container")]
    outside = [one["id"] for one in status.get("slices") or [] if one.get("state") == "in use"]
    return sorted({one for lease in leases for one in lease["slice_ids"]} | set(outside))


def _compare_kubelet(seen: dict[str, Any], answer: dict[str, Any]) -> None:
    """Compares the slices that the kubelet knows with the existing slices. On a host without a kubelet the device
    plugin's own list is compared instead.
    """
    status = seen["plugin"] or {}
    leased = _leased(status)
    if answer["kubelet"]:
        known = {name: registered(seen["checkpoint_text"], name) for name in answer["resources"]}
        unknown = [name for name, ids in known.items() if ids is None]
        advertised = [one for ids in known.values() for one in ids or []]
        deaf = bool(seen["kubelet_fault"]) or status.get("registered") is False
        if seen["kubelet_fault"]:
            remedy = "systemctl status kubelet; journalctl -u kubelet"
            _differ(answer["drift"], "kubelet", "its socket", "an answer", seen["kubelet_fault"], remedy)
            advertised = []
        elif status.get("registered") is False:
            found = status.get("kubelet_error") or "not registered"
            remedy = "wait for the kubelet; journalctl -u vgpu-device-plugin -u kubelet"
            _differ(answer["drift"], "kubelet", "device plugin", "registered", found, remedy)
            advertised = []
        for name in unknown if not deaf else []:
            remedy = "wait for the kubelet, or restart it: systemctl restart kubelet"
            _differ(answer["drift"], "kubelet", name, "registered", "not in the checkpoint", remedy)
        answer["advertised"] = advertised
        if answer["claims"] is not None:
            # This module does not compare with the API server; kube_capacity_info does.
            answer["advertised"] = [] if deaf else _healthy(status)
            return _count(answer, leased)
        expected = [piece["id"] for piece in answer["expected"]]
        unhealthy = _unhealthy(status, answer)
        unoffered = {piece["id"] for piece in answer["expected"] if piece["uuid"] in unhealthy}
        missing = sorted(set(expected) - set(advertised) - set(leased) - unoffered)
        foreign = sorted(one for one in set(advertised) - set(expected) if one.partition("::")[0] not in _lost(answer))
        # If the plugin is not registered, all slices are missing. Report this as one difference.
        if expected and missing and not deaf:
            remedy = "systemctl restart vgpu-device-plugin; if the difference stays, check slice health above"
            found = f"{len(set(advertised) & set(expected))} of {len(expected)}; missing {_some(missing)}"
            where = ", ".join(answer["resources"])
            _differ(answer["drift"], "advertised", where, f"{len(expected)} slices", found, remedy)
        if expected and foreign:
            remedy = "another device plugin registers the same resource; remove it"
            where = ", ".join(answer["resources"])
            _differ(answer["drift"], "advertised", where, "only our slices", _some(foreign), remedy)
    else:
        answer["advertised"] = _healthy(status)
    return _count(answer, leased)


def _healthy(status: dict[str, Any]) -> list[str]:
    return [piece["id"] for piece in status.get("slices") or [] if piece.get("health", HEALTHY) == HEALTHY]


def _count(answer: dict[str, Any], leased: Sequence[str]) -> None:
    for row in answer["gpus"]:
        mine = {piece["id"] for piece in answer["expected"] if piece["uuid"] == row["uuid"]}
        ids = {*answer["advertised"], *leased} & mine
        row["advertised"] = len(ids)


def registered(checkpoint_text: str | None, resource: str) -> list[str] | None:
    """Returns the device ids that the kubelet knows under a resource, None if it does not know the resource."""
    try:
        known = json.loads(checkpoint_text or "")["Data"]["RegisteredDevices"].get(resource)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return [str(one) for one in known] if known is not None else None


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
