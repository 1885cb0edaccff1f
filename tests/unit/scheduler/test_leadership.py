# SPDX-License-Identifier: Apache-2.0
"""Tests the election of the replica that binds pods. The elected replica, the holder, has a Lease: an object in
the API server that it renews. Some tests use HTTP and an in-memory API server, others run step by step with a fake
clock.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from doubles.kube_api import KubeApi
from vgpu_plugin.node.kube_access import Access
from vgpu_scheduler import api as api_module
from vgpu_scheduler import leadership as leadership_module
from vgpu_scheduler.api import Api
from vgpu_scheduler.extender import Extender
from vgpu_scheduler.leadership import QUIET, RECENT, WANTED, Candidacy, Leadership
from vgpu_scheduler.ledger import Ledger
from vgpu_scheduler.wire import BindArgs

from .samples import faults, node
from .test_service import plans, pod_object, pod_path, replica, world

NAME = "kube-system/extender"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/extender"


class Listed:
    """Replaces Cluster in an election. Its lists of pods and nodes are always up to date."""

    synced = True

    def __init__(self):
        self.pods = self
        self.lists = 0

    listed_at = float("inf")

    def list_again(self):
        self.lists += 1


class Clock:
    def __init__(self):
        self.time = 1000.0

    def __call__(self):
        return self.time


@pytest.fixture
def stage():
    """Runs a test coroutine. It gets an API server, a clock, three electors (replicas that take part in the election)
    named one, two and three, and a dictionary of the electors with a bind under way.
    """

    def run(story):
        async def go():
            async with KubeApi() as double, Api(Access(double.url), timeout=60.0) as api:
                clock, busy = Clock(), {}
                electors = {
                    name: Leadership(
                        api, Listed(), Candidacy(NAME, name), lambda name=name: busy.get(name, False), clock
                    )
                    for name in ("one", "two", "three")
                }
                await story(double, clock, electors, busy)

        asyncio.run(go())

    return run


def path_of(pod):
    return pod_path(pod["metadata"]["name"])


def holder(double):
    return double.objects[LEASE]["spec"]["holderIdentity"]


def test_first_replica_takes_and_renews_the_lease(stage):
    async def story(double, clock, electors, _busy):
        one, two, _three = electors.values()
        assert await one.may_bind() and not one.writes()
        await one.round()
        assert await one.may_bind() == "" and one.writes() and holder(double) == "one"
        await two.round()
        assert "the replica that binds is one" in two.why and not two.writes()
        for _each in range(20):
            clock.time += 2
            await one.round()
            await two.round()
        assert holder(double) == "one" and await one.may_bind() == ""
        assert double.objects[LEASE]["spec"]["leaseTransitions"] == 0
        # A renewal is a single request, because the elector does not read the Lease again.
        calls = len(double.calls)
        await one.round()
        assert double.calls[calls:] == [("PUT", LEASE)]

    stage(story)


def test_dead_holder_is_replaced_after_its_lease_ends(stage):
    async def story(double, clock, electors, _busy):
        one, two, _three = electors.values()
        await one.round()
        clock.time += 3
        await two.round()
        # The holder must stop binding as soon as, by the holder's own clock, a call could last longer than the Lease.
        clock.time = 1000 + 15 - api_module.TIMEOUT
        assert await one.may_bind() == ""
        clock.time += 0.1
        assert "about to end" in await one.may_bind() and not one.writes()
        # The second elector counts the Lease's time from the moment when it first saw this Lease.
        clock.time = 1000 + 15 + 2.9
        await two.round()
        assert holder(double) == "one" and not two.leads
        clock.time = 1000 + 15 + 3.1
        await two.round()
        assert holder(double) == "two" and await two.may_bind() == ""
        assert double.objects[LEASE]["spec"]["leaseTransitions"] == 1
        # The first elector runs again and must notice that it has lost the Lease.
        await one.round()
        await one.round()
        assert not one.leads and "the replica that binds is two" in await one.may_bind()

    stage(story)


def test_clocks_of_machines_are_not_compared(stage):
    """A renewTime in the Lease that is years off must neither shorten nor extend the Lease."""

    async def story(double, clock, electors, _busy):
        one, two, _three = electors.values()
        await one.round()
        for stamp in ("1999-01-01T00:00:00.000000Z", "2199-01-01T00:00:00.000000Z"):
            lease = double.objects[LEASE]
            lease["spec"]["renewTime"] = stamp
            double.put(LEASE, lease)
            await two.round()
            clock.time += 10
            await two.round()
            assert holder(double) == "one"
        clock.time += 6
        await two.round()
        assert holder(double) == "two"

    stage(story)


def test_idle_holder_releases_the_lease_to_a_called_replica(stage):
    async def story(double, clock, electors, busy):
        one, two, three = electors.values()
        await one.round()
        one.called()
        two.called()
        await two.round()
        assert double.objects[LEASE]["metadata"]["annotations"][WANTED] == "two"
        # A holder that is called by its kube-scheduler keeps the Lease, even if another replica requests it.
        await one.round()
        await one.round()
        assert holder(double) == "one" and await one.may_bind() == ""
        clock.time += QUIET + 0.1
        two.called()
        await two.round()
        busy["one"] = True
        await one.round()
        await one.round()
        assert holder(double) == "one"
        busy["one"] = False
        await two.round()
        await one.round()
        await one.round()
        assert holder(double) == "" and not one.leads
        # The second replica requested the Lease, so a third replica that is not called must not take it.
        await three.round()
        assert holder(double) == ""
        await two.round()
        assert holder(double) == "two" and await two.may_bind() == "" and two._cluster.lists == 1
        assert WANTED not in double.objects[LEASE]["metadata"].get("annotations", {})

    stage(story)


def test_released_lease_that_is_not_taken_is_free_for_all(stage):
    async def story(double, clock, electors, _busy):
        one, two, three = electors.values()
        await one.round()
        two.called()
        await two.round()
        clock.time += QUIET + 0.1
        await one.round()
        await one.round()
        assert holder(double) == ""
        await three.round()
        clock.time += 15.1
        await three.round()
        assert holder(double) == "three"

    stage(story)


def test_replica_without_recent_calls_does_not_request_the_lease(stage):
    async def story(double, clock, electors, _busy):
        one, two, _three = electors.values()
        await one.round()
        two.called()
        clock.time += RECENT + 0.1
        await two.round()
        assert WANTED not in double.objects[LEASE]["metadata"].get("annotations", {})

    stage(story)


def test_regular_shutdown_releases_the_lease(stage):
    async def story(double, _clock, electors, _busy):
        one, two, _three = electors.values()
        await one.round()
        await two.release()
        assert holder(double) == "one"
        await one.release()
        assert holder(double) == "" and not one.leads
        await two.round()
        assert holder(double) == "two"

    stage(story)


FAULTS = [403, 404, 409, 500, "hang"]


@pytest.mark.parametrize("fault", FAULTS)
def test_leader_stops_binding_if_the_api_server_does_not_respond(fault, monkeypatch):
    monkeypatch.setattr(leadership_module, "RETRY", 0.1)

    async def go():
        async with world(lease=NAME, timeout=0.5, seconds=6.0) as (double, one, _names):
            await one.until(lambda: one.leadership.leads)
            double.fault = lambda _method, path: fault if "/leases" in path else None
            pod = double.put(pod_path("a"), pod_object("a"))
            await one.until(lambda: not one.leadership.writes())
            said = await one.bind(pod, "n0")
            assert "lease" in said and not double.objects[pod_path("a")]["spec"].get("nodeName")
            double.fault = None
            await one.until(one.leadership.writes)
            await one.until(lambda: one.cluster.pods.listed_at >= one.leadership._since)
            assert await one.bind(pod, "n0") == ""

    asyncio.run(go())


WHILE_READ = [
    # columns: seconds that reading the pod takes, replica that requests the Lease meanwhile; expected words of the
    # bind's error
    (0.0, "", ""),
    (12.0, "", "about to end"),
    (4.0, "two", "the kube-scheduler now calls two"),
]


@pytest.mark.parametrize(("seconds", "asks", "says"), WHILE_READ)
def test_bind_checks_the_lease_again_after_reading_the_pod(seconds, asks, says, stage):
    async def story(double, clock, electors, _busy):
        one, two, _three = electors.values()
        await one.round()
        ledger = Ledger()
        ledger.set_node("n0", node("n0", 1))
        extender = Extender(ledger, one._api, may_bind=one.may_bind)
        pod = double.put(pod_path("a"), pod_object("a"))

        async def slow(_namespace, _name):
            clock.time += seconds
            if asks:
                two.called()
                await two.round()
                await one.round()
                await one.round()
            return pod

        one._api.pod = slow
        said = (await extender.bind(BindArgs("a", "default", "uid-a", "n0"))).Error
        assert says in said and (said == "") == (says == "")
        assert double.count("POST", "/binding") == (not says)
        assert (ledger.held("uid-a") is not None) == (not says)

    stage(story)


def test_two_electors_may_never_bind_at_once(stage):
    """Clock steps, calls, crashes and restarts come in random order. At no moment may two replicas be
    allowed to bind.
    """

    async def story(_double, clock, electors, busy):
        chance = random.Random(11)
        asleep, transitions, last = {}, 0, None
        for _step in range(600):
            clock.time += chance.choice((0.1, 0.5, 2.0))
            for name, one in electors.items():
                if asleep.get(name, 0) > clock.time:
                    continue
                if chance.random() < 0.02:
                    asleep[name] = clock.time + chance.choice((5, 12, 40))
                busy[name] = chance.random() < 0.1
                if chance.random() < 0.2:
                    one.called()
                if chance.random() < 0.7:
                    await one.round()
            binding = [name for name, one in electors.items() if one.writes()]
            assert len(binding) <= 1, binding
            if binding and binding[0] != last:
                transitions, last = transitions + 1, binding[0]
        assert transitions > 5

    stage(story)


def test_only_the_holder_binds_and_only_after_listing():
    async def go():
        async with world(lease=NAME) as found:
            double, one, names = found
            async with replica(double, NAME, "two") as two:
                await one.until(lambda: one.leadership.leads or two.leadership.leads)
                first, second = (one, two) if one.leadership.leads else (two, one)
                pods = [double.put(pod_path(name), pod_object(name)) for name in "abcd"]
                await first.until(lambda: first.cluster.pods.listed_at >= first.leadership._since)
                assert await first.bind(pods[0], "n0") == ""
                assert "the replica that binds is" in await second.bind(pods[1], "n0")
                # Both replicas filter, because an autoscaler may call either.
                assert (await second.verb("filter", {"Pod": pods[1], "NodeNames": names}))[1]["NodeNames"] == names
                # The second replica must not learn of the leader's last bind by an event, so its events are cut off.
                double.silent = True
                assert await first.bind(pods[1], "n0") == ""
                await first.leadership.release()
                first.election.cancel()
                await asyncio.sleep(0)
                lists = double.count("GET", "/api/v1/pods")
                await second.until(lambda: second.leadership.leads)
                assert second.ledger.held("uid-b") is None or double.count("GET", "/api/v1/pods") > lists
                await second.until(lambda: second.cluster.pods.listed_at >= second.leadership._since)
                assert second.ledger.held("uid-b") is not None
                assert await second.bind(pods[2], "n0") == ""
                assert (
                    "lease" in await first.bind(pods[3], "n0")
                    or "this replica is shutting down" in first.leadership.why
                )

    asyncio.run(go())


def test_no_pod_is_lost_or_placed_twice_when_the_leader_dies(monkeypatch):
    """The first replica dies. A kube-scheduler continues with the second replica and tries each pod until
    it is bound.
    """
    monkeypatch.setattr(leadership_module, "RETRY", 0.2)

    async def go():
        async with world(nodes=2, gpus=2, lease=NAME, seconds=8.0) as (double, one, names):
            pods = [double.put(pod_path(f"p{n}"), pod_object(f"p{n}")) for n in range(20)]
            await one.until(lambda: one.leadership.leads)
            await one.until(lambda: one.cluster.pods.listed_at >= one.leadership._since)
            async with replica(double, NAME, "two", seconds=8.0) as two:

                async def bound(by, left, rounds):
                    """Schedules the unbound pods repeatedly, as a kube-scheduler does."""
                    for _round in range(rounds):
                        for pod in left:
                            await by.schedule(pod, names)
                        # A kube-scheduler watches pods and tries no pod that has a node.
                        left = [one for one in left if not double.objects[path_of(one)]["spec"].get("nodeName")]
                        if not left:
                            return
                        await asyncio.sleep(0.2)
                    raise AssertionError([pod["metadata"]["name"] for pod in left])

                await bound(one, pods[:6], 200)
                # The API server carries out a bind, but its response is lost. Then the first replica ends.
                double.fault = lambda _method, path: "done" if path.endswith("/binding") else None
                assert (await one.schedule(pods[6], names))[1]
                double.fault = None
                one.election.cancel()
                await bound(two, pods[6:], 300)
                assert len(plans(double)) == 20 and faults(double.nodes, plans(double)) == []
                assert double.count("POST", "/binding") >= 20

    asyncio.run(go())


def test_only_the_holder_restores_a_deleted_plan(monkeypatch):
    monkeypatch.setattr(leadership_module, "RETRY", 0.2)

    async def go():
        async with world(lease=NAME) as found:
            double, one, names = found
            async with replica(double, NAME, "two") as two:
                await one.until(lambda: one.leadership.leads or two.leadership.leads)
                first, second = (one, two) if one.leadership.leads else (two, one)
                await first.until(lambda: first.cluster.pods.listed_at >= first.leadership._since)
                pod = double.put(pod_path("a"), pod_object("a"))
                assert (await first.schedule(pod, names))[1] == ""
                await second.until(lambda: second.ledger.held("uid-a") is not None)
                first.cluster.writes = lambda: False
                stored = dict(double.objects[pod_path("a")])
                stored["metadata"] = dict(stored["metadata"], annotations={})
                double.put(pod_path("a"), stored)
                await second.until(lambda: second.cluster.drift["plan_deleted"] and first.cluster.drift["plan_deleted"])
                await second.cluster.repair()
                await first.cluster.repair()
                assert double.objects[pod_path("a")]["metadata"]["annotations"] == {}
                first.cluster.writes = first.leadership.writes
                await first.until(lambda: double.objects[pod_path("a")]["metadata"]["annotations"])

    asyncio.run(go())


def test_call_timeout_is_shorter_than_the_remaining_lease():
    # If two renewals in a row fail, there must still be time for one bind.
    assert api_module.TIMEOUT + 3 * leadership_module.RETRY < 15
