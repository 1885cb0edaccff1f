# SPDX-License-Identifier: Apache-2.0
"""Tests vgpuctl explain pod, which explains why a pod waits. If this project's scheduler listens on this host, vgpuctl
asks the scheduler, otherwise the API server.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from doubles.kube_api import KubeApi, KubeClient, write_kubeconfig
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods.annotations import APP, Device, Part
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.ctl import pod as ctl_pod
from vgpu_plugin.errors import Fatal
from vgpu_plugin.node.kube_api import ApiError

PLAN = pod_annotations.write_plan([Part("main", APP, (Device("GPU-a", 3000, 30),))])
PATH = "/api/v1/namespaces/team/pods/a"
GIVEN = pod_annotations.write_plan([Part("main", APP, (Device("GPU-b", 3000, 0),))])


def pod(limits=None, annotations=None, node="", **status):
    limits = (
        {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"} if limits is None else limits
    )
    return {
        "metadata": {"name": "a", "namespace": "team", "uid": "u-1", "annotations": annotations or {}},
        "spec": {
            "schedulerName": "vgpu-scheduler",
            "nodeName": node,
            "containers": [{"name": "main", "resources": {"limits": limits}}],
        },
        "status": {"phase": "Pending", **status},
    }


def event(reason, message, writer="vgpu-scheduler", when="2026-01-01T00:00:00Z", kind="Warning"):
    return {
        "metadata": {},
        "type": kind,
        "reason": reason,
        "message": message,
        "lastTimestamp": when,
        "source": {"component": writer},
    }


def cluster(made, events=()):
    """A cluster with a pod, the pod's events, and an event of another pod."""
    out = KubeClient()
    out.put(PATH, made)
    for number, one in enumerate([*events, event("GpusNotFree", "of another pod")]):
        one["involvedObject"] = {"uid": "u-1" if number < len(events) else "u-2"}
        out.put(f"/api/v1/namespaces/team/events/{number}", one)
    return out


TOLD = [
    # columns: the pod, its events; expected: words that the explanation contains, words that it does not contain
    (
        pod(),
        [],
        ["team/a: Pending, on no node", "1 GPU 3000 MiB and 30 % of the compute", "no plan of its GPUs yet"],
        [],
    ),
    (
        pod(annotations={pod_annotations.PLAN: PLAN}, node="n0"),
        [],
        ["on n0", "planned:", "GPU-a: 3000 MiB, 30 %"],
        ["no plan"],
    ),
    (
        pod(annotations={pod_annotations.PLAN: PLAN, pod_annotations.GIVEN: GIVEN}, node="n0"),
        [],
        ["assigned by the kubelet, not as planned", "GPU-b: 3000 MiB, the compute that others leave"],
        ["GPU-a"],
    ),
    (pod(annotations={pod_annotations.PLAN: "{"}), [], ['metadata.annotations["vgpu.fleet/plan"]: is no JSON'], []),
    (pod({"nvidia.com/gpumem": "-1"}), [], ["its GPU request is invalid", "expected a whole number"], []),
    (pod({"cpu": "1"}), [], ["requests no GPU"], []),
    (
        pod(conditions=[{"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}]),
        [],
        ["PodScheduled: 0/2 nodes are available"],
        [],
    ),
    (
        pod(),
        [
            event("GpusNotFree", "second", when="2026-01-01T00:00:02Z"),
            event("FailedScheduling", "first", "default-scheduler", "2026-01-01T00:00:01Z"),
            event("Pulled", "an image", "kubelet-of-others", kind="Normal"),
        ],
        ["vgpu-scheduler: GpusNotFree: second"],
        ["an image"],
    ),
]


@pytest.mark.parametrize(("made", "events", "words", "absent"), TOLD)
def test_explanation_follows_pod_and_events_of_the_api_server(made, events, words, absent):
    text = "\n".join(ctl_pod.of_api(cluster(made, events), "team", "a"))
    assert all(word in text for word in words), text
    assert not any(word in text for word in absent), text
    assert "of another pod" not in text
    if len(events) > 1:
        assert text.index("first") < text.index("second")


def test_forbidden_events_are_reported():
    api = cluster(pod())

    def get(path):
        if "/events" in path:
            raise ApiError(403, "403: no")
        return api.objects[path]

    lines = ctl_pod.of_api(SimpleNamespace(get=get), "team", "a")
    assert "its events cannot be read: 403: no" in lines[-1]


@pytest.fixture
def scheduler():
    """Starts a double (test replacement) of the scheduler that knows only the pod team/a."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            known = self.path == "/explain/team/a"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(b"team/a: waits\n  for room\n" if known else b"404: no such pod\n")

        def log_message(self, *_about):
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()


def test_command_asks_the_scheduler_first(scheduler, capsys):
    address, asked = scheduler
    assert ctl.main(["explain", "pod", "team/a", "--scheduler", address]) == 0
    assert capsys.readouterr().out == "team/a: waits\n  for room\n" and asked == ["/explain/team/a"]
    assert ctl.main(["explain", "pod", "team/a", "--scheduler", address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"pod": "team/a", "lines": ["team/a: waits", "  for room"]}
    assert ctl.main(["explain", "pod", "b", "--scheduler", address]) == 1
    assert "pod default/b: 404: no such pod" in capsys.readouterr().err and asked[-1] == "/explain/default/b"
    assert ctl.main(["explain", "pod", "--scheduler", address]) == 2
    assert "needs a name" in capsys.readouterr().err


def test_command_falls_back_to_the_api_server(tmp_path, capsys, monkeypatch):
    with KubeApi() as double:
        double.put(PATH, pod())
        path = write_kubeconfig(tmp_path / "kubeconfig", double.url)
        words = ["explain", "pod", "team/a", "--scheduler", "127.0.0.1:1"]
        assert ctl.main([*words, "--kubeconfig", str(path)]) == 0
        assert "team/a: Pending, on no node" in capsys.readouterr().out
        monkeypatch.setenv("KUBECONFIG", str(path))
        assert ctl.main(words) == 0
        assert ctl.main([*words[:2], "team/b", *words[3:]]) == 1
        assert "404" in capsys.readouterr().err
        assert ctl.main([*words, "--kubeconfig", str(tmp_path / "nothing")]) == 1
        assert "nothing" in capsys.readouterr().err


def test_missing_kubeconfig_is_reported(monkeypatch):
    monkeypatch.setattr(ctl_pod, "KUBECONFIGS", ("/nowhere/conf",))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(Fatal, match="name one with --kubeconfig"):
        ctl_pod.kubeconfig("")
