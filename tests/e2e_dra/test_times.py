# SPDX-License-Identifier: Apache-2.0
"""How long pods with claims take: to a running container, next to pods with a slice of the device plugin on the same
node in the same run; and how many a second the stock kube-scheduler binds, next to pods of an extended resource.

Times are reported. The gates are ratios within one run. VGPU_CLAIM_TIMES="pods,nodes,bound" for other sizes.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from conftest import CLAIMS, CONFIGURATION, SLICES, devices, remove
from kubebox import pods
from kubebox.api import ApiError
from kubebox.cluster import PODS, Cluster
from kubebox.gpunode import LIBRARIES, GpuNode
from kubebox.process import NeverCame, until

COUNT, NODES, BOUND = (int(word) for word in os.environ.get("VGPU_CLAIM_TIMES", "8,50,200").split(","))
# LONGER: the start of a container with a claim takes at most this many times as long as with a slice.
# SHARE: pods with claims are bound at least at this part of the rate of pods with an extended resource.
LONGER, SHARE = 2.0, 0.1
CLAIMED = (CONFIGURATION, {"allocation": "dra"})
SLICED = ({"vcuda": {"libraryRoot": str(LIBRARIES), "splitCount": 4}},)
NUMBER = "example.com/number"
UNLIMITED = 5000


def claim_of(name: str, memory: str, cores: str) -> dict[str, Any]:
    asked = {"deviceClassName": "vgpu", "capacity": {"requests": {"memory": memory, "cores": cores}}}
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": asked}]}}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}, "spec": spec}


def with_claim(body: dict[str, Any], claim: str) -> dict[str, Any]:
    body["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": claim}]
    body["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
    return body


def seconds_to_running(cluster: Cluster, way: str, n: int) -> float:
    """From the first object that is created to a container that runs, as the API server has it."""
    container = pods.container([pods.WORKER, "take", "0"], slices=int(way == "slice"))
    body = pods.manifest(f"{way}-{n}", container)
    began = time.monotonic()
    if way == "claim":
        cluster.api.create(CLAIMS, claim_of(f"c{n}", "1Gi", "10"))
        with_claim(body, f"c{n}")
    pod = pods.create(cluster, body)
    until(pod.running, f"pod {pod.name} that is running", pause_s=0.02)
    took = time.monotonic() - began
    pod.delete()
    if way == "claim":
        remove(cluster, f"c{n}")
    return took


def change(cluster: Cluster, node: GpuNode, way: str) -> None:
    """Has the node offer its cards by the other way; the program ends by itself, and its unit starts it again."""
    node.configure(*(CLAIMED if way == "claim" else SLICED))
    until(lambda: not node.plugin.running, "end of the program, which was told another way")
    node.start()
    offered = {"claim": (2, 0), "slice": (0, 8)}[way]
    until(lambda: (len(devices(cluster)), cluster.allocatable()) == offered, f"cards by {way} alone")


@pytest.fixture
def sliced(cluster: Cluster, node: GpuNode) -> Iterator[None]:
    yield
    if not devices(cluster):
        pods.delete_all(cluster)
        change(cluster, node, "claim")


def test_the_time_to_a_running_container(cluster: Cluster, node: GpuNode, sliced: None) -> None:
    """Pods one after the other, half of the claims before the slices and half after them."""
    took: dict[str, list[float]] = {"claim": [], "slice": []}
    for way, count in (("claim", COUNT // 2), ("slice", COUNT), ("claim", COUNT // 2)):
        if took["claim"]:
            change(cluster, node, way)
        # The first of a way pays for what is read once.
        took[way] += [seconds_to_running(cluster, way, n) for n in range(count + 1)][1:]
    (stored,) = cluster.api.get(SLICES)["items"]
    middle = {way: statistics.median(found) for way, found in took.items()}
    words = ", ".join(
        f"{way} {1000 * middle[way]:.0f} ({1000 * max(found):.0f} at most)" for way, found in took.items()
    )
    print(f"\nto a running container, ms, {COUNT} pods each: {words}; load {os.getloadavg()[0]:.0f}")
    sizes = [len(json.dumps(one, separators=(",", ":"))) for one in (stored, stored["spec"])]
    print(f"the slice of two cards as the API server has it: {sizes[0]} bytes, its spec {sizes[1]}")
    assert middle["claim"] <= LONGER * middle["slice"], took


class Bound(threading.Thread):
    """When each pod got its node, by a watch, which the server may end at any time."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.at: dict[str, float] = {}
        self.ended = False
        self.version = cluster.api.get(PODS)["metadata"]["resourceVersion"]
        self.start()

    def run(self) -> None:
        while not self.ended:
            self.follow()

    def follow(self) -> None:
        url = f"{self.cluster.api.server}{PODS}?watch=1&resourceVersion={self.version}&timeoutSeconds=60"
        rest = b""
        with self.cluster.api._opener.open(url, timeout=90) as stream:
            while not self.ended and (chunk := stream.read1(1 << 20)):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    pod = json.loads(line)["object"]
                    self.version = pod["metadata"]["resourceVersion"]
                    if (pod.get("spec") or {}).get("nodeName"):
                        self.at.setdefault(pod["metadata"]["name"], time.monotonic())

    def rate(self, count: int) -> float:
        """Pods a second, from the first that is bound to the last. Requests of one kind wait for one another in the
        scheduler's client, so the last steps of many pods come together.
        """
        try:
            until(lambda: len(self.at) >= count or not self.is_alive(), f"{count} pods with a node", 60, 0.05)
        except NeverCame as fault:
            raise NeverCame(f"{fault}: {len(self.at)} have one\n{self.cluster.scheduler.tail(20)}") from None
        assert self.is_alive(), f"the watch ended by a fault after {len(self.at)} pods"
        self.ended = True
        return (count - 1) / (max(self.at.values()) - min(self.at.values()))


def device(n: int) -> dict[str, Any]:
    """A card as a node publishes it, with room for eight."""
    amounts = {"memory": "16000Mi", "cores": "100", "slots": "8"}
    return {
        "name": f"gpu-{n}",
        "allowMultipleAllocations": True,
        "attributes": {"type": {"string": "gpu"}, "uuid": {"string": f"GPU-{n}"}},
        "capacity": {
            "memory": {
                "value": amounts["memory"],
                "requestPolicy": {"default": "2000Mi", "validRange": {"min": "1Mi", "step": "1Mi"}},
            },
            "cores": {
                "value": amounts["cores"],
                "requestPolicy": {"default": "10", "validRange": {"min": "1", "step": "1"}},
            },
            "slots": {
                "value": amounts["slots"],
                "requestPolicy": {"default": "1", "validRange": {"min": "1", "max": "1"}},
            },
        },
    }


@pytest.fixture
def many(cluster: Cluster) -> Iterator[Cluster]:
    """Nodes of objects alone, each with two cards by a ResourceSlice and eight of a number."""
    names = [f"made-{n:03d}" for n in range(NODES)]
    for name in names:
        labels = {"kubernetes.io/hostname": name, "example.com/made": "yes"}
        amounts = {"cpu": "64", "memory": "64Gi", "pods": "110", NUMBER: "8"}
        body = {"metadata": {"name": name, "labels": labels}, "status": {"capacity": amounts, "allocatable": amounts}}
        cluster.api.create("/api/v1/nodes", body)
        cluster.api.patch(f"/api/v1/nodes/{name}/status", {"status": body["status"]})
        pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": "gpu.vgpu.fleet", "nodeName": name, "pool": pool, "devices": [device(n) for n in range(2)]}
        cluster.api.create(
            SLICES,
            {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec},
        )
    yield cluster
    # Nobody ends pods of nodes without a kubelet.
    clear(cluster)
    cluster.scheduler.stop()
    cluster.write_scheduler_configuration([])
    cluster.scheduler.start()
    for name in names:
        cluster.api.delete(f"{SLICES}/{name}")
        cluster.api.delete(f"/api/v1/nodes/{name}")


def limit(cluster: Cluster, requests: int | None) -> None:
    """How many requests a second the scheduler's client does; None: as it is shipped, 50."""
    cluster.scheduler.stop()
    cluster.write_scheduler_configuration([])
    path = cluster.folder / "scheduler.yaml"
    configuration = yaml.safe_load(path.read_text())
    if requests:
        configuration["clientConnection"] |= {"qps": requests, "burst": 2 * requests}
    path.write_text(yaml.safe_dump(configuration))


def store(cluster: Cluster, way: str) -> None:
    for n in range(BOUND):
        body = pods.manifest(f"{way}-{n}", pods.container(["none"], slices=0))
        body["spec"] |= {"nodeSelector": {"example.com/made": "yes"}, "tolerations": [{"operator": "Exists"}]}
        if way == "claim":
            cluster.api.create(CLAIMS, claim_of(f"b{n}", "1Gi", "10"))
            with_claim(body, f"b{n}")
        else:
            body["spec"]["containers"][0]["resources"] = {"limits": {NUMBER: "1"}}
        pods.create(cluster, body)


def bound_a_second(cluster: Cluster, way: str, requests: int | None) -> float:
    """Pods that are stored while no scheduler runs."""
    limit(cluster, requests)
    store(cluster, way)
    watch = Bound(cluster)
    cluster.scheduler.start()
    rate = watch.rate(BOUND)
    clear(cluster)
    return rate


def clear(cluster: Cluster) -> None:
    """The claims' finalizer is taken by a controller that does 20 requests a second; here it need not."""
    cluster.api.delete(PODS, 0)
    cluster.api.delete(CLAIMS)
    for one in cluster.api.get(CLAIMS)["items"]:
        try:
            cluster.api.patch(f"{CLAIMS}/{one['metadata']['name']}", {"metadata": {"finalizers": None}})
        except ApiError as fault:
            if fault.code != 404:
                raise
    until(lambda: not cluster.api.get(PODS)["items"] and not cluster.api.get(CLAIMS)["items"], "an empty cluster")


def test_claims_bound_a_second(many: Cluster) -> None:
    rates = {}
    for requests in (None, UNLIMITED):
        rate = {way: bound_a_second(many, way, requests) for way in ("number", "claim")}
        words = f"number {rate['number']:.0f}, claim {rate['claim']:.0f}"
        rates[requests] = rate["claim"] / rate["number"]
        print(
            f"\n{NODES} nodes of two cards, {BOUND} pods, pods/s with {requests or 50} requests/s: {words}; "
            f"load {os.getloadavg()[0]:.0f}"
        )
    assert min(rates.values()) >= SHARE, rates
