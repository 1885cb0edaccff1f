# SPDX-License-Identifier: Apache-2.0
"""Tests the rollback of playbooks/upgrade.yml in a cluster whose device plugin is a DaemonSet. The rollback follows a
failure of the isolation check, which tries to exceed the limits, with the new version. The role's own tasks run on this
machine, with an API server in memory that stores applied objects.
"""

from __future__ import annotations

import hashlib
import json

import pytest
from doubles.kube_api import APPLY, KubeApi, write_kubeconfig

pytestmark = pytest.mark.slow

NODE, OTHER = "/api/v1/nodes/a1", "/api/v1/nodes/a2"
DAEMON_SET = "/apis/apps/v1/namespaces/kube-system/daemonsets/vgpu-device-plugin"
PODS = "/api/v1/namespaces/kube-system/pods"
CONFIGS = "/api/v1/namespaces/kube-system/configmaps/vgpu-configs"
LABELS = {"vgpu.fleet/device-plugin": "daemonset"}
NODE_CONFIG, BIG = "/etc/vgpu/node.yaml", "/etc/vgpu/configs/big.yaml"
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


def runs(place, version="1", path=NODE_CONFIG, text="former\n"):
    """Sets the status that vgpuctl in the node's pod reports."""
    said = {"version": version, "config_path": path, "config_sha256": hashlib.sha256(text.encode()).hexdigest()}
    (place / "runs").write_text(json.dumps(said))


@pytest.fixture
def cluster(tmp_path):
    """Starts an API server with two nodes that run the new DaemonSet. Yields (variables for the role to reach the
    server, stored objects by path)."""
    api = KubeApi()
    for path in (NODE, OTHER):
        api.request("PATCH", path, {"kind": "Node", "metadata": {"name": path[-2:], "labels": LABELS}}, APPLY)
    for name in ("a1", "a2"):
        spec = {"nodeName": name, "containers": [{"image": NEW["image"]}]}
        meta = {"name": f"p-{name}", "labels": {"app.kubernetes.io/name": "vgpu-device-plugin"}}
        api.put(f"{PODS}/p-{name}", {"kind": "Pod", "metadata": meta, "spec": spec})
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api.url)
    program = tmp_path / "plugin" / "current" / "bin" / "vgpuctl"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\ncat {tmp_path / 'runs'}\n")
    program.chmod(0o755)
    runs(tmp_path)
    given = {
        "device_plugin_api_kubeconfig": str(kubeconfig),
        "device_plugin_api_context": "",
        "device_plugin_namespace": "kube-system",
        "device_plugin_node_name": "a1",
        "device_plugin_rollout": 4,
        "device_plugin_root": str(tmp_path / "plugin"),
        "__device_plugin_daemonset_path": str(tmp_path / "daemonset.json"),
        "__device_plugin_config_path": NODE_CONFIG,
    }
    with api:
        yield given, api.objects


def go_back(place, given, daemonset, configs=True):
    """Runs the rollback's tasks for the DaemonSet, with the state before the upgrade (the rollback point)."""
    place.hosts({"some": ["a1"]})
    path = given["__device_plugin_daemonset_path"]
    point = {
        "plugin": "1",
        "node_config": "former\n",
        "configs": {BIG: "big\n"} if configs else None,
        "daemonset": {path: daemonset},
    }
    role = {"name": "vgpu.fleet.upgrade", "tasks_from": "return_daemonset"}
    variables = {**given, "__upgrade_kept": {"point": point}}
    step = {"name": "Return", "ansible.builtin.import_role": role, "vars": variables}
    return place.play([{"name": "Return", "hosts": "all", "gather_facts": False, "tasks": [step]}])


def container(objects):
    return objects[DAEMON_SET]["spec"]["template"]["spec"]["containers"][0]


def test_rollback_restores_the_former_image_and_options(place, cluster, tmp_path):
    given, objects = cluster
    objects[CONFIGS] = {"kind": "ConfigMap", "metadata": {"name": "vgpu-configs"}, "data": {"theirs.yaml": "x\n"}}
    text = json.dumps(FORMER)
    run = go_back(place, given, text)
    assert run.code == 0, run.output
    assert container(objects)["image"] == FORMER["image"]
    assert "--log-level=debug" in json.dumps(container(objects))
    # The host's former configurations are restored; the other host's configuration stays.
    assert objects[CONFIGS]["data"] == {"theirs.yaml": "x\n", "big.yaml": "big\n"}
    assert objects[OTHER]["metadata"]["labels"] == LABELS
    # Only the pod of this node is deleted; the pod of the other node runs a version that has passed its check.
    assert [path for path in objects if path.startswith(PODS)] == [f"{PODS}/p-a2"]
    assert json.loads((tmp_path / "daemonset.json").read_text()) == FORMER
    again = go_back(place, given, text)
    assert "changed=0 " in again.output, again.output


# columns: version of the pod; path of the pod's configuration; text of the pod's configuration; whether the rollback
# point has named configurations; whether the role is expected to accept this state as the end of the rollback
SAYS = [
    pytest.param("1", BIG, "big\n", True, True, id="former version, former named configuration"),
    pytest.param("1", BIG, "unknown\n", False, True, id="former version, no recorded named configurations"),
    pytest.param("2", NODE_CONFIG, "former\n", True, False, id="newer version, former configuration"),
    pytest.param("1", NODE_CONFIG, "newer\n", True, False, id="former version, newer configuration"),
    pytest.param("1", BIG, "newer\n", True, False, id="former version, newer text of a named configuration"),
    pytest.param(
        "1",
        "/etc/vgpu/configs/added.yaml",
        "big\n",
        True,
        False,
        id="former version, named configuration added by the newer version",
    ),
]


@pytest.mark.parametrize("version, path, text, named, back", SAYS)
def test_rollback_waits_for_the_former_version_and_configuration(
    place, cluster, tmp_path, version, path, text, named, back
):
    given, _objects = cluster
    runs(tmp_path, version, path, text)
    run = go_back(place, given, json.dumps(FORMER), named)
    assert (run.code == 0) is back, run.output
    assert back or "Wait until the pod runs the former version and configuration" in run.output
    assert (tmp_path / "daemonset.json").exists() is back, (
        "a complete rollback keeps the record of the DaemonSet; an incomplete one removes it"
    )


def test_rollback_to_a_release_without_a_daemonset_removes_the_node_from_it(place, cluster, tmp_path):
    given, objects = cluster
    (tmp_path / "daemonset.json").write_text(json.dumps({**FORMER, **NEW}))
    run = go_back(place, given, None)
    assert run.code == 0, run.output
    assert objects[NODE]["metadata"].get("labels", {}) == {}
    assert objects[OTHER]["metadata"]["labels"] == LABELS
    assert not (tmp_path / "daemonset.json").exists()
