# SPDX-License-Identifier: Apache-2.0
"""Attacks by a tenant with the role `edit` through resize requests and memory requests of pods.

The tenant tries to resize its own and other tenants' running pods. It requests invalid values and more than the quota
or the GPU allows, and it sends very many requests. The tenant also tries to change the promise (the guaranteed memory)
of an admitted pod. Afterwards the tests check the objects at the API server, the memory that the scheduler counts, and
that a neighbour's pod gets the remaining memory. The nodes are only API objects, so the tests write the annotations of
the device plugins.

docs/threat-model.md lists each test function with its verdict.
"""

from __future__ import annotations

import json

import pytest
from attacks import CARD, GPU, IGNORE, MEM, MERGE, NEIGHBOUR, Try, gpu_pod, judged, part, said
from kubebox.api import Api
from kubebox.cluster import PODS, SERVER
from kubebox.process import until
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods import resizes

EVENTS = "/api/v1/namespaces/default/events"
OURS = "is written by vgpu.fleet alone"


@pytest.fixture(scope="module")
def kubelet(fleet):
    """Returns a client with the identity of node a, which its device plugin uses."""
    authority = fleet.cluster.authority
    pair = authority.pair("system-node-a", "/O=system:masters/CN=system:node:a")
    return Api(SERVER, authority.certificate, *pair)


def annotated(**texts):
    return {"metadata": {"annotations": {f"vgpu.fleet/{name}": text for name, text in texts.items()}}}


def asks(memory, container="main", **more):
    return annotated(resize=json.dumps({container: {"memory_mib": memory, **more}}))


def notes(fleet, name):
    return fleet.get(name)["metadata"].get("annotations") or {}


def given(fleet, name):
    plan = pod_annotations.read_annotations(notes(fleet, name))
    return [(one.uuid, one.memory_mib) for item in plan for one in item.devices]


def counted(fleet):
    """Returns the MiB used on node a as each program reports it, or [] if a program does not listen yet."""
    try:
        held = [fleet.metric(one, "node_memory_held_bytes", node="a") for one in fleet.replicas]
    except OSError:
        return []
    return [each >> 20 for each in held]


def oversold(fleet):
    """Returns UUID → MiB of each oversold GPU, added up from the pods of all namespaces."""
    sums = {}
    for one in fleet.api.get("/api/v1/pods")["items"]:
        parts = resizes.counted(one["metadata"].get("annotations") or {}) or ()
        for uuid, use in pod_annotations.use_of(parts).items():
            sums[uuid] = sums.get(uuid, 0) + use.memory_mib
    return {uuid: total for uuid, total in sums.items() if total > CARD}


def told(fleet, name, words):
    def found():
        items = fleet.api.get(EVENTS)["items"]
        return [one for one in items if one["involvedObject"]["name"] == name and words in one["message"]]

    return until(found, f"event on {name}: {words}")


def test_only_the_owner_requests_a_resize_and_only_the_leader_grants_it(fleet, tenant, neighbour):
    """A tenant can neither annotate another tenant's pod nor write the annotations by which the scheduler grants a
    resize on its own pods.
    """
    fleet.node("a", 1)
    neighbour.bound("theirs", {GPU: 1, MEM: 3000})
    tenant.create(PODS, gpu_pod("mine", {GPU: 1, MEM: 3000}, IGNORE))
    tenant.create(PODS, gpu_pod("tried", {GPU: 1, MEM: 100}))
    fleet.bound("tried")
    mine, theirs = f"{PODS}/tried", f"{NEIGHBOUR}/pods/theirs"
    tries = [
        Try("PATCH", theirs, asks(1), "forbidden", MERGE),
        Try("PATCH", f"{theirs}/status", asks(1), "forbidden", MERGE),
        Try("PATCH", f"{mine}/status", asks(9000), "forbidden", MERGE),
        Try("PATCH", mine, annotated(given=part(9000)), OURS, MERGE),
        Try("PATCH", mine, annotated(resized='{"main":{"memory_mib":9000}}'), OURS, MERGE),
        Try("PATCH", mine, annotated(former=part(1)), OURS, MERGE),
        Try("PATCH", mine, annotated(former=part(16 << 20)), OURS, MERGE),
    ]
    tries += [
        Try("POST", PODS, gpu_pod("new", notes={f"vgpu.fleet/{name}": part(9000)}), "written by")
        for name in ("given", "former", "resized")
    ]
    judged(tenant, tries)
    assert given(fleet, "tried") == [("GPU-a-0", 100)] and notes(fleet, "tried").keys() == {pod_annotations.PLAN}
    text = neighbour.get("theirs")["metadata"]["annotations"]
    assert resizes.RESIZE not in text and resizes.RESIZED not in text


# columns: text of the resize annotation; expected text of the refusal
NONSENSE = [
    ("", "is no JSON"),
    ("8Gi", "is no JSON"),
    ("{}", "names no container"),
    ('{"main": {}}', "expected memory_mib, cores or both"),
    ('{"main": {"memory_mib": 0}}', "found 0"),
    ('{"main": {"memory_mib": -9000}}', "found -9000"),
    ('{"main": {"memory_mib": 99999999999999999999}}', "expected a whole number from 1 to 16777216"),
    ('{"main": {"memory_mib": 1e9}}', "found 1000000000.0"),
    ('{"main": {"memory_mib": "9000"}}', "expected a whole number"),
    ('{"main": {"cores": 101}}', "found 101"),
    ('{"main": {"memory_mib": 1, "uuid": "GPU-b-0"}}', "and nothing else"),
    ('{"main": {"cores": 1}, "main": {"cores": 2}}', "names a key twice"),
    ('{"other": {"memory_mib": 1}}', "other: no container of the pod"),
    ("[" * 60000, "is no JSON"),
    (json.dumps({f"c{n}": {"memory_mib": 1} for n in range(4000)}), "expected text of at most 65536"),
]


@pytest.mark.parametrize("labels", [{}, IGNORE], ids=["admitted by the webhook", "ignored by the webhook"])
def test_invalid_resizes_are_refused_and_reserve_nothing(fleet, tenant, neighbour, labels):
    """Invalid resize requests are refused, and afterwards the neighbour gets the rest of the GPU."""
    fleet.node("a", 1)
    tenant.create(PODS, gpu_pod("mine", {GPU: 1, MEM: 3000}, labels, schedulerName="vgpu-scheduler"))
    fleet.bound("mine")
    judged(tenant, [Try("PATCH", f"{PODS}/mine", annotated(resize=text), words, MERGE) for text, words in NONSENSE])
    assert notes(fleet, "mine").keys() == {pod_annotations.PLAN}
    assert neighbour.bound("rest", {GPU: 1, MEM: CARD - 3000}) == [("GPU-a-0", CARD - 3000)]


def test_a_resize_beyond_quota_or_gpu_is_refused(fleet, tenant, neighbour):
    """A refused request reserves nothing: the neighbour gets the rest of the GPU."""
    fleet.node("a", 1)
    quota = {"metadata": {"name": "own"}, "spec": {"hard": {f"limits.{MEM}": "5000"}}}
    fleet.api.create("/api/v1/namespaces/default/resourcequotas", quota)
    labels = {"namespace": "default", "quota": "own", "resource": f"limits.{MEM}"}
    until(
        lambda: all(fleet.metric(one, "quota_hard", **labels) for one in fleet.replicas),
        "metric of the new quota in both programs",
    )
    for name in ("mine", "other"):
        tenant.create(PODS, gpu_pod(name, {GPU: 1, MEM: 2000}))
        fleet.bound(name)
    tenant.patch(f"{PODS}/mine", asks(3001))
    told(fleet, "mine", "3001 asked for on all GPUs of the pod together, 2000 of 5000 in use; ask for at most 3000")
    tenant.patch(f"{PODS}/mine", asks(3000))
    until(lambda: given(fleet, "mine") == [("GPU-a-0", 3000)], "resize of pod mine to 3000 MiB, the rest of the quota")
    fleet.api.delete("/api/v1/namespaces/default/resourcequotas/own")
    for huge in (CARD, 1 << 24):
        tenant.patch(f"{PODS}/other", asks(huge))
    told(fleet, "other", f"are asked for, 3000 of {CARD} are held by others")
    assert neighbour.bound("rest", {GPU: 1, MEM: CARD - 5000}) == [("GPU-a-0", CARD - 5000)]
    assert given(fleet, "other") == [("GPU-a-0", 2000)] and oversold(fleet) == {}


def test_freed_memory_stays_reserved_until_the_node_confirms_the_limit(fleet, tenant, neighbour, kubelet):
    """Memory that a resize frees stays reserved for the pod until the node has confirmed the lower limit.

    The processes in the pod may still use that memory. A restart of the scheduler does not change the reservation.
    """
    fleet.node("a", 1)
    tenant.create(PODS, gpu_pod("mine", {GPU: 1, MEM: 3000}))
    fleet.bound("mine")
    tenant.patch(f"{PODS}/mine", asks(15000))
    until(
        lambda: given(fleet, "mine") == [("GPU-a-0", 15000)] and counted(fleet) == [15000] * 2,
        "resize to 15000 MiB, counted by both programs",
    )
    kubelet.patch(f"{PODS}/mine", annotated(former=None))
    tenant.patch(f"{PODS}/mine", asks(1000))
    until(lambda: given(fleet, "mine") == [("GPU-a-0", 1000)], "grant of 1000 MiB to pod mine")
    assert OURS in said(tenant, Try("PATCH", f"{PODS}/mine", annotated(former=None), "", MERGE))
    neighbour.make("large", {GPU: 1, MEM: 10000})
    fleet.pause(3)
    for one in fleet.replicas:
        one.ours.stop()
        one.ours.start()
    until(lambda: counted(fleet) == [15000] * 2, "metric of 15000 used MiB in both restarted programs")
    assert "nodeName" not in neighbour.get("large")["spec"]
    kubelet.patch(f"{PODS}/mine", annotated(former=None))
    until(
        lambda: neighbour.get("large")["spec"].get("nodeName"), "bind of the neighbour's pod to the freed memory", 120
    )
    assert oversold(fleet) == {}


def test_a_flood_of_resizes_delays_no_neighbour_and_oversells_no_gpu(fleet, tenant, neighbour):
    """A tenant sends 320 resize requests; the neighbour's pod is still bound, and no GPU is oversold."""
    fleet.node("a", 1)
    names = [f"p{n}" for n in range(8)]
    for name in names:
        tenant.create(PODS, gpu_pod(name, {GPU: 1, MEM: 100}))
    for name in names:
        fleet.bound(name)
    before = len(fleet.api.get(EVENTS)["items"])
    turns = 40
    for turn in range(turns):
        for n, name in enumerate(names):
            tenant.patch(f"{PODS}/{name}", asks(1 << 24 if (turn + n) % 2 else 100 + turn))
        if turn == 7:
            assert neighbour.bound("honest", {GPU: 1, MEM: 8000}) == [("GPU-a-0", 8000)]
    until(lambda: all(resizes.RESIZE in notes(fleet, name) for name in names), "resize annotation on every pod")
    fleet.pause(5)
    assert oversold(fleet) == {} and max(counted(fleet)) <= CARD
    events = len(fleet.api.get(EVENTS)["items"]) - before
    assert events < turns * len(names) / 4, (
        f"expected far fewer events than requests, found {events} events for {turns * len(names)} requests"
    )
    for name in names:
        assert given(fleet, name)[0][1] < 100 + turns


REQUEST = "vgpu.fleet/memory-request"
# columns: memory request of a new pod whose limit is 8000 MiB; expected text of the refusal
PROMISES = [
    ("0", "expected whole MiB from 1"),
    ("-5", "found -5"),
    ("8001", "8001 MiB are more than its limit of 8000 MiB"),
    ("16777217", "expected whole MiB from 1"),
    ("2Gi", "whole MiB without a unit"),
    ('{"other": 1}', "other: no container that asks for a GPU"),
    ('{"main": 1, "main": 8000}', "whole MiB without a unit"),
    ("[" * 60000, "whole MiB without a unit"),
]


def test_guaranteed_memory_is_fixed_at_admission(fleet, tenant, neighbour):
    """No change to the memory request of an admitted pod is accepted, whether the pod waits or runs.

    The value at admission counts, and the neighbour gets the rest of the GPU.
    """
    fleet.node("a", 1)
    size = {GPU: 1, MEM: 8000}
    judged(tenant, [Try("POST", PODS, gpu_pod("new", size, notes={REQUEST: text}), words) for text, words in PROMISES])
    neighbour.bound("theirs", {GPU: 1, MEM: 3000})
    tenant.create(PODS, gpu_pod("mine", {GPU: 1, MEM: 8000}, notes={REQUEST: "2000"}))
    tenant.create(PODS, gpu_pod("plain", {GPU: 1, MEM: 1000}))
    tenant.create(PODS, gpu_pod("waits", {GPU: 1, MEM: CARD}, notes={REQUEST: str(CARD - 1)}))
    for name in ("mine", "plain"):
        fleet.bound(name)
    fixed = "stays as it was admitted"
    tries = [
        Try("PATCH", f"{PODS}/{name}", annotated(**{"memory-request": value}), fixed, MERGE)
        for name, value in (("mine", "8000"), ("mine", "1"), ("mine", None), ("waits", "1"), ("plain", "1"))
    ]
    tries += [
        Try("PATCH", f"{NEIGHBOUR}/pods/theirs", annotated(**{"memory-request": "1"}), "forbidden", MERGE),
        Try("PATCH", f"{PODS}/mine", asks(8000), "its memory is from 2000 to 8000 MiB", MERGE),
        Try("PATCH", f"{PODS}/mine", annotated(given=part(8000)), OURS, MERGE),
    ]
    judged(tenant, tries)
    assert given(fleet, "mine") == [("GPU-a-0", 2000)] and notes(fleet, "mine")[REQUEST] == "2000"
    assert neighbour.bound("rest", {GPU: 1, MEM: CARD - 6000}) == [("GPU-a-0", CARD - 6000)]
    assert oversold(fleet) == {} and counted(fleet) == [CARD] * 2


def test_no_label_and_no_binding_adds_guaranteed_memory(fleet, tenant):
    """The scheduler applies the webhook's rules to a pod that bypasses it; annotations of a Binding are refused."""
    fleet.node("a", 1)
    tenant.create(PODS, gpu_pod("none", {GPU: 1, MEM: 8000}, IGNORE, {REQUEST: "0"}, schedulerName="vgpu-scheduler"))
    tenant.create(PODS, gpu_pod("less", {GPU: 1, MEM: 8000}, IGNORE, {REQUEST: "2000"}, schedulerName="vgpu-scheduler"))
    fleet.bound("less")
    assert given(fleet, "less") == [("GPU-a-0", 2000)]
    assert "nodeName" not in fleet.get("none")["spec"]
    spec = {"containers": [{"name": "main", "image": "pause"}], "schedulerName": "another"}
    fleet.api.create(PODS, {"metadata": {"name": "free"}, "spec": spec})
    target = {"apiVersion": "v1", "kind": "Node", "name": "a"}
    metadata = {"name": "free", "annotations": {REQUEST: "1"}}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
    judged(fleet.api, [Try("POST", f"{PODS}/free/binding", body, "stays as it was admitted")])


def test_a_quota_counts_guaranteed_memory(fleet, tenant):
    """A quota counts the guaranteed memory of a pod (its memory request), not its limit."""
    fleet.node("a", 1)
    quota = {"metadata": {"name": "own"}, "spec": {"hard": {f"limits.{MEM}": "5000"}}}
    fleet.api.create("/api/v1/namespaces/default/resourcequotas", quota)
    labels = {"namespace": "default", "quota": "own", "resource": f"limits.{MEM}"}
    until(
        lambda: all(fleet.metric(one, "quota_hard", **labels) for one in fleet.replicas),
        "metric of the new quota in both programs",
    )
    tenant.create(PODS, gpu_pod("mine", {GPU: 1, MEM: 15000}, notes={REQUEST: "3000"}))
    fleet.bound("mine")
    words = "2001 asked for on all GPUs of the pod together, 3000 of 5000 in use"
    judged(tenant, [Try("POST", PODS, gpu_pod("over", {GPU: 1, MEM: 9000}, notes={REQUEST: "2001"}), words)])
    tenant.create(PODS, gpu_pod("rest", {GPU: 1, MEM: 9000}, notes={REQUEST: "2000"}))
    fleet.bound("rest")
    assert counted(fleet) == [5000] * 2 and oversold(fleet) == {}
    fleet.api.delete("/api/v1/namespaces/default/resourcequotas/own")
