# SPDX-License-Identifier: Apache-2.0
"""Compares nodes' ResourceSlices with the devices that the nodes should have, and finds the pods that use these
devices. It is for nodes whose pods get GPUs by claims (Dynamic Resource Allocation). It works on objects as the API
returns them and does no I/O.
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

from ..pods import quantity
from .running import CLAIM_DRIVER, MIB, entry

LOOK = "see: vgpuctl status, journalctl -u vgpu-device-plugin"
# Columns: name in a device's capacity; key of the expected value; factor that converts the expected value to the unit
# of the device's capacity.
CAPACITIES = (("memory", "memory_mib", MIB), ("slots", "slots", 1))


def compare(
    name: str, found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], lost: Iterable[str] = ()
) -> list[dict[str, str]]:
    """Returns the differences of one node. ``found``: its ResourceSlices of our driver; ``wanted``: the expected
    devices of claims.py; ``lost``: UUIDs of lost GPUs, which another finding reports.
    """
    where = f"{name} {CLAIM_DRIVER}"
    pools = [one["spec"].get("pool") or {} for one in found]
    newest = max((int(one.get("generation") or 0) for one in pools), default=0)
    current = [
        one
        for one, pool in zip(found, pools)
        if int(pool.get("generation") or 0) == newest and one["spec"].get("devices")
    ]
    if not current:
        return [entry("ResourceSlices", where, f"{len(wanted)} devices", "none", LOOK)] if wanted else []
    devices = {_uuid(one): one for piece in current for one in piece["spec"]["devices"]}
    out = []
    for want in wanted:
        device = devices.pop(want["uuid"], None)
        if device is None:
            out.append(entry("ResourceSlices", f"{where} {want['uuid']}", "a device", "none", LOOK))
            continue
        shared = bool(device.get("allowMultipleAllocations"))
        if shared != want["shared"]:
            words = {True: "a device for many claims", False: "a device for one claim"}
            remedy = f"{LOOK}; the API server needs the feature gate DRAConsumableCapacity"
            out.append(entry("ResourceSlices", f"{where} {want['uuid']}", words[want["shared"]], words[shared], remedy))
        for key, ours, unit in CAPACITIES:
            amount = _amount(device, key)
            if want[ours] is not None and amount != want[ours] * unit:
                shown = "none" if amount is None else f"{float(amount / unit):g}"
                out.append(entry(f"ResourceSlices {key}", f"{where} {want['uuid']}", want[ours], shown, LOOK))
    remedy = "wait for the device plugin's next update; if the device stays: systemctl restart vgpu-device-plugin"
    out += [
        entry("ResourceSlices", f"{where} {uuid}", "no device", "a device", remedy)
        for uuid in sorted(devices)
        if uuid not in lost
    ]
    return out


def _uuid(device: Mapping[str, Any]) -> str:
    for name, value in (device.get("attributes") or {}).items():
        if name.rpartition("/")[2] == "uuid":
            return str((value or {}).get("string") or "")
    return str(device.get("name"))


def _amount(device: Mapping[str, Any], key: str) -> Any:
    for name, value in (device.get("capacity") or {}).items():
        if name.rpartition("/")[2] == key:
            return quantity.exact((value or {}).get("value"))
    return None


def holders(name: str, found: Iterable[dict[str, Any]], phases: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the pods that use devices of our driver on this node as ``{pod, resource, count, phase}``. ``found``: the
    claims of the cluster. ``phases``: maps a pod's ``namespace/name`` to its phase.
    """
    out = []
    for claim in found:
        status, place = claim.get("status") or {}, claim["metadata"]["namespace"]
        results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or []
        count = sum(1 for one in results if one.get("driver") == CLAIM_DRIVER and one.get("pool") == name)
        pods = [f"{place}/{one['name']}" for one in status.get("reservedFor") or [] if one.get("resource") == "pods"]
        resource = f"claim {claim['metadata']['name']}"
        out += [{"pod": pod, "resource": resource, "count": count, "phase": phases.get(pod)} for pod in pods if count]
    return out
