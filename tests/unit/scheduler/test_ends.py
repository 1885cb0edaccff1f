# SPDX-License-Identifier: Apache-2.0
"""Tests that the program's endless loops end when they are cancelled, whichever step they have reached."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from vgpu_scheduler import wire
from vgpu_scheduler.leadership import Candidacy, Leadership
from vgpu_scheduler.reflector import Kind, Reflector

STEPS = 60


class NoCluster:
    synced = True


class Nothing:
    """An API server without objects. It ends each watch after one step."""

    async def list(self, _path, kind, _query):
        yield kind(wire.ListMeta("1"), [])

    async def watch(self, *_about, **_query):
        await asyncio.sleep(0)
        return
        yield

    async def json(self, *_about):
        await asyncio.sleep(0)
        return {"metadata": {}, "spec": {"holderIdentity": "another", "leaseDurationSeconds": 15}}


def reflector():
    def nothing(*_about):
        return None

    one = Reflector(Nothing(), Kind("/api/v1/nodes", wire.Node, wire.NodeList), nothing, nothing)
    return one.run(), one._again


def leadership():
    one = Leadership(Nothing(), NoCluster(), Candidacy("kube-system/x", "me"))
    return one.run(), one._wake


async def steps(count):
    for _each in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("made", [reflector, leadership])
@pytest.mark.parametrize("between", range(6))
def test_loop_ends_when_cancelled_at_any_step(made, between):
    async def ends_after(count):
        run, event = made()
        task = asyncio.create_task(run)
        await steps(count)
        event.set()
        await steps(between)
        task.cancel()
        done, _waits = await asyncio.wait([task], timeout=20)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return bool(done)

    async def go():
        # All runs are parallel. So if some loops do not end, their timeout passes only once.
        ends = await asyncio.gather(*(ends_after(count) for count in range(STEPS)))
        assert [count for count, ended in enumerate(ends) if not ended] == []

    asyncio.run(go())


STRANGE = [b'{"metadata": {"annotations": {"a": 1}}}', b'{"metadata": "x"}', b"[]", b"7"]


@pytest.mark.parametrize("text", STRANGE)
@pytest.mark.parametrize("event", ["MODIFIED", "ERROR"])
def test_unreadable_object_is_a_fault_and_does_not_end_the_loop(text, event):
    """An unreadable object must not end the program, because after each restart the object would end it again."""

    class Strange(Nothing):
        async def watch(self, *_about, **_query):
            yield wire.Event(event, wire.msgspec.Raw(text))

    async def go():
        seen = []
        kind = Kind("/api/v1/nodes", wire.Node, wire.NodeList)
        one = Reflector(Strange(), kind, lambda *_about: None, lambda *about: seen.append(about))
        task = asyncio.create_task(one.run())
        for _each in range(50):
            await asyncio.sleep(0.001)
        assert not task.done(), task.exception()
        task.cancel()
        assert one.fault and not seen

    asyncio.run(go())
