# SPDX-License-Identifier: Apache-2.0
"""Tests the plan (the changes that a run would make) of the sharing modes MIG (hardware partitions of a GPU) and MPS (a
daemon of NVIDIA that runs several programs on a GPU at once), and of the time slice (the time for which a process gets
the GPU): changes, errors, and whether running work is disturbed.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import mig_unit, mps, time_slice
from ansible_collections.vgpu.fleet.plugins.module_utils.host.digest import sha256
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import desired, plan
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import modes as plan_modes
from plan_samples import changed

PROFILES = {
    "1g.5gb": {"slices": 1, "most": 7, "memory_mib": 4864},
    "3g.20gb": {"slices": 3, "most": 2, "memory_mib": 20096},
}
GPU = {
    "index": 0,
    "uuid": "GPU-0",
    "model": "A100",
    "mode": True,
    "pending": True,
    "profiles": PROFILES,
    "instances": [{"id": 2, "profile": "3g.20gb", "start": 4, "size": 4, "complete": True}],
    "processes": [],
}
ON = {"present": True, "enabled": True, "active": True}
WANTED = {"3g.20gb": 1}
CARD = {
    "index": 0,
    "uuid": "GPU-0",
    "model": "T4",
    "memory_mib": 15360,
    "compute_capability": "7.5",
    "mig_enabled": False,
}


def on_disk(files):
    return {path: {"sha256": sha256(text), "mtime": 1.0} for path, text in files.items()}


AS_WANTED = {
    "os": {"id": "debian", "version_id": "12"},
    "nvml": {"ok": True, "error": "", "cuda_version": "12.2"},
    "gpus": [CARD],
    "mig": {"ok": True, "error": "", "gpus": [GPU]},
    "units": {mig_unit.UNIT: ON, mps.UNIT: ON, time_slice.UNIT: ON},
    "files": on_disk({**mig_unit.files(WANTED), **mps.files([CARD], 4), **time_slice.files("long")}),
}
FIRST = "mig.gpus"
BUSY = [{**GPU, "processes": [{"pid": 7, "instance": 2}]}]

# columns: variables of the role that differ, facts of the state that differ; expected changes (None: any changes that
# create MIG devices), words of the error, whether running work is disturbed
MIG = [
    ({}, {}, [], "", False),
    ({"geometry": {"1g.5gb": 2}}, {}, None, "", True),
    ({"geometry": {"1g.5gb": 2}}, {FIRST: BUSY}, [], "used by the processes 7", False),
    ({"geometry": {"3g.20gb": 1, "1g.5gb": 1}}, {FIRST: BUSY}, None, "", True),  # The MIG device in use stays.
    ({"geometry": {"9g.80gb": 1}}, {}, [], "has no MIG profile 9g.80gb", False),
    ({"geometry": {}}, {}, [], "vgpu_mig_geometry is empty", False),
    ({}, {FIRST: [{**GPU, "mode": None}]}, [], "has no MIG", False),
    ({}, {FIRST: [{**GPU, "pending": False}]}, [], "waits for a reset", False),
    ({}, {("files", mig_unit.GEOMETRY): None}, [f"write {mig_unit.GEOMETRY}"], "", False),
    ({}, {("files", mig_unit.UNIT_PATH): {"sha256": "x"}}, [f"change {mig_unit.UNIT_PATH}"], "", False),
    ({}, {("units", mig_unit.UNIT): {}}, [f"enable {mig_unit.UNIT}"], "", False),
    ({"boot": False}, {("units", mig_unit.UNIT): {}}, [], "", False),
    ({"state": "absent", "record": "/r"}, {"files": {}}, [], "", False),
    ({"state": "absent", "record": "/r"}, {"files": {"/r": {}}}, ["revert the changes recorded in /r"], "", True),
    (
        {"boot": False},
        {"mig": {"ok": False, "error": "no driver", "gpus": []}, "nvml.ok": False},
        ["set the GPUs to 1 x 3g.20gb"],
        "",
        False,
    ),
]


@pytest.mark.parametrize(("wanted", "state", "changes", "fault", "disturbs"), MIG)
def test_changes_of_mig(wanted, state, changes, fault, disturbs):
    whole = {**desired.INPUTS["mig"], "state": "present", "geometry": WANTED, **wanted}
    part = plan_modes.mig(whole, changed(AS_WANTED, state), {})
    if changes is None:
        assert any("create 1g.5gb" in line for line in part.changes)
    else:
        assert list(part.changes) == changes
    assert (fault in " ".join(part.errors)) if fault else not part.errors
    assert part.disturbs is disturbs


# columns: variables of the role that differ, facts of the state that differ; expected reason
REASONS = [
    ({"geometry": {"1g.5gb": 2}}, {}, "the GPUs have another geometry"),
    ({"geometry": {"1g.5gb": 2}}, {("units", mig_unit.UNIT): {}}, "the GPUs have another geometry"),
    ({}, {("units", mig_unit.UNIT): {}}, "the unit that creates the geometry at boot differs"),
]


@pytest.mark.parametrize(("wanted", "state", "reason"), REASONS)
def test_another_geometry_is_the_reason_even_if_the_unit_differs_too(wanted, state, reason):
    whole = {**desired.INPUTS["mig"], "state": "present", "geometry": WANTED, **wanted}
    assert plan_modes.mig(whole, changed(AS_WANTED, state), {}).reason == reason


# columns: variables of the role that differ, facts of the state that differ; expected changes, words of the error,
# whether running work is disturbed
MPS = [
    ({}, {}, [], "", False),
    ({"replicas": 8}, {}, [f"change {mps.START_PATH}", f"restart {mps.UNIT}"], "", True),
    ({"replicas": 49}, {}, [], "at most 48 clients", False),
    ({}, {("units", mps.UNIT, "active"): False}, [f"start {mps.UNIT}"], "", False),
    ({}, {("units", mps.UNIT, "enabled"): False}, [f"enable {mps.UNIT}"], "", True),
    # A run was killed after it wrote the file and before the restart, so the file is newer than the service.
    ({}, {("units", mps.UNIT, "started"): 0.5}, [f"restart {mps.UNIT}"], "", True),
    ({}, {("units", mps.UNIT, "stale"): True}, [f"restart {mps.UNIT}"], "", True),
    ({}, {("units", mps.UNIT, "started"): 1.5}, [], "", False),
    # If the file has the start time of the service, the service has read the file.
    ({}, {("units", mps.UNIT, "started"): 1.0}, [], "", False),
    # Without vgpu_split_count and mps_replicas each GPU has two clients.
    (
        {"replicas": desired.INPUTS["mps"]["replicas"]},
        {("files", mps.START_PATH, "sha256"): sha256(mps.files([CARD], 2)[mps.START_PATH])},
        [],
        "",
        False,
    ),
    ({}, {"nvml.ok": False}, [f"run {mps.UNIT} when the driver answers"], "", False),
    ({"state": "absent"}, {}, [f"remove {mps.UNIT_PATH}", f"remove {mps.START_PATH}"], "", True),
    ({"state": "absent"}, {"files": {}}, [], "", False),
]


@pytest.mark.parametrize(("wanted", "state", "changes", "fault", "disturbs"), MPS)
def test_changes_of_mps(wanted, state, changes, fault, disturbs):
    whole = {**desired.INPUTS["mps"], "state": "present", "replicas": 4, **wanted}
    part = plan_modes.mps_part(whole, changed(AS_WANTED, state), {})
    assert list(part.changes) == changes
    assert (fault in " ".join(part.errors)) if fault else not part.errors
    assert part.disturbs is disturbs


SET = "set the time slice of the GPUs to long"
SLICE = [
    ({}, {}, []),
    ({}, {("units", time_slice.UNIT, "active"): False}, [SET]),
    ({}, {("units", time_slice.UNIT, "started"): 0.5}, [SET]),
    ({}, {("units", time_slice.UNIT, "started"): 1.5}, []),
    ({}, {("units", time_slice.UNIT): {}}, [f"enable {time_slice.UNIT}", SET]),
    ({}, {("files", time_slice.UNIT_PATH): {"sha256": "x"}}, [f"change {time_slice.UNIT_PATH}", SET]),
    ({"state": "absent"}, {}, [f"remove {time_slice.UNIT_PATH}"]),
    ({"state": "absent"}, {"files": {}}, []),
]


@pytest.mark.parametrize(("wanted", "state", "changes"), SLICE)
def test_changes_of_the_time_slice(wanted, state, changes):
    part = plan_modes.time_slicing({"state": "present", "slice": "long", **wanted}, changed(AS_WANTED, state), {})
    assert (list(part.changes), list(part.errors)) == (changes, [])


def test_roles_read_only_their_inputs():
    options = desired.reads(
        desired.collect({"mig_state": "present", "mps_state": "present", "time_slicing_state": "present"})
    )
    assert options["mig"] is True
    assert {mig_unit.UNIT, mps.UNIT, time_slice.UNIT} <= set(options["units"])
    assert {mig_unit.GEOMETRY, mps.UNIT_PATH, time_slice.UNIT_PATH} <= set(options["files"])
    # For a group without MIG only the record of the role is read, because it shows whether there is something to roll
    # back.
    other = desired.reads(desired.collect({"mig_state": "absent", "__mig_record": "/r"}))
    assert other.get("mig") is None
    assert other["files"] == ["/r"]


IN_MIG = {
    **CARD,
    "mig_enabled": True,
    "mig": [{"index": 0, "uuid": "MIG-1", "profile": "3g.20gb", "memory_mib": 20096}],
}
EMPTY = {**CARD, "mig_enabled": True, "mig": []}
TO_MIG = {"vgpu_sharing": "mig", "vgpu_mig_strategy": "mixed", "vgpu_mig_geometry": WANTED}
RECORD = {"__mig_record": "/r"}
# columns: variables, GPU of the host, whether the role has a record of its changes; expected: whether the plan has an
# error about the GPU
BOTH_WAYS = [
    ({**TO_MIG, "mig_state": "present", "mig_geometry": WANTED}, CARD, False, False),
    ({**TO_MIG, "mig_state": "present", "mig_geometry": WANTED}, EMPTY, False, False),  # left by an interrupted run
    ({**TO_MIG, "mig_state": "present", "mig_geometry": WANTED}, IN_MIG, False, False),
    ({**RECORD, "mig_state": "absent"}, IN_MIG, True, False),
    ({**RECORD, "mig_state": "absent"}, IN_MIG, False, True),  # No record, so somebody else set up MIG.
    ({}, IN_MIG, False, True),
]


@pytest.mark.parametrize(("variables", "gpu", "record", "refused"), BOTH_WAYS)
def test_only_mig_that_the_role_did_not_set_up_is_an_error(variables, gpu, record, refused):
    state = {**AS_WANTED, "gpus": [gpu], "pci_gpus": [], "files": {"/r": {}} if record else {}}
    found = plan.check_gpus(desired.collect(variables), state)
    assert any(one.level == "error" for one in found) is refused


def test_gpus_after_mig_are_in_mig_mode_with_the_geometry():
    state = {**AS_WANTED, "gpus": [CARD]}
    wanted = desired.collect({**TO_MIG, "mig_state": "present", "mig_geometry": WANTED})
    (gpu,) = plan_modes.gpus_after_mig(wanted, state)
    assert gpu["mig_enabled"] is True
    assert [(one["index"], one["profile"], one["memory_mib"]) for one in gpu["mig"]] == [(0, "3g.20gb", 20096)]
