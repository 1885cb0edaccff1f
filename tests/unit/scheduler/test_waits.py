# SPDX-License-Identifier: Apache-2.0
"""Tests the events on pods that wait for GPUs: their text, their frequency, and which other pods they may name."""

from __future__ import annotations

import asyncio

import pytest
from vgpu_plugin._shared.pods.annotations import APP, Device, Part
from vgpu_scheduler import waits as waits_module
from vgpu_scheduler import wire
from vgpu_scheduler.api import ApiError
from vgpu_scheduler.ledger import Ledger
from vgpu_scheduler.waits import AGAIN, CHANGED, WaitingPods, Waits

from .samples import ask as one_ask
from .samples import node, pod_ask
from .test_quota import MEM, quota_object, quota_path
from .test_service import node_object, pod_object, pod_path, world


class Told:
    def __init__(self):
        self.events = []
        self.faults = []

    async def event(self, pod, reason, message):
        for fault in self.faults:
            raise fault
        self.events.append((pod["name"], reason, message))


def story(go):
    async def run():
        clock, told, ledger = [0.0], Told(), Ledger()
        ledger.set_node("n0", node("n0", 1))
        ledger.set_node("n1", node("n1", 1))
        await go(clock, told, ledger, WaitingPods(told, ledger, lambda: clock[0]))

    asyncio.run(run())


def about(name, space="default"):
    return {"namespace": space, "name": name, "uid": f"uid-{name}"}


def hold(ledger, name, node_name, memory, space="default"):
    ledger.hold(
        f"uid-{name}", f"{space}/{name}", node_name, [Part("m", APP, (Device(f"GPU-{node_name}-0", memory, 0),))]
    )


def test_event_counts_nodes_by_reason():
    async def go(_clock, told, ledger, waiting):
        hold(ledger, "big", "n0", 12000)
        hold(ledger, "other", "n1", 10000, space="secret")
        ledger.set_node("n2", node("n2", 1, memory=4000))
        waiting.add(Waits(about("a"), pod_ask(one_ask(8000)), ["n0", "n1", "n2"], ""))
        await waiting.tell()
        ((name, reason, text),) = told.events
        assert (name, reason) == ("a", "GpusNotFree")
        assert text.startswith("0 of 3 nodes have room: 2 not a GPU with 8000 MiB free (n0, n1); ")
        assert "1 not a GPU large enough for 8000 MiB (n2)" in text
        # The smallest pod whose end would help is in another namespace, so the event says its size but not its name.
        assert (
            text.endswith("It would fit on n1 once a pod of another namespace (10000 MiB) ends")
            and "secret" not in text
        )
        ledger.release("uid-other")
        hold(ledger, "other", "n1", 13000, space="secret")
        waiting.add(Waits(about("b"), pod_ask(one_ask(8000)), ["n0", "n1"], ""))
        await waiting.tell()
        assert told.events[-1][2].endswith("It would fit on n0 once default/big (12000 MiB) ends")

    story(go)


# columns: the request of a pod; expected words of the event on it
HELPS = [
    (pod_ask(one_ask(90000)), "The end of other pods does not help: request less or other GPUs, or add a node"),
    (pod_ask(one_ask(1000, gpus=2)), "2 fewer than 2 GPUs (n0, n1)"),
    (pod_ask(one_ask(1000), use_models=("a100",)), "2 not a GPU that the pod's annotations accept (n0, n1)"),
]


@pytest.mark.parametrize(("asked", "words"), HELPS)
def test_event_names_what_would_help(asked, words):
    async def go(_clock, told, _ledger, waiting):
        waiting.add(Waits(about("a"), asked, ["n0", "n1"], ""))
        await waiting.tell()
        assert words in told.events[0][2]

    story(go)


def test_events_are_rare_while_their_reasons_stay_equal():
    """The first event comes at once. An event with new reasons follows after a minute, events with equal reasons are
    rare, and a deleted pod gets none.
    """

    async def go(clock, told, ledger, waiting):
        for name in ("n0", "n1"):
            hold(ledger, f"on-{name}", name, 12000)
        waits = Waits(about("a"), pod_ask(one_ask(8000)), ["n0", "n1"], "")

        async def again(seconds):
            clock[0] += seconds
            waiting.add(waits)
            before = len(told.events)
            if waiting._due:
                await waiting.tell()
            return len(told.events) - before

        assert await again(0) == 1
        assert [await again(1) for _each in range(30)] == [0] * 30
        assert await again(CHANGED) == 0, "expected no event for equal reasons"
        ledger.drop_node("n1")
        ledger.set_node("n1", node("n1", 1, memory=4000))
        assert await again(CHANGED) == 1
        assert await again(CHANGED) == 0 and await again(AGAIN) == 1
        clock[0] += 2 * AGAIN
        waiting.add(waits)
        waiting.forget("uid-a")
        assert not waiting._due and not waiting._reported

    story(go)


def test_failed_and_too_many_events_are_dropped(monkeypatch):
    monkeypatch.setattr(waits_module, "MAX_DUE", 3)
    monkeypatch.setattr(waits_module, "MAX_REPORTED", 2)

    async def go(_clock, told, _ledger, waiting):
        told.faults = [ApiError("503", 503)]
        for n in range(10):
            waiting.add(Waits(about(f"p{n}"), pod_ask(one_ask(90000)), ["n0"], ""))
        waiting.add(Waits({"namespace": "default", "name": "x", "uid": ""}, pod_ask(), ["n0"], ""))
        assert len(waiting._due) == 3
        for _each in range(3):
            await waiting.tell()
        assert told.events == [] and list(waiting._reported) == ["uid-p1", "uid-p2"] and waiting.events == 0

    story(go)


def test_only_pending_pods_get_an_event_over_http(monkeypatch):
    monkeypatch.setattr(waits_module, "BETWEEN", 0.01)

    async def go():
        async with world(nodes=1, gpus=1) as (double, one, names):
            task = asyncio.create_task(one.extender.waiting.run())
            first = double.put(pod_path("first"), pod_object("first", memory=12000))
            assert (await one.schedule(first, names))[1] == ""
            waits = double.put(pod_path("waits"), pod_object("waits", memory=8000))
            for _each in range(5):
                assert (await one.schedule(waits, names))[0] is None
            await one.until(lambda: double.of("events"))
            await asyncio.sleep(0.2)
            (event,) = double.of("events")
            assert event["reason"] == "GpusNotFree" and event["type"] == "Warning"
            assert event["involvedObject"]["uid"] == "uid-waits" and event["involvedObject"]["name"] == "waits"
            assert "It would fit on n0 once default/first (12000 MiB) ends" in event["message"]
            assert "vgpu_scheduler_waiting_events_total 1" in (await one.get("/metrics"))[1]
            # A pod may also wait because of a quota; both the event and /explain name the quota.
            double.put(quota_path(), quota_object({MEM: "12500"}))
            await one.until(lambda: list(one.extender.quotas.namespaces))
            small = double.put(pod_path("small"), pod_object("small", memory=700))
            assert (await one.schedule(small, names))[0] is None
            await one.until(lambda: len(double.of("events")) == 2)
            assert "12000 of 12500 in use" in double.of("events")[-1]["message"]
            text = (await one.get("/explain/default/small"))[1]
            assert "12000 of 12500 in use" in text and "it does not wait for GPUs" not in text
            # A pod that is bound or deleted is removed from the program's memory.
            double.remove(pod_path("waits"))
            await one.until(lambda: "uid-waits" not in one.extender.waiting._reported)
            task.cancel()

    asyncio.run(go())


def test_fitting_pod_gets_no_event():
    async def go():
        async with world(nodes=1, gpus=1) as (double, one, names):
            double.put("/api/v1/nodes/n9", node_object("n9"))
            pod = double.put(pod_path("a"), pod_object("a"))
            assert (await one.schedule(pod, [*names, "n9"]))[1] == ""
            assert not one.extender.waiting._due and not double.of("events")
            args = wire.ExtenderArgs(pod, names)
            assert one.extender.filter(args).NodeNames == names

    asyncio.run(go())
