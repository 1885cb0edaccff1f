# SPDX-License-Identifier: Apache-2.0
"""Tests the part of the scheduler that keeps its ledger (which pod holds how much of which GPU) equal to the cluster:
which reservations it keeps and releases, step by step, without an API server.
"""

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
    """An API server that binds and returns one pod. A test can set ``during_read``, which runs while the
    pod is read.
    """

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
def test_pod_bound_during_cleanup_keeps_its_reservation(begun):
    """The read finds that the pod has no node, but this is outdated, because a second bind succeeded during the read.
    So the reservation must stay.
    """

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


def test_running_bind_is_not_cleaned_up():
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
        # For comparison: if no bind is under way, a pod that was never bound loses its reservation.
        extender.posting.clear()
        server.during_read = None
        await cluster.clear_up()
        assert extender.ledger.held("uid-a") is None and not extender.uncertain

    asyncio.run(go())


def test_lost_node_annotation_is_logged_once(caplog):
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
        # If a new annotation is written, it is used. If the node is removed, its recorded fault is dropped.
        cluster.node(False, other)
        assert len(extender.ledger.nodes["n0"]) == 1
        cluster.node(False, bare)
        cluster.node(True, bare)
        assert cluster._faulty == {} and "n0" not in extender.ledger.nodes
        cluster.node(False, broken)
        cluster.all_nodes([], 0.0)
        assert cluster._faulty == {}


def test_deleted_and_bound_pods_are_forgotten():
    _server, extender, cluster = parts()
    for name in ("gone", "bound", "ended", "waits"):
        extender.filter(wire.ExtenderArgs(pod_object(name), ["n0"]))
        cluster.pod(False, item(pod_object(name)))
    assert len(extender._waiting) == 4 and set(extender.quotas._waiting["default"]) == set(extender._waiting)
    cluster.pod(True, item(pod_object("gone")))
    cluster.pod(False, item(pod_object("bound", nodeName="n0")))
    cluster.pod(False, item(dict(pod_object("ended"), status={"phase": "Failed"})))
    assert list(extender._waiting) == ["uid-waits"] and list(extender.quotas._waiting["default"]) == ["uid-waits"]


def test_number_of_waiting_pods_is_limited(monkeypatch):
    monkeypatch.setattr("vgpu_scheduler.extender.MAX_WAITING", 3)
    _server, extender, _cluster = parts()
    for n in range(10):
        extender.filter(wire.ExtenderArgs(pod_object(f"p{n}"), ["n0"]))
    assert list(extender._waiting) == ["uid-p7", "uid-p8", "uid-p9"] and MAX_WAITING > 3


def test_changed_pod_is_parsed_again():
    """A pod's annotations select its GPUs and may change while the pod is pending, so a changed pod is parsed again."""
    _server, extender, _cluster = parts()
    pod = pod_object("a")
    pod["metadata"]["resourceVersion"] = "1"
    assert extender.filter(wire.ExtenderArgs(pod, ["n0"])).NodeNames == ["n0"]
    pod["metadata"]["annotations"] = {"nvidia.com/use-gpuuuid": "GPU-elsewhere"}
    assert extender.filter(wire.ExtenderArgs(pod, ["n0"])).NodeNames == ["n0"], (
        "a pod of an equal version is not parsed again"
    )
    pod["metadata"]["resourceVersion"] = "2"
    assert extender.filter(wire.ExtenderArgs(pod, ["n0"])).NodeNames == []


def test_lists_keep_container_specs_only_of_pending_pods():
    for made, kept in (
        (pod_object("a"), True),
        (pod_object("a", nodeName="n0"), False),
        (dict(pod_object("a"), status={"phase": "Succeeded"}), False),
    ):
        read = wire.lean(item(made))
        assert bool(wire.plain(read)["spec"]) == kept
    assert wire.plain(wire.lean(item(pod_object("a"))))["spec"]["containers"] == pod_object("a")["spec"]["containers"]
