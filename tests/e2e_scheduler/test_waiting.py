# SPDX-License-Identifier: Apache-2.0
"""Tests pending pods: they report why they wait, and they are retried after changes that the kube-scheduler does not
notice.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from fleet import FREED_S, NODES, QUOTAS
from kubebox.cluster import PODS, SERVER
from kubebox.process import until
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods.annotations import NodeGpu

GPU, MEM = "nvidia.com/gpu", "nvidia.com/gpumem"
EVENTS = "/api/v1/namespaces/default/events"
NOBODY = "127.0.0.1:1"


def events(fleet, name, reason):
    uid = fleet.get(name)["metadata"]["uid"]
    found = fleet.api.get(f"{EVENTS}?fieldSelector=involvedObject.uid%3D{uid}%2Creason%3D{reason}")["items"]
    return [one["message"] for one in found]


def vgpuctl(fleet, name, scheduler):
    """Runs vgpuctl as a user with read rights only."""
    kubeconfig = fleet.cluster.authority.kubeconfig("reader", SERVER, "/O=readers/CN=reader")
    command = [sys.executable, "-m", "vgpu_plugin.ctl.main", "explain", "pod", f"default/{name}"]
    done = subprocess.run(
        [*command, "--kubeconfig", str(kubeconfig), "--scheduler", scheduler],
        env={**os.environ, "PYTHONPATH": str(fleet.root / "native/plugin/src"), "no_proxy": "*"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else f"exit {done.returncode}: {done.stderr}"


@pytest.fixture(scope="module")
def reader(fleet):
    """Creates a user that may read pods and events. The built-in role ``view`` is empty here, because the
    controller that gives it its rules does not run."""
    group = "rbac.authorization.k8s.io"
    role = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "readers"},
        "rules": [{"apiGroups": [""], "resources": ["pods", "events"], "verbs": ["get", "list"]}],
    }
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "readers"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "readers"},
        "subjects": [{"apiGroup": group, "kind": "Group", "name": "readers"}],
    }
    made = {"clusterroles": role, "clusterrolebindings": binding}
    for kind, one in made.items():
        fleet.api.create(f"/apis/{group}/v1/{kind}", one)
    yield
    for kind in made:
        fleet.api.delete(f"/apis/{group}/v1/{kind}/readers")


def test_events_and_vgpuctl_explain_a_waiting_pod(fleet, reader):
    for name in ("a", "b"):
        fleet.node(name, 1)
        fleet.pod(f"on-{name}", {GPU: 1, MEM: 12000})
        fleet.bound(f"on-{name}")
    fleet.pod("waits", {GPU: 1, MEM: 8000})
    fleet.pod("huge", {GPU: 1, MEM: 90000})
    fleet.waits("waits")
    fleet.waits("huge")
    (said,) = until(lambda: events(fleet, "waits", "GpusNotFree"), "event of pod default/waits", 60)
    where = {fleet.node_of(f"on-{name}") for name in ("a", "b")}
    assert where == {"a", "b"}
    assert "8000 MiB" in said and re.search(r"once default/on-[ab] \(12000 MiB\) ends", said), said
    (said,) = until(lambda: events(fleet, "huge", "GpusNotFree"), "event of pod default/huge", 60)
    assert "90000 MiB" in said and "once" not in said, said
    # If vgpuctl cannot reach vgpu-scheduler, it shows what the API server has: the request, the kube-scheduler's
    # condition, and the event.
    text = vgpuctl(fleet, "waits", NOBODY)
    assert "Pending, on no node" in text and "1 GPU 8000 MiB" in text, text
    assert "PodScheduled: 0/2 nodes" in text and "once default/on-" in text, text
    # With the address of vgpu-scheduler, vgpuctl shows the explanation of vgpu-scheduler too.
    text = vgpuctl(fleet, "waits", f"127.0.0.1:{fleet.leader().extender}")
    assert "0 of 2 nodes have room" in text and "(a, b)" in text and "it would fit on" in text, text
    text = vgpuctl(fleet, "huge", f"127.0.0.1:{fleet.leader().extender}")
    assert "not a GPU large enough for 90000 MiB" in text and "add a node" in text, text
    # For a bound pod, vgpuctl shows its node and GPUs.
    held = vgpuctl(fleet, "on-a", NOBODY)
    assert "12000 MiB" in held and f"on {fleet.node_of('on-a')}" in held and "GPU-" in held, held
    assert "exit 1" in vgpuctl(fleet, "nobody", NOBODY)


def test_freed_room_is_used_at_once_although_the_watch_is_late(fleet):
    """When a pod has ended, the kube-scheduler asks again for the waiting pod, here always before vgpu-scheduler sees
    that end.
    """

    def helped():
        return sum(fleet.metric(one, "late_watch_total") for one in fleet.replicas)

    with fleet.late(0.05):
        fleet.node("a", 1)
        fleet.pod("p0", {GPU: 1, MEM: 12000})
        fleet.bound("p0")
        before = helped()
        for n in (1, 2, 3):
            fleet.pod(f"p{n}", {GPU: 1, MEM: 12000})
            fleet.waits(f"p{n}")
            # After this pause the kube-scheduler delays no retry of the pod.
            fleet.pause(3)
            fleet.delete(f"p{n - 1}")
            fleet.bound(f"p{n}", FREED_S)
        assert helped() > before
    assert fleet.faults() == []


def test_a_pod_is_retried_within_a_minute_of_an_unseen_change(fleet):
    """After a change that the kube-scheduler does not notice, a pending pod is retried within about a minute.

    Such changes are more GPU memory in the node's annotation and a raised quota. The Deployment sets the retry interval
    to one minute; the kube-scheduler's default is five.
    """
    fleet.node("a", 1, 8000)
    hard = "limits.nvidia.com/gpumem"
    fleet.api.create(QUOTAS, {"metadata": {"name": "team"}, "spec": {"hard": {hard: "20000"}}})
    fleet.pod("quota", {GPU: 1, MEM: 3000}, nodeSelector={"later": "yes"})
    fleet.pod("memory", {GPU: 1, MEM: 9000})
    fleet.waits("memory")
    fleet.api.patch(f"{QUOTAS}/team", {"spec": {"hard": {hard: "2000"}}})
    fleet.node("b", 1, 4000, later="yes")
    until(
        lambda: "quota team" in json.dumps(events(fleet, "quota", "GpusNotFree")),
        "event of pod default/quota that names the quota",
        120,
    )
    assert not fleet.node_of("memory") and not fleet.node_of("quota")
    fleet.api.patch(f"{QUOTAS}/team", {"spec": {"hard": {hard: "20000"}}})
    gpus = [NodeGpu("GPU-a-0", "Tesla V100-SXM2-16GB", 16160, 16160, 10, 1616, 10)]
    fleet.api.patch(
        f"{NODES}/a", {"metadata": {"annotations": {pod_annotations.GPUS: pod_annotations.write_gpus(gpus)}}}
    )
    # The interval is one minute, and the kube-scheduler checks it every 30 s; a busy machine needs longer.
    for name, where in (("memory", "a"), ("quota", "b")):
        node, (part,) = fleet.bound(name, 200)
        assert (node, part.devices[0].uuid) == (where, f"GPU-{where}-0")
    assert fleet.faults() == []


def test_an_api_server_that_hangs_during_binds_oversells_nothing(fleet):
    """The API server hangs while pods are being bound, so the outcome of some binds is unknown.

    The GPUs of these pods stay reserved, nothing is oversold, and in the end every pod is bound.
    """
    fleet.node("a", 8)
    count = 60
    server = fleet.cluster.apiserver
    for n in range(count):
        fleet.pod(f"p{n}", {GPU: 1, MEM: 1600})
    until(lambda: fleet.node_of("p0") or fleet.node_of("p1"), "first bound pod", 60, 0.02)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        # The pause is longer than vgpu-scheduler's timeout for a call to the API server.
        fleet.pause(6)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    # A kube-scheduler that cannot renew its lease exits. No kubelet runs here, so the test restarts it.
    fleet.pause(3)
    for replica in fleet.replicas:
        replica.kube.start()

    def bound():
        return sum(bool(one["spec"].get("nodeName")) for one in fleet.api.get(PODS)["items"])

    until(lambda: bound() == count, f"number of {count} bound pods", 180)
    assert fleet.faults() == []
    until(
        lambda: all(fleet.metric(replica, "uncertain_binds") == 0 for replica in fleet.replicas),
        "metric uncertain_binds of 0 in both vgpu-schedulers",
        120,
    )
    assert fleet.metric(fleet.writer(), "node_memory_held_bytes", node="a") == count * 1600 << 20
