# SPDX-License-Identifier: Apache-2.0
"""Tests the capacity of a node whose pods get GPUs by ResourceClaims (dynamic resource allocation) instead of the
kubelet's device plugins. The ResourceSlices that the API server has are compared with the expected ones, and the pods
that use each claim are listed.
"""

from __future__ import annotations

import copy

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.capacity import claims, cluster_claims, tables
from ansible_collections.vgpu.fleet.plugins.module_utils.config import node_config, sharing
from ansible_collections.vgpu.fleet.plugins.module_utils.host.digest import sha256
from capacity_samples import GPUS, compared, plugin, slices

DRIVER = "gpu.vgpu.fleet"


def config(**group):
    return node_config.from_vars({"vgpu_split_count": 2, "vgpu_allocation": "dra", **group})


def wanted(gpus=GPUS, **group):
    clean = config(**group)
    return claims.expected(gpus, sharing.pieces_for(gpus, clean)[0], clean)


MIG = [
    {**GPUS[0], "mig_enabled": True, "mig": [{"index": 0, "uuid": "MIG-x", "profile": "1g.5gb", "memory_mib": 4864}]}
]
BY_MIG = {"vgpu_sharing": "mig", "vgpu_mig_strategy": "mixed", "vgpu_mig_geometry": {"1g.5gb": 1}}
EXPECTED = [
    ({}, (True, 15360, 2)),
    ({"vgpu_split_count": 7}, (True, 7 * 2194, 7)),
    ({"vgpu_memory_scaling": "1.5"}, (True, 23040, 2)),
    ({"vgpu_slice_sizing": "requested"}, (True, 15360 - 960, 2)),
    ({"vgpu_slice_sizing": "requested", "vgpu_memory_scaling": 2}, (True, 30720 - 1024, 2)),
    ({"vgpu_sharing": "time-slicing", "vgpu_split_count": 4}, (True, None, 4)),
    ({"vgpu_sharing": "none"}, (False, 15360, None)),
]


@pytest.mark.parametrize(("group", "first"), EXPECTED)
def test_expected_devices_for_claims(group, first):
    found = wanted(**{**group, **({} if "vgpu_split_count" in group else {"vgpu_split_count": 2})})
    assert [one["uuid"] for one in found] == ["GPU-a", "GPU-b"]
    assert (found[0]["shared"], found[0]["memory_mib"], found[0]["slots"]) == first


def test_mig_instance_is_a_device_for_one_claim():
    assert wanted(MIG, **BY_MIG) == [{"uuid": "MIG-x", "shared": False, "memory_mib": 4864, "slots": None}]


def device(uuid, memory="15Gi", slots="2", **more):
    capacity = {"memory": {"value": memory}, "slots": {"value": slots}}
    return {"name": uuid.lower(), "attributes": {"uuid": {"string": uuid}}, "capacity": capacity, **more}


SHARED = {"allowMultipleAllocations": True}


def piece(*devices, generation=1):
    return {"spec": {"driver": DRIVER, "pool": {"generation": generation}, "devices": list(devices)}}


def good():
    return [device("GPU-a", **SHARED), device("GPU-b", "16106127360", **SHARED)]


# columns: the ResourceSlices of the API server; expected words of each difference. The node should publish two GPUs,
# each for many claims.
COMPARED = [
    ([piece(*good())], []),
    ([piece(good()[0]), piece(good()[1])], []),
    ([piece(*good(), generation=None)], []),
    ([], ["ResourceSlices n1 gpu.vgpu.fleet: expected 2 devices, found none"]),
    ([piece()], ["ResourceSlices n1 gpu.vgpu.fleet: expected 2 devices, found none"]),
    ([piece(good()[0])], ["GPU-b: expected a device, found none"]),
    # The newer generation of the ResourceSlices replaces the older one, so a device that only the older one has is
    # missing.
    ([piece(*good()), piece(good()[0], generation=2)], ["GPU-b: expected a device, found none"]),
    ([piece(device("GPU-a"), good()[1])], ["expected a device for many claims, found a device for one claim"]),
    (
        [piece(device("GPU-a", "14Gi", **SHARED), good()[1])],
        ["memory n1 gpu.vgpu.fleet GPU-a: expected 15360, found 14336"],
    ),
    ([piece(device("GPU-a", slots="3", **SHARED), good()[1])], ["slots n1 gpu.vgpu.fleet GPU-a: expected 2, found 3"]),
    (
        [piece(device("GPU-b", slots="3", **SHARED))],
        ["GPU-a: expected a device, found none", "slots n1 gpu.vgpu.fleet GPU-b: expected 2, found 3"],
    ),
    ([piece(*good(), device("GPU-c", **SHARED))], ["GPU-c: expected no device, found a device"]),
    ([piece(*good(), device("GPU-lost", **SHARED))], []),
]


@pytest.mark.parametrize(("found", "words"), COMPARED)
def test_resource_slices_are_compared_with_the_expected_devices(found, words):
    lines = [tables.sentence(one) for one in cluster_claims.compare("n1", found, wanted(), ["GPU-lost"])]
    assert len(lines) == len(words) and all(text in one for text, one in zip(words, lines)), lines


def test_claims_name_the_pods_of_a_node():
    def claim(name, pods, *results):
        given = [{"driver": driver, "pool": pool} for driver, pool in results]
        reserved = [{"resource": "pods", "name": one} for one in pods]
        status = {"allocation": {"devices": {"results": given}}, "reservedFor": reserved}
        return {"metadata": {"namespace": "work", "name": name}, "status": status}

    ours, theirs = (DRIVER, "n1"), ("gpu.nvidia.com", "n1")
    found = [
        claim("c", ["p", "q"], ours, ours, theirs),
        claim("other", ["r"], theirs),
        claim("far", ["s"], (DRIVER, "n2")),
        {"metadata": {"namespace": "work", "name": "waits"}},
    ]
    assert cluster_claims.holders("n1", found, {"work/p": "Running"}) == [
        {"pod": "work/p", "resource": "claim c", "count": 2, "phase": "Running"},
        {"pod": "work/q", "resource": "claim c", "count": 2, "phase": None},
    ]


TEXT = node_config.dump(config(vgpu_cores_scaling=1))
CLAIMED = {"config_text": TEXT, "checkpoint_text": None}


def status(**more):
    return plugin(**{"config_sha256": sha256(TEXT), **more})


def test_host_with_claims_needs_no_resource_at_the_kubelet():
    found = compared(**CLAIMED, plugin=status())
    assert (found["ok"], found["drift"], found["resources"], found["resource"]) == (True, [], [], DRIVER)
    assert len(found["advertised"]) == 4 and [one["advertised"] for one in found["gpus"]] == [2, 2]
    assert [one["uuid"] for one in found["claims"]] == ["GPU-a", "GPU-b"]
    (line, *_more) = tables.host_report(found)
    assert line == "gpu.vgpu.fleet: 4 advertised by the driver of claims, 4 expected"
    assert compared()["claims"] is None


def test_gpu_with_slices_of_a_former_split_is_expected_of_no_claim():
    """GPU-a keeps the slices of its former split, because one of them is in use. The new configuration gives whole
    GPUs. The device plugin does not publish GPU-a (test_dra_devices.py), so its absence is no difference."""
    text = node_config.dump(config(vgpu_sharing="none"))
    made = [{**one, "resource": "nvidia.com/gpu", "mode": "vcuda", "device": "GPU-a"} for one in slices()[:2]]
    made[0]["in_use"] = True
    answered = plugin(config_sha256=sha256(text), slices=made, waiting=["GPU-a"])
    found = compared(config_text=text, checkpoint_text=None, plugin=answered)
    assert found["claims"] == [{"uuid": "GPU-b", "shared": False, "slots": None, "memory_mib": 15360}]


# columns: changed facts of the host; expected words of the difference
FAULTS = [
    ({"plugin": {"registered": False, "kubelet_error": "no socket"}}, "expected registered, found no socket"),
    ({"kubelet_fault": "refused"}, "expected an answer, found refused"),
    ({"plugin": {"slices": []}}, "not made"),
]


@pytest.mark.parametrize(("spoiled", "words"), FAULTS)
def test_driver_unknown_to_the_kubelet_is_a_difference(spoiled, words):
    spoiled = copy.deepcopy(spoiled)
    found = compared(**{**CLAIMED, **spoiled, "plugin": status(**spoiled.get("plugin", {}))})
    assert not found["ok"] and any(words in tables.sentence(one) for one in found["drift"])
