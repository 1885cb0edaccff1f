# SPDX-License-Identifier: Apache-2.0
"""Tests the rules that decide how much compute and memory of a GPU is free: if the GPU also has equal slices, if it has
no NUMA node, and if the size of another container is not known yet.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from vgpu_plugin._shared.config.sharing import Piece
from vgpu_plugin.allocation.records import KUBELET, Record
from vgpu_plugin.allocation.sizing import Held, Place, crowded, held, node_gpus, placed, together
from vgpu_plugin.node.gpus import NO_NUMA

from .. import samples

MIB = 1 << 20
GPU = "GPU-a"

# columns: percent of the SMs of each slice that the GPU offers, percent that other containers have, requested percent;
# whether the request is expected to fit
SHARES = [
    ([25, 25, 25, 25], 60, 40, True),
    ([25, 25, 25, 25], 60, 41, False),
    # If the slices have no compute limit, the GPU has 100 % in total.
    ([], 0, 100, True),
    ([], 1, 100, False),
    # If the slices of a GPU add up to more than 100 %, their sum is the total.
    ([75, 75], 75, 75, True),
    ([75, 75], 75, 76, False),
]


@pytest.mark.parametrize(("offered", "others", "requested", "fits"), SHARES)
def test_percent_must_fit_next_to_equal_slices(offered: list[int], others: int, requested: int, fits: bool) -> None:
    pieces = [Piece(f"{GPU}::{n}", GPU, 100, percent, "gpu", "vcuda", GPU) for n, percent in enumerate(offered)]
    reason = crowded(pieces, Held(0, others), requested)
    assert (reason == "") is fits
    assert fits or reason.startswith(f"{requested} % of the SMs are asked for, {others} of ")


# columns: the NUMA node that NVML reports; the expected NUMA node in the annotation of the Node object
NUMA = [(0, 0), (1, 1), (NO_NUMA, -1)]


@pytest.mark.parametrize(("reported", "published"), NUMA)
def test_numa_node_of_a_gpu_is_published(reported: int, published: int) -> None:
    (gpu,) = samples.gpus("T4")
    (found,) = node_gpus([replace(gpu, numa_node=reported)], {"sharing": {"vcuda": {"splitCount": 4}}}, {})
    assert json.dumps(found.numa) == str(published)


def test_only_gpus_that_are_split_are_published() -> None:
    split, in_mig = samples.gpus("T4", "T4")
    gpus = [replace(in_mig, mig_enabled=True), split]
    assert [one.uuid for one in node_gpus(gpus, {"sharing": {"vcuda": {"splitCount": 4}}}, {})] == [split.uuid]
    assert node_gpus(gpus, {"sharing": {"mps": {"replicas": 4}}}, {}) == []


def record(name: str, mib: int, **limits: object) -> Record:
    device = {"uuid": GPU, "memory_bytes": mib * MIB, "sm_percent": 10}
    return Record(name, KUBELET, (f"{GPU}::{name}",), {"devices": [device], **limits}, cores={GPU: 10})


INIT_A, INIT_B, SIDECAR, APP_A, APP_B = ("init", 0), ("init", 2), ("sidecar", 1), ("app", 3), ("app", 4)
# An init container that ran before an upgrade, when the records had no places. The next container has its slice.
FORMER = None
# columns: kind and position in its pod of each container, and its MiB; the expected MiB of the pod, and the MiB beside
# which the last container must fit
PODS = [
    ([(INIT_A, 10000)], 10000, 0),
    ([(INIT_A, 10000), (APP_A, 2000)], 10000, 0),
    ([(INIT_A, 10000), (APP_A, 2000), (APP_B, 4000)], 10000, 2000),
    ([(APP_B, 4000), (INIT_A, 1000), (APP_A, 2000)], 6000, 4000),
    # A sidecar runs next to all containers that start after it.
    ([(INIT_A, 10000), (SIDECAR, 1000), (APP_A, 4000)], 10000, 1000),
    ([(INIT_A, 10000), (SIDECAR, 1000), (INIT_B, 9500)], 10500, 1000),
    ([(INIT_A, 10000), (INIT_B, 9500), (APP_A, 4000), (SIDECAR, 1000)], 10500, 9500),
    ([(FORMER, 10000), (APP_A, 6000)], 10000, 0),
    ([(FORMER, 10000), (APP_A, 12000)], 12000, 0),
    # Nothing tells that the init container is of the pod of the last container, which has another slice.
    ([(FORMER, 10000), (APP_A, 2000), (APP_B, 4000)], 10000, 10000),
]


@pytest.mark.parametrize(("containers", "pod", "beside"), PODS)
def test_pod_counts_with_its_largest_phase(containers: list, pod: int, beside: int) -> None:
    made = [
        placed(record(str(n), mib), Place("uid", *place, False)) if place else record(str(n + 1), mib)
        for n, (place, mib) in enumerate(containers)
    ]
    other = [placed(record("other", 500), Place("uid-2", "app", 0, True)), record("lease", 300)]
    assert held([*made, *other])[GPU].memory_mib == pod + 800
    mates = [one for one in [*made, *other] if together(made[-1], one)]
    assert held(mates)[GPU].memory_mib == beside + 800


def test_container_without_a_size_does_not_hide_other_containers() -> None:
    records = [record("0", 100), record("1", 5000, deny=True), record("2", 300)]
    assert held(records) == {GPU: Held(400, 20)}


def test_container_without_cores_counts_0_percent() -> None:
    assert held([replace(record("0", 100), cores={}), record("1", 50)]) == {GPU: Held(150, 10)}
