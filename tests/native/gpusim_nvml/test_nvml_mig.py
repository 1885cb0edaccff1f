# SPDX-License-Identifier: Apache-2.0
"""Tests MIG through nvidia-ml-py: modes, profiles, instances and their placements, and MIG devices. The expected
figures are NVIDIA's. Strings such as ``make(9)`` are Python expressions that ask_nvml.py evaluates in a new process,
with the functions of SETUP."""

from __future__ import annotations

import pytest
from simulated_host import needs_root

pytestmark = needs_root
MIB = 1 << 20
ENABLE = "nvmlDeviceSetMigMode(gpu(0), 1)"
PROFILES = {
    # Keys: models. Values: the expected profiles as {profile id: (name, maximum number of instances, slices, SMs)}.
    "A100-40GB": {
        19: ("MIG 1g.5gb", 7, 1, 14),
        20: ("MIG 1g.5gb+me", 1, 1, 14),
        15: ("MIG 1g.10gb", 4, 1, 14),
        14: ("MIG 2g.10gb", 3, 2, 28),
        9: ("MIG 3g.20gb", 2, 3, 42),
        5: ("MIG 4g.20gb", 1, 4, 56),
        0: ("MIG 7g.40gb", 1, 7, 98),
    },
    "A100-80GB": {
        19: ("MIG 1g.10gb", 7, 1, 14),
        20: ("MIG 1g.10gb+me", 1, 1, 14),
        15: ("MIG 1g.20gb", 4, 1, 14),
        14: ("MIG 2g.20gb", 3, 2, 28),
        9: ("MIG 3g.40gb", 2, 3, 42),
        5: ("MIG 4g.40gb", 1, 4, 56),
        0: ("MIG 7g.80gb", 1, 7, 98),
    },
    "H100-80GB": {
        19: ("MIG 1g.10gb", 7, 1, 16),
        20: ("MIG 1g.10gb+me", 1, 1, 16),
        15: ("MIG 1g.20gb", 4, 1, 26),
        14: ("MIG 2g.20gb", 3, 2, 32),
        9: ("MIG 3g.40gb", 2, 3, 60),
        5: ("MIG 4g.40gb", 1, 4, 64),
        0: ("MIG 7g.80gb", 1, 7, 132),
    },
    "H200": {
        19: ("MIG 1g.18gb", 7, 1, 16),
        20: ("MIG 1g.18gb+me", 1, 1, 16),
        15: ("MIG 1g.35gb", 4, 1, 26),
        14: ("MIG 2g.35gb", 3, 2, 32),
        9: ("MIG 3g.71gb", 2, 3, 60),
        5: ("MIG 4g.71gb", 1, 4, 64),
        0: ("MIG 7g.141gb", 1, 7, 132),
    },
}
# Functions for the expressions. make() creates an instance of a MIG profile (a number such as 19) and returns its
# placement [start, size]. left() returns, for each of seven profiles, how many more instances fit. compute() creates a
# compute instance. mig() returns the handle of a MIG device.
SETUP = """
def profiles(handle):
    found = {}
    for number in range(NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = nvmlDeviceGetGpuInstanceProfileInfo(handle, number, version=2)
        except NVMLError_NotSupported:
            continue
        found[info.id] = (info.name, info.instanceCount, info.sliceCount, info.multiprocessorCount)
    return sorted([key, *value] for key, value in found.items())

def make(profile, start=None, size=None):
    if start is None:
        instance = nvmlDeviceCreateGpuInstance(gpu(0), profile)
    else:
        placement = c_nvmlGpuInstancePlacement_t(start, size)
        instance = nvmlDeviceCreateGpuInstanceWithPlacement(gpu(0), profile, ctypes.byref(placement))
    info = nvmlGpuInstanceGetInfo(instance)
    return [info.placement.start, info.placement.size]

def left():
    return [nvmlDeviceGetGpuInstanceRemainingCapacity(gpu(0), p) for p in (19, 20, 15, 14, 9, 5, 0)]

def instances(profile):
    array, count = (c_nvmlGpuInstance_t * 8)(), ctypes.c_uint()
    nvmlDeviceGetGpuInstances(gpu(0), profile, array, ctypes.byref(count))
    return [array[i] for i in range(count.value)]

def compute(instance, profile):
    made = nvmlGpuInstanceCreateComputeInstance(instance, profile)
    info = nvmlComputeInstanceGetInfo(made)
    return [info.id, info.placement.start, info.placement.size]

def mig(index):
    return nvmlDeviceGetMigDeviceHandleByIndex(gpu(0), index)
"""


@pytest.fixture()
def a100(make_host):
    """Returns an A100-40GB with MIG on."""
    host = make_host("[gpu]\nmodel = A100-40GB\n")
    host.nvml(ENABLE)
    return host


@pytest.mark.parametrize("model", PROFILES)
def test_each_model_has_its_mig_profiles(make_host, model):
    host = make_host(f"[gpu]\nmodel = {model}\n")
    assert host.nvml("profiles(gpu(0))", setup=SETUP) == [sorted([key, *row] for key, row in PROFILES[model].items())]


# Columns: the profiles in the order in which instances are created; the expected placement [start, size] of each
# instance.
PLACED = [
    ([19] * 7, [[n, 1] for n in (6, 5, 4, 3, 2, 1, 0)]),
    ([19, 14, 5], [[6, 1], [4, 2], [0, 4]]),
    ([9, 9], [[4, 4], [0, 4]]),
    ([0], [[0, 8]]),
    ([15] * 4, [[6, 2], [4, 2], [2, 2], [0, 2]]),
]
# Columns: the profiles of which instances are created; a profile of which no instance can then be created.
FULL = [([0], 19), ([9, 9], 19), ([19] * 7, 19), ([20], 20), ([5, 9], 9), ([14] * 3, 14), ([19], 0)]


@pytest.mark.parametrize(("profiles", "placements"), PLACED, ids=[str(row[0]) for row in PLACED])
def test_instances_are_placed(a100, profiles, placements):
    assert a100.nvml(*[f"make({p})" for p in profiles], setup=SETUP) == placements


@pytest.mark.parametrize(("profiles", "more"), FULL, ids=[f"{row[0]}-{row[1]}" for row in FULL])
def test_mig_instance_that_does_not_fit_is_refused(a100, profiles, more):
    *_unused, last = a100.nvml(*[f"make({p})" for p in profiles], f"make({more})", setup=SETUP)
    assert last == "NVML_ERROR_INSUFFICIENT_RESOURCES"


# Columns: the profiles of which instances are created first; expected: how many instances then still fit of the
# profiles 19, 20, 15, 14, 9, 5 and 0.
CAPACITY = [
    ([], [7, 1, 4, 3, 2, 1, 1]),
    ([19], [6, 1, 3, 3, 1, 1, 0]),
    ([9], [4, 1, 2, 2, 1, 1, 0]),
    ([5], [3, 1, 2, 1, 1, 0, 0]),
    ([0], [0, 0, 0, 0, 0, 0, 0]),
]


@pytest.mark.parametrize(("profiles", "expected"), CAPACITY, ids=[str(row[0]) for row in CAPACITY])
def test_nvml_reports_how_many_instances_still_fit(a100, profiles, expected):
    *_unused, left = a100.nvml(*[f"make({p})" for p in profiles], "left()", setup=SETUP)
    assert left == expected


def test_instance_is_created_at_a_chosen_placement(a100):
    calls = ["make(19, 2, 1)", "make(19, 2, 1)", "make(9, 0, 4)", "make(9, 2, 4)", "make(9, 4, 4)"]
    full, wrong = "NVML_ERROR_INSUFFICIENT_RESOURCES", "NVML_ERROR_INVALID_ARGUMENT"
    assert a100.nvml(*calls, setup=SETUP) == [[2, 1], full, full, wrong, [4, 4]]


def test_no_mig_instance_is_created_while_mig_is_off(make_host):
    host = make_host("a100-40")
    assert host.nvml("make(19)", "left()", setup=SETUP) == ["NVML_ERROR_NOT_SUPPORTED", [0] * 7]


def test_instances_outlive_the_process_that_created_them(a100):
    """Each step runs in a new process, because instances belong to the GPU and not to the process that created them."""
    assert a100.nvml("make(9)", "make(14)", setup=SETUP) == [[4, 4], [2, 2]]
    assert a100.nvml("compute(instances(9)[0], 2)", setup=SETUP) == [[0, 0, 3]]
    assert a100.nvml("compute(instances(14)[0], 0)", "compute(instances(14)[0], 0)", setup=SETUP) == [
        [0, 0, 1],
        [1, 1, 1],
    ]
    assert a100.nvml("compute(instances(14)[0], 0)", setup=SETUP) == ["NVML_ERROR_INSUFFICIENT_RESOURCES"]
    names = a100.nvml(*[f"nvmlDeviceGetName(mig({i}))" for i in range(4)], setup=SETUP)
    assert names == [
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA A100-SXM4-40GB MIG 1c.2g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 1c.2g.10gb",
        "NVML_ERROR_NOT_FOUND",
    ]
    uuids = a100.nvml(*[f"nvmlDeviceGetUUID(mig({i}))" for i in range(3)], setup=SETUP)
    assert len(set(uuids)) == 3
    assert all(uuid.startswith("MIG-") and len(uuid) == 40 for uuid in uuids)
    facts = {
        "nvmlDeviceGetMemoryInfo(mig(0)).total": 20096 * MIB,
        "nvmlDeviceGetMemoryInfo(mig(1)).total": 9984 * MIB,
        "nvmlDeviceGetGpuInstanceId(mig(0))": 2,
        "nvmlDeviceGetComputeInstanceId(mig(2))": 1,
        "nvmlDeviceGetAttributes(mig(0)).multiprocessorCount": 42,
        "nvmlDeviceGetAttributes(mig(1)).multiprocessorCount": 14,
        "nvmlDeviceGetAttributes(mig(1)).gpuInstanceSliceCount": 2,
        "nvmlDeviceIsMigDeviceHandle(mig(0))": 1,
        "nvmlDeviceGetIndex(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig(1)))": 0,
        f"nvmlDeviceGetUUID(nvmlDeviceGetHandleByUUID('{uuids[1]}'))": uuids[1],
        "nvmlDeviceGetUtilizationRates(gpu(0))": "NVML_ERROR_NOT_SUPPORTED",
        "nvmlDeviceGetUtilizationRates(mig(0))": "NVML_ERROR_NOT_SUPPORTED",
        "nvmlGpuInstanceDestroy(instances(9)[0])": "NVML_ERROR_IN_USE",
        "nvmlDeviceSetMigMode(gpu(0), 0)": 19,
        "nvmlDeviceGetMigMode(gpu(0))": [1, 0],
    }
    assert dict(zip(facts, a100.nvml(*facts, setup=SETUP))) == facts
    destroy = (
        "for p in (9, 14):\n    for i in instances(p):\n        for c in (0, 1):\n            try:\n"
        "                nvmlComputeInstanceDestroy(nvmlGpuInstanceGetComputeInstanceById(i, c))\n"
        "            except NVMLError_NotFound:\n                pass\n        nvmlGpuInstanceDestroy(i)"
    )
    assert a100.nvml("mig(0)", "instances(9)", "left()", setup=SETUP + destroy) == [
        "NVML_ERROR_NOT_FOUND",
        [],
        [7, 1, 4, 3, 2, 1, 1],
    ]
    assert a100.nvml("nvmlDeviceSetMigMode(gpu(0), 0)", "nvmlDeviceGetMigMode(gpu(0))") == [0, [0, 0]]


def test_mode_stays_pending_while_a_process_holds_the_gpu(make_host):
    host = make_host("a100-40")
    in_use = 19
    with host.worker(0):
        assert host.nvml(ENABLE, "nvmlDeviceGetMigMode(gpu(0))") == [in_use, [0, 1]]
    assert host.nvml(ENABLE, "nvmlDeviceGetMigMode(gpu(0))") == [0, [1, 1]]
