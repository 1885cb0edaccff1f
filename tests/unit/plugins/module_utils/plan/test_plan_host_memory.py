# SPDX-License-Identifier: Apache-2.0
"""Tests the findings about a memory scaling above 1: the slices (parts of a GPU) may then have more memory than the
GPU, and the rest must fit into the memory of the host. The GPUs are T4 of 15360 MiB.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.config import variables as schema
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import plan
from plan_samples import CONVERGED, VARIABLES, changed, desired

T4 = [{"index": n, "uuid": f"GPU-{n}", "model": "Tesla T4", "memory_mib": 15360} for n in range(2)]
S100 = {"vgpu_memory_scaling": 100, "vgpu_split_count": 7}
ONE = [{"match": {"index": 1}, "memory_scaling": 4}]
SLIGHT = [{"match": {"index": 1}, "memory_scaling": "1.00007"}]

# columns: GPUs, variables, memory of the host in MiB; expected finding as (level, variable, words), None: no finding
CASES = [
    (T4[:1], {"vgpu_memory_scaling": 1}, 1024, None),
    (T4[:1], {"vgpu_memory_scaling": 2}, 15360, None),
    (T4[:1], {"vgpu_memory_scaling": 2}, 15359, ("warning", "vgpu_memory_scaling", "have 15360 MiB more than the")),
    (T4, {"vgpu_memory_scaling": 2}, 15360, ("warning", "vgpu_memory_scaling", "have 30720 MiB more than the")),
    # A former version accepted this slice of 214 GiB.
    (T4, S100, 65536, ("error", "vgpu_memory_scaling", "of GPU 0 has 219428 MiB; expected at most the 15360 MiB")),
    # In the first row the slice is as large as GPU and host together; in the second row the host has 1 MiB less.
    (T4[:1], {"vgpu_memory_scaling": 10}, 15360, ("warning", "vgpu_memory_scaling", "have 138240 MiB more")),
    (T4[:1], {"vgpu_memory_scaling": 10}, 15359, ("error", "vgpu_memory_scaling", "the 15359 MiB of the host")),
    # A slice of 15361 MiB has one MiB more than its card, and this one MiB counts as well.
    (
        T4,
        {"vgpu_split_count": 1, "vgpu_memory_scaling": 2, "vgpu_devices": SLIGHT},
        15360,
        ("warning", "vgpu_memory_scaling", "have 15361 MiB more than the"),
    ),
    (T4, {"vgpu_devices": ONE}, 40000, ("warning", "vgpu_devices[0].memory_scaling", "have 46080 MiB more")),
    # The slices of GPU 0 would be empty, which another finding reports. GPU 1 still counts.
    (
        T4,
        {"vgpu_memory_scaling": 4, "vgpu_devices": [{"match": {"index": 0}, "memory_scaling": "0.00001"}]},
        40000,
        ("warning", "vgpu_memory_scaling", "have 46080 MiB more"),
    ),
    (T4[:1], S100, 0, None),
    (T4[:1], {**S100, "vgpu_sharing": "none"}, 1024, None),
]


@pytest.mark.parametrize(("gpus", "variables", "memory", "expected"), CASES)
def test_slices_beyond_the_memory_of_the_host_have_a_finding(gpus, variables, memory, expected):
    variables = {**VARIABLES, "vgpu_split_count": 5, **variables}
    state = changed(CONVERGED, {"gpus": gpus, "memory_mib": memory})
    found = [one for one in plan.check_gpus(desired.collect(variables), state) if "memoryScaling" in one.path]
    if expected is None:
        assert found == []
        return
    level, variable, words = expected
    assert {one.level for one in found} == {level}
    assert schema.variable_of(found[0].path) == variable
    assert words in found[0].message
