# SPDX-License-Identifier: Apache-2.0
"""Tests that the scheduler's account has exactly the rights that the program uses. The API server of the tests records
which right each request of the real client needs. All other tests of this folder run with the same rights (conftest).
"""

from __future__ import annotations

import asyncio
import json

import pytest
from doubles.kube_api import KubeApi
from doubles.kube_rights import accounts, built_in, grants, missing, unused
from vgpu_plugin._shared.kube import scheduler_manifests
from vgpu_plugin._shared.kube.scheduler_desired import LEASES, NAME, Desired
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin.node.kube_access import Access as KubeAccess
from vgpu_scheduler import tls
from vgpu_scheduler.api import Api, ApiError
from vgpu_scheduler.leadership import Candidacy, Leadership
from vgpu_scheduler.pod_claims import PodClaims

from .samples import node
from .test_claim_admission import claiming
from .test_leadership import Listed
from .test_service import node_object, pod_object, pod_path, replica

IMAGES = ("x/vgpu-scheduler:1", "x/kube-scheduler:v1.34.2")
MANIFESTS = scheduler_manifests.manifests(Desired(*IMAGES, config={"claims": True}))
RIGHTS = grants(MANIFESTS, NAME)
HOOKS = "/apis/admissionregistration.k8s.io/v1"
SECRET = f"/api/v1/namespaces/kube-system/secrets/{NAME}-tls"

# Rights of the stock kube-scheduler, which runs in the same pod with the same account. A comment at each entry names
# its source.
OF_KUBE_SCHEDULER = {
    # client-go's LeaseLock reads, creates and updates the Lease; bootstrappolicy restricts that to the Lease
    # kube-scheduler.
    *((verb, "coordination.k8s.io", "leases", LEASES[0]) for verb in ("get", "update")),
}
# Built-in role of Kubernetes → the source file of Kubernetes that defines the role, and what the role is for.
BUILT_IN = {
    "system:kube-scheduler": "bootstrappolicy/policy.go: what kube-scheduler itself is bound to",
    "system:volume-scheduler": "bootstrappolicy/policy.go: volumes of pods that it binds",
    "extension-apiserver-authentication-reader": "bootstrappolicy/namespace_policy.go: who may read its metrics",
}


async def certificates(api, double):
    """Creates certificates, replaces a broken Secret, and updates both webhook configurations."""
    for kind in tls.KINDS:
        double.put(f"{HOOKS}/{kind}/{NAME}", {"metadata": {"name": NAME}, "webhooks": [{"name": "a"}]})
    for _twice in range(2):
        await tls.Tls(api, f"kube-system/{NAME}-tls", ["127.0.0.1"], [NAME]).keep()
        double.put(SECRET, dict(double.objects[SECRET], data={}))
    await tls.Tls(api, f"kube-system/{NAME}-tls", ["127.0.0.1"], [NAME]).keep()


async def election(api):
    """Makes all requests of an election: the first replica takes, renews and releases the Lease; the second requests
    it.
    """
    one, two = (Leadership(api, Listed(), Candidacy(f"kube-system/{LEASES[1]}", name)) for name in ("one", "two"))
    await one.round()
    await one.round()
    two.called()
    await two.round()
    await one.release()


async def life_of_pods(double):
    """Binds a pod, restores a deleted plan, refuses a bind after a restart, and evicts pods for a higher priority."""
    double.put("/api/v1/nodes/n0", node_object("n0", node("n0", 1)))
    pods = [
        double.put(pod_path(name), pod_object(name, memory))
        for name, memory in (("a", 3000), ("b", 16160), ("d", 3000))
    ]
    async with replica(double) as one:
        for pod in (pods[0], pods[2]):
            assert (await one.schedule(pod, ["n0"]))[1] == ""
        assert "it is scheduled again" in await one.bind(pods[1], "n0")
        stored = json.loads(json.dumps(double.objects[pod_path("a")]))
        del stored["metadata"]["annotations"][pod_annotations.PLAN]
        double.put(pod_path("a"), stored)
        await one.until(lambda: pod_annotations.PLAN in double.objects[pod_path("a")]["metadata"]["annotations"])
        await one.until(lambda: double.watches >= len(one.cluster.reflectors))
        above = double.put(pod_path("c"), pod_object("c", 16160, priority=1))
        assert (await one.schedule(above, ["n0"]))[0] is None
        double.graceful = True
        await one.extender.shortages.help()
        assert double.objects[pod_path("a")]["metadata"]["deletionTimestamp"] and one.extender.shortages.evicted == 2


async def claims(api, double):
    """Makes all requests for claims: the first replica creates the claim; the second finds it."""
    for made in (1, 0):
        one = PodClaims(api)
        one.all_pods([claiming("a", {"vgpu-1": [1, 1000, 10]})], 0.0)
        await one.round()
        assert one.counts == {"made": made, "refused": 0}


@pytest.fixture(scope="module")
def asked():
    async def go():
        async with KubeApi() as double, Api(KubeAccess(double.url), timeout=60.0) as api:
            await certificates(api, double)
            await election(api)
            await life_of_pods(double)
            await claims(api, double)
            return double.accesses

    return asyncio.run(go())


def test_all_used_rights_are_granted(asked):
    assert missing(RIGHTS, asked) == set()


def test_unused_rights_belong_to_the_kube_scheduler(asked):
    left = {(one.verb, one.group, one.resource, one.name) for one in unused(RIGHTS, asked)}
    assert left == OF_KUBE_SCHEDULER


def test_each_missing_right_is_detected(asked):
    """Control of the check: if any one of the used rights is taken away, the check must report it as missing."""
    used = {one for one in RIGHTS if (one.verb, one.group, one.resource, one.name) not in OF_KUBE_SCHEDULER}
    assert len(used) > 20
    assert all(missing(RIGHTS - {one}, asked) for one in used)


def test_no_rights_on_claims_if_claims_are_disabled():
    less = grants(scheduler_manifests.manifests(Desired(*IMAGES)), NAME)
    assert {one.resource for one in RIGHTS - less} == {"resourceclaims"} and less < RIGHTS


def test_request_without_a_granted_right_is_refused():
    """The API servers of this folder's tests enforce the rights, so a request without a right fails."""

    async def go():
        async with KubeApi() as double, Api(KubeAccess(double.url), timeout=60.0) as api:
            double.put("/api/v1/nodes/n0", node_object("n0"))
            with pytest.raises(ApiError, match="is forbidden"):
                await api.json("GET", "/api/v1/nodes/n0")

    asyncio.run(go())


def test_other_roles_belong_to_the_kube_scheduler():
    assert built_in(MANIFESTS, NAME) == set(BUILT_IN)
    assert accounts(MANIFESTS) == {NAME}
    assert not any("*" in one for one in RIGHTS)
