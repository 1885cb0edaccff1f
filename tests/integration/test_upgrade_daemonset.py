# SPDX-License-Identifier: Apache-2.0
"""What playbooks/upgrade.yml gives back to a cluster where the proof of a DaemonSet fails: the role's own tasks on this
machine, before an API server in memory that keeps what is applied."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

NODE, OTHER = "/api/v1/nodes/a1", "/api/v1/nodes/a2"
DAEMON_SET = "/apis/apps/v1/namespaces/kube-system/daemonsets/vgpu-device-plugin"
CONFIGS = "/api/v1/namespaces/kube-system/configmaps/vgpu-configs"
ANSWERS = {
    "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.2"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "groups": []},
}
LABEL = "vgpu.fleet/device-plugin"
FORMER = {
    "namespace": "kube-system",
    "image": "localhost/vgpu-device-plugin:1",
    "config_path": "/etc/vgpu/node.yaml",
    "kubelet_dir": "/var/lib/kubelet",
    "library_root": "/usr/local/lib/vgpu",
    "options": ["--log-level=debug"],
    "environment": {"A": "1"},
    "tolerations": [],
}
NEW = {"image": "localhost/vgpu-device-plugin:2", "options": []}


class Cluster(BaseHTTPRequestHandler):
    objects: dict = {}

    def do_GET(self):
        path, _mark, query = self.path.partition("?")
        if path == "/api/v1/nodes" and "labelSelector" in query:
            nodes = [one for key, one in self.objects.items() if key.startswith("/api/v1/nodes/")]
            return self.say({"items": [one for one in nodes if LABEL in one["metadata"].get("labels", {})]})
        return self.say(ANSWERS.get(path) or self.objects.get(path))

    def do_PATCH(self):
        path = self.path.partition("?")[0]
        self.objects[path] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.say(self.objects[path])

    def do_DELETE(self):
        self.say(self.objects.pop(self.path.partition("?")[0], None))

    def say(self, found):
        body = json.dumps(found or {"kind": "Status", "message": "not found"}).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_about):
        pass


@pytest.fixture
def cluster(tmp_path):
    """An API server with two nodes of the new DaemonSet. (variables that reach it, object by path)"""
    labelled = {"labels": {LABEL: "daemonset"}}
    objects = {path: {"kind": "Node", "metadata": {"name": path[-2:], **labelled}} for path in (NODE, OTHER)}
    handler = type("Handler", (Cluster,), {"objects": objects})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    program = tmp_path / "plugin" / "current" / "bin" / "vgpuctl"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "{\\"version\\": \\"$(cat ' + str(tmp_path / "runs") + ')\\"}"\n')
    program.chmod(0o755)
    (tmp_path / "runs").write_text("1")
    given = {
        "device_plugin_api_kubeconfig": str(kubeconfig),
        "device_plugin_api_context": "",
        "device_plugin_namespace": "kube-system",
        "device_plugin_node_name": "a1",
        "device_plugin_rollout": 4,
        "device_plugin_root": str(tmp_path / "plugin"),
        "device_plugin_daemonset_path": str(tmp_path / "daemonset.json"),
    }
    yield given, objects
    server.shutdown()
    server.server_close()


def go_back(place, given, daemonset):
    """The tasks of a return that are about the DaemonSet, with what the upgrade kept."""
    place.hosts({"some": ["a1"]})
    path = given["device_plugin_daemonset_path"]
    point = {"plugin": "1", "configs": {"/etc/vgpu/configs/big.yaml": "former\n"}, "daemonset": {path: daemonset}}
    role = {"name": "vgpu.fleet.upgrade", "tasks_from": "return_daemonset"}
    variables = {**given, "__upgrade_kept": {"point": point}}
    step = {"name": "Return", "ansible.builtin.import_role": role, "vars": variables}
    return place.play([{"name": "Return", "hosts": "all", "gather_facts": False, "tasks": [step]}])


def container(objects):
    return objects[DAEMON_SET]["spec"]["template"]["spec"]["containers"][0]


def test_the_former_image_and_options_come_back(place, cluster, tmp_path):
    given, objects = cluster
    objects[CONFIGS] = {"kind": "ConfigMap", "metadata": {"name": "vgpu-configs"}, "data": {"theirs.yaml": "x\n"}}
    text = json.dumps(FORMER)
    run = go_back(place, given, text)
    assert run.code == 0, run.output
    assert container(objects)["image"] == FORMER["image"]
    assert "--log-level=debug" in json.dumps(container(objects))
    # The former text of this host's configurations; another host's stay.
    assert objects[CONFIGS]["data"] == {"theirs.yaml": "x\n", "big.yaml": "former\n"}
    assert objects[OTHER]["metadata"]["labels"] == {LABEL: "daemonset"}
    assert json.loads((tmp_path / "daemonset.json").read_text()) == FORMER
    again = go_back(place, given, text)
    assert "changed=0 " in again.output, again.output


def test_a_return_that_does_not_run_the_former_version_fails(place, cluster, tmp_path):
    given, _objects = cluster
    (tmp_path / "runs").write_text("2")
    run = go_back(place, given, json.dumps(FORMER))
    assert run.code != 0, run.output
    assert "Wait until the pod runs the former version" in run.output
    assert not (tmp_path / "daemonset.json").exists(), "noted before it was so"


def test_a_node_that_had_no_daemonset_is_taken_from_it(place, cluster, tmp_path):
    given, objects = cluster
    (tmp_path / "daemonset.json").write_text(json.dumps({**FORMER, **NEW}))
    run = go_back(place, given, None)
    assert run.code == 0, run.output
    assert objects[NODE]["metadata"].get("labels", {}) == {}
    assert objects[OTHER]["metadata"]["labels"] == {LABEL: "daemonset"}
    assert not (tmp_path / "daemonset.json").exists()
