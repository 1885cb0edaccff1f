# SPDX-License-Identifier: Apache-2.0
"""Tests quotas of namespaces: the amounts with which pods count, and how admission and bind enforce the quota, over
HTTP with an in-memory API server. The ledger is the scheduler's record of which pod holds how much of which GPU.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from vgpu_plugin._shared.pods.annotations import APP, Device, Part
from vgpu_plugin._shared.pods.requests import Card, read_pod
from vgpu_scheduler import wire
from vgpu_scheduler.ledger import Ledger
from vgpu_scheduler.quota import Demand, Quotas, least

from .samples import gpu, node
from .test_service import pod_object, pod_path, replica, world

MEM, CORES = "limits.nvidia.com/gpumem", "limits.nvidia.com/gpucores"
V100, T4 = Card(16160, 16160, 1616, 10), Card(15360, 15360, 2194, 14)


def pod(limits, labels=None, init=(), sidecars=(), late=()):
    """``late`` are the sidecars that start after the init containers; ``sidecars`` start before them."""

    def container(name, limits, **more):
        return {"name": name, "resources": {"limits": {key: str(value) for key, value in limits.items()}}, **more}

    first = [container(f"s{n}", one, restartPolicy="Always") for n, one in enumerate(sidecars)]
    first += [container(f"i{n}", one) for n, one in enumerate(init)]
    first += [container(f"l{n}", one, restartPolicy="Always") for n, one in enumerate(late)]
    every = limits if isinstance(limits, list) else [limits]
    containers = [container(f"c{n}", one) for n, one in enumerate(every)]
    return {"metadata": {"labels": labels or {}}, "spec": {"containers": containers, "initContainers": first}}


G, M, C = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"
COUNTS = [
    # columns: pod, GPU models of the cluster; expected (MiB, percent) over all GPUs of the pod, computed by hand
    (pod({G: 1, M: 3000, C: 30}), [V100], (3000, 30)),
    (pod({G: 4, M: 3000, C: 30}), [V100], (12000, 120)),
    (pod({M: 3000}), [V100], (3000, 0)),
    (pod({G: 2, "nvidia.com/gpumem-percentage": 50}), [V100], (16160, 0)),
    # The model of the pod's GPU is not known yet, so the pod counts with the amount on the smallest GPU.
    (pod({G: 2, "nvidia.com/gpumem-percentage": 50}), [V100, T4], (15360, 0)),
    (pod({G: 1}), [V100, T4], (15360, 100)),
    (pod({G: 1, M: 15500}), [V100, T4], (15500, 0)),
    (pod({G: 1, M: 99000}), [V100, T4], (0, 0)),
    (pod({G: 1, M: 3000}), [], (0, 0)),
    (pod({"aliyun.com/gpu-mem": 8}, {"aliyun.com/gpu-count": "2"}), [V100], (2 * 4309, 0)),
    (pod({"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 30}), [V100], (7680, 50)),
    (pod({"tencent.com/vcuda-core": 200}), [V100], (32320, 200)),
    (pod({"nvidia.com/gpu.shared": 1}), [T4], (2194, 14)),
    (pod([{M: 1000}, {M: 2000, C: 10}]), [V100], (3000, 10)),
    # An init container and the containers after it never run together; a sidecar runs with all that start after it.
    (pod({M: 1000}, init=[{M: 4000, C: 5}]), [V100], (4000, 5)),
    (pod({M: 1000, C: 20}, init=[{M: 300}]), [V100], (1000, 20)),
    (pod({M: 1000}, init=[{M: 4000}], sidecars=[{M: 500}]), [V100], (4500, 0)),
    (pod({M: 5000}, init=[{M: 4000}], sidecars=[{M: 500}]), [V100], (5500, 0)),
    (pod({M: 1000}, init=[{M: 4000, C: 5}], late=[{M: 500}]), [V100], (4000, 5)),
    (pod({M: 1000}, init=[{M: 4000}], sidecars=[{M: 500}], late=[{M: 7000}]), [V100], (8500, 0)),
]


@pytest.mark.parametrize(("made", "cards", "expected"), COUNTS)
def test_pod_counts_with_these_quota_amounts(made, cards, expected):
    assert tuple(least(read_pod(made), cards)) == expected


def quotas_of(hard, held=(), config=None):
    """Returns the quotas of the namespace ``team``. ``held``: (MiB, percent) that each of its pods uses."""
    ledger = Ledger()
    ledger.set_node("n0", node("n0", 8))
    for n, (memory, cores) in enumerate(held):
        ledger.hold(f"held-{n}", f"team/held-{n}", "n0", [Part("main", APP, (Device("GPU-n0-0", memory, cores),))])
    made = Quotas(config or read_pod.__globals__["Config"](), ledger)
    for name, one in hard.items():
        made.enter(False, wire.Quota(wire.Meta(name, "team"), wire.QuotaSpec(one)))
    return made


HARD = [
    # columns: limits of each quota, (MiB, percent) of each running pod, request of the new pod; expected words of the
    # refusal ("" if the pod is admitted)
    ({}, [], {M: 3000}, ""),
    ({"q": {MEM: "3000"}}, [], {M: 3000}, ""),
    ({"q": {MEM: "2999"}}, [], {M: 3000}, "limits.nvidia.com/gpumem: 3000 asked for on all GPUs"),
    ({"q": {MEM: "5999"}}, [], {G: 2, M: 3000}, "6000 asked for"),
    ({"q": {MEM: "6000"}}, [], {G: 2, M: 3000}, ""),
    ({"q": {MEM: "6000"}}, [(3001, 0)], {M: 3000}, "3001 of 6000 in use; ask for at most 2999"),
    ({"q": {MEM: "6000"}}, [(3000, 0)], {M: 3000}, ""),
    ({"q": {MEM: "0"}}, [], {M: 1}, "0 of 0 in use; ask for at most 0"),
    ({"q": {MEM: "6k"}}, [(3000, 0)], {M: 3001}, "3000 of 6000"),
    ({"q": {MEM: "2Ki"}}, [], {M: 2048}, ""),
    ({"q": {MEM: "2Ki"}}, [], {M: 2049}, "0 of 2048"),
    ({"q": {MEM: "2048.9"}}, [], {M: 2049}, "0 of 2048"),
    ({"q": {MEM: None}}, [], {M: 1}, "0 of 0"),
    ({"q": {CORES: "50"}}, [(1, 30)], {M: 5, C: 21}, "limits.nvidia.com/gpucores: 21 asked for"),
    ({"q": {CORES: "50"}}, [(1, 30)], {M: 5, C: 20}, ""),
    ({"q": {CORES: "50"}}, [], {G: 1}, "100 asked for"),
    # A pod without a request for compute counts 0 % and is admitted even if the quota is used up.
    ({"q": {CORES: "0"}}, [], {M: 5}, ""),
    # The quota was lowered below what is in use. A new pod that needs this resource is refused, other pods are
    # admitted.
    ({"q": {MEM: "100"}}, [(3000, 0)], {M: 1}, "3000 of 100 in use; ask for at most 0"),
    ({"q": {CORES: "10", MEM: "9000"}}, [(3000, 90)], {M: 1}, ""),
    # If a namespace has several quotas, all of them apply.
    ({"a": {MEM: "9000"}, "b": {MEM: "500"}}, [], {M: 600}, "quota b of namespace team"),
    # These resources are counted by Kubernetes itself.
    ({"q": {"requests.nvidia.com/gpumem": "1", "pods": "0", "limits.cpu": "0"}}, [], {M: 600}, ""),
]


@pytest.mark.parametrize(("hard", "held", "asks", "words"), HARD)
def test_quota_admits_or_refuses(hard, held, asks, words):
    quotas = quotas_of(hard, held)
    said = quotas.admit("team", "u", read_pod(pod(asks)))
    assert (words in said and said) if words else said == ""
    assert quotas.admit("other", "u", read_pod(pod(asks))) == ""
    assert bool(quotas.fits("team", read_pod(pod(asks)))) == (bool(words) and bool(said))


def test_deleted_and_changed_quotas_are_followed():
    quotas = quotas_of({"a": {MEM: "10"}, "b": {CORES: "10"}})
    ask = read_pod(pod({M: 11}))
    assert "quota a" in quotas.admit("team", "u", ask)
    quotas.enter(False, wire.Quota(wire.Meta("a", "team"), wire.QuotaSpec({MEM: "11"})))
    assert quotas.fits("team", ask) == ""
    quotas.enter(True, wire.Quota(wire.Meta("a", "team")))
    quotas.enter(True, wire.Quota(wire.Meta("a", "team")))
    assert list(quotas.namespaces) == ["team"]
    quotas.enter_all([])
    assert list(quotas.namespaces) == []


def test_quota_uses_the_memory_factor():
    config = read_pod.__globals__["Config"](memory_factor=1024)
    quotas = quotas_of({"q": {MEM: "4"}}, [(2048, 0)], config)
    assert quotas.admit("team", "u", read_pod(pod({M: 2}), config)) == ""
    assert "3 asked for" in quotas.admit("team", "v", read_pod(pod({M: 3}), config))


def test_admission_reserves_nothing():
    """Any client can send reviews to the webhook, so a pod must not count before it is stored."""
    quotas = quotas_of({"q": {MEM: "6000"}})
    ask = read_pod(pod({M: 3000}))
    assert [quotas.admit("team", f"forged-{n}", ask) for n in range(100)] == [""] * 100
    assert quotas.admit("team", "own", ask) == ""
    assert quotas._waiting == {}


def test_stored_pods_count_while_pending_and_bound():
    quotas = quotas_of({"q": {MEM: "6000"}})
    ask = read_pod(pod({M: 3000}))
    quotas.waits("team", "a", ask)
    quotas.waits("team", "b", ask)
    assert quotas.admit("team", "c", ask)
    # The API server may review a stored pod again; the pod still counts once.
    assert quotas.admit("team", "b", ask) == ""
    # Until the watch event of its bind arrives, a pod is known as bound and as pending; it must still count once.
    quotas._ledger.hold("a", "team/a", "n0", [Part("main", APP, (Device("GPU-n0-1", 3000, 0),))])
    assert quotas.admit("team", "b", ask) == ""
    quotas.forget("team", "a")
    assert quotas.admit("team", "c", ask)
    quotas.forget_others(set())
    assert quotas._waiting == {}
    assert quotas.admit("team", "c", ask) == ""


def test_namespace_sums_equal_the_sums_of_pods():
    """Pods are added, moved and removed, and nodes come and go. The test computes each namespace's sum from the pods
    and compares it with the ledger's.
    """
    import random

    chance = random.Random(7)
    ledger, truth = Ledger(), {}
    for step in range(400):
        uid = f"u{chance.randrange(20)}"
        if chance.random() < 0.1:
            name = f"n{chance.randrange(3)}"
            if name in ledger.nodes:
                ledger.drop_node(name)
            else:
                ledger.set_node(name, node(name, chance.randrange(1, 4), memory=chance.choice((8000, 16160))))
        elif chance.random() < 0.3:
            ledger.release(uid)
            truth.pop(uid, None)
        else:
            space, name = f"s{uid[-1]}", f"n{chance.randrange(3)}"
            devices = tuple(
                Device(f"GPU-{name}-{n}", chance.randrange(1, 900), chance.randrange(0, 50)) for n in range(2)
            )
            ledger.hold(uid, f"{space}/{uid}", name, [Part("main", APP, devices)])
            truth[uid] = (space, devices)
        for space in {f"s{n}" for n in range(10)}:
            mine = [one for owner, devices in truth.values() if owner == space for one in devices]
            expected = sum(one.memory_mib for one in mine), sum(one.cores for one in mine)
            assert ledger.held_in(space) == expected, step
        gpus = [one for each in ledger.nodes.values() for one in each]
        assert set(ledger.cards) == {
            Card(one.memory_mib, one.capacity_mib, one.slice_mib, one.slice_cores) for one in gpus
        }
        shapes = {(len(each), max(one.capacity_mib for one in each)) for each in ledger.nodes.values()}
        assert set(ledger.shapes) == shapes


# --- over HTTP


def quota_object(hard, name="q", namespace="default"):
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"hard": hard}}


def quota_path(name="q", namespace="default"):
    return f"/api/v1/namespaces/{namespace}/resourcequotas/{name}"


def review(made, operation="CREATE", namespace="default", **more):
    request = {"uid": "r", "operation": operation, "namespace": namespace, "object": made, **more}
    return json.dumps({"request": request}).encode()


async def admission(one, made, verb="validate", **more):
    """Sends a pod to the webhook. Returns (allowed, code, message)."""
    async with one.session.post(f"{one.webhook_url}/{verb}", data=review(made, **more)) as answer:
        response = (await answer.json())["response"]
    status = response.get("status") or {}
    return response["allowed"], status.get("code"), status.get("message", "")


def test_admission_refusal_has_the_amounts():
    async def go():
        async with world(nodes=1, gpus=4) as (double, one, names):
            double.put(quota_path(), quota_object({MEM: "9000", CORES: "100"}))
            await one.until(lambda: list(one.extender.quotas.namespaces) == ["default"])
            first = pod_object("a", gpus=2)
            # The pod is sent twice, as the API server does: for the mutation and for the validation.
            assert (await admission(one, first, "mutate"))[0] and (await admission(one, first))[0]
            stored = double.put(pod_path("a"), first)
            await one.until(lambda: one.extender.quotas._waiting)
            allowed, code, message = await admission(one, pod_object("b", memory=3001))
            assert (allowed, code) == (False, 403)
            assert "3001 asked for" in message and "6000 of 9000 in use" in message and "quota q" in message
            assert (await admission(one, pod_object("b", memory=3001), namespace="free"))[0]
            # A pod that is bound counts with the same amount. A pod that has ended counts nothing.
            assert (await one.schedule(stored, names))[1] == ""
            await one.until(lambda: one.extender.quotas.held("default") == Demand(6000, 0))
            assert (await admission(one, pod_object("b", memory=3001)))[1] == 403
            double.put(pod_path("a"), dict(double.objects[pod_path("a")], status={"phase": "Succeeded"}))
            await one.until(lambda: one.extender.quotas.held("default") == Demand())
            assert (await admission(one, pod_object("b", memory=3001)))[0]
            text = (await one.get("/metrics"))[1]
            labels = 'namespace="default",quota="q",resource="limits.nvidia.com/gpumem"'
            assert f"vgpu_scheduler_quota_hard{{{labels}}} 9000" in text
            assert f"vgpu_scheduler_quota_used{{{labels}}} 0" in text

    asyncio.run(go())


def test_bind_enforces_the_quota_across_replicas():
    async def go():
        async with world(nodes=2, gpus=4) as found:
            double, one, names = found
            async with replica(double) as two:
                double.put(quota_path(), quota_object({MEM: "9000"}))
                for each in (one, two):
                    await each.until(lambda each=each: list(each.extender.quotas.namespaces) == ["default"])
                # The replicas do not know what the other one admitted. So each admits three pods, but the quota allows
                # three in total.
                pods = [pod_object(f"p{n}") for n in range(6)]
                answers = [await admission(one if n < 3 else two, made) for n, made in enumerate(pods)]
                assert all(allowed for allowed, _code, _message in answers)
                stored = [double.put(pod_path(made["metadata"]["name"]), made) for made in pods]
                done = await asyncio.gather(*(one.bind(made, names[n % 2]) for n, made in enumerate(stored)))
                assert sorted(bool(said) for said in done) == [False] * 3 + [True] * 3
                assert all("9000 of 9000 in use" in said for said in done if said)
                late = next(made for made, said in zip(stored, done, strict=True) if said)
                _status, found = await one.verb("filter", {"Pod": late, "NodeNames": names})
                assert not found["NodeNames"] and "9000 of 9000" in found["FailedAndUnresolvableNodes"]["n0"]
                bound = next(made for made, said in zip(stored, done, strict=True) if not said)
                double.remove(pod_path(bound["metadata"]["name"]))
                await one.until(lambda: one.extender.quotas.held("default").memory_mib == 6000)
                assert (await one.schedule(late, names))[1] == ""
                events = double.of("events")
                assert {made["reason"] for made in events} == {"GpuQuota"}

    asyncio.run(go())


def test_bind_checks_the_exact_size():
    """50 % is less memory on the smaller GPU. The pod is admitted with that amount, and its bind to the larger GPU is
    refused.
    """

    async def go():
        async with world(nodes=1, gpus=1) as (double, one, _names):
            small = (gpu("GPU-small", memory=8000),)
            from .test_service import node_object

            double.put("/api/v1/nodes/small", node_object("small", small))
            double.put(quota_path(), quota_object({MEM: "4000"}))
            await one.until(lambda: "small" in one.ledger.nodes and list(one.extender.quotas.namespaces))
            half = pod_object("half")
            limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "50"}
            half["spec"]["containers"][0]["resources"] = {"limits": limits}
            assert (await admission(one, half))[0]
            stored = double.put(pod_path("half"), half)
            assert "8080 asked for" in await one.bind(stored, "n0")
            assert one.ledger.held("uid-half") is None
            assert await one.bind(stored, "small") == ""

    asyncio.run(go())


def test_not_ready_while_quotas_cannot_be_listed():
    async def go():
        async with world(nodes=1, wait=False) as (double, one, _names):
            double.fault = lambda _method, path: 403 if "resourcequotas" in path else None
            async with replica(double, wait=False) as two:
                await two.until(lambda: two.cluster.quotas.fault)
                status, text = await two.get("/readyz")
                assert status == 503 and "resourcequotas" in text
                assert "being listed" in await two.bind(pod_object("a"), "n0")
            assert one is not None

    asyncio.run(go())
