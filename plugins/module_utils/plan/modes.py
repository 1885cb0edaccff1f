# SPDX-License-Identifier: Apache-2.0
"""Plans the changes of the roles mig, mps and time_slicing, for hosts that share their GPUs by these modes. No I/O."""

from __future__ import annotations

from typing import Any

from ..gpu import mig_plan, mig_unit, mps, time_slice
from ..host.digest import sha256
from . import plugin_python
from .part import NOTHING, PRESENT, Part, undone


def mig(wanted: dict[str, Any], state: dict[str, Any], desired: dict[str, Any]) -> Part:
    if wanted["state"] != PRESENT:
        changes = undone(wanted, state)
        return Part("the former MIG geometry is to be restored", changes, bool(changes))
    if not wanted["geometry"]:
        return NOTHING._replace(errors=["vgpu_mig_geometry is empty; name a profile, such as {1g.10gb: 7}"])
    found = state["mig"]
    notes: list[str] = []
    changes = []
    if found["ok"]:
        able, notes = mig_plan.targets(found["gpus"], wanted["geometry"])
        steps = [(gpu, mig_plan.plan(gpu, wanted["geometry"])) for gpu in able]
        errors = [text for _gpu, one in steps for text in one.errors]
        if errors:
            return NOTHING._replace(errors=errors, warnings=notes)
        changes = [line for gpu, one in steps for line in mig_plan.describe(gpu, one)]
    elif state["nvml"]["ok"]:
        return NOTHING._replace(errors=[f"MIG cannot be read: {found['error']}"])
    else:
        # Without a driver the GPUs cannot be read, so the geometry is compared only by the next plan.
        changes = [f"set the GPUs to {mig_plan.show(wanted['geometry'])}"]
    geometry_differs = bool(changes)
    if wanted["boot"]:
        python = plugin_python.small_program(state["os"], wanted["python"])
        changes += _differing(mig_unit.files(wanted["geometry"], python), state)
        if not (state["units"].get(mig_unit.UNIT) or {}).get("enabled"):
            changes.append(f"enable {mig_unit.UNIT}")
    reason = (
        "the GPUs have another geometry" if geometry_differs else "the unit that creates the geometry at boot differs"
    )
    return Part(reason, changes, geometry_differs and found["ok"], notes)


def gpus_after_mig(desired: dict[str, Any], state: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the GPUs as they will be after the role mig has run, because the desired state is checked against these
    GPUs.
    """
    part = desired["roles"].get("mig")
    if part is None:
        return list(state["gpus"])
    if part["state"] != PRESENT:
        given_back = bool(undone(part, state))
        return [{**gpu, "mig_enabled": False, "mig": []} if given_back else gpu for gpu in state["gpus"]]
    profiles = {
        gpu["index"]: gpu["profiles"] for gpu in (state["mig"] or {}).get("gpus", []) if gpu["mode"] is not None
    }
    after = []
    for gpu in state["gpus"]:
        if gpu["index"] in profiles:
            gpu = {**gpu, "mig_enabled": True, "mig": []}
            for profile, count in part["geometry"].items():
                memory = profiles[gpu["index"]].get(profile, {}).get("memory_mib", 1)
                for _n in range(count):
                    number = len(gpu["mig"])
                    one = {"index": number, "uuid": f"MIG-{gpu['uuid']}-{number}", "profile": profile}
                    gpu["mig"].append({**one, "memory_mib": memory})
        after.append(gpu)
    return after


def mps_part(wanted: dict[str, Any], state: dict[str, Any], desired: dict[str, Any]) -> Part:
    there = [path for path in (mps.UNIT_PATH, mps.START_PATH) if state["files"].get(path) is not None]
    if wanted["state"] != PRESENT:
        return Part("MPS is to be absent", [f"remove {path}" for path in there], bool(there))
    if not state["nvml"]["ok"]:
        return Part("the control daemon of MPS is to run", [f"run {mps.UNIT} when the driver answers"])
    refused = mps.refusals(state["gpus"], wanted["replicas"], state["nvml"]["cuda_version"])
    if refused:
        return NOTHING._replace(errors=refused)
    files = mps.files(state["gpus"], wanted["replicas"], wanted["root"], wanted["resource"], wanted["exclusive"])
    changes = _differing(files, state)
    unit = state["units"].get(mps.UNIT) or {}
    if not unit.get("enabled"):
        changes.append(f"enable {mps.UNIT}")
    if not unit.get("active"):
        changes.append(f"start {mps.UNIT}")
    elif any(change.startswith(("write", "change")) for change in changes) or _left_over(files, state, unit):
        changes.append(f"restart {mps.UNIT}")
    # A restart disturbs running work, because MPS clients do not survive the server that they are connected to.
    return Part("the control daemon of MPS differs or does not run", changes, bool(changes and unit.get("active")))


def time_slicing(wanted: dict[str, Any], state: dict[str, Any], desired: dict[str, Any]) -> Part:
    path = time_slice.UNIT_PATH
    if wanted["state"] != PRESENT:
        there = state["files"].get(path) is not None
        return Part("the driver's default time slice is to be restored", [f"remove {path}"] if there else [])
    files = time_slice.files(wanted["slice"])
    changes = _differing(files, state)
    unit = state["units"].get(time_slice.UNIT) or {}
    if not unit.get("enabled"):
        changes.append(f"enable {time_slice.UNIT}")
    if changes or not unit.get("active") or _left_over(files, state, unit):
        changes.append(f"set the time slice of the GPUs to {wanted['slice']}")
    return Part("the GPUs do not have the desired time slice", changes)


def _differing(files: dict[str, str], state: dict[str, Any]) -> list[str]:
    changes = []
    for path, text in sorted(files.items()):
        found = state["files"].get(path)
        if found is None:
            changes.append(f"write {path}")
        elif found["sha256"] != sha256(text):
            changes.append(f"change {path}")
    return changes


def _left_over(files: dict[str, str], state: dict[str, Any], unit: dict[str, Any]) -> bool:
    """Returns whether the service started before one of its files was written. Then a run was killed between writing
    the files and the restart.
    """
    newest = max(float(state["files"][path]["mtime"]) for path in files)
    return bool(unit.get("stale")) or (bool(unit.get("started")) and newest > float(unit["started"]))
