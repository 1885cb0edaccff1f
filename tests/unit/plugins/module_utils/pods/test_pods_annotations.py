# SPDX-License-Identifier: Apache-2.0
"""Tests the annotations by which the scheduler and the device plugins exchange data: the plan of a pod (devices for
each container, chosen by the scheduler) and the GPUs of a node. The annotations are written and read back, and every
invalid form is refused.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.pods import annotations as pod_annotations
from ansible_collections.vgpu.fleet.plugins.module_utils.pods.annotations import (
    NO_POLICY,
    Device,
    NodeGpu,
    Part,
    PlanError,
    Topology,
)

PLAN = (
    Part("first", "init", (Device("GPU-a", 1, 0),)),
    Part("main", "app", (Device("GPU-a", 4309, 0), Device("GPU-b", 4309, 100))),
)
GPUS = (
    NodeGpu("GPU-a", "Tesla T4", 15360, 30720, 7, 4388, 14, True, 0, (("GPU-b", 50),)),
    NodeGpu("GPU-b", "", 15360, 15360, 7, 2194, 14, False),
)


def test_annotations_are_written_and_read_back():
    assert pod_annotations.read_plan(pod_annotations.write_plan(PLAN)) == PLAN
    assert pod_annotations.read_gpus(pod_annotations.write_gpus(GPUS)) == GPUS
    assert (
        pod_annotations.read_plan(pod_annotations.write_plan(()))
        == ()
        == pod_annotations.read_gpus(pod_annotations.write_gpus(()))
    )


def test_written_form_is_fixed():
    assert json.loads(pod_annotations.write_plan(PLAN))["containers"][0] == {
        "name": "first",
        "kind": "init",
        "gpus": [["GPU-a", 1, 0]],
    }
    assert json.loads(pod_annotations.write_gpus(GPUS))["gpus"][0] == {
        "uuid": "GPU-a",
        "model": "Tesla T4",
        "memory_mib": 15360,
        "capacity_mib": 30720,
        "slots": 7,
        "slice_mib": 4388,
        "slice_cores": 14,
        "healthy": True,
        "numa": 0,
        "links": {"GPU-b": 50},
    }


def test_unknown_keys_of_later_versions_are_ignored():
    later = dict(json.loads(pod_annotations.write_gpus(GPUS)), version=2, more=1)
    later["gpus"][0]["colour"] = "green"
    assert pod_annotations.read_gpus(json.dumps(later)) == GPUS


TOPOLOGIES = [
    (None, NO_POLICY),
    ({}, NO_POLICY),
    ([], NO_POLICY),
    ("single-numa-node", NO_POLICY),
    ({"policy": "single-numa-node"}, Topology("single-numa-node", "container")),
    ({"policy": "single-numa-node", "scope": "pod"}, Topology("single-numa-node", "pod")),
    ({"policy": "single-numa-node", "scope": "rack", "more": 1}, Topology("single-numa-node", "container")),
    ({"policy": "of-tomorrow", "scope": "pod"}, NO_POLICY),
    ({"policy": 1}, NO_POLICY),
    ({"policy": ["none"]}, NO_POLICY),
]


@pytest.mark.parametrize(("found", "expected"), TOPOLOGIES)
def test_topology_of_a_node_is_optional(found, expected):
    """An older device plugin reports no topology of its node, and an older scheduler must still read the GPUs that a
    newer plugin reports."""
    document = json.loads(pod_annotations.write_gpus(GPUS))
    assert "topology" not in document
    text = json.dumps(document if found is None else dict(document, topology=found))
    assert pod_annotations.read_topology(text) == expected and pod_annotations.read_gpus(text) == GPUS
    assert pod_annotations.read_topology(pod_annotations.write_gpus(GPUS, expected)) == expected


def test_allocated_devices_override_the_plan():
    given = pod_annotations.write_plan(PLAN[:1])
    assert pod_annotations.read_annotations({}) is None
    assert pod_annotations.read_annotations({pod_annotations.PLAN: pod_annotations.write_plan(PLAN)}) == PLAN
    assert (
        pod_annotations.read_annotations(
            {pod_annotations.PLAN: pod_annotations.write_plan(PLAN), pod_annotations.GIVEN: given}
        )
        == PLAN[:1]
    )
    with pytest.raises(PlanError, match=r"vgpu\.fleet/given"):
        pod_annotations.read_annotations(
            {pod_annotations.PLAN: pod_annotations.write_plan(PLAN), pod_annotations.GIVEN: "x"}
        )


def changed(text, *path, to):
    document = json.loads(text)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return json.dumps(document)


P, G = pod_annotations.write_plan(PLAN), pod_annotations.write_gpus(GPUS)
# columns: invalid text of the plan; expected pattern of the error
BAD_PLANS = [
    ("", "no JSON"),
    (P[:-5], "no JSON"),
    ("[" * 100000, "no JSON"),
    ("[]", "expected a mapping"),
    (changed(P, "version", to=0), '"version": 1'),
    (changed(P, "version", to="1"), '"version": 1'),
    (changed(P, "containers", to={}), "containers: expected a list"),
    (changed(P, "containers", 0, to=1), "containers: expected a list"),
    (changed(P, "containers", 0, "kind", to="other"), r"containers\[0\]"),
    (changed(P, "containers", 0, "name", to=1), r"containers\[0\]"),
    (changed(P, "containers", 1, "gpus", to=None), r"containers\[1\].gpus"),
    (changed(P, "containers", 1, "gpus", 0, to=["GPU-a", 1]), r"containers\[1\].gpus"),
    (changed(P, "containers", 1, "gpus", 0, to=["GPU-a", -1, 0]), "found"),
    (changed(P, "containers", 1, "gpus", 0, to=["GPU-a", True, 0]), "found"),
    (changed(P, "containers", 1, "gpus", 0, to=["GPU-a", 1, 101]), "found"),
    (changed(P, "containers", 1, "gpus", 0, to=[7, 1, 1]), "found"),
    # Each entry alone is valid. The sum of a few such pods would overflow the numbers in the scheduler's ledger (its
    # account of each GPU), so the entries of a pod are also limited together.
    (changed(P, "containers", 1, "gpus", to=[["GPU-z", pod_annotations.MAX_MIB, 0]] * 2), "together"),
]
# columns: invalid text of a node's GPUs; expected pattern of the error
BAD_GPUS = [
    ("null", "expected a mapping"),
    (changed(G, "gpus", 0, "uuid", to=""), "uuid"),
    (changed(G, "gpus", 0, "uuid", to="GPU-b"), "twice"),
    (changed(G, "gpus", 0, "memory_mib", to=0), r"gpus\[0\].memory_mib"),
    (changed(G, "gpus", 1, "slots", to=1.5), r"gpus\[1\].slots"),
    (changed(G, "gpus", 1, "slice_cores", to=101), "slice_cores"),
    (changed(G, "gpus", to=[dict(json.loads(G)["gpus"][0], uuid=f"GPU-{n}") for n in range(129)]), "at most 128"),
]


@pytest.mark.parametrize(("text", "words"), BAD_PLANS)
def test_invalid_plan_is_an_error(text, words):
    with pytest.raises(PlanError, match=words):
        pod_annotations.read_plan(text)


@pytest.mark.parametrize(("text", "words"), BAD_GPUS)
def test_invalid_gpus_are_an_error(text, words):
    with pytest.raises(PlanError, match=words):
        pod_annotations.read_gpus(text)


def test_gpu_is_healthy_only_if_reported_true():
    assert not pod_annotations.read_gpus(changed(G, "gpus", 0, "healthy", to="yes"))[0].healthy
    assert pod_annotations.read_gpus(changed(G, "gpus", 0, "links", to=["GPU-b"]))[0].links == ()
