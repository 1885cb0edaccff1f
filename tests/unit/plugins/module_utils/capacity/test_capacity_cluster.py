# SPDX-License-Identifier: Apache-2.0
"""What Kubernetes shows of nodes: the rule on tables, and the module against a small API server with pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from ansible_collections.vgpu.fleet.plugins.module_utils.capacity import cluster as capacity_cluster
from ansible_collections.vgpu.fleet.plugins.module_utils.capacity import tables

ROOT = Path(__file__).resolve().parents[5]
GPU = "nvidia.com/gpu"


def node(capacity=4, allocatable=4, ready="True", name="n1"):
    shown = {"capacity": {"cpu": "8"}, "allocatable": {"cpu": "8"}, "conditions": [{"type": "Ready", "status": ready}]}
    if capacity is not None:
        shown["capacity"][GPU], shown["allocatable"][GPU] = str(capacity), str(allocatable)
    return {"metadata": {"name": name}, "status": shown}


def container(count=0, **more):
    return {"name": "c", "resources": {"limits": {GPU: str(count)}} if count else {}, **more}


def pod(name, *counts, phase="Running", init=(), on="n1"):
    return {
        "metadata": {"name": name, "namespace": "work"},
        "spec": {"nodeName": on, "containers": [container(one) for one in counts], "initContainers": list(init)},
        "status": {"phase": phase},
    }


SIDECAR = {"restartPolicy": "Always"}
ASKED = [
    ("a pod of which nothing is told", {}, 0),
    ("no init containers, as Go writes it", {"spec": {"containers": [container(2)], "initContainers": None}}, 2),
    ("no limits, as Go writes it", {"spec": {"containers": [{"resources": {"limits": None}}, {"resources": None}]}}, 0),
    ("no whole number", {"spec": {"containers": [{"resources": {"limits": {GPU: "1k"}}}]}}, 0),
    ("the larger of two init containers", pod("a", 1, init=[container(3), container(2)]), 3),
    ("a sidecar after a larger init container", pod("a", 1, init=[container(3), container(1, **SIDECAR)]), 3),
    ("two sidecars", pod("a", 1, init=[container(1, **SIDECAR), container(2, **SIDECAR)]), 4),
    ("a sidecar between init containers", pod("a", init=[container(2), container(1, **SIDECAR), container(2)]), 3),
    ("nothing", pod("a", 0), 0),
    ("two containers", pod("a", 1, 2), 3),
    ("a larger init container", pod("a", 1, init=[container(2)]), 2),
    ("a smaller one", pod("a", 3, init=[container(2)]), 3),
    ("a sidecar beside them", pod("a", 1, init=[container(1, restartPolicy="Always")]), 2),
    ("an init container after a sidecar", pod("a", 1, init=[container(1, restartPolicy="Always"), container(2)]), 3),
]


@pytest.mark.parametrize(("about", "one", "count"), ASKED)
def test_what_a_pod_holds(about, one, count):
    assert capacity_cluster.asked(one, GPU) == count


OFFERED = {"resources": {GPU: 4}, "withheld": 0}
# About, the node, its pods, what is withheld, what the differences are about.
SHOWN = [
    ("all agree", node(), [pod("a", 1), pod("b", 3)], 0, []),
    ("no such node", None, [], 0, ["Kubernetes"]),
    ("not ready", node(ready="Unknown"), [], 0, ["Kubernetes"]),
    ("one too many", node(5, 5), [], 0, ["Kubernetes capacity"]),
    ("one too few", node(3, 3), [], 0, ["Kubernetes capacity"]),
    ("the resource is not there", node(None), [], 0, ["Kubernetes capacity"]),
    ("sick pieces", node(4, 3), [], 0, ["Kubernetes allocatable"]),
    ("sick pieces, as the node says itself", node(4, 3), [], 1, []),
    ("more given out than there is", node(), [pod("a", 3), pod("b", 2)], 0, ["Kubernetes allocated"]),
    ("all given out", node(), [pod("a", 4)], 0, []),
    ("sick pieces, more than the node says", node(4, 2), [], 1, ["Kubernetes allocatable"]),
    ("more allocatable than the node says", node(4, 4), [], 2, []),
    ("an allocatable that is not told", {"status": {**node()["status"], "allocatable": None}}, [], 0, []),
    ("not ready, and one too few", node(3, 3, ready="False"), [], 0, ["Kubernetes", "Kubernetes capacity"]),
    ("a node of which nothing is told", {}, [], 0, ["Kubernetes", "Kubernetes capacity"]),
    ("what has failed holds nothing", node(), [pod("a", 3), pod("b", 2, phase="Failed")], 0, []),
    (
        "a pod that waits for its start holds",
        node(),
        [pod("a", 3), pod("b", 2, phase="Pending")],
        0,
        ["Kubernetes allocated"],
    ),
    ("what has ended holds nothing", node(), [pod("a", 3), pod("b", 2, phase="Succeeded")], 0, []),
]


@pytest.mark.parametrize(("about", "shown", "pods", "withheld", "what"), SHOWN)
def test_differences(about, shown, pods, withheld, what):
    seen = capacity_cluster.facts(shown, pods, [GPU])
    found = capacity_cluster.compare("n1", seen, dict(OFFERED, withheld=withheld))
    assert [one["what"] for one in found] == what
    assert all(one["remedy"] and "n1" in one["where"] for one in found)


def test_other_conditions_are_not_readiness():
    pressure = {"type": "MemoryPressure", "status": "False"}
    for conditions in ([pressure, *node()["status"]["conditions"]], [*node()["status"]["conditions"], pressure]):
        shown = {"status": {**node()["status"], "conditions": conditions}}
        assert capacity_cluster.facts(shown, [], [GPU])["ready"] is True
    assert (
        capacity_cluster.facts({"status": {**node()["status"], "conditions": [pressure]}}, [], [GPU])["ready"] is False
    )


def test_what_pods_hold_is_told_by_pod():
    seen = capacity_cluster.facts(node(), [pod("a", 1), pod("idle", 0), pod("b", 2, phase="Pending")], [GPU])
    assert seen["resources"] == {GPU: {"capacity": 4, "allocatable": 4, "allocated": 3}}
    assert [(one["pod"], one["count"], one["phase"]) for one in seen["pods"]] == [
        ("work/a", 1, "Running"),
        ("work/b", 2, "Pending"),
    ]


CAPACITY = {
    "ok": True,
    "resources": [GPU],
    "expected": [{"id": f"GPU-a::{n}", "resource": GPU} for n in range(4)],
    "advertised": [f"GPU-a::{n}" for n in range(4)],
    "drift": [],
    "sentences": [],
    "missing": {},
}


def test_what_a_node_offers():
    assert capacity_cluster.offered(CAPACITY) == OFFERED
    assert capacity_cluster.offered(dict(CAPACITY, advertised=["GPU-a::0"]))["withheld"] == 3
    told_twice = dict(CAPACITY, advertised=[*CAPACITY["advertised"], "GPU-b::0"])
    assert capacity_cluster.offered(told_twice)["withheld"] == 0
    two = dict(CAPACITY, resources=[GPU, "nvidia.com/mig"])
    assert capacity_cluster.offered(two)["resources"] == {GPU: 4, "nvidia.com/mig": 0}
    assert capacity_cluster.offered({}) == {"resources": {}, "withheld": 0}


DRIFT = {"what": "Kubernetes capacity", "where": "n1", "expected": "4", "found": "5", "remedy": "wait"}


def test_one_list_of_differences():
    seen = {"ready": True, "resources": {}, "pods": [], "drift": [DRIFT]}
    found = tables.with_kubernetes(CAPACITY, {"nodes": {"n1": seen}, "missing": ""}, "n1")
    assert (found["ok"], found["drift"], len(found["sentences"])) == (False, [DRIFT], 1)
    assert CAPACITY["drift"] == []


@pytest.mark.parametrize(
    ("kube", "why"),
    [({"skipped": True}, "not asked"), ({"nodes": {}, "missing": "no rights"}, "no rights"), (None, "not asked")],
)
def test_kubernetes_that_was_not_asked_is_said(kube, why):
    found = tables.with_kubernetes(CAPACITY, kube, "n1")
    assert (found["ok"], found["missing"]) == (True, {"kubernetes": why})


class Cluster:
    def __init__(self) -> None:
        self.nodes = [node(), node(name="other")]
        self.pods = [pod("a", 1), pod("b", 1), pod("elsewhere", 4, on="other")]
        self.status = 200
        self.asked: list[str] = []
        self.page = 2

    def answer(self, path):
        self.asked.append(path)
        url = urlsplit(path)
        query = parse_qs(url.query)
        kind, items = ("NodeList", self.nodes) if url.path.endswith("/nodes") else ("PodList", self.pods)
        first = int(query.get("continue", ["0"])[0])
        rest = str(first + self.page) if first + self.page < len(items) else ""
        if len(self.asked) > 4:
            self.nodes = [node(), node(name="other")]  # the kubelet has told the API server by now
        return {
            "kind": kind,
            "apiVersion": "v1",
            "metadata": {"continue": rest},
            "items": items[first : first + self.page],
        }


@pytest.fixture
def cluster(tmp_path):
    found = Cluster()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            text = json.dumps(found.answer(self.path) if found.status == 200 else {"kind": "Status"}).encode()
            self.send_response(found.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    names = {"clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}]}
    names.update(users=[{"name": "u", "user": {}}], contexts=[{"name": "x", "context": {"cluster": "c", "user": "u"}}])
    names.update({"apiVersion": "v1", "kind": "Config", "current-context": "x"})
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(names))
    found.kubeconfig = str(tmp_path / "kubeconfig")
    yield found
    server.shutdown()
    server.server_close()


def module(cluster, timeout=0, **more):
    given = {"kubeconfig": cluster.kubeconfig, "timeout": timeout, "nodes": {"n1": CAPACITY}, **more}
    done = subprocess.run(
        [sys.executable, "-m", "ansible_collections.vgpu.fleet.plugins.modules.kube_capacity_info"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": given}),
        env={**os.environ, "PYTHONPATH": str(ROOT / ".build" / "collections")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_module_asks_once_for_all_nodes_in_pages(cluster):
    found = module(cluster, nodes={"n1": CAPACITY, "gone": CAPACITY})
    assert found["missing"] == ""
    assert found["nodes"]["n1"]["drift"] == []
    assert found["nodes"]["n1"]["resources"][GPU]["allocated"] == 2
    assert [one["what"] for one in found["nodes"]["gone"]["drift"]] == ["Kubernetes"]
    assert len(cluster.asked) == 3  # the nodes, and two pages of pods


def test_module_waits_for_the_kubelet_to_tell(cluster):
    cluster.nodes = [node(2, 2)]
    found = module(cluster)
    assert [one["what"] for one in found["nodes"]["n1"]["drift"]] == ["Kubernetes capacity"]
    cluster.asked.clear()
    cluster.nodes = [node(2, 2)]
    assert module(cluster, timeout=60)["nodes"]["n1"]["drift"] == []


@pytest.mark.parametrize(("status", "words"), [(403, "answered 403"), (500, "answered 500")])
def test_api_server_that_refuses_is_a_missing_source(cluster, status, words):
    cluster.status = status
    found = module(cluster)
    assert words in found["missing"]
    assert (found["nodes"], found.get("failed", False)) == ({}, False)


def test_kubeconfig_that_is_not_there_is_a_missing_source(cluster):
    found = module(cluster, kubeconfig="/nonexistent/kubeconfig")
    assert "/nonexistent/kubeconfig" in found["missing"]
