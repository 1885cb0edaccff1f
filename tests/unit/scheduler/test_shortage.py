# SPDX-License-Identifier: Apache-2.0
"""Tests the preemption (the eviction of pods of lower priority) if a GPU has free slots (a slot is the place for one
container) and only its memory is short: which pods are evicted and which stay.
"""

from __future__ import annotations

import asyncio

import pytest
from doubles.kube_api import KubeApi
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods.annotations import APP, Device, Part
from vgpu_plugin.node.kube_access import Access
from vgpu_scheduler import shortage, wire
from vgpu_scheduler.api import Api
from vgpu_scheduler.cluster import Cluster
from vgpu_scheduler.extender import Extender
from vgpu_scheduler.ledger import Ledger

from .samples import gpu
from .test_cluster import item
from .test_service import pod_object, pod_path

CARD = 10000
EVICTION = "/eviction"


class Stage:
    """The program with an API server over HTTP, but without its endless loops, so that a test runs each step. ``told``
    makes the program read all pods of the API server.
    """

    def __init__(self, double, api):
        self.double, self.may = double, ""
        self.extender = Extender(Ledger(), api, may_bind=self._may)
        self.cluster = Cluster(api, self.extender, "vgpu-scheduler")
        self.ledger, self.shortages = self.extender.ledger, self.extender.shortages

    async def _may(self):
        return self.may

    def node(self, name, gpus=1, slots=10):
        self.ledger.set_node(name, [gpu(f"{name}-{n}", CARD, slots=slots) for n in range(gpus)])

    def told(self):
        for one in self.double.of("pods"):
            self.cluster.pod(False, item(one))

    def bound(self, name, node, mib, priority=0, card=0, ending=False, app=""):
        """``app``: the pod's label; a pod with this label is ready, and a disruption budget may select it."""
        made = pod_object(name, nodeName=node, priority=priority)
        if app:
            made["metadata"]["labels"] = {"app": app}
            made["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        plan = pod_annotations.write_plan([Part("main", APP, (Device(f"{node}-{card}", mib, 0),))])
        made["metadata"]["annotations"][pod_annotations.PLAN] = plan
        if ending:
            made["metadata"]["deletionTimestamp"] = "2026-11-22T00:00:00Z"
        self.double.put(pod_path(name), made)
        self.told()

    def budget(self, name, app, allowed):
        status = {"disruptionsAllowed": allowed}
        spec = {"selector": {"matchLabels": {"app": app}}}
        made = {"metadata": {"name": name, "namespace": "default"}, "spec": spec, "status": status}
        self.double.put(f"/apis/policy/v1/namespaces/default/poddisruptionbudgets/{name}", made)

    def waits(self, name, mib, priority=5, **spec):
        self.double.put(pod_path(name), pod_object(name, mib, priority=priority, **spec))
        self.told()

    def tries(self, name):
        """Sends the filter call of a kube-scheduler. Returns the nodes with enough memory."""
        pod = self.double.objects[pod_path(name)]
        return self.extender.filter(wire.ExtenderArgs(pod, list(self.ledger.nodes))).NodeNames

    def ending(self):
        return {one["metadata"]["name"] for one in self.double.of("pods") if "deletionTimestamp" in one["metadata"]}

    async def helps(self, name):
        """Schedules a pod and runs the preemption for it. Returns (names of evicted pods, nominated node)."""
        before = self.ending()
        assert self.tries(name) == []
        await self.shortages.help()
        self.told()
        gone = self.ending() - before
        return sorted(gone), self.double.objects[pod_path(name)]["status"].get("nominatedNodeName") or ""


def on_stage(test):
    """Runs a test coroutine with a Stage."""

    async def go(*args):
        async with KubeApi() as double, Api(Access(double.url), timeout=60.0) as api:
            double.graceful = True
            await test(Stage(double, api), *args)

    def run(*args, **named):
        asyncio.run(go(*args, *named.values()))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


# columns: bound pods (name, GPU, MiB, priority) on two GPUs of 10000 MiB, MiB that a pod of priority 5 requests;
# expected victims (None if no pod is evicted)
TABLE = [
    ([("a", 0, 9000, 0), ("b", 1, 9000, 1)], 9500, ["a"]),
    ([("a", 0, 9000, 2), ("b", 1, 9000, 1)], 9500, ["b"]),
    ([("a", 0, 4000, 0), ("b", 0, 4000, 0), ("c", 1, 9000, 0)], 9500, ["c"]),
    ([("a", 0, 4000, 0), ("b", 0, 4000, 0), ("c", 1, 9000, 1)], 9500, ["a", "b"]),
    # Only pods whose eviction is necessary are evicted, and only pods of lower priority.
    ([("a", 0, 4000, 0), ("b", 0, 4000, 0), ("c", 1, 9000, 5)], 5000, ["a"]),
    ([("a", 0, 9000, 5), ("b", 1, 9000, 9)], 9500, None),
    ([("a", 0, 4000, 0), ("b", 0, 4000, 5), ("c", 1, 9000, 5)], 7000, None),
    # The request is larger than any GPU, so no eviction would help.
    ([("a", 0, 9000, 0), ("b", 1, 9000, 0)], 10001, None),
]


@pytest.mark.parametrize(("there", "asked", "expected"), TABLE)
def test_victims_if_only_memory_is_short(there, asked, expected):
    @on_stage
    async def go(stage):
        stage.node("n", 2)
        for name, card, mib, priority in there:
            stage.bound(name, "n", mib, priority, card)
        stage.waits("p", asked)
        gone, node = await stage.helps("p")
        assert (gone, node) == ((expected, "n") if expected else ([], ""))
        assert stage.shortages.evicted == len(gone)
        # Meanwhile the memory is reserved for the pod, and no further pod may be evicted.
        if expected:
            stage.waits("low", 100, 0)
            assert stage.tries("low") == []
            assert await stage.helps("p") == ([], "n")
            for name in expected:
                stage.double.remove(pod_path(name))
                stage.cluster.pod(True, item(pod_object(name)))
            assert stage.tries("p") == ["n"]

    go()


def test_victim_gets_the_kube_schedulers_condition():
    """If a pod has this condition, the kube-scheduler waits for its end and keeps the nomination. An event informs the
    owner of the victim.
    """

    @on_stage
    async def go(stage):
        stage.node("n")
        stage.bound("a", "n", 9000)
        stage.waits("p", 9000)
        assert await stage.helps("p") == (["a"], "n")
        (condition,) = stage.double.objects[pod_path("a")]["status"]["conditions"]
        assert (condition["type"], condition["status"]) == ("DisruptionTarget", "True")
        assert condition["reason"] == "PreemptionByScheduler"
        (event,) = [one for one in stage.double.of("events") if one["reason"] == "Preempted"]
        assert event["involvedObject"]["name"] == "a" and "uid-p" in event["message"]
        assert stage.double.objects[pod_path("p")]["status"]["phase"] == "Pending", (
            "the rest of the pod's status is unchanged"
        )

    go()


def test_node_with_the_lowest_priority_victims_is_chosen():
    @on_stage
    async def go(stage):
        for name, priority in (("a", 3), ("b", 1), ("c", 2)):
            stage.node(name)
            stage.bound(f"on-{name}", name, 9000, priority)
        stage.waits("p", 9000)
        assert await stage.helps("p") == (["on-b"], "b")

    go()


@pytest.mark.parametrize("chunk", [1, 64])
def test_ending_pods_are_not_evicted_again(chunk, monkeypatch):
    monkeypatch.setattr(shortage, "MAX_NODES", chunk)

    @on_stage
    async def go(stage):
        for name in ("a", "b"):
            stage.node(name)
        stage.bound("on-a", "a", 9000, 0)
        stage.bound("on-b", "b", 9000, 3, ending=True)
        stage.waits("p", 9000)
        assert await stage.helps("p") == ([], "b")
        # A second pod must get the other node.
        stage.waits("q", 9000)
        assert await stage.helps("q") == (["on-a"], "a")

    go()


def refuses(*names, status=429):
    """Makes the API server refuse the eviction of these pods, as with a PodDisruptionBudget."""
    return lambda method, path: status if any(path.endswith(f"/{name}{EVICTION}") for name in names) else None


# 429: a PodDisruptionBudget; 500: two of them; 400, 403 and 422: admission, which may also refuse any dry run
@pytest.mark.parametrize("status", [429, 500, 400, 403, 422])
def test_disruption_budget_is_respected(status):
    @on_stage
    async def go(stage):
        stage.node("n", 2)
        stage.bound("a", "n", 9000, 0)
        stage.bound("b", "n", 9000, 1, card=1)
        stage.waits("p", 9000)
        stage.double.fault = refuses("a", status=status)
        assert await stage.helps("p") == (["b"], "n")
        stage.waits("q", 9000)
        stage.double.fault = refuses("a", "b", status=status)
        assert await stage.helps("q") == ([], "")

    go()


def test_budget_for_one_of_two_victims_evicts_none():
    """Evictions are tried as a dry run first. So if the second eviction is refused, no pod is evicted."""

    @on_stage
    async def go(stage):
        stage.node("n")
        for name in ("a", "b"):
            stage.bound(name, "n", 4000)
        stage.waits("p", 9000)
        stage.double.fault = refuses("b")
        assert await stage.helps("p") == ([], "")
        stage.double.fault = None
        stage.shortages.forget("uid-p")
        assert await stage.helps("p") == (["a", "b"], "n")

    go()


# columns: disruption budgets (label of their pods, allowed disruptions), bound pods (name, GPU of 10000 MiB, MiB,
# label; the priority rises from pod to pod), expected victims of a pod that requests 9500 MiB
BUDGETS = [
    ([("web", 2)], [("a", 0, 4000, "web"), ("b", 0, 4000, "web"), ("c", 1, 9000, "web")], ["a", "b"]),
    # The dry run of each eviction succeeds, because a dry run does not count as a disruption.
    ([("web", 1)], [("a", 0, 4000, "web"), ("b", 0, 4000, "web")], []),
    ([("web", 1)], [("a", 0, 4000, "web"), ("b", 0, 4000, "web"), ("c", 1, 9000, "db")], ["c"]),
    ([("web", 1), ("db", 1)], [("a", 0, 4000, "web"), ("b", 0, 4000, "db")], ["a", "b"]),
    # A pod without the label does not count against the budget.
    ([("web", 1)], [("a", 0, 4000, "web"), ("b", 0, 4000, "")], ["a", "b"]),
    # The API server refuses to evict a pod with two budgets.
    ([("web", 1), ("web", 1)], [("a", 0, 9000, "web"), ("b", 1, 9000, "db")], ["b"]),
]


@pytest.mark.parametrize(("budgets", "there", "expected"), BUDGETS)
def test_budgets_are_counted_before_the_first_eviction(budgets, there, expected):
    @on_stage
    async def go(stage):
        stage.node("n", 1 + max(card for _name, card, *_more in there))
        for n, (app, allowed) in enumerate(budgets):
            stage.budget(f"of-{n}", app, allowed)
        for n, (name, card, mib, app) in enumerate(there):
            stage.bound(name, "n", mib, n, card, app=app)
        stage.waits("p", 9500)
        assert await stage.helps("p") == (expected, "n" if expected else "")

    go()


def pairs(first, last):
    """Returns two pods of the label web on each of these GPUs."""
    return [(f"w{card}{each}", card, 4000, "web") for card in range(first, last) for each in "ab"]


# columns: bound pods as in BUDGETS, on more GPUs than the program makes choices of victims (db has the higher
# priority); allowed disruptions of the label web; expected victims
MANY = [
    ([*pairs(0, 8), ("d", 8, 9000, "db")], 1, ["d"]),
    # One pod of the budget may still go together with another pod.
    ([*pairs(0, 8), ("wx", 8, 4000, "web"), ("d", 8, 4000, "db")], 1, ["d", "wx"]),
    ([*pairs(0, 8), ("d", 8, 9000, "db")], 0, ["d"]),
    ([*((f"w{card}", card, 9000, "web") for card in range(8)), ("d", 8, 9000, "db")], 0, ["d"]),
    (pairs(0, 8), 1, []),
]


@pytest.mark.parametrize(("there", "allowed", "expected"), MANY)
def test_budget_of_many_pods_does_not_use_up_the_choices(there, allowed, expected):
    @on_stage
    async def go(stage):
        stage.node("n", 1 + max(card for _name, card, *_more in there))
        stage.budget("web", "web", allowed)
        for name, card, mib, app in there:
            stage.bound(name, "n", mib, int(app == "db"), card, app=app)
        stage.waits("p", 9500)
        assert await stage.helps("p") == (expected, "n" if expected else "")

    go()


@pytest.mark.parametrize("end", ["gone", "another"])
def test_victim_that_is_already_gone_does_not_count(end):
    """The watch may be late: a victim is gone, or another pod has its name. The others are evicted."""

    @on_stage
    async def go(stage):
        stage.node("n")
        stage.budget("web", "web", 1)
        for name in ("a", "b"):
            stage.bound(name, "n", 4000, app="web")
        stage.waits("p", 9500)
        assert stage.tries("p") == []
        if end == "gone":
            stage.double.remove(pod_path("a"))
        else:
            with stage.double.edit(pod_path("a")) as found:
                found["metadata"]["uid"] = "another"
        await stage.shortages.help()
        assert stage.ending() == {"b"}

    go()


def test_budgets_that_may_not_be_read_are_unknown(caplog):
    """The API server still checks each eviction."""

    @on_stage
    async def go(stage):
        stage.double.fault = lambda _method, path: 403 if path.endswith("/poddisruptionbudgets") else None
        for node in ("n", "m"):
            stage.node(node)
            for n in range(2):
                stage.bound(f"{node}{n}", node, 4000)
            stage.waits(f"on-{node}", 9500)
            assert await stage.helps(f"on-{node}") == ([f"{node}0", f"{node}1"], node)

    go()
    (warning,) = [one for one in caplog.messages if "poddisruptionbudgets" in one]
    assert "403" in warning and "grant" in warning


NOT = ["never", "quota", "no-leader", "no-lower", "helped", "bound"]


@pytest.mark.parametrize("why", NOT)
def test_no_pod_is_evicted_in_these_cases(why):
    @on_stage
    async def go(stage):
        stage.node("n")
        stage.bound("a", "n", 9000, 5 if why == "no-lower" else 0)
        stage.waits("p", 9000, **({"preemptionPolicy": "Never"} if why == "never" else {}))
        if why == "quota":
            hard = {"limits.nvidia.com/gpumem": "100"}
            quota = wire.Quota(wire.Meta("q", "default"), wire.QuotaSpec(hard))
            stage.extender.quotas.enter(False, quota)
        if why == "no-leader":
            stage.may = "another replica binds"
        assert stage.tries("p") == []
        if why == "helped":
            # The other node has too few free slots, so the kube-scheduler's own preemption comes first, and the
            # preemption under test has nothing to do.
            stage.node("m", slots=1)
            stage.bound("b", "m", 1000)
            picked = {"m": wire.MetaVictims([wire.MetaPod("uid-b")])}
            pod = stage.double.objects[pod_path("p")]
            assert stage.extender.preempt(wire.PreemptArgs(pod, picked)).NodeNameToMetaVictims == picked
        if why == "bound":
            stage.bound("p", "n", 100)
        await stage.shortages.help()
        assert not stage.double.count("POST", EVICTION) and not stage.double.count("PATCH", "/status")

    go()


def test_pods_per_round_are_limited(monkeypatch):
    """The number of pods in one round is limited. A pod that no eviction helps is tried again later."""
    monkeypatch.setattr(shortage, "MAX_DUE", 2)
    now = [0.0]

    @on_stage
    async def go(stage):
        stage.shortages._now = lambda: now[0]
        stage.node("n", 2)
        stage.bound("a", "n", 9000)
        stage.bound("b", "n", 9000, 9, card=1)
        for name in ("p", "q", "r"):
            stage.waits(name, 10001 if name == "r" else 9500, 0)
            stage.tries(name)
        assert not stage.shortages._due, "no pod has a lower priority"
        stage.bound("c", "n", 500, -1)
        for name in ("p", "q", "r"):
            stage.tries(name)
        assert list(stage.shortages._due) == ["uid-p", "uid-q"]
        await stage.shortages.help()
        await stage.shortages.help()
        assert not stage.double.count("POST", EVICTION)
        stage.tries("p")
        assert not stage.shortages._due
        now[0] = shortage.AGAIN
        stage.tries("p")
        assert list(stage.shortages._due) == ["uid-p"]

    go()


def test_loop_waits_for_the_kube_scheduler(monkeypatch):
    monkeypatch.setattr(shortage, "DELAY", 0.05)

    @on_stage
    async def go(stage):
        stage.node("n")
        stage.bound("a", "n", 9000)
        stage.waits("p", 9000)
        task = asyncio.create_task(stage.shortages.run())
        assert stage.tries("p") == []
        for _each in range(600):
            if stage.shortages.evicted:
                break
            await asyncio.sleep(0.05)
        assert stage.shortages.evicted == 1
        task.cancel()

    go()


@pytest.mark.parametrize("end", ["gone", "bound"])
def test_pod_that_ends_during_the_eviction_calls(end):
    """If the pod ends during the API calls, no pod is evicted and no memory is reserved for it."""

    @on_stage
    async def go(stage):
        stage.node("n")
        stage.bound("a", "n", 9000)
        stage.waits("p", 9000)

        def meanwhile(_method, path):
            if path.endswith(EVICTION) and pod_path("p") in stage.double.objects:
                if end == "gone":
                    stage.double.remove(pod_path("p"))
                else:
                    stage.ledger.hold("uid-p", "default/p", "n", [Part("main", APP, (Device("n-0", 100, 0),))])

        stage.double.fault = meanwhile
        assert stage.tries("p") == []
        await stage.shortages.help()
        assert not stage.ending() and stage.shortages.evicted == 0
        stage.waits("low", 500, 0)
        assert stage.tries("low") == ["n"]

    go()


# The request that fails, and its status.
FAULTS = [("/p/status", 500), (f"/a{EVICTION}", 401), (f"/a{EVICTION}", 503), (f"/a{EVICTION}", 504)]


@pytest.mark.parametrize(("end", "status"), FAULTS)
def test_failing_api_server_is_retried_without_evictions(end, status):
    """Such a status says nothing about the cheapest victim, so a pod of higher priority must not be evicted instead."""

    @on_stage
    async def go(stage):
        stage.node("n", 2)
        stage.bound("a", "n", 9000)
        stage.bound("b", "n", 9000, 1, card=1)
        stage.waits("p", 9000)
        stage.double.fault = lambda method, path: status if path.endswith(end) else None
        assert await stage.helps("p") == ([], "")
        stage.double.fault = None
        stage.told()
        assert await stage.helps("p") == (["a"], "n")

    go()
