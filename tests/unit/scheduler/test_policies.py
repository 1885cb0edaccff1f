# SPDX-License-Identifier: Apache-2.0
"""Tests policies of pods and nodes for the choice of GPUs: GPUs that no pod uses yet (``mutex``), GPUs of one NUMA
node, chains of policies (a list in which each policy decides between GPUs that are equal for the policies before it),
and node labels, also by the names that ACK (Alibaba Cloud's Kubernetes) gives them.
"""

from __future__ import annotations

import logging

import pytest
from vgpu_plugin._shared.pods.annotations import APP, Device, Part
from vgpu_plugin._shared.pods.node_labels import NodeLabels
from vgpu_plugin._shared.pods.requests import read_pod
from vgpu_scheduler import wire
from vgpu_scheduler.ledger import Ledger, NoRoom

from .samples import CARD, MIB, ask, gpu, node, pod_ask
from .test_cluster import item, parts
from .test_service import node_object

MEMORY = 16160
WHOLE, PART = ask(0, 100, kind=CARD), ask(3000, kind=MIB)


def ledger_of(*used, numas=(0, 0, 1, 1), labels=None, **policies):
    """Returns the ledger (the scheduler's record of used GPUs) of a node with four GPUs. ``used``: MiB that another pod
    uses on each GPU.
    """
    ledger = Ledger(**policies)
    gpus = [gpu(f"g{n}", MEMORY, numa=numa) for n, numa in enumerate(numas)]
    ledger.set_node("a", gpus, labels=labels or NodeLabels())
    for n, mib in enumerate(used):
        if mib:
            ledger.hold(f"used-{n}", f"default/used-{n}", "a", [Part("c", APP, (Device(f"g{n}", mib, 0),))])
    return ledger


def asked(annotations, gpus=1, memory=3000):
    """Returns the request of a pod with these annotations, as the real parser reads it."""
    container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": gpus, "nvidia.com/gpumem": memory}}}
    return read_pod({"metadata": {"annotations": annotations}, "spec": {"containers": [container]}})


def placed(ledger, wanted):
    """Returns the numbers of the GPUs that each container gets, as strings, or the reason for the refusal."""
    answer = ledger.filter(wanted, ["a"])
    if not answer.fits:
        with pytest.raises(NoRoom):
            ledger.place(wanted, "a")
        return {**answer.failed, **answer.never}["a"]
    return ["".join(device.uuid[1:] for device in part.devices) for part in ledger.place(wanted, "a")]


GPU_POLICY = "hami.io/gpu-scheduler-policy"
BIND = "nvidia.com/numa-bind"
# columns: MiB used on each of four GPUs, annotations of the pod, number of requested GPUs; expected numbers of the
# GPUs, or words of the reason
CHAINS = [
    ((1, 0, 0, 0), {GPU_POLICY: "mutex"}, 1, "1"),
    ((1, 1, 1, 0), {GPU_POLICY: "mutex"}, 1, "3"),
    ((1, 1, 1, 0), {GPU_POLICY: "mutex"}, 2, "not 2 GPUs that no pod uses"),
    ((1, 1, 1, 1), {GPU_POLICY: "mutex,binpack"}, 1, "not a GPU that no pod uses"),
    ((1, 1, 1, 1), {}, 1, "0"),
    # The annotation for one NUMA node takes precedence over binpack.
    ((9, 0, 8, 0), {GPU_POLICY: "binpack"}, 2, "02"),
    ((9, 0, 8, 0), {GPU_POLICY: "binpack", BIND: "true"}, 2, "01"),
    ((0, 0, 8, 7), {GPU_POLICY: "binpack", BIND: "true"}, 2, "23"),
    ((0, MEMORY, 0, MEMORY), {BIND: "true"}, 2, "free on one NUMA node, as the pod requires"),
    ((0, MEMORY, 0, MEMORY), {}, 2, "02"),
    ((0, 0, 0, 0), {BIND: "true"}, 3, "free on one NUMA node, as the pod requires"),
    # In a chain, each further policy decides only between GPUs that are equal for the policies before it.
    ((9, 0, 8, 0), {GPU_POLICY: "binpack,numa"}, 2, "02"),
    ((9, 0, 8, 0), {GPU_POLICY: "numa,binpack"}, 2, "01"),
    ((5, 5, 0, 5), {GPU_POLICY: "binpack,numa"}, 2, "01"),
    ((5, 0, 5, 5), {GPU_POLICY: "binpack,numa"}, 2, "23"),
    ((5, 0, 5, 5), {GPU_POLICY: "binpack"}, 2, "02"),
    ((9, 0, 8, 0), {GPU_POLICY: "spread,numa"}, 2, "13"),
    ((9, 0, 8, 0), {GPU_POLICY: "numa,spread"}, 2, "23"),
    ((9, 0, 8, 0), {GPU_POLICY: "binpack,topology-aware"}, 2, "01"),
    ((9, 0, 8, 7), {GPU_POLICY: "binpack,topology-aware"}, 2, "23"),
    ((9, 0, 8, 7), {GPU_POLICY: "spread,topology-aware,mutex"}, 2, "not 2 GPUs that no pod uses"),
    ((9, 9, 0, 0), {GPU_POLICY: "spread,topology-aware,mutex"}, 2, "23"),
]


@pytest.mark.parametrize(("used", "annotations", "gpus", "expected"), CHAINS)
def test_policy_chains_of_pods(used, annotations, gpus, expected):
    found = placed(ledger_of(*used), asked(annotations, gpus))
    assert found == [expected] or expected in found, found


def test_mutex_pod_starts_on_an_empty_gpu_and_others_may_join():
    ledger = ledger_of(numas=(0,))
    alone = asked({GPU_POLICY: "mutex"})
    ledger.hold("x", "default/x", "a", ledger.place(alone, "a"))
    assert placed(ledger, alone) == "not a GPU that no pod uses"
    assert placed(ledger, asked({})) == ["0"]
    # The refusal is not permanent, because a preemption may free the GPU.
    assert ledger.filter(alone, ["a"], {"a": ["x"]}).fits == ["a"] and not ledger.filter(alone, ["a"]).never


def test_containers_of_a_mutex_pod_get_separate_gpus():
    two = pod_ask(ask(alone=True), ask(alone=True))
    assert placed(ledger_of(1), two) == ["1", "2"]
    assert "not all containers fit at once" in placed(ledger_of(1, 1, 1), two)
    one_way = pod_ask(ask(gpus=1, alone=True), ask(10, gpus=2, one_numa=True, alone=True))
    assert placed(ledger_of(numas=(0, 0, 1)), one_way) == ["2", "01"]


def test_gpus_without_numa_nodes_count_as_one_numa_node():
    assert placed(ledger_of(numas=(-1, -1)), asked({BIND: "true"}, 2)) == ["01"]
    assert placed(ledger_of(numas=(-1, -1, 0)), asked({BIND: "true"}, 2)) == (
        "not 2 GPUs with 3000 MiB free on one NUMA node, as the pod requires"
    )


# columns: labels of the node, the scheduler's policy, annotations of the pod; expected number of the chosen GPU. On GPU
# 0, 5000 MiB are in use.
LABELS = [
    ({}, "spread", {}, "1"),
    ({"vgpu.fleet/gpu-policy": "binpack"}, "spread", {}, "0"),
    ({"ack.node.gpu.placement": "binpack"}, "spread", {}, "0"),
    ({"ack.node.gpu.placement": "spread"}, "binpack", {}, "1"),
    ({"vgpu.fleet/gpu-policy": "spread", "ack.node.gpu.placement": "binpack"}, "binpack", {}, "1"),
    # The pod's annotation takes precedence over the node's label.
    ({"vgpu.fleet/gpu-policy": "binpack"}, "binpack", {GPU_POLICY: "spread"}, "1"),
    ({"vgpu.fleet/gpu-policy": "spred"}, "binpack", {}, "0"),
]


def told(labels, policy="spread", name="a"):
    _server, extender, cluster = parts()
    extender.ledger.gpu_policy = policy
    made = node_object(name, [gpu(f"g{n}", MEMORY) for n in range(4)])
    made["metadata"]["labels"] = labels
    cluster.node(False, item(made, wire.Node))
    return extender.ledger, cluster, made


@pytest.mark.parametrize(("labels", "policy", "annotations", "expected"), LABELS)
def test_node_label_sets_the_gpu_policy(labels, policy, annotations, expected):
    ledger, _cluster, _made = told(labels, policy)
    ledger.hold("x", "default/x", "a", [Part("c", APP, (Device("g0", 5000, 0),))])
    assert placed(ledger, asked(annotations)) == [expected]
    # A second node without labels must not change the result.
    ledger.set_node("b", node("b", 4))
    two = pod_ask(ask(100), gpu_policy=asked(annotations).preferences.gpu_policy)
    assert ledger.filter(two, ["a", "b"]).fits == ["a", "b"]


SHARING = [
    ("vgpu.fleet/gpu-sharing", "exclusive", True, False),
    ("vgpu.fleet/gpu-sharing", "shared", False, True),
    ("vgpu.fleet/gpu-sharing", "any", True, True),
    ("ack.node.gpu.schedule", "default", True, False),
    ("ack.node.gpu.schedule", "topology", True, False),
    ("ack.node.gpu.schedule", "cgpu", False, True),
    ("ack.node.gpu.schedule", "core_mem", False, True),
    ("ack.node.gpu.schedule", "unheard", True, True),
]


@pytest.mark.parametrize(("label", "value", "whole", "part"), SHARING)
def test_node_label_limits_gpus_to_whole_or_partial_requests(label, value, whole, part):
    ledger, _cluster, _made = told({label: value})
    for wanted, fits, kind in ((pod_ask(WHOLE), whole, "parts of GPUs"), (pod_ask(PART), part, "whole GPUs")):
        answer = ledger.filter(wanted, ["a"])
        assert (answer.fits == ["a"]) is fits
        assert answer.never == ({} if fits else {"a": f"labelled for pods that take {kind}"})
    # If a single container requests a part of a GPU, the pod counts as a pod that takes parts.
    assert (ledger.filter(pod_ask(WHOLE, PART), ["a"]).fits == ["a"]) is part


def test_label_changes_are_followed_and_wrong_labels_logged_once(caplog):
    ledger, cluster, made = told({"ack.node.gpu.schedule": "cgpu"})
    assert ledger.filter(pod_ask(WHOLE), ["a"]).fits == []
    with caplog.at_level(logging.WARNING):
        for _heartbeat in range(3):
            made["metadata"]["labels"] = {"ack.node.gpu.schedule": "gpu"}
            cluster.node(False, item(made, wire.Node))
    assert ledger.filter(pod_ask(WHOLE), ["a"]).fits == ["a"]
    (line,) = [record.message for record in caplog.records if "ack.node.gpu.schedule" in record.message]
    assert "node a" in line and "expected one of default, cgpu" in line
    # A new node that reuses the row of a removed node in the table must not inherit its labels.
    made["metadata"]["labels"] = {"vgpu.fleet/gpu-sharing": "exclusive"}
    cluster.node(False, item(made, wire.Node))
    cluster.node(True, item(made, wire.Node))
    ledger.set_node("b", node("b", 2))
    assert ledger.filter(pod_ask(PART), ["b"]).fits == ["b"]
