# SPDX-License-Identifier: Apache-2.0
"""Tests filter calls that come before the scheduler's own watch shows that a pod has ended or a node has come: the call
waits a moment for the watch, and all calls together wait for only a small part of the time.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_scheduler import late_watch
from vgpu_scheduler.late_watch import BURST, LAG, PART, LateWatch

from .samples import node
from .test_quota import MEM, quota_object, quota_path
from .test_service import node_object, pod_object, pod_path, world

FIRST = pod_path("first")


def changed(double, **more):
    """Changes fields of the first pod's metadata, spec or status."""
    found = double.objects[FIRST]
    double.put(FIRST, {**found, **{key: {**found[key], **value} for key, value in more.items()}})


def delete(double, _one):
    double.remove(FIRST)


def end(double, _one):
    changed(double, status={"phase": "Succeeded"})


def shrink(double, _one):
    annotations = double.objects[FIRST]["metadata"]["annotations"]
    (part,) = pod_annotations.read_plan(annotations[pod_annotations.PLAN])
    smaller = part._replace(devices=(part.devices[0]._replace(memory_mib=4000),))
    changed(
        double, metadata={"annotations": {**annotations, pod_annotations.GIVEN: pod_annotations.write_plan([smaller])}}
    )


def add_node(double, _one):
    double.put("/api/v1/nodes/n1", node_object("n1", node("n1", 1)))


def add_gpu(double, _one):
    double.put("/api/v1/nodes/n0", node_object("n0", node("n0", 2)))


def withdraw(double, _one):
    changed(double, status={"nominatedNodeName": ""})


def list_again(double, one):
    """The watch misses the pod's end, and a list shows it."""
    double.silent = True
    double.remove(FIRST)
    one.cluster.pods.list_again()


# Columns: MiB of the waiting pod; limit of the namespace's quota; the change; the node that has room then. Before the
# change the first pod holds 12000 MiB of the only GPU. In the rows with nominated it is not bound, but nominated.
CHANGES = [
    (8000, "", "bound", delete, "n0"),
    (8000, "", "bound", end, "n0"),
    (8000, "", "bound", shrink, "n0"),
    (8000, "", "bound", list_again, "n0"),
    (8000, "", "bound", add_node, "n1"),
    (8000, "", "bound", add_gpu, "n0"),
    (8000, "", "nominated", delete, "n0"),
    (8000, "", "nominated", withdraw, "n0"),
    (3000, "13000", "bound", delete, "n0"),
    (3000, "13000", "bound", end, "n0"),
]


@pytest.mark.parametrize(("memory", "hard", "state", "change", "where"), CHANGES)
def test_call_that_comes_before_the_watch_finds_the_room(monkeypatch, memory, hard, state, change, where):
    """The filter call is sent before the change, as if the kube-scheduler had seen the change first."""
    monkeypatch.setattr(late_watch, "LAG", 60.0)

    async def go():
        async with world(nodes=1, gpus=1) as (double, one, names):
            task = asyncio.create_task(one.extender.waiting.run())
            first = double.put(FIRST, pod_object("first", memory=12000, priority=10))
            if state == "bound":
                assert (await one.schedule(first, names))[1] == ""
            else:
                changed(double, status={"nominatedNodeName": "n0"})
                await one.until(lambda: one.extender.preemption.comes("uid-first"))
            if hard:
                double.put(quota_path(), quota_object({MEM: hard}))
                await one.until(lambda: list(one.extender.quotas.namespaces))
            waits = double.put(pod_path("waits"), pod_object("waits", memory=memory))
            call = asyncio.create_task(one.verb("filter", {"Pod": waits, "NodeNames": ["n0", "n1"]}))
            await asyncio.sleep(0.3)
            assert not call.done()
            change(double, one)
            async with asyncio.timeout(30):
                assert (await call)[1]["NodeNames"] == [where]
            assert "vgpu_scheduler_late_watch_total 1" in (await one.get("/metrics"))[1]
            # The pod did not wait, so no event says so.
            assert not one.extender.waiting._due and not double.of("events")
            task.cancel()

    asyncio.run(go())


def test_pod_that_is_deleted_during_the_call_is_not_entered_again(monkeypatch):
    monkeypatch.setattr(late_watch, "LAG", 1.0)

    async def go():
        async with world(nodes=1, gpus=1) as (double, one, names):
            waits = double.put(pod_path("waits"), pod_object("waits", memory=99000))
            call = asyncio.create_task(one.verb("filter", {"Pod": waits, "NodeNames": names}))
            await asyncio.sleep(0.3)
            double.remove(pod_path("waits"))
            assert (await call)[1]["NodeNames"] == []
            extender = one.extender
            assert not extender.waiting._due and not extender.shortages._due and not extender._waiting

    asyncio.run(go())


def test_call_without_news_ends_with_the_reasons():
    async def go():
        async with world(nodes=1, gpus=1) as (double, one, names):
            for name, memory in (("first", 12000), ("other", 200)):
                held = double.put(pod_path(name), pod_object(name, memory=memory))
                assert (await one.schedule(held, names))[1] == ""
            waits = double.put(pod_path("waits"), pod_object("waits", memory=8000))
            call = asyncio.create_task(one.verb("filter", {"Pod": waits, "NodeNames": names}))
            await asyncio.sleep(0.05)
            double.remove(pod_path("other"))
            found = (await call)[1]
            assert found["NodeNames"] == [] and "not a GPU with 8000 MiB free" in found["FailedNodes"]["n0"]
            assert "uid-waits" in one.extender.waiting._due
            assert "vgpu_scheduler_late_watch_total 0" in (await one.get("/metrics"))[1]

    asyncio.run(go())


# Pods for which no news can change the result of the call.
AT_ONCE = [
    pod_object("fits"),
    {**pod_object("plain"), "spec": {"containers": [{"name": "main"}]}},
    pod_object("invalid", memory="much"),
]


@pytest.mark.parametrize("pod", AT_ONCE, ids=lambda pod: pod["metadata"]["name"])
def test_other_calls_never_wait(monkeypatch, pod):
    monkeypatch.setattr(LateWatch, "until", lambda self: pytest.fail("the call waits"))

    async def go():
        async with world(nodes=1, gpus=1) as (_double, one, names):
            status, found = await one.verb("filter", {"Pod": pod, "NodeNames": names})
            assert status == 200 and not found["Error"]

    asyncio.run(go())


class Clock:
    """A clock that only the test moves."""

    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


async def vain(watch, clock):
    """Makes one call without news. Returns the seconds that it waited."""
    until = watch.until()
    waited = until - clock.time
    if waited:
        # The clock is at the end of the wait before the timeout ends.
        asyncio.get_running_loop().call_soon(lambda: setattr(clock, "time", until))
    assert not await watch.news(until)
    return waited


@pytest.fixture
def clock(monkeypatch):
    """Returns a clock that only the test moves; a wait takes 2 ms of real time."""
    real = asyncio.timeout
    monkeypatch.setattr(late_watch.asyncio, "timeout", lambda _seconds: real(0.002))
    return Clock()


# Columns: seconds between the end of a call and the next one; seconds that each of the first calls waits.
PAUSES = [
    # The calls that follow one change: only the first waits.
    (0.0, [LAG, 0, 0, 0, 0, 0, 0, 0]),
    (0.06, [LAG, 0, 0, 0, 0, LAG, 0, 0]),
    # After a pause each call waits until BURST is used up.
    (0.35, [LAG] * 8 + [0, LAG, 0, 0, LAG]),
    (1.1, [LAG] * 20),
]


@pytest.mark.parametrize(("pause", "expected"), PAUSES)
def test_calls_wait_for_a_small_part_of_the_time(clock, pause, expected):
    async def go():
        watch = LateWatch(clock)
        found = []
        for _each in expected:
            found.append(await vain(watch, clock))
            clock.time += pause
        assert found == pytest.approx(expected)
        # In the long run PART is the limit, and after a quiet time the same calls may wait again.
        began, waited = clock.time, 0.0
        while clock.time < began + 60:
            waited += await vain(watch, clock)
            clock.time += pause or 0.01
        assert 0.9 * PART * 60 <= waited <= PART * 60 + BURST + LAG
        clock.time += 1000
        assert await vain(watch, clock) == LAG

    asyncio.run(go())


def test_news_at_the_end_of_the_time_counts():
    """The loop is blocked beyond the end of the time, and then the news and the end come together."""

    async def go():
        watch = LateWatch()
        call = asyncio.create_task(watch.news(watch.until()))
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + LAG, watch.report)
        time.sleep(LAG + 0.1)
        assert await call

    asyncio.run(go())
