# SPDX-License-Identifier: Apache-2.0
"""Compares the running containers of a host with their records, and node.yaml with the group's variables. No I/O. A
difference (a fault) is ``{what, where, expected, found, remedy}``. A note has the same keys but is not a fault, because
its cause disappears when the container that it names ends.

The records are the ledgers (files in which each container's library records its GPU memory) and the kubelet's
checkpoint. They are compared with NVML's figures. Findings of the watcher, which looks for processes that bypass their
limits, are reported as well.
"""

from __future__ import annotations

import json
import time
from typing import Any, Mapping

MIB = 1 << 20
# The driver name of claims (Dynamic Resource Allocation).
CLAIM_DRIVER = "gpu.vgpu.fleet"
# Tolerance by which the sum of the ledgers may exceed the driver's figure: LEAST_MIB, or the sum divided by PART if
# that is more. In the other direction, the watcher allows the driver's figure to exceed the ledgers by as much.
LEAST_MIB, PART = 64, 16
ABSENT = "not set"
# Keys of node.yaml that are not compared, because no vgpu_ variable sets them: the role vcuda chooses the folder of the
# library.
NOT_OF_THE_GROUP = ("sharing.vcuda.libraryRoot",)


def entry(what: str, where: str, expected: Any, found: Any, remedy: str) -> dict[str, str]:
    return {"what": what, "where": where, "expected": str(expected), "found": str(found), "remedy": remedy}


def wanted(wanted_text: str | None, text: str | None, path: str) -> list[dict[str, str]]:
    """Compares, key by key, a node's configuration file with the text that the group's variables produce."""
    if not wanted_text or text is None:
        return []
    try:
        ours, theirs = _flat(json.loads(wanted_text)), _flat(json.loads(text))
    except ValueError:
        return []  # Report no difference here, because another finding reports the unreadable file.
    keys = [
        key
        for key in sorted({*ours, *theirs})
        if key not in NOT_OF_THE_GROUP and ours.get(key, ABSENT) != theirs.get(key, ABSENT)
    ]
    remedy = "run site.yml for this host"
    return [
        entry("group variables", f"{path}: {key}", ours.get(key, ABSENT), theirs.get(key, ABSENT), remedy)
        for key in keys
    ]


def _flat(value: Any, path: str = "") -> dict[str, str]:
    """Maps the dotted path of each leaf of a nested value to the leaf's text."""
    if isinstance(value, dict) and value:
        pairs = [(f"{path}.{key}" if path else str(key), one) for key, one in value.items()]
    elif isinstance(value, list) and value:
        pairs = [(f"{path}[{n}]", one) for n, one in enumerate(value)]
    else:
        return {path: value if isinstance(value, str) else json.dumps(value)}
    return {name: leaf for key, one in pairs for name, leaf in _flat(one, key).items()}


def names(usages: list[dict[str, Any]]) -> dict[str, str]:
    """Maps each allocation to its pod and container, if Kubernetes has a name for it."""
    out = {}
    for one in usages:
        parts = [one.get(key) for key in ("namespace", "pod", "container")]
        if one.get("allocation") and all(parts):
            out[str(one["allocation"])] = "/".join(str(part) for part in parts)
    return out


def uses(usages: list[dict[str, Any]], slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each limited container and GPU: ``by`` (the user), ``uuid``, ``slices``, ``limit_mib``,
    ``used_mib`` and ``processes``. Other slices (shares of a GPU) in use, such as whole GPUs, have rows in which the
    last three values are None, because their memory is not known. The argument ``slices`` lists the slices with their
    holders, as ``vgpuctl slices`` does.
    """
    held = {str(one["id"]): str(one.get("held_by") or "") for one in slices if one.get("in_use")}
    out: list[dict[str, Any]] = []
    for one in usages:
        ids = [str(each) for each in one.get("slice_ids") or []]
        named = "/".join(str(one[key]) for key in ("namespace", "pod", "container") if one.get(key))
        by = next((held[each] for each in ids if held.get(each)), "")
        out.append(
            {
                "by": by or named or str(one.get("holder") or one.get("allocation") or ""),
                "uuid": one.get("uuid"),
                "slices": ids,
                "limit_mib": int(one.get("memory_limit") or 0) >> 20,
                # Report the greater of two figures: the container's own and the driver's.
                "used_mib": max(int(one.get(key) or 0) for key in ("memory_used", "memory_driver")) >> 20,
                "processes": int(one.get("processes") or 0),
            }
        )
    known = {each for one in usages for each in map(str, one.get("slice_ids") or [])}
    unknown: dict[str, Any] = {"limit_mib": None, "used_mib": None, "processes": None}
    rest = [one for one in slices if one["id"] in held and one["id"] not in known]
    return out + [{"by": held[one["id"]], "uuid": one.get("uuid"), "slices": [one["id"]], **unknown} for one in rest]


def ledgers(usages: list[dict[str, Any]], gpus: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Returns a difference for each GPU whose ledgers together record more memory than the driver reports in use. In
    this case a ledger is stale.

    ``gpus``: rows of vgpu_capacity_info. Skips oversold GPUs, because part of their slices may be in host memory.
    """
    out = []
    for gpu in gpus:
        if gpu["slices"] * gpu["slice_mib"] > gpu["memory_mib"]:
            continue
        mine = [one for one in usages if one.get("uuid") == gpu["uuid"]]
        charged = sum(int(one.get("memory_used") or 0) for one in mine) // MIB
        if charged > gpu["used_mib"] + max(LEAST_MIB, charged // PART):
            worst = max(mine, key=lambda one: int(one.get("memory_used") or 0))
            who = names(mine).get(str(worst.get("allocation")), str(worst.get("allocation")))
            remedy = (
                f"a ledger still charges freed memory; restart {who}, which has the largest charge; see: vgpuctl top"
            )
            expected = f"at most the {gpu['used_mib']} MiB that the driver has in use"
            out.append(entry("ledger", str(gpu["uuid"]), expected, f"{charged} MiB charged", remedy))
    return out


def held(checkpoint_text: str | None, resources: list[str]) -> dict[str, list[str]] | None:
    """Maps each "pod uid/container" to the slice ids that the kubelet allocated to it under these resources; None if
    the checkpoint cannot be read.
    """
    try:
        entries = json.loads(checkpoint_text or "")["Data"].get("PodDeviceEntries") or []
        out: dict[str, list[str]] = {}
        for one in entries:
            if one["ResourceName"] in resources:
                ids = one.get("DeviceIDs") or []
                flat = [name for some in ids.values() for name in some or []] if isinstance(ids, dict) else list(ids)
                out.setdefault(f"{one['PodUID']}/{one['ContainerName']}", []).extend(flat)
        return out
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def allocations(status: dict[str, Any], given: dict[str, list[str]] | None) -> list[dict[str, str]]:
    """Compares the plugin's records of slices in use with the kubelet's records of the same slices."""
    if given is None:
        return []
    recorded = [one for one in status.get("allocations") or [] if one.get("kind") == "kubelet"]
    known = {name for ids in given.values() for name in ids}
    of_plugin = {name for one in recorded for name in one["slice_ids"]}
    slices = {one["id"] for one in status.get("slices") or []}
    out = []
    for one in recorded:
        if not known & set(one["slice_ids"]):
            remedy = (
                "the plugin removes the record within about two minutes; if it stays: journalctl -u "
                "vgpu-device-plugin -u kubelet"
            )
            out.append(entry("allocation", one["id"], "a container of the kubelet", "none", remedy))
    for holder, ids in sorted(given.items()):
        lost = sorted((set(ids) & slices) - of_plugin)
        if lost:
            remedy = "this plugin does not apply the container's limits: restart vgpu-device-plugin, then the pod"
            out.append(entry("allocation", holder, f"a record of {', '.join(lost)}", "none", remedy))
    return out


def older_libraries(status: dict[str, Any], who: dict[str, str]) -> list[dict[str, str]]:
    """Returns a note for each container that maps another version of the library than new containers get."""
    current = status.get("library")
    return [
        entry(
            "library",
            who.get(one["id"], f"allocation {one['id']}"),
            current,
            f"{one['library']}, still mapped",
            "the old version stays until the pod ends; upgrade.yml replaces a node's pods in batches",
        )
        for one in status.get("allocations") or []
        if current and one.get("kind") == "kubelet" and one.get("library") and one["library"] != current
    ]


# Maps the reason of a watcher's finding to the expected state and the remedy. A finding with any other reason is about
# memory and uses MEMORY.
EXPECTED = {
    "more-time": ("at most its share of the GPU's time", "check that container; its processes are not ended"),
    "foreign-mount": ("the node's own files at their paths", "check the mounts of that container"),
    "unplaced": (
        ("a container with a slice, or a process of the host"),
        "find out what started the process; it has no limit",
    ),
}
MEMORY = (
    "all its GPU memory in its ledger, and within its limit",
    "check that container; with vgpu_watch: end, such processes are ended",
)


def watched(answer: dict[str, Any] | None) -> list[dict[str, str]]:
    """Returns a difference for each present finding of the watcher that no isolation check causes."""
    out = []
    for one in (answer or {}).get("findings") or []:
        if one.get("kind") == "lease":
            continue  # The running isolation check causes this finding on purpose.
        expected, remedy = EXPECTED.get(str(one.get("reason")), MEMORY)
        out.append(entry("process", _where(one), expected, one["text"], remedy))
    return out


def old_mounts(answer: dict[str, Any] | None) -> list[dict[str, str]]:
    """Returns a note for each container that still has the mounts of a former version of the collection."""
    remedy = "the old mounts stay until the pod or container ends; upgrade.yml replaces a node's pods in batches"
    return [
        entry("mounts", _where(one), "the folders below /dev/vgpu", "single files of a former version", remedy)
        for one in (answer or {}).get("old_mounts") or []
    ]


def _where(one: dict[str, Any]) -> str:
    name = "/".join(str(one[key]) for key in ("namespace", "pod", "container") if one.get(key))
    return name or (f"allocation {one['allocation']}" if one.get("allocation") else "no known container")


def card(plugin: Mapping[str, Any] | None, uuid: str, now: float) -> dict[str, Any]:
    """Returns for one GPU: ``utilisation`` in percent and ``temperature`` in degrees Celsius (each None if not known),
    and ``xids`` since the plugin's start, the latest first: ``xid``, ``count``, and ``last``, its time in UTC.

    ``plugin``: the output of ``vgpuctl status --json``, None if there is none. ``now``: the time of that output in
    seconds since 1970.
    """
    gpus = (plugin or {}).get("gpus") or []
    gpu: Mapping[str, Any] = next((one for one in gpus if one.get("uuid") == uuid), {})
    # A plugin of a former version reports no age of an Xid, so its time is unknown.
    xids = sorted(gpu.get("xids") or [], key=lambda one: one.get("age_s") or 0.0)
    return {
        "utilisation": _figure(gpu.get("utilisation")),
        "temperature": _figure(gpu.get("temperature")),
        "xids": [{"xid": one["xid"], "count": one["count"], "last": _utc(one.get("age_s"), now)} for one in xids],
    }


def _figure(value: Any) -> int | None:
    """Returns a figure of the plugin; None if it is -1, which means that the driver reports no figure."""
    return None if value is None or value < 0 else int(value)


def _utc(age_s: float | None, now: float) -> str | None:
    return None if age_s is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now - age_s))
