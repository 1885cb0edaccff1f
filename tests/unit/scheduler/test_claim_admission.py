# SPDX-License-Identifier: Apache-2.0
"""Pods of dialects that get claims: what is put into them, what is refused, and the templates that are made."""

from __future__ import annotations

import asyncio
import base64
import copy
import json

import pytest
from doubles.kube_api import KubeApi, refusing
from vgpu_plugin._shared.pods.claim_requests import template_name
from vgpu_plugin.node.kube_access import Access
from vgpu_scheduler import webhook, wire
from vgpu_scheduler.api import Api, ApiError
from vgpu_scheduler.claim_templates import ALL, FRESH, LABEL, OLD, USED, TemplateError, Templates
from vgpu_scheduler.webhook import Settings

from .test_runtime_classes import of as classes_of
from .test_service import pod_path, world
from .test_webhook import applied, pod

GPU, MEM, CORES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"
LABEL_OF_POD = "vgpu.fleet/allocation"
DRA, EXTENDER = {LABEL_OF_POD: "dra"}, {LABEL_OF_POD: "extender"}
FOLDER = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
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
NAME = template_name(SPEC)
ASKS = {MEM: "3000", CORES: "30"}


def review(made, of_namespace="", settings=None, last=False):
    """The response and the templates that it needs."""
    needed = {}
    request = wire.AdmissionRequest("7", "CREATE", "default", made)
    settings = settings or Settings(claims=True)
    way = webhook.Way(of_namespace, None if last else needed)
    found = webhook.mutate(request, settings, classes=classes_of(), way=way)
    return found, needed


@pytest.mark.parametrize(("labels", "of_namespace"), [(DRA, ""), ({}, "dra"), (DRA, "extender")])
def test_a_pod_gets_a_claim_for_what_it_asks(labels, of_namespace):
    made = pod({**ASKS, "cpu": "1"}, labels)
    made["spec"]["containers"][0]["resources"]["requests"] = {**ASKS, "cpu": "1"}
    made["spec"]["containers"].append({"name": "side", "resources": {"limits": {"memory": "1Gi"}}})
    response, needed = review(made, of_namespace)
    assert response["allowed"] and "warnings" not in response and needed == {NAME: SPEC}
    changed = applied(made, response)
    expected = copy.deepcopy(made)
    expected["spec"]["resourceClaims"] = [{"name": "vgpu-main", "resourceClaimTemplateName": NAME}]
    resources = {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}, "claims": [{"name": "vgpu-main"}]}
    expected["spec"]["containers"][0]["resources"] = resources
    assert changed == expected
    for last in (False, True):
        response, needed = review(changed, of_namespace, last=last)
        assert response["allowed"] and "patch" not in response and not needed, "a second look changes nothing"


def test_claims_that_a_pod_has_stay_and_containers_have_their_own():
    own = [{"name": "vgpu-main", "resourceClaimName": "net"}]
    made = pod(ASKS, DRA, schedulerName="vgpu-scheduler", resourceClaims=own)
    made["spec"]["containers"][0]["resources"]["claims"] = [{"name": "vgpu-main"}]
    made["spec"]["initContainers"] = [{"name": "first", "resources": {"limits": {GPU: "2", MEM: "3000"}}}]
    response, needed = review(made)
    assert ["equal part of a GPU" in one for one in response["warnings"]] == [True]
    changed = applied(made, response)["spec"]
    assert changed["schedulerName"] == "default-scheduler"
    first, kept, main = (changed["resourceClaims"][n] for n in (1, 0, 2))
    assert kept == own[0] and first["name"] == "vgpu-first" and main["name"].startswith("vgpu-main-")
    assert {first["resourceClaimTemplateName"], NAME} == set(needed) == {*needed, main["resourceClaimTemplateName"]}
    assert changed["containers"][0]["resources"]["claims"] == [{"name": "vgpu-main"}, {"name": main["name"]}]
    assert changed["initContainers"][0]["resources"] == {"limits": {}, "claims": [{"name": "vgpu-first"}]}


def test_annotations_by_which_it_asked_go():
    made = pod({}, DRA, {"gpu-memory": "2000", "other": "x"})
    changed = applied(made, review(made)[0])
    assert changed["metadata"]["annotations"] == {"other": "x"}
    response, needed = review(changed)
    assert response["allowed"] and "patch" not in response and not needed


# Limits, labels, of the namespace, more of the spec, settings, words of the refusal.
REFUSED = [
    ({"nvidia.com/gpumem-percentage": "50"}, DRA, "", {}, True, "label the pod vgpu.fleet/allocation: extender"),
    (ASKS, {LABEL_OF_POD: "DRA"}, "", {}, True, 'expected dra or extender, found "DRA"'),
    (ASKS, {}, "unknown", {}, True, "is neither dra nor extender"),
    (ASKS, DRA, "", {}, False, "set scheduler_claims: true"),
    (ASKS, DRA, "", {"nodeName": "n1"}, True, "use a nodeSelector"),
    (ASKS, DRA, "", {"runtimeClassName": "kata"}, True, "kata-qemu"),
]


@pytest.mark.parametrize(("limits", "labels", "of_namespace", "spec", "claims", "words"), REFUSED)
def test_what_is_refused(limits, labels, of_namespace, spec, claims, words):
    response, needed = review(pod(limits, labels, **spec), of_namespace, Settings(claims=claims))
    assert not response["allowed"] and not needed and words in response["status"]["message"]


def test_a_pod_that_another_webhook_made_ask_again_is_refused_at_the_end():
    response, _needed = review(pod(ASKS, DRA), last=True)
    assert not response["allowed"] and "another webhook" in response["status"]["message"]


@pytest.mark.parametrize(("labels", "of_namespace"), [({}, ""), (EXTENDER, "dra"), ({}, "extender")])
def test_elsewhere_it_stays_on_the_extender(labels, of_namespace):
    made = pod(ASKS, labels)
    response, needed = review(made, of_namespace)
    changed = applied(made, response)["spec"]
    assert changed["schedulerName"] == "vgpu-scheduler" and "resourceClaims" not in changed and not needed


# ---- templates


class Clock:
    now = 1_800_000_000.0

    def stamp(self, before):
        return Templates(None, lambda: self.now - before)._stamp()


def template(clock, used=0.0, made=0.0, spec=None, **labels):
    metadata = {
        "name": NAME,
        "namespace": "default",
        "uid": "u",
        "creationTimestamp": clock.stamp(made),
        "annotations": {USED: used if isinstance(used, str) else clock.stamp(used)},
        "labels": {LABEL: "pods", **labels},
    }
    return {"metadata": metadata, "spec": {"spec": SPEC} if spec is None else spec}


def with_templates(test):
    async def go():
        clock = Clock()
        async with KubeApi() as double, Api(Access(double.url), timeout=60.0) as api:
            await test(double, Templates(api, lambda: clock.now), clock)

    asyncio.run(go())


def test_a_template_is_made_once_and_its_time_renewed():
    async def go(double, templates, clock):
        await templates.ensure("default", {NAME: SPEC})
        made = double.objects[f"{FOLDER}/{NAME}"]
        assert made["spec"] == {"spec": SPEC} and made["metadata"]["labels"] == {LABEL: "pods"}
        before = made["metadata"]["annotations"][USED]
        await templates.ensure("default", {NAME: SPEC})
        assert not double.count("PATCH", FOLDER)
        clock.now += FRESH + 1
        await templates.ensure("default", {NAME: SPEC})
        assert double.count("PATCH", FOLDER) == 1
        assert double.objects[f"{FOLDER}/{NAME}"]["metadata"]["annotations"][USED] > before

    with_templates(go)


# What stands there under the name.
FOREIGN = [
    {"spec": {"devices": {"requests": []}}},
    {"spec": {**SPEC, "more": 1}},
    {"spec": SPEC, "metadata": {"labels": {"a": "b"}}},
    {},
]


@pytest.mark.parametrize("spec", FOREIGN)
def test_a_template_that_says_something_else_is_never_used(spec):
    async def go(double, templates, clock):
        double.put(f"{FOLDER}/{NAME}", template(clock, spec=spec))
        with pytest.raises(TemplateError, match=f"default/{NAME} says something else .*; delete it"):
            await templates.ensure("default", {NAME: SPEC})
        assert not double.count("PATCH", FOLDER)

    with_templates(go)


@pytest.mark.parametrize("namespace", ["", "..", "a/b", "a?dryRun=All", "A", "a" * 64])
def test_a_review_of_ones_own_leads_to_no_other_path(namespace):
    async def go(double, templates, _clock):
        with pytest.raises(TemplateError, match="names no namespace"):
            await templates.ensure(namespace, {NAME: SPEC})
        assert not double.calls

    with_templates(go)


def test_an_api_server_that_drops_fields_of_shares_is_found():
    async def go(double, templates, _clock):
        double.keeps = lambda sent: {**sent, "spec": {"spec": {"devices": {}}}}
        with pytest.raises(TemplateError, match="drops fields of shares"):
            await templates.ensure("default", {NAME: SPEC})

    with_templates(go)


def test_one_that_is_deleted_between_two_looks_is_made_again():
    async def go(double, templates, clock):
        double.put(f"{FOLDER}/{NAME}", template(clock))

        def gone(method, path):
            if method == "GET" and path in double.objects:
                double.remove(path)

        double.fault = gone
        await templates.ensure("default", {NAME: SPEC})
        assert double.count("POST", FOLDER) == 2 and f"{FOLDER}/{NAME}" in double.objects

    with_templates(go)


# Seconds since its use and its making, whether a pod names it, and whether it stays.
AGES = [
    (0.0, 2 * OLD, False, True),
    (2 * OLD, 0.0, False, True),
    (2 * OLD, 2 * OLD, True, True),
    (2 * OLD, 2 * OLD, False, False),
    # What tenants write of the time.
    (-2 * OLD, 2 * OLD, False, False),
    ("soon", 2 * OLD, False, False),
    ("soon", 0.0, False, True),
]


@pytest.mark.parametrize(("used", "made", "named", "stays"), AGES)
def test_old_templates_that_no_pod_names_go(used, made, named, stays):
    async def go(double, templates, clock):
        double.put(f"{FOLDER}/{NAME}", template(clock, used, made))
        claims = [{"name": "x", "resourceClaimTemplateName": NAME if named else "other"}, {"name": "y"}]
        double.put(pod_path("a"), {"metadata": {"name": "a"}, "spec": {"resourceClaims": claims}})
        double.put(pod_path("b"), {"metadata": {"name": "b"}, "spec": {"containers": []}})
        await templates.clear_up()
        assert (f"{FOLDER}/{NAME}" in double.objects) is stays

    with_templates(go)


def test_templates_of_others_stay_and_pods_of_other_namespaces_do_not_count():
    async def go(double, templates, clock):
        double.put(f"{FOLDER}/{NAME}", template(clock, 2 * OLD, 2 * OLD))
        other = template(clock, 2 * OLD, 2 * OLD)
        other["metadata"].update(name="own", labels={})
        double.put(f"{FOLDER}/own", other)
        named = {"metadata": {"name": "a"}, "spec": {"resourceClaims": [{"resourceClaimTemplateName": NAME}]}}
        double.put("/api/v1/namespaces/other/pods/a", named)
        await templates.clear_up()
        assert [one["metadata"]["name"] for one in double.of("resourceclaimtemplates")] == ["own"]

    with_templates(go)


def test_one_that_is_used_while_it_is_looked_at_stays():
    """Admission renews its time between the list and the deletion."""

    async def go(double, templates, clock):
        path = f"{FOLDER}/{NAME}"
        double.put(path, template(clock, 2 * OLD, 2 * OLD))

        def used(method, asked):
            if method == "GET" and asked.endswith("/pods"):
                double.put(path, template(clock, 0.0, 2 * OLD))

        double.fault = used
        await templates.clear_up()
        assert path in double.objects and double.count("DELETE", FOLDER) == 1

    with_templates(go)


def test_no_more_than_a_page_is_read_at_once():
    async def go(double, templates, clock):
        for n in range(120):
            one = template(clock)
            one["metadata"]["name"] = f"t{n:03}"
            double.put(f"{FOLDER}/t{n:03}", one)
        await templates.clear_up()
        assert double.calls.count(("GET", ALL)) == 3

    with_templates(go)


# ---- the program


async def admission(one, made, path="/mutate", dry_run=False):
    request = {"uid": "7", "operation": "CREATE", "namespace": "default", "object": made, "dryRun": dry_run}
    async with one.session.post(one.webhook_url + path, data=json.dumps({"request": request})) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["response"]


def test_the_webhook_makes_templates_before_it_admits():
    async def go():
        async with world(nodes=1) as (double, one, _names):
            made = pod(ASKS)
            assert (await admission(one, made, "/mutate/dra", dry_run=True))["allowed"]
            assert not double.of("resourceclaimtemplates"), "nothing at dry run"
            response = await admission(one, made, "/mutate/dra")
            assert response["allowed"] and json.loads(base64.b64decode(response["patch"]))
            (found,) = double.of("resourceclaimtemplates")
            assert found["metadata"]["name"] == NAME and found["spec"]["spec"] == SPEC
            assert not (await admission(one, made, "/mutate/unknown"))["allowed"]
            # Of a namespace without the label the pod is the extender's.
            response = await admission(one, made)
            assert applied(made, response)["spec"]["schedulerName"] == "vgpu-scheduler"

    asyncio.run(go())


@pytest.mark.parametrize("code", [403, 422, 500])
def test_where_a_template_cannot_be_made_the_pod_is_refused(code):
    async def go():
        async with world(nodes=1) as (double, one, _names):
            double.fault = refusing("POST", FOLDER, code, "the reason")
            response = await admission(one, pod(ASKS, DRA))
            message = response["status"]["message"]
            assert not response["allowed"] and "patch" not in response
            assert "the reason" in message and message.endswith("try again")

    asyncio.run(go())


def test_a_list_that_fails_deletes_nothing():
    async def go(double, templates, clock):
        double.put(f"{FOLDER}/{NAME}", template(clock, 2 * OLD, 2 * OLD))
        double.fault = refusing("GET", "/api/v1/namespaces/default/pods", 500, "no")
        with pytest.raises(ApiError):
            await templates.clear_up()
        assert double.of("resourceclaimtemplates")

    with_templates(go)
