# SPDX-License-Identifier: Apache-2.0
"""Tests size changes of running pods: what the leading replica grants and refuses, step by step, without an API server.

The tests check the result, which is the pod's annotations and the ledger (which pod holds how much of which GPU). They
do not rely on the program's own status.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods import resizes
from vgpu_plugin._shared.pods.annotations import APP, Device, Part
from vgpu_scheduler import resizing, wire
from vgpu_scheduler.api import ApiError, Unknown
from vgpu_scheduler.cluster import Cluster
from vgpu_scheduler.extender import Extender
from vgpu_scheduler.ledger import Ledger

from .samples import gpu
from .test_service import SCHEDULER, pod_object, pod_path, world

A, B = "GPU-n0-0", "GPU-n0-1"
CARD = 16160


class World:
    """Replaces the API server. Pods have versions, so a write with another version is a conflict (409)."""

    def __init__(self, *gpus):
        self.pods: dict[str, dict] = {}
        self.version = 100
        self.writes: list[tuple[str, dict]] = []
        self.events: list[tuple[str, str, str]] = []
        self.fault = None
        self.during = None
        self.time = 1000.0
        self.ledger = Ledger()
        self.extender = Extender(self.ledger, self)
        self.cluster = Cluster(self, self.extender, SCHEDULER)
        self.resizing = self.cluster.resizing
        self.resizing._now = lambda: self.time
        self.ledger.set_node("n0", gpus or (gpu(A), gpu(B)))

    def add(self, name, *devices, annotations=None, **more):
        plan = pod_annotations.write_plan([Part("main", APP, tuple(Device(*one) for one in devices or [(A, 3000, 0)]))])
        made = pod_object(name, nodeName="n0")
        made["metadata"].update(annotations={pod_annotations.PLAN: plan, **(annotations or {})}, **more)
        made["status"]["phase"] = "Running"
        self.pods[f"uid-{name}"] = made
        self.tell(name)

    def change(self, name, **texts):
        """Sets annotations of a pod and sends the event; None deletes an annotation. A keyword is the annotation's name
        without vgpu.fleet/: resize, given, former or resized.
        """
        annotations = self.pods[f"uid-{name}"]["metadata"]["annotations"]
        for key, text in texts.items():
            if text is None:
                annotations.pop(f"vgpu.fleet/{key}", None)
            else:
                annotations[f"vgpu.fleet/{key}"] = text
        self.tell(name)

    def ask(self, name, memory=None, cores=None):
        size = {key: value for key, value in (("memory_mib", memory), ("cores", cores)) if value is not None}
        self.change(name, resize=json.dumps({"main": size}))

    def tell(self, name):
        """Sends a watch event with the pod's current state."""
        self.version += 1
        self.pods[f"uid-{name}"]["metadata"]["resourceVersion"] = str(self.version)
        self.event_of(name)

    def event_of(self, name):
        read = wire.msgspec.json.decode(json.dumps(self.pods[f"uid-{name}"]), type=wire.Pod)
        self.cluster.pod(False, read)

    def done(self, name):
        """Marks the granted size as applied by the node, as the device plugin does."""
        self.change(name, former=None)

    def round(self, seconds=30.0):
        self.time += seconds
        asyncio.run(self.resizing.round())

    def held(self, name):
        return {uuid: (memory, cores) for uuid, memory, cores, _slots in self.ledger.held(f"uid-{name}").uses}

    def annotations(self, name):
        return self.pods[f"uid-{name}"]["metadata"]["annotations"]

    def given(self, name):
        plan = pod_annotations.read_annotations(self.annotations(name))
        return [tuple(one[:3]) for part in plan for one in part.devices]

    # --- methods of api.Api

    async def annotate(self, namespace, name, uid, annotations, version=""):
        if self.during:
            self.during()
        if isinstance(self.fault, ApiError):
            raise self.fault
        meta = self.pods[uid]["metadata"]
        if version and version != meta["resourceVersion"]:
            raise ApiError("the object has been modified", 409)
        self.writes.append((name, dict(annotations)))
        meta["annotations"].update(annotations)
        self.version += 1
        meta["resourceVersion"] = str(self.version)

    async def event(self, pod, reason, message):
        wire.msgspec.json.encode(message)
        self.events.append((pod["name"], reason, message))


def test_growth_counts_at_once_and_shrinking_after_confirmation():
    here = World()
    here.add("a", (A, 3000, 10))
    here.ask("a", 8000, 40)
    here.round()
    assert here.given("a") == [(A, 8000, 40)] and here.held("a") == {A: (8000, 40)}
    assert pod_annotations.read_plan(here.annotations("a")[resizes.FORMER])[0].devices == (Device(A, 3000, 10),)
    here.tell("a")
    here.done("a")
    assert here.held("a") == {A: (8000, 40)}
    here.ask("a", 1000)
    here.round()
    assert here.given("a") == [(A, 1000, 40)] and here.held("a") == {A: (8000, 40)}, (
        "the node has not confirmed the grant"
    )
    here.tell("a")
    assert here.held("a") == {A: (8000, 40)}
    here.done("a")
    assert here.held("a") == {A: (1000, 40)}
    assert here.events == [] and len(here.writes) == 2
    here.round()
    assert len(here.writes) == 2, "a granted request causes no further write"


def test_later_changes_by_others_are_not_reverted():
    """Others, for example vgpuctl, may change the size after the grant. The old request was granted once and must not
    be granted again.
    """
    here = World()
    here.add("a", (A, 3000, 10))
    here.ask("a", 8000)
    here.round()
    here.done("a")
    here.change("a", given=pod_annotations.write_plan([Part("main", APP, (Device(A, 500, 10),))]))
    here.round()
    assert here.given("a") == [(A, 500, 10)] and here.held("a") == {A: (500, 10)}
    here.ask("a", 8001)
    here.round()
    assert here.given("a") == [(A, 8001, 10)]


# columns: (MiB, %) of each other pod on the GPU, present (MiB, %) of the pod, requested (MiB, %) where None means
# unchanged; expected words of the event ("" if the request is granted)
FITS = [
    ([], (3000, 0), (CARD, None), ""),
    ([], (3000, 0), (CARD + 1, None), f"{CARD + 1} MiB are asked for, 0 of {CARD} are held by others; at most {CARD}"),
    ([(6000, 30)], (3000, 10), (10160, 70), ""),
    ([(6000, 30)], (3000, 10), (10161, None), "10161 MiB are asked for, 6000 of 16160 are held by others"),
    ([(6000, 30)], (3000, 10), (None, 71), "71 % of the SMs are asked for, 30 % are held by others"),
    ([(6000, 0)], (3000, 10), (None, 100), "100 % requires the GPU without other pods"),
    ([], (3000, 10), (None, 100), ""),
    ([(13160, 90)], (3000, 10), (2000, 5), ""),
    ([(16000, 90)], (3000, 10), (2999, 10), ""),
    ([(16000, 90)], (3000, 10), (3001, 10), "3001 MiB are asked for"),
    ([(6000, 30)], (3000, 10), (3000, 10), ""),
    ([(6000, 30)], (3000, 10), (None, 0), ""),
]


@pytest.mark.parametrize(("others", "has", "asks", "words"), FITS)
def test_room_of_the_gpu(others, has, asks, words):
    """A resize is granted only if the GPU has enough free memory and compute."""
    here = World()
    for n, size in enumerate(others):
        here.add(f"other-{n}", (A, *size))
    here.add("a", (A, *has))
    here.ask("a", *asks)
    here.round()
    wanted = tuple(had if one is None else one for had, one in zip(has, asks, strict=True))
    if words:
        ((name, reason, text),) = here.events
        assert (name, reason) == ("a", "GpuResizeWaits") and words in text and "other-" not in text
        assert here.writes == [] and here.held("a") == {A: has}
    else:
        assert here.events == [] and here.given("a") == [(A, *wanted)]


def test_waiting_resize_is_granted_later_with_one_event():
    here = World()
    here.add("other", (A, 10000, 0))
    here.add("a", (A, 3000, 0))
    here.ask("a", 8000)
    for _second in range(50):
        here.round(1.0)
    assert len(here.events) == 1 and here.writes == []
    here.cluster.pod(True, wire.msgspec.json.decode(json.dumps(here.pods["uid-other"]), type=wire.Pod))
    here.round()
    assert here.given("a") == [(A, 8000, 0)]


# Invalid texts of the annotation vgpu.fleet/resize.
NONSENSE = ["", "{", "{}", "[]", '{"main": {"memory_mib": -1}}', '{"other": {"cores": 1}}', "[" * 5000]
# An unpaired surrogate cannot be encoded as UTF-8, but the event's message is sent as UTF-8.
NONSENSE += ['{"\\ud800": {"cores": 1}}', '{"\\udfff": 1}']


@pytest.mark.parametrize("text", NONSENSE)
def test_invalid_request_causes_one_event_and_no_change(text):
    """If the webhook is missing, an invalid request is not refused at admission. It must cause one event
    and no write.
    """
    here = World()
    here.add("a")
    here.change("a", resize=text)
    for _minute in range(5):
        here.round(61.0)
        here.tell("a")
    ((_name, reason, said),) = here.events
    assert (reason == "GpuResizeRefused" and "vgpu.fleet/resize" in said) or "no container" in said
    assert here.writes == [] and here.held("a") == {A: (3000, 0)}
    here.change("a", resize=None)
    assert here.resizing.pending == 0


QUOTAS = [
    # columns: quota in MiB, MiB of another pod of the namespace, present MiB of the pod, requested MiB; expected words
    # of the event ("" if the request is granted)
    (10000, 4000, 3000, 6000, ""),
    (10000, 4000, 3000, 6001, "quota own of namespace default: limits.nvidia.com/gpumem: 6001 asked for"),
    (5000, 4000, 3000, 2000, ""),  # The quota was lowered below what is in use.
    (5000, 4000, 3000, 3001, "in use"),
]


@pytest.mark.parametrize(("hard", "other", "has", "asks", "words"), QUOTAS)
def test_quota_of_the_namespace(hard, other, has, asks, words):
    """A resize is granted only if the quota of the pod's namespace allows it."""
    here = World()
    quota = {"metadata": {"name": "own", "namespace": "default"}, "spec": {"hard": {"limits.nvidia.com/gpumem": hard}}}
    here.extender.quotas.enter(False, wire.msgspec.json.decode(json.dumps(quota), type=wire.Quota))
    here.add("other", (B, other, 0))
    here.add("a", (A, has, 0))
    here.ask("a", asks)
    here.round()
    if words:
        assert words in here.events[0][2] and here.writes == []
    else:
        assert here.given("a") == [(A, asks, 0)] and here.events == []


def test_granted_memory_is_reserved_during_the_write():
    """An outdated event arrives while the grant is written. The granted memory must stay reserved."""
    here = World()
    here.add("a", (A, 3000, 0))
    here.ask("a", 12000)
    seen = []

    def older():
        here.event_of("a")
        seen.append(here.held("a"))

    here.during = older
    here.round()
    assert seen == [{A: (12000, 0)}] and here.cluster._repairs == {}
    here.during = None
    here.add("b", (B, 1000, 0))
    here.tell("a")
    assert here.given("a") == [(A, 12000, 0)] and not here.resizing.claims("uid-a")


FAULTS = [
    (ApiError("forbidden", 403), 3000),
    (ApiError("conflict", 409), 3000),
    (Unknown("no answer"), 12000),
]


@pytest.mark.parametrize(("fault", "held"), FAULTS)
def test_refused_grant_frees_memory_and_unanswered_grant_keeps_it(fault, held):
    """If the API server refuses the write, the memory is freed. If there is no response, the write may have succeeded,
    so the memory stays reserved as long as a request may live.
    """
    here = World()
    here.add("a", (A, 3000, 0))
    here.ask("a", 12000)
    here.fault = fault
    here.round()
    assert here.held("a") == {A: (held, 0)}
    here.fault = None
    here.round(1.0)
    here.tell("a")
    if held == 3000:
        assert here.given("a") == [(A, 12000, 0)]
        return
    assert here.given("a") == [(A, 3000, 0)] and here.held("a") == {A: (12000, 0)}
    here.round(resizing.GIVE_UP + 1)
    assert here.given("a") == [(A, 12000, 0)]


def test_grant_does_not_overwrite_a_changed_pod():
    """The node has changed the pod meanwhile. The grant must not overwrite that change."""
    here = World()
    here.add("a", (A, 3000, 0))
    here.ask("a", 12000)

    def changed():
        here.version += 1
        here.pods["uid-a"]["metadata"]["resourceVersion"] = str(here.version)

    here.during = changed
    here.round()
    assert here.writes == [] and here.held("a") == {A: (3000, 0)}
    here.during = None
    here.tell("a")
    here.round()
    assert here.given("a") == [(A, 12000, 0)]


def test_many_resize_requests_are_granted_in_small_groups(monkeypatch):
    monkeypatch.setattr(resizing, "MAX_JUDGED", 30)
    here = World(*(gpu(f"GPU-n0-{n}", slots=1000) for n in range(2)))
    here.add("honest", (B, 100, 0))
    for n in range(100):
        here.add(f"p{n}", (A, 10, 0))
        here.ask(f"p{n}", 20 if n % 2 else 1 << 20)
    here.ask("honest", 9000)
    for _second in range(5):
        writes, events = len(here.writes), len(here.events)
        here.round(1.0)
        assert len(here.writes) - writes <= 20 and len(here.events) - events <= 5
    assert ("honest", 9000) in [(name, here.given(name)[0][1]) for name, _texts in here.writes]
    # If a pod changes its request every second, it gets a grant every ten seconds at most.
    writes = len(here.writes)
    for second in range(30):
        here.ask("p1", 30 + second)
        here.round(1.0)
    assert 2 <= sum(name == "p1" for name, _texts in here.writes[writes:]) <= 4


def test_deleted_pods_are_forgotten():
    here = World()
    here.add("a")
    here.ask("a", 1 << 20)
    here.round()
    here.cluster.pod(True, wire.msgspec.json.decode(json.dumps(here.pods["uid-a"]), type=wire.Pod))
    assert here.resizing.pending == 0 and here.resizing._said == {} and here.ledger.held("uid-a") is None
    here.add("b")
    here.ask("b", 1 << 20)
    here.round()
    here.cluster.all_pods([], 1e9)
    assert here.resizing.pending == 0 and here.resizing._said == {}


def test_new_ledger_computes_the_same_use():
    """A new ledger must compute the same use from the annotations alone."""
    here = World()
    here.add("a", (A, 3000, 10))
    here.ask("a", 1000, 60)
    here.round()
    here.tell("a")
    assert here.held("a") == {A: (3000, 60)}
    again = World()
    again.pods = here.pods
    again.tell("a")
    assert again.held("a") == here.held("a")
    again.round()
    assert again.writes == []


def test_memory_reserved_for_a_nominated_pod_is_not_granted():
    here = World(gpu(A, slots=1))
    here.add("a", (A, 3000, 0))
    waits = pod_object("high", 14000)
    waits["spec"]["priority"] = 1000
    waits["status"]["nominatedNodeName"] = "n0"
    here.cluster.pod(False, wire.msgspec.json.decode(json.dumps(waits), type=wire.Pod))
    here.ask("a", 8000)
    here.round()
    assert here.writes == [] and "reserved for a pod whose preemption victims are still ending" in here.events[0][2]
    here.ask("a", 100)
    here.round()
    assert here.given("a") == [(A, 100, 0)], "expected a grant of the smaller size"


def test_replica_without_the_lease_grants_nothing():
    here = World()
    here.add("a")
    here.ask("a", 8000)
    for name, value in (("writes", lambda: False), ("writes_since", lambda: 1e12)):
        before = getattr(here.cluster, name)
        setattr(here.cluster, name, value)
        for one in here.cluster.reflectors:
            one.listed_at = 1.0
        asyncio.run(here.cluster.resize())
        assert here.writes == []
        setattr(here.cluster, name, before)
    asyncio.run(here.cluster.resize())
    assert len(here.writes) == 1


def test_resize_over_http_with_the_shipped_rights():
    """Runs the whole program with an API server that enforces the shipped rights: a resize is requested, granted, and
    confirmed by the node.
    """

    async def go():
        async with world(nodes=1) as (double, one, names):
            pod = double.put(pod_path("a"), pod_object("a"))
            assert (await one.schedule(pod, names))[1] == ""

            def notes():
                return double.objects[pod_path("a")]["metadata"]["annotations"]

            def change(**texts):
                with double.edit(pod_path("a")) as stored:
                    stored["metadata"]["annotations"].update(texts)

            change(**{resizes.RESIZE: '{"main": {"memory_mib": 16000}}'})
            await one.until(lambda: pod_annotations.GIVEN in notes())
            ((_name, _kind, (given,)),) = pod_annotations.read_annotations(notes())
            assert given.memory_mib == 16000 and notes()[resizes.FORMER] == notes()[pod_annotations.PLAN]
            assert one.ledger.held("uid-a").uses == ((given.uuid, 16000, 0, 1),)
            with double.edit(pod_path("a")) as stored:
                del stored["metadata"]["annotations"][resizes.FORMER]
            # A request larger than the GPU must cause an event and no write.
            writes = len(double.writes)
            change(**{resizes.RESIZE: '{"main": {"memory_mib": 16161}}'})
            await one.until(lambda: double.of("events"))
            assert "at most 16160 are possible now" in double.of("events")[-1]["message"]
            assert [each for each in double.writes[writes:] if "events" not in each[1]] == []

    asyncio.run(go())
