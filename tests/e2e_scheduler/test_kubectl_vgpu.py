# SPDX-License-Identifier: Apache-2.0
"""Runs ``kubectl vgpu`` as users do: a real kubectl finds the plugin on the PATH and talks to a real API server.

Most tests run it as a user with only read rights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kubebox.cluster import SERVER
from kubebox.process import until

GPU, MEM = "nvidia.com/gpu", "nvidia.com/gpumem"
WRAPPER = '#!/bin/sh\nexec "{python}" -c "import sys; from vgpu_kubectl.{module} import main; sys.exit(main())" "$@"\n'


@pytest.fixture(scope="module")
def reader(fleet):
    """Creates a user that may only list, in all namespaces."""
    group = "rbac.authorization.k8s.io"
    rules = [{"apiGroups": [""], "resources": ["nodes", "pods", "events"], "verbs": ["get", "list"]}]
    role = {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": {"name": "lookers"}, "rules": rules}
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "lookers"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "lookers"},
        "subjects": [{"apiGroup": group, "kind": "Group", "name": "lookers"}],
    }
    made = {"clusterroles": role, "clusterrolebindings": binding}
    for kind, one in made.items():
        fleet.api.create(f"/apis/{group}/v1/{kind}", one)
    yield fleet.cluster.authority.kubeconfig("looker", SERVER, "/O=lookers/CN=looker")
    for kind in made:
        fleet.api.delete(f"/apis/{group}/v1/{kind}/lookers")


@pytest.fixture
def kubectl(fleet, reader, tmp_path):
    """Returns a function that runs kubectl with the given arguments as the read-only user, and returns (exit status,
    output)."""
    for name, module in (("kubectl-vgpu", "main"), ("kubectl_complete-vgpu", "completion")):
        (tmp_path / name).write_text(WRAPPER.format(python=sys.executable, module=module))
        (tmp_path / name).chmod(0o755)
    programs: Path = fleet.cluster.programs.kubernetes
    environment = {
        "PATH": f"{tmp_path}:{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(fleet.root / "native/plugin/src"),
        "KUBECONFIG": str(reader),
        "HOME": str(tmp_path),
        "no_proxy": "*",
    }

    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run(["kubectl", *words], env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def test_nodes_cards_pods_and_why_show_the_cluster(fleet, kubectl):
    fleet.node("a", 2, told={1: {"healthy": False}})
    fleet.node("none", 0)
    fleet.pod("has", {GPU: 1, MEM: 12000, "nvidia.com/gpucores": 30})
    fleet.bound("has")
    fleet.pod("waits", {GPU: 1, MEM: 8000})
    fleet.waits("waits")
    status, said = kubectl("vgpu", "nodes", "-o", "json")
    assert status == 0, said
    found = {one["node"]: one for one in json.loads(said)["nodes"]}
    assert (found["a"]["gpus"], found["a"]["unhealthy"], found["a"]["planned_mib"]) == (2, 1, 12000)
    assert found["a"]["resources"][GPU] == {"capacity": 20, "allocatable": 20, "allocated": 1}
    status, said = kubectl("vgpu", "cards", "-o", "json")
    first, second = json.loads(said)["cards"]
    assert (first["uuid"], first["planned_mib"], first["planned_cores"]) == ("GPU-a-0", 12000, 30)
    assert (second["healthy"], second["planned_mib"]) == (False, 0)
    assert [one["pod"] for one in first["pods"]] == ["default/has"]
    status, said = kubectl("vgpu", "pods")
    assert status == 0 and "12000 MiB, 30 %" in said and "default/waits: 0/2 nodes" in said, said
    until(lambda: "GpusNotFree" in kubectl("vgpu", "why", "waits")[1], "event GpusNotFree of pod waits", 60)
    status, said = kubectl("vgpu", "why", "default/waits")
    assert status == 0 and "8000 MiB" in said and "waits: 0/2 nodes" in said, said


def test_errors_are_shown_with_exit_status_1(fleet, kubectl):
    status, said = kubectl("vgpu", "why", "nobody")
    assert status == 1 and 'pods "nobody" not found' in said, said
    status, said = kubectl("vgpu", "nodes", "--context", "nowhere")
    assert status == 1 and "Error in configuration" in said and "nowhere" in said, said


def test_kubectl_completes_subcommands(fleet, kubectl):
    status, said = kubectl("__complete", "vgpu", "c")
    assert status == 0 and said.splitlines()[0].split("\t")[0] == "cards", said


@pytest.fixture
def admin(fleet, kubectl, monkeypatch):
    """Returns a function that runs kubectl as a user that may write nodes and pods."""
    config = fleet.cluster.authority.kubeconfig("kubectl-admin", SERVER, "/O=system:masters/CN=kubectl-admin")
    return lambda *words: kubectl(*words, f"--kubeconfig={config}")


def test_drain_annotates_the_node_and_evicts_the_pods_of_the_gpu(fleet, kubectl, admin):
    """The real API server accepts the node's annotation and the eviction. No kubelet runs that would end the pod."""
    fleet.node("a", 2)
    fleet.pod("has", {GPU: 1, MEM: 12000})
    _node, parts = fleet.bound("has")
    (device,) = parts[0].devices
    fleet.pod("other", {GPU: 1, MEM: 12000})
    fleet.bound("other")
    status, said = kubectl("vgpu", "drain", "a", device.uuid, "--force")
    assert status == 1 and "forbidden" in said.lower(), said
    status, said = admin("vgpu", "drain", "a", device.uuid)
    assert status == 1 and "no controller creates these pods again: default/has" in said, said
    status, said = admin("vgpu", "drain", "a", device.uuid, "--force")
    assert status == 0 and "evicted: default/has" in said and "default/other" not in said, said
    notes = fleet.api.get("/api/v1/nodes/a")["metadata"]["annotations"]
    assert notes["vgpu.fleet/drained-gpus"] == device.uuid
    until(
        lambda: fleet.api.get_or_none("/api/v1/namespaces/default/pods/has") is None or ends(fleet, "has"),
        "end of pod has",
    )
    assert not ends(fleet, "other")
    assert admin("vgpu", "undrain", "a", device.uuid)[0] == 0
    assert "vgpu.fleet/drained-gpus" not in fleet.api.get("/api/v1/nodes/a")["metadata"]["annotations"]


def ends(fleet, name: str) -> bool:
    return "deletionTimestamp" in fleet.get(name)["metadata"]


def test_resize_writes_the_request_of_the_pods_owner(fleet, admin):
    fleet.node("a", 1)
    fleet.pod("has", {GPU: 1, MEM: 4000})
    fleet.bound("has")
    status, said = admin("vgpu", "resize", "default/has", "--memory", "6000", "--wait", "0")
    assert status == 0 and 'requested {"' in said, said
    (asked,) = json.loads(fleet.get("has")["metadata"]["annotations"]["vgpu.fleet/resize"]).values()
    assert asked == {"memory_mib": 6000}
