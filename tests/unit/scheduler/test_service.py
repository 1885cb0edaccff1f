# SPDX-License-Identifier: Apache-2.0
"""Tests the scheduler's extender (the HTTP service that a kube-scheduler calls) with an in-memory API server: binds,
restarts, lost events, several replicas, and invalid bodies. Its ledger records which pod holds how much of which GPU.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from contextlib import asynccontextmanager

import aiohttp
import pytest
from doubles.kube_api import KubeApi
from prometheus_client.parser import text_string_to_metric_families
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods.annotations import Use
from vgpu_plugin.node.kube_access import Access
from vgpu_scheduler import api as api_module
from vgpu_scheduler import cluster as cluster_module
from vgpu_scheduler import main as main_module
from vgpu_scheduler import webhook
from vgpu_scheduler.api import Api
from vgpu_scheduler.cluster import Cluster
from vgpu_scheduler.extender import Extender
from vgpu_scheduler.leadership import Candidacy, Leadership
from vgpu_scheduler.ledger import Ledger
from vgpu_scheduler.pod_claims import PodClaims
from vgpu_scheduler.server import MAX_BODY, Service

from .samples import faults, node

SCHEDULER = "vgpu-scheduler"


def by_prometheus(text: str) -> subprocess.CompletedProcess:
    command = ["promtool", "check", "metrics"]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def node_object(name, gpus=None):
    annotations = {} if gpus is None else {pod_annotations.GPUS: pod_annotations.write_gpus(gpus)}
    return {"metadata": {"name": name, "annotations": annotations}}


def pod_object(name, memory=3000, gpus=1, **spec):
    limits = {"nvidia.com/gpu": str(gpus), "nvidia.com/gpumem": str(memory)}
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "annotations": {}},
        "spec": {
            "schedulerName": SCHEDULER,
            "containers": [{"name": "main", "resources": {"limits": limits, "requests": limits}}],
            **spec,
        },
        "status": {"phase": "Pending"},
    }


def pod_path(name):
    return f"/api/v1/namespaces/default/pods/{name}"


class Replica:
    """One replica of the program. It has the program's parts, and its extender listens on a socket."""

    def __init__(self, double, session):
        self.double, self.session = double, session

    async def verb(self, name, body):
        data = body if isinstance(body, bytes) else json.dumps(body)
        async with self.session.post(f"{self.url}/{name}", data=data) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.status == 200 else text

    async def get(self, path):
        async with self.session.get(self.url + path) as answer:
            return answer.status, await answer.text()

    async def schedule(self, pod, nodes):
        """Schedules one pod as a kube-scheduler does. Returns (node or None, error of the bind)."""
        status, found = await self.verb("filter", {"Pod": pod, "NodeNames": nodes})
        assert status == 200 and not found["Error"], found
        if not found["NodeNames"]:
            return None, str(found)
        _status, scores = await self.verb("prioritize", {"Pod": pod, "NodeNames": found["NodeNames"]})
        best = max(scores, key=lambda one: one["Score"])["Host"]
        return best, await self.bind(pod, best)

    async def bind(self, pod, name):
        meta = pod["metadata"]
        body = {"PodName": meta["name"], "PodNamespace": "default", "PodUID": meta["uid"], "Node": name}
        status, found = await self.verb("bind", body)
        assert status == 200, found
        return found["Error"]

    async def until(self, holds, seconds=60.0):
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "the condition did not become true"
            await asyncio.sleep(0.02)


@asynccontextmanager
async def replica(double, lease="", identity="one", resync=300.0, wait=True, timeout=60.0, seconds=15.0):
    # The default timeout is long, for a busy machine. Tests of hanging calls pass a shorter one.
    async with Api(Access(double.url), timeout=timeout) as api, aiohttp.ClientSession() as session:
        one = Replica(double, session)
        one.ledger = Ledger()
        one.extender = Extender(one.ledger, api)
        one.cluster = Cluster(api, one.extender, SCHEDULER, resync)
        busy = one.extender.posting
        one.leadership = Leadership(api, one.cluster, Candidacy(lease, identity, seconds), lambda: bool(busy))
        one.extender.may_bind, one.cluster.writes = one.leadership.may_bind, one.leadership.writes
        one.claims = PodClaims(api, resync)
        settings = webhook.Settings(claims=True)
        service = Service(api, one.extender, one.cluster, one.leadership, settings, one.claims)
        runner = await main_module.listen(service.extender_app(), "127.0.0.1:0", None)
        one.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        outer = await main_module.listen(service.webhook_app(), "127.0.0.1:0", None)
        one.webhook_url = f"http://127.0.0.1:{outer.addresses[0][1]}"
        task = asyncio.create_task(one.cluster.run())
        election = asyncio.create_task(one.leadership.run())
        one.election = election
        try:
            if wait:
                await one.until(lambda: one.cluster.synced)
            yield one
        finally:
            for each in (task, election):
                each.cancel()
            ends = await asyncio.gather(task, election, return_exceptions=True)
            # Without a Lease the election may already have ended; every other task must end by its cancellation.
            assert isinstance(ends[0], asyncio.CancelledError), ends[0]
            assert ends[1] is None or isinstance(ends[1], asyncio.CancelledError), ends[1]
            await runner.cleanup()
            await outer.cleanup()


@asynccontextmanager
async def world(nodes=2, gpus=2, **options):
    async with KubeApi() as double:
        names = [f"n{n}" for n in range(nodes)]
        double.nodes = {name: node(name, gpus) for name in names}
        for name in names:
            double.put(f"/api/v1/nodes/{name}", node_object(name, double.nodes[name]))
        async with replica(double, **options) as one:
            yield double, one, names


def plans(double):
    """Returns (node, plan) of each pod that is bound in the API server; the plan is the annotation with the
    pod's GPUs.
    """
    found = []
    for one in double.of("pods"):
        if one["spec"].get("nodeName"):
            found.append(
                (
                    one["spec"]["nodeName"],
                    pod_annotations.read_plan(one["metadata"]["annotations"][pod_annotations.PLAN]),
                )
            )
    return found


def test_bind_writes_plan_and_node_in_one_request():
    async def go():
        async with world() as (double, one, names):
            pod = double.put(pod_path("a"), pod_object("a"))
            calls = len(double.calls)
            where, said = await one.schedule(pod, [*names, "no-gpus"])
            assert said == "" and where in names
            ours = [call for call in double.calls[calls:] if call[0] != "GET"]
            assert ours == [("POST", pod_path("a") + "/binding")]
            stored = double.objects[pod_path("a")]
            (part,) = pod_annotations.read_plan(stored["metadata"]["annotations"][pod_annotations.PLAN])
            assert (stored["spec"]["nodeName"], part.container, part.devices[0].memory_mib) == (where, "main", 3000)

    asyncio.run(go())


def test_concurrent_pods_never_oversell():
    async def go():
        async with world(nodes=3, gpus=2) as (double, one, names):
            # Each GPU has room for five pods, so there is room for 30. 45 pods are scheduled at the same time, all to
            # the best node.
            pods = [double.put(pod_path(f"p{n}"), pod_object(f"p{n}")) for n in range(45)]
            answers = await asyncio.gather(*(one.schedule(pod, names) for pod in pods))
            for _round in range(4):
                again = [n for n, (where, said) in enumerate(answers) if where and said]
                for n in again:
                    answers[n] = await one.schedule(pods[n], names)
            assert sum(said == "" for _where, said in answers) == 30
            assert faults(double.nodes, plans(double)) == [] and one.ledger.oversold() == []
            waits = [said for where, said in answers if where is None]
            assert len(waits) == 15 and all("not a GPU with 3000 MiB free" in said for said in waits)

    asyncio.run(go())


def test_ledger_is_rebuilt_from_pods_and_nodes():
    async def go():
        async with world() as (double, one, names):
            for n in range(6):
                pod = double.put(pod_path(f"p{n}"), pod_object(f"p{n}"))
                assert (await one.schedule(pod, names))[1] == ""
            double.page = 2
            async with replica(double) as other:
                assert {name: other.ledger.use(name) for name in names} == {
                    name: one.ledger.use(name) for name in names
                }
                double.remove(pod_path("p0"))
                done = dict(double.objects[pod_path("p1")], status={"phase": "Succeeded"})
                double.put(pod_path("p1"), done)
                for each in (one, other):
                    await each.until(lambda each=each: len(list(each.ledger.held_by())) == 4)

    asyncio.run(go())


BINDS = [
    # columns: fault of the API server during the bind; expected: whether the pod is bound, whether GPUs are reserved
    # for it right after the bind, whether they still are once the outcome of the bind is known
    (lambda _m, path: 409 if path.endswith("/binding") else None, False, True, False),
    (lambda _m, path: 404 if path.endswith("/binding") else None, False, False, False),
    (lambda _m, path: 503 if path.endswith("/binding") else None, False, True, False),
    (lambda _m, path: "hang" if path.endswith("/binding") else None, False, True, False),
    (lambda _m, path: "done" if path.endswith("/binding") else None, True, True, True),
]


@pytest.mark.parametrize(("fault", "bound", "holds", "finally_holds"), BINDS)
def test_failed_bind_keeps_or_releases_its_reservation(fault, bound, holds, finally_holds, monkeypatch):
    monkeypatch.setattr(cluster_module, "GIVE_UP", 1.5)

    async def go():
        async with world(timeout=2.0) as (double, one, names):
            pod = double.put(pod_path("a"), pod_object("a"))
            double.silent, double.fault = True, fault
            _where, said = await one.schedule(pod, names)
            assert said
            assert bool(double.objects[pod_path("a")]["spec"].get("nodeName")) == bound
            assert (one.ledger.held("uid-a") is not None) == holds
            double.fault = None
            await one.until(lambda: not one.extender.uncertain)
            assert (one.ledger.held("uid-a") is not None) == finally_holds
            if not bound:
                assert (await one.schedule(pod, names))[1] == ""

    asyncio.run(go())


def test_retried_bind_after_a_lost_response_succeeds():
    async def go():
        async with world(timeout=2.0) as (double, one, names):
            pod = double.put(pod_path("a"), pod_object("a"))
            double.silent, double.fault = True, lambda _m, path: "done" if path.endswith("/binding") else None
            where, said = await one.schedule(pod, names)
            assert said
            double.fault = None
            assert "already assigned" in await one.bind(pod, where)
            assert one.ledger.held("uid-a") is not None
            await one.until(lambda: not one.extender.uncertain)
            assert one.ledger.held("uid-a") is not None

    asyncio.run(go())


def test_next_list_repairs_lost_events():
    async def go():
        async with world(resync=1.5) as (double, one, names):
            for name in ("a", "b"):
                pod = double.put(pod_path(name), pod_object(name))
                assert (await one.schedule(pod, names))[1] == ""
            double.silent = True
            double.remove(pod_path("a"))
            stranger = dict(double.objects[pod_path("b")])
            stranger["metadata"] = dict(stranger["metadata"], name="c", uid="uid-c")
            double.put(pod_path("c"), stranger)
            await one.until(lambda: one.ledger.held("uid-a") is None and one.ledger.held("uid-c") is not None)
            assert one.cluster.drift["surplus"] == 1 and one.cluster.drift["missing"] == 1
            assert one.ledger.held("uid-b") is not None

    asyncio.run(go())


def test_too_old_version_causes_a_new_list():
    async def go():
        async with world(resync=300.0) as (double, one, names):
            double.silent = True
            pod = double.put(pod_path("a"), pod_object("a"))
            assert (await one.schedule(pod, names))[1] == ""
            double.remove(pod_path("a"))
            double.compacted, double.silent = double.version + 1, False
            lists = double.count("GET", "/api/v1/pods")
            one.cluster.pods._again.set()
            await one.until(lambda: one.ledger.held("uid-a") is None)
            double.compacted = 0
            await one.until(lambda: double.count("GET", "/api/v1/pods") > lists + 1)

    asyncio.run(go())


def test_deleted_plan_is_restored():
    async def go():
        async with world() as (double, one, names):
            pod = double.put(pod_path("a"), pod_object("a"))
            assert (await one.schedule(pod, names))[1] == ""
            stored = json.loads(json.dumps(double.objects[pod_path("a")]))
            plan = stored["metadata"]["annotations"].pop(pod_annotations.PLAN)
            double.put(pod_path("a"), stored)
            await one.until(
                lambda: double.objects[pod_path("a")]["metadata"]["annotations"].get(pod_annotations.PLAN) == plan
            )
            assert one.cluster.drift["plan_deleted"] == 1 and one.ledger.held("uid-a") is not None

    asyncio.run(go())


def one_part(memory, uuid="GPU-n0-0"):
    devices = (pod_annotations.Device(uuid, memory, 0),)
    return pod_annotations.write_plan([pod_annotations.Part("main", pod_annotations.APP, devices)])


# columns: name of the case, the pod's annotations after another user has changed the plan
CHANGED_PLANS = [
    ("smaller", {pod_annotations.PLAN: one_part(1)}),
    ("larger than any GPU", {pod_annotations.PLAN: one_part(1 << 24)}),
    ("another GPU", {pod_annotations.PLAN: one_part(3000, "GPU-other")}),
    ("empty", {pod_annotations.PLAN: ""}),
]


@pytest.mark.parametrize("changed", [one for _name, one in CHANGED_PLANS], ids=[name for name, _one in CHANGED_PLANS])
def test_changed_plan_is_ignored_and_restored(changed):
    async def go():
        async with world() as (double, one, names):
            pod = double.put(pod_path("a"), pod_object("a"))
            assert (await one.schedule(pod, names))[1] == ""
            await one.until(lambda: "uid-a" in one.cluster.confirmed)
            stored = json.loads(json.dumps(double.objects[pod_path("a")]))
            plan, held = stored["metadata"]["annotations"][pod_annotations.PLAN], one.ledger.held("uid-a")
            stored["metadata"]["annotations"].update(changed)
            double.put(pod_path("a"), stored)
            await one.until(
                lambda: double.objects[pod_path("a")]["metadata"]["annotations"].get(pod_annotations.PLAN) == plan
            )
            assert one.ledger.held("uid-a") == held
            assert sum(one.cluster.drift[kind] for kind in ("plan_changed", "plan_deleted")) == 1

    asyncio.run(go())


def test_kubelets_choice_remains_after_its_annotation_is_deleted():
    async def go():
        async with world() as (double, one, names):
            pod = double.put(pod_path("a"), pod_object("a"))
            assert (await one.schedule(pod, names))[1] == ""
            stored = json.loads(json.dumps(double.objects[pod_path("a")]))
            given = one_part(2000, one.ledger.held("uid-a").uses[0][0])
            stored["metadata"]["annotations"][pod_annotations.GIVEN] = given
            double.put(pod_path("a"), stored)
            await one.until(lambda: one.ledger.held("uid-a").plan == given)
            del stored["metadata"]["annotations"][pod_annotations.GIVEN]
            double.put(pod_path("a"), stored)
            await one.until(
                lambda: double.objects[pod_path("a")]["metadata"]["annotations"].get(pod_annotations.PLAN) == given
            )
            assert one.ledger.held("uid-a").plan == given

    asyncio.run(go())


def test_ledger_follows_the_kubelets_choice():
    async def go():
        async with world(nodes=1) as (double, one, names):
            pod = double.put(pod_path("a"), pod_object("a"))
            assert (await one.schedule(pod, names))[1] == ""
            stored = json.loads(json.dumps(double.objects[pod_path("a")]))
            annotations = stored["metadata"]["annotations"]
            (planned,) = [uuid for uuid, use in one.ledger.use("n0").items() if use.slots]
            (other,) = {"GPU-n0-0", "GPU-n0-1"} - {planned}
            annotations[pod_annotations.GIVEN] = annotations[pod_annotations.PLAN].replace(planned, other)
            double.put(pod_path("a"), stored)
            await one.until(lambda: one.ledger.use("n0")[other] == Use(3000, 0, 1))
            assert one.ledger.use("n0")[planned] == Use(0, 0, 0)

    asyncio.run(go())


def test_ledger_follows_removed_and_returning_nodes():
    async def go():
        async with world() as (double, one, names):
            pod = double.put(pod_path("a"), pod_object("a"))
            where, said = await one.schedule(pod, names)
            before = one.ledger.use(where)
            double.remove(f"/api/v1/nodes/{where}")
            await one.until(lambda: where not in one.ledger.nodes)
            double.put(f"/api/v1/nodes/{where}", node_object(where, double.nodes[where]))
            await one.until(lambda: where in one.ledger.nodes)
            assert one.ledger.use(where) == before and said == ""
            for wrong, kind in ((node_object(where), "gpus_deleted"), (node_object(where), "gpus_unreadable")):
                if kind == "gpus_unreadable":
                    wrong["metadata"]["annotations"][pod_annotations.GPUS] = "{"
                double.put(f"/api/v1/nodes/{where}", wrong)
                await one.until(lambda kind=kind: one.cluster.drift[kind] > 0)
                assert one.ledger.use(where) == before

    asyncio.run(go())


def test_bind_reads_an_unknown_pod_after_a_restart():
    async def go():
        async with world() as (double, one, _names):
            pod = double.put(pod_path("a"), pod_object("a"))
            assert await one.bind(pod, "n0") == ""
            stale = json.loads(json.dumps(pod))
            stale["metadata"]["uid"] = "uid-of-before"
            assert "another pod has the name" in await one.bind(stale, "n0")
            gone = pod_object("gone")
            assert "404" in await one.bind(gone, "n0")

    asyncio.run(go())


def test_preempt_keeps_nodes_where_it_helps():
    async def go():
        async with world(nodes=2, gpus=1) as (double, one, names):
            for name, where in (("a", "n0"), ("b", "n1"), ("c", "n1")):
                pod = double.put(pod_path(name), pod_object(name, memory=8000))
                assert await one.bind(pod, where) == ""
            big = pod_object("big", memory=16000)
            victims = {"n0": {"Pods": [{"UID": "uid-a"}], "NumPDBViolations": 1}, "n1": {"Pods": [{"UID": "uid-b"}]}}
            status, found = await one.verb("preempt", {"Pod": big, "NodeNameToMetaVictims": victims})
            assert status == 200 and list(found["NodeNameToMetaVictims"]) == ["n0"]
            assert found["NodeNameToMetaVictims"]["n0"] == {"Pods": [{"UID": "uid-a"}], "NumPDBViolations": 1}
            full = {"n0": {"Pods": [double.objects[pod_path("a")]]}}
            found = (await one.verb("preempt", {"Pod": big, "NodeNameToVictims": full}))[1]
            assert found["NodeNameToMetaVictims"]["n0"]["Pods"] == [{"UID": "uid-a"}]
            assert names == ["n0", "n1"]

    asyncio.run(go())


GOOD = {"Pod": pod_object("a"), "NodeNames": ["n0"]}
# columns: the call, the body of the request; expected status and words of the response
BODIES = [
    ("filter", b"", 400, "expected JSON"),
    ("filter", json.dumps(GOOD).encode()[:-20], 400, "expected JSON"),
    ("filter", b"not json at all", 400, "expected JSON"),
    ("filter", b"[" * 1_000_000, 400, "expected JSON"),
    ("filter", b"[]", 400, "expected JSON"),
    ("filter", b'{"NodeNames": ["n0"]}', 400, "Pod"),
    ("filter", b'{"Pod": {}, "NodeNames": "n0"}', 400, "expected JSON"),
    ("filter", b"\xff\xfe\x00", 400, "expected JSON"),
    ("filter", b'"' + b"x" * (10 << 20) + b'"', 413, f"at most {MAX_BODY} bytes"),
    ("bind", b'{"PodName": 1}', 400, "expected JSON"),
    ("preempt", b"{", 400, "expected JSON"),
    ("nothing", b"{}", 404, "Not Found"),
]


def test_invalid_bodies_get_an_error_and_the_service_continues():
    async def go():
        async with world() as (_double, one, _names):
            for verb, body, status, words in BODIES:
                found, text = await one.verb(verb, body)
                assert found == status and words in text and text.count("\n") == 1, (verb, body[:40], found, text)
            assert (await one.verb("filter", GOOD))[1]["NodeNames"] == ["n0"]
            odd = [{"Pod": made, "NodeNames": ["n0"]} for made in ({}, {"spec": 1}, {"spec": {"containers": [None]}})]
            for body in odd:
                assert (await one.verb("filter", body))[0] == 200, body
            assert "nodeCacheCapable" in (await one.verb("filter", {"Pod": {}, "Nodes": {"items": []}}))[1]["Error"]

    asyncio.run(go())


def test_invalid_pod_is_refused_on_every_node():
    async def go():
        async with world() as (_double, one, names):
            wrong = pod_object("a", memory="-5")
            found = (await one.verb("filter", {"Pod": wrong, "NodeNames": names}))[1]
            assert found["NodeNames"] == [] and "found" in found["FailedAndUnresolvableNodes"]["n0"]
            scores = (await one.verb("prioritize", {"Pod": wrong, "NodeNames": names}))[1]
            assert [one["Score"] for one in scores] == [0, 0]

    asyncio.run(go())


def test_reasons_are_shown_in_metrics_and_commands(capsys):
    async def go():
        async with world(nodes=2, gpus=1) as (double, one, names):
            for name, where in (("a", "n0"), ("b", "n1")):
                pod = double.put(pod_path(name), pod_object(name, memory=9000))
                assert await one.bind(pod, where) == ""
            double.put(pod_path("waits"), pod_object("waits", memory=8000))
            double.put(pod_path("huge"), pod_object("huge", memory=90000))
            double.put(pod_path("odd"), pod_object("odd", memory="-1"))
            status, text = await one.get("/explain/default/waits")
            assert status == 200 and "0 of 2 nodes have room" in text and "it would fit on n0 once default/a" in text
            assert "2 nodes: not a GPU with 8000 MiB free (n0, n1)" in text
            text = (await one.get("/explain/default/huge"))[1]
            assert "not a GPU large enough for 90000 MiB" in text and "add a node" in text
            assert "its GPU request is invalid" in (await one.get("/explain/default/odd"))[1]
            assert "holds on node n0" in (await one.get("/explain/default/a"))[1]
            assert (await one.get("/explain/default/nobody"))[0] == 404
            address = one.url.removeprefix("http://")
            assert await asyncio.to_thread(main_module.ask, address, "waits") == 0
            assert await asyncio.to_thread(main_module.ask, address, "default/nobody") == 1
            assert await asyncio.to_thread(main_module.ask, "127.0.0.1:1", "a") == 1
            said = capsys.readouterr()
            assert "it would fit on n0" in said.out and "404" in said.err and "no scheduler listens" in said.err
            # The webhook's socket, which the API server calls, must not serve metrics of the cluster.
            async with one.session.get(f"{one.webhook_url}/metrics") as refused:
                assert refused.status == 404
            status, text = await one.get("/metrics")
            assert 'vgpu_scheduler_binds_total{outcome="bound"} 2' in text
            assert 'vgpu_scheduler_node_memory_held_bytes{node="n0"} 9437184000' in text
            assert 'vgpu_scheduler_request_duration_seconds_count{verb="bind"} 2' in text
            families = {one.name: one for one in text_string_to_metric_families(text)}
            assert families["vgpu_scheduler_request_duration_seconds"].type == "histogram"
            bounds = {each.labels.get("le") for each in families["vgpu_scheduler_request_duration_seconds"].samples}
            assert {"10.0", "+Inf"} <= bounds, "expected buckets up to the kube-scheduler's timeout"
            assert families["process_resident_memory_bytes"].samples[0].value > 0
            # promtool is in Debian's package prometheus; this part runs only if it is installed.
            if shutil.which("promtool"):
                checked = await asyncio.to_thread(by_prometheus, text)
                assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
            assert families["vgpu_scheduler_binds"].type == "counter"
            assert all(one.documentation for one in families.values())
            assert (await one.get("/readyz"))[0] == 200 and (await one.get("/healthz"))[0] == 200
            assert names == ["n0", "n1"]

    asyncio.run(go())


def test_service_is_not_ready_before_the_first_lists():
    async def go():
        async with KubeApi() as double:
            double.fault = lambda _method, _path: 403
            async with replica(double, wait=False) as one:
                await one.until(lambda: one.cluster.pods.fault)
                status, text = await one.get("/readyz")
                assert status == 503 and "403" in text
                assert "being listed" in await one.bind(pod_object("a"), "n0")
                # The response must be an error, which the kube-scheduler retries soon. It would not soon retry after
                # "no node has GPUs".
                _status, found = await one.verb("filter", {"Pod": pod_object("a"), "NodeNames": ["n0"]})
                assert "being listed" in found["Error"] and not found["FailedAndUnresolvableNodes"]
                # No pod may be evicted while the data are incomplete.
                asked = {"Pod": pod_object("a"), "NodeNameToMetaVictims": {"n0": {"Pods": [{"UID": "uid-b"}]}}}
                status, text = await one.verb("preempt", asked)
                assert status == 503 and "being listed" in text

    asyncio.run(go())


def test_call_timeout_is_shorter_than_the_remaining_lease():
    # The lease of a kube-scheduler lasts 15 s, and its holder gives up 10 s after the last renewal.
    assert api_module.TIMEOUT < 15 - 10
