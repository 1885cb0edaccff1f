# SPDX-License-Identifier: Apache-2.0
"""Tests pods whose GPU requests are replaced by ResourceClaims, so that the kube-scheduler and not our extender chooses
their GPUs: how admission changes the pods, which pods it refuses, and which claims are created.
"""

from __future__ import annotations

import asyncio
import copy
import json

import msgspec
import pytest
from doubles.kube_api import KubeApi, refusing
from vgpu_plugin._shared.pods.claim_requests import object_name
from vgpu_plugin.node.kube_access import Access
from vgpu_scheduler import webhook, wire
from vgpu_scheduler.api import Api
from vgpu_scheduler.pod_claims import (
    BETWEEN_EVENTS,
    FIRST_PAUSE,
    LAST_PAUSE,
    MAX_EVENTS,
    MAX_SERVED,
    REFUSED,
    PodClaims,
)
from vgpu_scheduler.webhook import Settings

from .test_runtime_classes import of as classes_of
from .test_service import pod_path, world
from .test_webhook import applied, pod

GPU, MEM, CORES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"
LABEL_OF_POD = "vgpu.fleet/allocation"
DRA, EXTENDER = {LABEL_OF_POD: "dra"}, {LABEL_OF_POD: "extender"}
FOLDER = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
CLAIMS = "vgpu.fleet/claims"
SPEC = {
    "devices": {
        "requests": [
            {
                "name": "gpu",
                "exactly": {
                    "deviceClassName": "vgpu",
                    "allocationMode": "ExactCount",
                    "count": 1,
                    "capacity": {"requests": {"memory": "3000Mi", "cores": "30"}},
                },
            }
        ]
    }
}
NAME = object_name("7", "main")
ASKS = {MEM: "3000", CORES: "30"}


def review(made, of_namespace="", settings=None, last=False):
    """Sends a pod to admission. Returns the response."""
    request = wire.AdmissionRequest("7", "CREATE", "default", made)
    way = webhook.Way(of_namespace, not last)
    return webhook.mutate(request, settings or Settings(claims=True), classes=classes_of(), way=way)


@pytest.mark.parametrize(("labels", "of_namespace"), [(DRA, ""), ({}, "dra"), (DRA, "extender")])
def test_pod_gets_a_claim_for_its_request(labels, of_namespace):
    made = pod({**ASKS, "cpu": "1"}, labels)
    made["spec"]["containers"][0]["resources"]["requests"] = {**ASKS, "cpu": "1"}
    made["spec"]["containers"].append({"name": "side", "resources": {"limits": {"memory": "1Gi"}}})
    response = review(made, of_namespace)
    assert response["allowed"] and "warnings" not in response
    changed = applied(made, response)
    expected = copy.deepcopy(made)
    expected["spec"]["resourceClaims"] = [{"name": "vgpu-main", "resourceClaimName": NAME}]
    expected["metadata"]["labels"] = {**labels, CLAIMS: "wanted"}
    expected["metadata"]["annotations"] = {CLAIMS: f'{{"claims":{{"{NAME}":[1,3000,30]}},"selectors":[]}}'}
    resources = {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}, "claims": [{"name": "vgpu-main"}]}
    expected["spec"]["containers"][0]["resources"] = resources
    assert changed == expected
    for last in (False, True):
        response = review(changed, of_namespace, last=last)
        assert response["allowed"] and "patch" not in response, "a second review changes nothing"


def test_existing_claims_of_a_pod_are_kept():
    own = [{"name": "vgpu-main", "resourceClaimName": "net"}]
    made = pod(ASKS, DRA, schedulerName="vgpu-scheduler", resourceClaims=own)
    made["spec"]["containers"][0]["resources"]["claims"] = [{"name": "vgpu-main"}]
    made["spec"]["initContainers"] = [{"name": "first", "resources": {"limits": {GPU: "2", MEM: "3000"}}}]
    response = review(made)
    assert ["equal part of a GPU" in one for one in response["warnings"]] == [True]
    changed = applied(made, response)
    spec, asked = changed["spec"], json.loads(changed["metadata"]["annotations"][CLAIMS])["claims"]
    assert spec["schedulerName"] == "default-scheduler"
    kept, first, main = spec["resourceClaims"]
    assert kept == own[0] and first["name"] == "vgpu-first" and main["name"].startswith("vgpu-main-")
    assert asked == {first["resourceClaimName"]: [2, 3000, 0], main["resourceClaimName"]: [1, 3000, 30]}
    assert spec["containers"][0]["resources"]["claims"] == [{"name": "vgpu-main"}, {"name": main["name"]}]
    assert spec["initContainers"][0]["resources"] == {"limits": {}, "claims": [{"name": "vgpu-first"}]}


def test_request_annotations_are_removed():
    made = pod({}, DRA, {"gpu-memory": "2000", "other": "x", CLAIMS: "by hand"})
    changed = applied(made, review(made))
    said = {"other": "x", CLAIMS: f'{{"claims":{{"{NAME}":[1,2000,0]}},"selectors":[]}}'}
    assert changed["metadata"]["annotations"] == said
    response = review(changed)
    assert response["allowed"] and "patch" not in response


# columns: the pod's limits and labels, its namespace's label, further fields of its spec, whether claims are enabled;
# expected words of the refusal
REFUSALS = [
    ({"nvidia.com/gpumem-percentage": "50"}, DRA, "", {}, True, "label the pod vgpu.fleet/allocation: extender"),
    (ASKS, {LABEL_OF_POD: "DRA"}, "", {}, True, 'expected dra or extender, found "DRA"'),
    (ASKS, {}, "unknown", {}, True, "is neither dra nor extender"),
    (ASKS, DRA, "", {}, False, "set scheduler_claims: true"),
    (ASKS, DRA, "", {"nodeName": "n1"}, True, "use a nodeSelector"),
    (ASKS, DRA, "", {"runtimeClassName": "kata"}, True, "kata-qemu"),
]


@pytest.mark.parametrize(("limits", "labels", "of_namespace", "spec", "claims", "words"), REFUSALS)
def test_pod_that_no_claim_can_serve_is_refused(limits, labels, of_namespace, spec, claims, words):
    response = review(pod(limits, labels, **spec), of_namespace, Settings(claims=claims))
    assert not response["allowed"] and words in response["status"]["message"]


def test_request_added_by_a_later_webhook_is_refused():
    response = review(pod(ASKS, DRA), last=True)
    assert not response["allowed"] and "another webhook" in response["status"]["message"]


@pytest.mark.parametrize(("labels", "of_namespace"), [({}, ""), (EXTENDER, "dra"), ({}, "extender")])
def test_pod_without_the_label_uses_the_extender(labels, of_namespace):
    made = pod(ASKS, labels)
    changed = applied(made, review(made, of_namespace))["spec"]
    assert changed["schedulerName"] == "vgpu-scheduler" and "resourceClaims" not in changed


# ---- the claims of stored pods


def claiming(name, claims, named=None, **annotations):
    """Returns a stored pod whose annotation requests claims, in the form that the program reads. ``claims``: name →
    [number of GPUs, MiB, percent].
    """
    text = json.dumps({"claims": claims, "selectors": []})
    sources = [{"name": f"c{n}", "resourceClaimName": one} for n, one in enumerate(claims if named is None else named)]
    meta = {"name": name, "namespace": "default", "uid": f"uid-{name}", "labels": {CLAIMS: "wanted"}}
    made = {"metadata": {**meta, "annotations": {CLAIMS: text, **annotations}}, "spec": {"resourceClaims": sources}}
    return msgspec.convert(made, wire.ClaimingPod)


class Clock:
    now = 1000.0


def with_claims(test):
    async def go():
        clock = Clock()
        async with KubeApi() as double, Api(Access(double.url), timeout=60.0) as api:
            await test(double, PodClaims(api, now=lambda: clock.now), clock)

    asyncio.run(go())


ONE = {NAME: [1, 3000, 30]}


def told(double):
    return [one["message"] for one in double.of("events")]


def test_stored_pod_gets_its_claims_once():
    async def go(double, claims, clock):
        claims.pod(False, claiming("a", {**ONE, "other": [2, 1024, 0]}, named=[NAME, "other", "net"]))
        await claims.round()
        made = double.objects[f"{FOLDER}/{NAME}"]
        assert made["spec"] == SPEC
        (owner,) = made["metadata"]["ownerReferences"]
        assert owner == {"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "uid-a", "controller": True}
        request = double.objects[f"{FOLDER}/other"]["spec"]["devices"]["requests"][0]["exactly"]
        assert (request["count"], request["capacity"]) == (2, {"requests": {"memory": "1Gi"}})
        # Later events of the pod must cause no more requests to the API server.
        calls = len(double.calls)
        claims.pod(False, claiming("a", {**ONE, "other": [2, 1024, 0]}, named=[NAME, "other"], more="x"))
        clock.now += LAST_PAUSE
        await claims.round()
        assert len(double.calls) == calls and not told(double) and claims.counts == {"made": 2, "refused": 0}

    with_claims(go)


def test_deleted_claim_is_created_again_at_the_next_list():
    async def go(double, claims, _clock):
        claims.pod(False, claiming("a", ONE))
        await claims.round()
        double.remove(f"{FOLDER}/{NAME}")
        claims.all_pods([claiming("a", ONE)], 0.0)
        await claims.round()
        assert double.objects[f"{FOLDER}/{NAME}"]["spec"] == SPEC and not told(double)

    with_claims(go)


def test_another_replica_finds_the_existing_claim():
    async def go(double, claims, _clock):
        claims.pod(False, claiming("a", ONE))
        await claims.round()
        async with Api(Access(double.url), timeout=60.0) as api:
            other = PodClaims(api)
            other.all_pods([claiming("a", ONE), claiming("b", {"b": [1, 500, 5]})], 0.0)
            await other.round()
        assert sorted(one["metadata"]["name"] for one in double.of("resourceclaims")) == sorted([NAME, "b"])
        assert other.counts == {"made": 1, "refused": 0}

    with_claims(go)


def ended(pod):
    pod.status.phase = "Failed"
    return False, pod


def bound(pod):
    pod.spec.nodeName = "n1"
    return False, pod


def leaving(pod):
    pod.metadata.deletionTimestamp = "2026-11-27T00:00:00Z"
    return False, pod


@pytest.mark.parametrize("end", [ended, bound, leaving, lambda pod: (True, pod)])
def test_ended_bound_or_deleted_pod_gets_no_claim(end):
    async def go(double, claims, _clock):
        claims.pod(False, claiming("a", ONE))
        claims.pod(*end(claiming("a", ONE)))
        await claims.round()
        assert not double.calls

    with_claims(go)


OWN = {"ownerReferences": [{"uid": "uid-a"}]}
# columns: metadata of an existing claim with the same name, its spec; expected words of the event on the pod
FOREIGN = [
    ({"ownerReferences": [{"uid": "uid-b"}]}, SPEC, "found another owner; create the pod again"),
    ({}, SPEC, "found another owner; create the pod again"),
    ({**OWN, "deletionTimestamp": "2026-11-27T00:00:00Z"}, SPEC, "it is being deleted"),
    (OWN, {"devices": {}}, "found another request; delete the claim"),
]


@pytest.mark.parametrize(("meta", "spec", "words"), FOREIGN)
def test_existing_claim_of_another_owner_is_not_changed(meta, spec, words):
    async def go(double, claims, _clock):
        there = {"metadata": {"name": NAME, "namespace": "default", "uid": "u", **meta}, "spec": spec}
        double.put(f"{FOLDER}/{NAME}", there)
        claims.pod(False, claiming("a", ONE))
        await claims.round()
        (text,) = told(double)
        assert words in text and f"ResourceClaim default/{NAME}" in text
        assert double.of("resourceclaims") == [double.objects[f"{FOLDER}/{NAME}"]] and not double.count(
            "DELETE", FOLDER
        )

    with_claims(go)


def test_no_claim_if_the_api_server_drops_share_fields():
    async def go(double, claims, _clock):
        double.keeps = lambda sent: {**sent, "spec": {"devices": {}}} if sent["kind"] == "ResourceClaim" else sent
        writes = list(double.writes)
        claims.pod(False, claiming("a", ONE))
        await claims.round()
        (text,) = told(double)
        assert "found fewer fields; shares need Kubernetes 1.36" in text and claims.counts["made"] == 0
        assert not double.of("resourceclaims") and not [one for one in double.writes[len(writes) :] if FOLDER in one[1]]

    with_claims(go)


# columns: pod with a forged annotation of claims; expected words of the event on it
FORGED = [
    (claiming("a", ONE, named=[]), "expected names of the pod's spec.resourceClaims"),
    (claiming("a", {"../../secrets": [1, 1, 1]}, named=["x"]), "expected names of the pod's spec.resourceClaims"),
    (claiming("a", {NAME: [1]}), "expected claims and selectors"),
    (claiming("a", {}), "expected at most 16 claims"),
]


@pytest.mark.parametrize(("forged", "words"), FORGED)
def test_forged_annotation_creates_no_claim(forged, words):
    async def go(double, claims, _clock):
        claims.pod(False, forged)
        await claims.round()
        assert words in told(double)[0] and not double.count("POST", FOLDER)

    with_claims(go)


@pytest.mark.parametrize("code", [403, 422, 500])
def test_refused_claim_is_retried_with_growing_delay(code):
    async def go(double, claims, clock):
        double.fault = refusing("POST", FOLDER, code, "exceeded quota")
        claims.pod(False, claiming("a", ONE))
        tried = []
        for _second in range(600):
            before = double.calls.count(("POST", FOLDER))
            await claims.round()
            if double.calls.count(("POST", FOLDER)) > before:
                tried.append(clock.now)
            clock.now += 1.0
        pauses = [after - before for before, after in zip(tried, tried[1:])]
        assert pauses == [FIRST_PAUSE * 2**n for n in range(len(pauses))] and len(pauses) == 8
        assert len(told(double)) == 1 and "exceeded quota" in told(double)[0], "one event for one reason"
        double.fault = None
        clock.now += LAST_PAUSE
        await claims.round()
        assert double.objects[f"{FOLDER}/{NAME}"]["spec"] == SPEC

    with_claims(go)


def test_changed_annotation_is_tried_at_once():
    async def go(double, claims, _clock):
        claims.pod(False, claiming("a", {NAME: [1]}))
        await claims.round()
        claims.pod(False, claiming("a", ONE))
        await claims.round()
        assert f"{FOLDER}/{NAME}" in double.objects

    with_claims(go)


def test_claims_per_round_are_limited():
    async def go(double, claims, clock):
        claims.all_pods([claiming(f"p{n}", {f"c{n}": [1, 100, 1]}) for n in range(MAX_SERVED + 10)], 0.0)
        await claims.round()
        assert claims.counts["made"] == len(double.of("resourceclaims")) == MAX_SERVED
        await claims.round()
        assert claims.counts["made"] == len(double.of("resourceclaims")) == MAX_SERVED + 10
        claims.all_pods([claiming(f"p{n}", {f"c{n}": [1]}) for n in range(50)], 0.0)
        await claims.round()
        assert len(told(double)) == MAX_EVENTS
        clock.now += BETWEEN_EVENTS
        claims.all_pods([], 0.0)
        await claims.round()
        assert len(told(double)) == MAX_EVENTS and {one["reason"] for one in double.of("events")} == {REFUSED}

    with_claims(go)


# ---- the whole program


async def admission(one, made, path="/mutate", dry_run=False):
    request = {"uid": "7", "operation": "CREATE", "namespace": "default", "object": made, "dryRun": dry_run}
    async with one.session.post(one.webhook_url + path, data=json.dumps({"request": request})) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["response"]


def test_admission_writes_nothing_and_the_stored_pod_gets_its_claims():
    async def go():
        async with world(nodes=1) as (double, one, _names):
            made = pod(ASKS)
            writes = list(double.writes)
            response = await admission(one, made, "/mutate/dra")
            assert response["allowed"] and double.writes == writes
            assert not (await admission(one, made, "/mutate/unknown"))["allowed"]
            # This namespace has no label, so the extender places the pod, without claims.
            kept = await admission(one, made)
            assert applied(made, kept)["spec"]["schedulerName"] == "vgpu-scheduler"
            stored = applied(made, response)
            stored["metadata"].update(name="late", namespace="default", uid="uid-late")
            for writes_here, expected in ((False, 0), (True, 1)):
                task = asyncio.create_task(one.claims.run(lambda it=writes_here: it))
                double.put(pod_path("late"), stored)
                await one.until(lambda: one.claims.pods.listed_at >= 0)
                if expected:
                    await one.until(lambda: double.of("resourceclaims"))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert len(double.of("resourceclaims")) == expected
            assert double.objects[f"{FOLDER}/{NAME}"]["spec"] == SPEC
            assert "vgpu_scheduler_claims_total" in (await one.get("/metrics"))[1]

    asyncio.run(go())
