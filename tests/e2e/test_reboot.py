# SPDX-License-Identifier: Apache-2.0
"""Tests a power cut of the node and its next boot, with the device plugin or with the kubelet starting first.

The plugin's unit makes systemd start the plugin before the unit kubelet.service. The kubelet starts first if its unit
has another name, or if the plugin waits for the driver. A kubelet that admits a pod while no plugin offers its devices
fails the pod permanently (kubernetes/kubernetes#125579). Such pods must be reported and use no slice (part of a GPU),
the node must offer no slice until the plugin runs, and replacement pods of a controller must run.
"""

from __future__ import annotations

from typing import Any

import pytest
from kubebox import pods, power
from kubebox.gpunode import LIBRARIES, MIB, RESOURCE
from kubebox.pods import WORKER
from kubebox.process import until

GPUS = ["T4"]
SPLIT = SLICES = 4
SLICE = 15360 // SPLIT * MIB
CONFIGURATION = {"vcuda": {"libraryRoot": str(LIBRARIES), "splitCount": SPLIT}}
FILL = [WORKER, "fill"]
REPLICA_SETS = "/apis/apps/v1/namespaces/default/replicasets"
EVENTS = "/api/v1/namespaces/default/events"


def used(node: Any) -> list[int]:
    """Returns the bytes of each process, as the simulated driver counts them."""
    return sorted(one["total"] for gpu in node.gpusimctl("usage", "--json")["gpus"] for one in gpu["processes"])


def boot_of(cluster: Any) -> str:
    return str(cluster.node_object()["status"]["nodeInfo"]["bootID"])


@pytest.fixture
def work(cluster, node, pod):
    """Starts two pods that fill their slices. Returns the pods, their devices and the current boot id."""
    ones = [pod(f"work-{n}", FILL, restart="Always") for n in range(2)]
    for one in ones:
        one.wait_running()
        one.wait_log(r"^filled ")
    assert used(node) == [SLICE] * 2
    return ones, node.held(), boot_of(cluster)


def test_plugin_first(cluster, node, work):
    """If the plugin starts first, the same pods run again, each with its former slice."""
    ones, held, boot = work
    uids = [one.uid for one in ones]

    power.cut(cluster, node)
    power.boot_programs(node)
    power.boot_runtime(cluster)
    cluster.kubelet.start()

    until(lambda: cluster.node_ready() and boot_of(cluster) != boot, "ready node with the new boot id")
    until(node.registered, "registration of the device plugin")
    until(
        lambda: used(node) == [SLICE] * 2,
        f"use of both slices in full; the pods: {[one.object()['status'] for one in ones]}",
    )
    assert [one.uid for one in ones] == uids
    # The kubelet writes a pod's status after it started the container.
    until(lambda: all(one.restarts() >= 1 for one in ones), "status of the pods with a restart of each container")
    until(lambda: node.held() == held, "report of the kubelet with the same slices")
    until(lambda: cluster.allocatable() == SLICES, "all allocatable slices")


@pytest.fixture
def replicas(cluster):
    """Creates a ReplicaSet of one pod that fills its slice; yields a function that returns its pods."""
    controllers = cluster.start_controllers("replicaset-controller")
    template = pods.manifest("", pods.container(FILL), restart="Always")
    label = {"app": "replicas"}
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": label},
        "template": {"metadata": {"labels": label}, "spec": template["spec"]},
    }
    body = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "replicas"}, "spec": spec}
    cluster.api.create(REPLICA_SETS, body)
    yield lambda: [
        pods.Pod(cluster, one["metadata"]["name"])
        for one in cluster.api.get(pods.PODS + "?labelSelector=app%3Dreplicas")["items"]
    ]
    controllers.stop()
    cluster.api.delete(f"{REPLICA_SETS}/replicas")


def refused(one: pods.Pod) -> str:
    """Returns why the kubelet refused the pod at admission, or "" if it did not."""
    status = one.object()["status"]
    return (
        status["message"] if (status["phase"], status.get("reason")) == ("Failed", "UnexpectedAdmissionError") else ""
    )


def test_kubelet_first(cluster, node, work, replicas, pod):
    """If the kubelet starts first, controllers replace their pods. Pods without a controller are reported as refused
    and use no slice."""
    ones, _held, boot = work
    (former,) = until(replicas, "pod of the ReplicaSet")
    former.wait_running()

    power.cut(cluster, node)
    power.boot_runtime(cluster)
    cluster.kubelet.start()

    until(lambda: cluster.node_ready() and boot_of(cluster) != boot, "ready node with the new boot id")
    for one in (*ones, former):
        text = until(lambda one=one: refused(one), f"refusal of {one.name} by the kubelet")
        assert RESOURCE in text
        assert not one.running()
    until(lambda: cluster.allocatable() == 0, "node without allocatable slices while no plugin runs")
    until(lambda: any(one.why_not_scheduled() for one in replicas()), "pending new pod of the ReplicaSet")

    node.start()

    until(lambda: (cluster.capacity(), cluster.allocatable()) == (SLICES, SLICES), "all allocatable slices")
    until(lambda: any(one.running() for one in replicas()), "running pod of the ReplicaSet")
    # Together with the ReplicaSet's pod these pods use all slices, so no refused pod keeps a slice.
    later = [pod(f"later-{n}", FILL).wait_running() for n in range(SLICES - 1)]
    until(lambda: used(node) == [SLICE] * SLICES, "every slice filled exactly")
    names = {name for name, _container in node.held()}
    assert names.isdisjoint({one.name for one in (*ones, former)})
    assert names > {one.name for one in later}
    # The refused pods are reported until they are deleted.
    assert all(refused(one) for one in ones)
