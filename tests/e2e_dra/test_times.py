# SPDX-License-Identifier: Apache-2.0
"""Measures how long a pod with a ResourceClaim takes to start and how many such pods the kube-scheduler binds per
second.

The start is compared with pods that get a slice (part of a GPU) from the device plugin on the same node. The bind rate
of the stock kube-scheduler is compared with pods that request an extended resource. Both comparisons use one run; the
tests print the times and assert only the ratios. VGPU_CLAIM_TIMES="pods,nodes,bound" sets other sizes.
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
# LONGER: highest allowed ratio of the start time of a container with a claim to that of a container with a slice.
# SHARE: lowest allowed ratio of the bind rate of pods with claims to that of pods with an extended resource.
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
    """Returns the seconds from the creation of the first object until the API server reports the container running."""
    container = pods.container([pods.WORKER, "take", "0"], slices=int(way == "slice"))
    body = pods.manifest(f"{way}-{n}", container)
    began = time.monotonic()
    if way == "claim":
        cluster.api.create(CLAIMS, claim_of(f"c{n}", "1Gi", "10"))
        with_claim(body, f"c{n}")
    pod = pods.create(cluster, body)
    until(pod.running, f"pod {pod.name} that runs", pause_s=0.02)
    took = time.monotonic() - began
    pod.delete()
    if way == "claim":
        remove(cluster, f"c{n}")
    return took


def change(cluster: Cluster, node: GpuNode, way: str) -> None:
    """Makes the node offer its GPUs by claims (``way`` "claim") or by the device plugin ("slice").

    The device plugin exits at such a change of its configuration, so the function starts it again.
    """
    node.configure(*(CLAIMED if way == "claim" else SLICED))
    until(lambda: not node.plugin.running, "exit of the device plugin after the change of its configuration")
    node.start()
    offered = {"claim": (2, 0), "slice": (0, 8)}[way]
    until(
        lambda: (len(devices(cluster)), cluster.allocatable()) == offered,
        f"offer of the GPUs by {way} only; (claim devices, slices): expected {offered}",
    )


@pytest.fixture
def sliced(cluster: Cluster, node: GpuNode) -> Iterator[None]:
    yield
    if not devices(cluster):
        pods.delete_all(cluster)
        change(cluster, node, "claim")


def test_a_container_with_a_claim_starts_about_as_fast(cluster: Cluster, node: GpuNode, sliced: None) -> None:
    """Starts one pod at a time: half of the pods with claims, all pods with slices, then the other pods with claims."""
    took: dict[str, list[float]] = {"claim": [], "slice": []}
    for way, count in (("claim", COUNT // 2), ("slice", COUNT), ("claim", COUNT // 2)):
        if took["claim"]:
            change(cluster, node, way)
        # The first pod after a change also pays for data that is read only once, so its time is dropped.
        took[way] += [seconds_to_running(cluster, way, n) for n in range(count + 1)][1:]
    (stored,) = cluster.api.get(SLICES)["items"]
    middle = {way: statistics.median(found) for way, found in took.items()}
    words = ", ".join(
        f"{way} {1000 * middle[way]:.0f} ({1000 * max(found):.0f} at most)" for way, found in took.items()
    )
    print(f"\nmedian time until the container runs, in ms, {COUNT} pods each: {words}; load {os.getloadavg()[0]:.0f}")
    sizes = [len(json.dumps(one, separators=(",", ":"))) for one in (stored, stored["spec"])]
    print(f"size of the ResourceSlice of two GPUs at the API server: {sizes[0]} bytes, its spec {sizes[1]} bytes")
    assert middle["claim"] <= LONGER * middle["slice"], took


class Bound(threading.Thread):
    """Watches pods and records when each pod got its node; starts a new watch whenever the API server ends one."""

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
        """Waits for ``count`` bound pods and returns the pods bound per second, from the first bind to the last.

        The scheduler's client queues its requests, so many pods are bound together at the end. The interval therefore
        covers all pods; a part of it would give a wrong rate.
        """
        try:
            until(lambda: len(self.at) >= count or not self.is_alive(), f"{count} bound pods", 60, 0.05)
        except NeverCame as fault:
            raise NeverCame(
                f"{fault}: found {len(self.at)}; the scheduler's log:\n{self.cluster.scheduler.tail(20)}"
            ) from None
        assert self.is_alive(), f"the watch of pods failed after {len(self.at)} bound pods"
        self.ended = True
        return (count - 1) / (max(self.at.values()) - min(self.at.values()))


def device(n: int) -> dict[str, Any]:
    """Returns a GPU as a node publishes it in a ResourceSlice; eight pods can share it."""
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
    """Creates nodes that exist only as API objects.

    Each node has two GPUs in a ResourceSlice and a capacity of eight of the extended resource NUMBER.
    """
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
    # No kubelet runs on these nodes, so the fixture deletes the pods itself.
    clear(cluster)
    cluster.scheduler.stop()
    cluster.write_scheduler_configuration([])
    cluster.scheduler.start()
    for name in names:
        cluster.api.delete(f"{SLICES}/{name}")
        cluster.api.delete(f"/api/v1/nodes/{name}")


def limit(cluster: Cluster, requests: int | None) -> None:
    """Stops the scheduler and sets how many requests per second its client may send; None means the default of 50."""
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
    """Returns the pods bound per second; all pods are created while no scheduler runs.

    ``requests``: limit of the scheduler's client in requests per second, None for the default.
    """
    limit(cluster, requests)
    store(cluster, way)
    watch = Bound(cluster)
    cluster.scheduler.start()
    rate = watch.rate(BOUND)
    clear(cluster)
    return rate


def clear(cluster: Cluster) -> None:
    """Deletes all pods and claims, and removes the claims' finalizers: their controller is limited to 20 requests/s."""
    cluster.api.delete(PODS, 0)
    cluster.api.delete(CLAIMS)
    for one in cluster.api.get(CLAIMS)["items"]:
        try:
            cluster.api.patch(f"{CLAIMS}/{one['metadata']['name']}", {"metadata": {"finalizers": None}})
        except ApiError as fault:
            if fault.code != 404:
                raise
    until(
        lambda: not cluster.api.get(PODS)["items"] and not cluster.api.get(CLAIMS)["items"],
        "deletion of all pods and claims",
    )


def test_pods_with_claims_are_bound_within_the_allowed_ratio(many: Cluster) -> None:
    rates = {}
    for requests in (None, UNLIMITED):
        rate = {way: bound_a_second(many, way, requests) for way in ("number", "claim")}
        words = f"extended resource {rate['number']:.0f}, claim {rate['claim']:.0f}"
        rates[requests] = rate["claim"] / rate["number"]
        print(
            f"\n{NODES} nodes of two GPUs, {BOUND} pods; pods bound per s at {requests or 50} requests per s: {words}; "
            f"load {os.getloadavg()[0]:.0f}"
        )
    assert min(rates.values()) >= SHARE, rates
