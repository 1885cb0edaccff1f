# SPDX-License-Identifier: Apache-2.0
"""What the reconciler keeps and clears up, step by step without a server."""

from __future__ import annotations

import asyncio
import json
import logging
import math

import pytest
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_scheduler import wire
from vgpu_scheduler.api import ApiError
from vgpu_scheduler.cluster import Cluster
from vgpu_scheduler.extender import MAX_WAITING, Extender
from vgpu_scheduler.ledger import Ledger

from .samples import node
from .test_service import node_object, pod_object


class Server:
    """Bind and read of one pod, with what a test lets happen between question and answer."""

    def __init__(self):
        self.node = ""
        self.during_read = None
        self.refuse = None

    async def bind(self, _namespace, _name, _uid, where, _annotations):
        if self.refuse:
            raise self.refuse
        if self.node:
            raise ApiError("already assigned", 409)
        self.node = where

    async def pod(self, namespace, name):
        found = {"metadata": {"uid": f"uid-{name}", "namespace": namespace}, "spec": {"nodeName": self.node}}
        if self.during_read:
            await self.during_read()
        return found

    async def event(self, *_about):
        pass


def parts():
    server, ledger = Server(), Ledger()
    extender = Extender(ledger, server)
    cluster = Cluster(server, extender, "vgpu-scheduler")
    ledger.set_node("n0", node("n0", 2))
    return server, extender, cluster


def item(made, kind=wire.Pod):
    return wire.msgspec.json.decode(json.dumps(made), type=kind)


def bind_args(name):
    return wire.BindArgs(name, "default", f"uid-{name}", "n0")


AGES = [-math.inf, 0.0]


@pytest.mark.parametrize("begun", AGES)
def test_what_is_bound_while_it_is_cleared_up_still_holds(begun):
    """The answer that it has no node is older than the bind that was tried again meanwhile, and won."""

    async def go():
        server, extender, cluster = parts()
        pod = pod_object("a")
        extender.filter(wire.ExtenderArgs(pod, ["n0"]))
        server.refuse = ApiError("no answer", 409)
        assert (await extender.bind(bind_args("a"))).Error and "uid-a" in extender.uncertain
        extender.uncertain["uid-a"] = (bind_args("a"), begun)
        server.refuse = None

        async def again():
            server.during_read = None
            assert (await extender.bind(bind_args("a"))).Error == ""

        server.during_read = again
        await cluster.clear_up()
        assert server.node == "n0" and extender.ledger.held("uid-a") is not None

    asyncio.run(go())


def test_what_is_at_the_server_now_is_not_cleared_up():
    async def go():
        server, extender, cluster = parts()
        extender.filter(wire.ExtenderArgs(pod_object("a"), ["n0"]))
        server.refuse = ApiError("conflict", 409)
        await extender.bind(bind_args("a"))
        for moment in ("before", "during"):
            if moment == "before":
                extender.posting.add("uid-a")
            else:
                extender.posting.clear()

                async def begins():
                    extender.posting.add("uid-a")

                server.during_read = begins
            await cluster.clear_up()
            assert extender.ledger.held("uid-a") is not None and "uid-a" in extender.uncertain, moment
        # The control: nothing is on the way, and it was not done.
        extender.posting.clear()
        server.during_read = None
        await cluster.clear_up()
        assert extender.ledger.held("uid-a") is None and not extender.uncertain

    asyncio.run(go())


def test_a_node_s_lost_annotation_is_said_once(caplog):
    _server, extender, cluster = parts()
    bare = item(node_object("n0"), wire.Node)
    broken = node_object("n0")
    broken["metadata"]["annotations"] = {pod_annotations.GPUS: "{"}
    broken = item(broken, wire.Node)
    whole = item(node_object("n0", node("n0", 2)), wire.Node)
    other = item(node_object("n0", node("n0", 1)), wire.Node)
    with caplog.at_level(logging.WARNING):
        for _each in range(50):
            cluster.node(False, bare)
        assert cluster.drift["gpus_deleted"] == 1 and len(caplog.records) == 1
        for _each in range(50):
            cluster.node(False, broken)
        assert cluster.drift["gpus_unreadable"] == 1 and len(caplog.records) == 2
        cluster.node(False, whole)
        cluster.node(False, bare)
        assert cluster.drift["gpus_deleted"] == 2
        # What it says afterwards counts, the same as before or not; and a node that went is a new one.
        cluster.node(False, other)
        assert len(extender.ledger.nodes["n0"]) == 1
        cluster.node(False, bare)
        cluster.node(True, bare)
        assert cluster._faulty == {} and "n0" not in extender.ledger.nodes
        cluster.node(False, broken)
        cluster.all_nodes([], 0.0)
        assert cluster._faulty == {}


def test_pods_that_are_gone_or_bound_are_not_remembered():
    _server, extender, cluster = parts()
    for name in ("gone", "bound", "ended", "waits"):
        extender.filter(wire.ExtenderArgs(pod_object(name), ["n0"]))
        cluster.pod(False, item(pod_object(name)))
    assert len(extender._waiting) == 4 and set(extender.quotas._waiting["default"]) == set(extender._waiting)
    cluster.pod(True, item(pod_object("gone")))
    cluster.pod(False, item(pod_object("bound", nodeName="n0")))
    cluster.pod(False, item(dict(pod_object("ended"), status={"phase": "Failed"})))
    assert list(extender._waiting) == ["uid-waits"] and list(extender.quotas._waiting["default"]) == ["uid-waits"]


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("vgpu_scheduler.extender.MAX_WAITING", 3)
    _server, extender, _cluster = parts()
    for n in range(10):
        extender.filter(wire.ExtenderArgs(pod_object(f"p{n}"), ["n0"]))
    assert list(extender._waiting) == ["uid-p7", "uid-p8", "uid-p9"] and MAX_WAITING > 3


def test_a_pod_that_changed_is_read_again():
    """Annotations say where it wants its GPUs, and may change while it waits."""
    _server, extender, _cluster = parts()
    pod = pod_object("a")
    pod["metadata"]["resourceVersion"] = "1"
    assert extender.filter(wire.ExtenderArgs(pod, ["n0"])).NodeNames == ["n0"]
    pod["metadata"]["annotations"] = {"nvidia.com/use-gpuuuid": "GPU-elsewhere"}
    assert extender.filter(wire.ExtenderArgs(pod, ["n0"])).NodeNames == ["n0"], "the same version is the same pod"
    pod["metadata"]["resourceVersion"] = "2"
    assert extender.filter(wire.ExtenderArgs(pod, ["n0"])).NodeNames == []


def test_lists_keep_the_text_of_containers_only_of_pods_that_wait():
    for made, kept in (
        (pod_object("a"), True),
        (pod_object("a", nodeName="n0"), False),
        (dict(pod_object("a"), status={"phase": "Succeeded"}), False),
    ):
        read = wire.lean(item(made))
        assert bool(wire.plain(read)["spec"]) == kept
    assert wire.plain(wire.lean(item(pod_object("a"))))["spec"]["containers"] == pod_object("a")["spec"]["containers"]
