# SPDX-License-Identifier: Apache-2.0
"""Tests filter calls that come before the scheduler's own watch shows that a pod has ended or a node has come: the call
waits a moment for the watch, and all calls together wait for only a small part of the time.
"""

from __future__ import annotations

import asyncio

import pytest
from vgpu_scheduler import late_watch
from vgpu_scheduler.late_watch import BURST, LAG, PART, LateWatch

from .samples import node
from .test_quota import MEM
from .test_service import node_object, pod_object, pod_path, world
from .test_waits import quota_object, quota_path


def delete(double):
    double.remove(pod_path("first"))


def end(double):
    double.put(pod_path("first"), {**double.objects[pod_path("first")], "status": {"phase": "Succeeded"}})


def add_node(double):
    double.put("/api/v1/nodes/n1", node_object("n1", node("n1", 1)))


def add_gpu(double):
    double.put("/api/v1/nodes/n0", node_object("n0", node("n0", 2)))


# Columns: MiB of the waiting pod; limit of the namespace's quota; the change; the node that has room then.
CHANGES = [
    (8000, "", delete, "n0"),
    (8000, "", end, "n0"),
    (8000, "", add_node, "n1"),
    (8000, "", add_gpu, "n0"),
    (3000, "13000", delete, "n0"),
    (3000, "13000", end, "n0"),
]


@pytest.mark.parametrize(("memory", "hard", "change", "where"), CHANGES)
def test_call_that_comes_before_the_watch_finds_the_room(monkeypatch, memory, hard, change, where):
    """The filter call is sent before the change, as if the kube-scheduler had seen the change first."""
    monkeypatch.setattr(late_watch, "LAG", 60.0)

    async def go():
        async with world(nodes=1, gpus=1) as (double, one, names):
            task = asyncio.create_task(one.extender.waiting.run())
            first = double.put(pod_path("first"), pod_object("first", memory=12000))
            assert (await one.schedule(first, names))[1] == ""
            if hard:
                double.put(quota_path(), quota_object({MEM: hard}))
                await one.until(lambda: list(one.extender.quotas.namespaces))
            waits = double.put(pod_path("waits"), pod_object("waits", memory=memory))
            call = asyncio.create_task(one.verb("filter", {"Pod": waits, "NodeNames": ["n0", "n1"]}))
            await asyncio.sleep(0.3)
            assert not call.done()
            change(double)
            assert (await call)[1]["NodeNames"] == [where]
            assert "vgpu_scheduler_late_watch_total 1" in (await one.get("/metrics"))[1]
            # The pod did not wait, so no event says so.
            assert not one.extender.waiting._due and not double.of("events")
            task.cancel()

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


def test_calls_wait_for_a_small_part_of_the_time(monkeypatch):
    """With PART 0.2 and BURST 1 s, calls that come without a pause may wait six times 0.25 s, and then a fifth of the
    time."""
    real = asyncio.timeout
    monkeypatch.setattr(late_watch.asyncio, "timeout", lambda seconds: real(0.002 * (seconds > 0)))

    async def go():
        clock = Clock()
        watch = LateWatch(clock)
        first = [await vain(watch, clock) for _each in range(10)]
        assert first == [LAG] * 6 + [0.0] * 4
        began, waited = clock.time, 0.0
        while clock.time < began + 60:
            waited += await vain(watch, clock)
            clock.time += 0.01
        assert 0.9 * PART * 60 <= waited <= PART * 60 + LAG
        # After a quiet time the whole burst is allowed again, and no more than that.
        clock.time += 1000
        again = [await vain(watch, clock) for _each in range(10)]
        assert again == first and sum(again) <= BURST / (1 - PART) + LAG

    asyncio.run(go())
