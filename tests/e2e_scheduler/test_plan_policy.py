# SPDX-License-Identifier: Apache-2.0
"""Tests two annotations of a pod on a real API server: the plan (the scheduler's choice of GPUs and sizes) and the
given annotation (what the node really gave). Only the scheduler and the device plugins may write them. The tests run
with and without the webhook; without it, only the admission policy protects the annotations.
"""

from __future__ import annotations

import json

import pytest
from kubebox.api import ApiError
from kubebox.cluster import PODS
from kubebox.process import until
from vgpu_plugin._shared.pods import annotations as pod_annotations

GPU, MEM = "nvidia.com/gpu", "nvidia.com/gpumem"
PLAN, GIVEN = pod_annotations.PLAN, pod_annotations.GIVEN
WORDS = "is written by vgpu.fleet alone"
SPEC = {"containers": [{"name": "main", "image": "pause"}]}


def part(memory: int) -> str:
    devices = (pod_annotations.Device("GPU-a-0", memory, 0),)
    return pod_annotations.write_plan([pod_annotations.Part("main", pod_annotations.APP, devices)])


def annotated(made: dict) -> dict:
    return {"metadata": {"annotations": made}}


@pytest.fixture
def without(fleet):
    """Stops all replicas of the scheduler. Its webhook then checks nothing, so only the policy protects the
    annotations."""
    for one in fleet.replicas:
        one.stop()
    yield
    for one in fleet.replicas:
        one.start()
    until(fleet.serves, "listening webhook and extenders after the restart", 60)


# columns: the user, suffix of the pod's API path, the patch; expected text of the refusal ("" means that the patch is
# accepted)
CHANGES = [
    ("tenant", "", annotated({PLAN: part(1)}), WORDS),
    ("tenant", "", annotated({PLAN: part(15000)}), WORDS),
    ("tenant", "", annotated({PLAN: ""}), WORDS),
    ("tenant", "", annotated({PLAN: None}), WORDS),
    ("tenant", "", annotated({GIVEN: part(15000)}), WORDS),
    ("tenant", "", annotated({GIVEN: ""}), WORDS),
    ("tenant", "/status", annotated({PLAN: part(1)}), "forbidden"),
    ("admin", "", annotated({PLAN: part(1)}), WORDS),
    ("admin", "/status", annotated({PLAN: part(1)}), WORDS),
    ("admin", "/status", annotated({GIVEN: part(16 << 20)}), WORDS),
    ("tenant", "", {"metadata": {"labels": {"team": "a"}, "annotations": {"own": "yes"}}}, ""),
]


def test_annotations_of_a_bound_pod_cannot_be_changed(fleet, tenant, request):
    """No change of the plan and given annotations of a bound pod is accepted, with and without running replicas."""
    fleet.node("a", 1)
    fleet.pod("held", {GPU: 1, MEM: 3000})
    fleet.bound("held")
    before = fleet.get("held")["metadata"]["annotations"]
    users = {"tenant": tenant, "admin": fleet.api}
    for away in (False, True):
        if away:
            request.getfixturevalue("without")
        for who, below, body, words in CHANGES:
            case = f"{who} {below} {json.dumps(body)} {'without' if away else 'with'} replicas"
            try:
                users[who].patch(f"{PODS}/held{below}", body)
                said = ""
            except ApiError as fault:
                said = str(fault)
            assert words in said if words else not said, f"{case}: {said}"
            now = fleet.get("held")["metadata"]["annotations"]
            assert {key: now.get(key) for key in (PLAN, GIVEN)} == {key: before.get(key) for key in (PLAN, GIVEN)}, case


@pytest.mark.parametrize("name", [PLAN, GIVEN])
def test_no_user_creates_a_pod_with_a_plan(fleet, tenant, name):
    """No user can create a pod with a plan or given annotation, not even an administrator."""
    for forged in ({name: part(1)}, {name: ""}):
        for kind, api in (("tenant", tenant), ("admin", fleet.api)):
            with pytest.raises(ApiError, match=WORDS) as fault:
                api.create(PODS, {"metadata": {"name": "forged", "annotations": forged}, "spec": SPEC})
            assert fault.value.code == 422, kind


def test_no_binding_adds_a_plan(fleet):
    """A Binding may carry annotations for the pod, but not a plan, even from a user who may bind pods."""
    fleet.node("a", 1)
    fleet.api.create(PODS, {"metadata": {"name": "free"}, "spec": dict(SPEC, schedulerName="another")})
    target = {"apiVersion": "v1", "kind": "Node", "name": "a"}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "free"}, "target": target}
    forged = dict(body, metadata={"name": "free", "annotations": {PLAN: part(1)}})
    for path in (f"{PODS}/free/binding", PODS.replace("/pods", "/bindings")):
        with pytest.raises(ApiError, match=WORDS):
            fleet.api.create(path, forged)
    assert not fleet.node_of("free")
    fleet.api.create(f"{PODS}/free/binding", body)
    assert fleet.node_of("free") == "a"
