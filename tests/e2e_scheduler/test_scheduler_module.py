# SPDX-License-Identifier: Apache-2.0
"""Tests the module kube_scheduler, which deploys the scheduler. The module runs as a process and calls a real API
server, in check mode, to apply, again without changes, and to remove.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fleet import Fleet
from kubebox.api import ApiError
from kubebox.cluster import SERVER
from vgpu_plugin._shared.kube import scheduler_manifests
from vgpu_plugin._shared.kube.scheduler_desired import Desired

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "other"
# Kinds of the objects that the module creates in its namespace; all other objects are cluster-wide.
HERE = [
    *("ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Service", "Deployment"),
    *("PodDisruptionBudget", "NetworkPolicy"),
]
KINDS = [one["kind"] for one in scheduler_manifests.manifests(Desired("a", "b"))]


@pytest.fixture(scope="module", autouse=True)
def replicas_withdrawn(fleet):
    """Stops the replicas of other test files during these tests, because both use the same cluster-wide objects."""
    fleet.withdraw()
    fleet.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    yield
    fleet.start()


def call(fleet, check=False, **params):
    kubeconfig = fleet.cluster.authority.kubeconfig("admin-of-module", SERVER, "/O=system:masters/CN=module")
    given = {"kubeconfig": str(kubeconfig), "namespace": NAMESPACE, "_ansible_check_mode": check, **params}
    arguments = {"ANSIBLE_MODULE_ARGS": {**given, "_ansible_remote_tmp": "/tmp", "_ansible_keep_remote_files": False}}
    name = "ansible_collections.vgpu.fleet.plugins.modules.kube_scheduler"
    program = f"import runpy; runpy.run_module({name!r}, run_name='__main__')"
    path = str(ROOT / ".build" / "collections")
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "no_proxy": "*"},
    )
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert "changed" in found or "msg" in found, found
    return found, done.returncode


def there(fleet):
    """Returns the kinds of the module's objects in the namespace, and its cluster roles, read from the API server."""
    desired = Desired("a", "b", NAMESPACE)
    found = []
    for one in scheduler_manifests.manifests(desired):
        if one["metadata"].get("namespace") == NAMESPACE:
            name = one["metadata"]["name"]
            if fleet.api.get_or_none(f"{Fleet.path(one)}/{name}"):
                found.append(f"{one['kind']} {name}")
    return found


def test_check_apply_repeat_change_undo(fleet):
    desired = {"image": "x:1", "kube_scheduler_repository": "registry.example/kube-scheduler"}
    planned, _code = call(fleet, check=True, **desired)
    assert planned.get("changed"), planned
    assert there(fleet) == []
    done, _code = call(fleet, **desired)
    assert done.get("changed"), done
    assert (
        done["changed"]
        and done["objects"] == planned["objects"]
        and there(fleet) == [f"{kind} vgpu-scheduler" for kind in HERE]
    ), done
    again, _code = call(fleet, **desired)
    assert not again["changed"], again["objects"]
    deployment = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/vgpu-scheduler"
    images = [one["image"] for one in fleet.api.get(deployment)["spec"]["template"]["spec"]["containers"]]
    assert images == ["x:1", f"registry.example/kube-scheduler:{done['kubernetes']}"]
    changed, _code = call(fleet, check=True, **desired, config={"plain": "slice"})
    assert changed["objects"] == [f"ConfigMap {NAMESPACE}/vgpu-scheduler", f"Deployment {NAMESPACE}/vgpu-scheduler"]
    assert not call(fleet, **desired)[0]["changed"]
    gone, _code = call(fleet, state="absent")
    assert gone["changed"] and there(fleet) == []
    assert not call(fleet, state="absent")[0]["changed"]


def test_errors_name_the_cause(fleet):
    failed, code = call(fleet)
    assert code and "image" in failed["msg"]
    failed, code = call(fleet, kubeconfig="/nowhere", state="absent")
    assert code and "no such file here; set vgpu_kubeconfig" in failed["msg"]
    failed, code = call(fleet, namespace="nowhere", image="x", kube_scheduler_repository="y")
    assert code and 'namespaces "nowhere" not found' in failed["msg"]


PLAY = """
- hosts: localhost
  connection: local
  gather_facts: false
  roles:
    - vgpu.fleet.scheduler
"""


def play(fleet, folder, **variables):
    kubeconfig = fleet.cluster.authority.kubeconfig("admin-of-module", SERVER, "/O=system:masters/CN=module")
    (folder / "play.yml").write_text(PLAY)
    given = {"scheduler_kubeconfig": str(kubeconfig), "scheduler_namespace": NAMESPACE, **variables}
    given["ansible_python_interpreter"] = sys.executable
    command = ["ansible-playbook", "-i", "localhost,", "-e", json.dumps(given), str(folder / "play.yml")]
    collections = str(ROOT / ".build" / "collections")
    env = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": collections, "ANSIBLE_HOME": str(folder), "no_proxy": "*"}
    env |= {"ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCALHOST_WARNING": "0", "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    return done.returncode, done.stdout + done.stderr


def test_the_role(fleet, tmp_path):
    code, said = play(fleet, tmp_path)
    assert code and "scheduler_hosts is []; expected hosts of the inventory" in said
    desired = {"scheduler_image": "x:1", "scheduler_rollout": 0}
    desired["vgpu_resource_names"] = {"count": "example.com/gpu", "memory_percentage": "example.com/part"}
    desired["scheduler_default_memory"] = 700
    # With scheduler_apply=False the role only writes a file. The API server must accept each object of the file.
    out = tmp_path / "objects.json"
    code, said = play(fleet, tmp_path, **desired, scheduler_apply=False, scheduler_manifests_out=str(out))
    assert code == 0 and there(fleet) == [], said
    items = json.loads(out.read_text())["items"]
    assert [one["kind"] for one in items] == KINDS
    for one in items:
        path = f"{Fleet.path(one)}/{one['metadata']['name']}?dryRun=All&fieldManager=test"
        taken = fleet.api.call("PATCH", path, one, "application/apply-patch+yaml")
        assert taken["metadata"]["name"] == one["metadata"]["name"]
    broken = next(one for one in items if one["kind"] == "Deployment")
    broken["spec"]["template"]["spec"]["containers"][0]["image"] = None
    with pytest.raises(ApiError, match="image"):
        path = f"{Fleet.path(broken)}/{broken['metadata']['name']}?dryRun=All&fieldManager=test"
        fleet.api.call("PATCH", path, broken, "application/apply-patch+yaml")
    code, said = play(fleet, tmp_path, **desired)
    assert code == 0 and "changed=1" in said, said
    assert "changed=0" in play(fleet, tmp_path, **desired)[1]
    config = fleet.api.get(f"/api/v1/namespaces/{NAMESPACE}/configmaps/vgpu-scheduler")["data"]["config.yaml"]
    found = json.loads(config)
    assert found["resourceNames"] == {"count": "example.com/gpu", "memoryPercentage": "example.com/part"}
    # vgpu-scheduler must understand the configuration that the role has written.
    sys.path.append(str(next((ROOT / ".build/scheduler/lib").iterdir()) / "site-packages"))
    from vgpu_scheduler import settings

    read = settings.read(found, "config.yaml")
    assert (read.config.gpu, read.config.default_memory_mib, read.gpu_policy) == ("example.com/gpu", 700, "spread")
    code, said = play(fleet, tmp_path, scheduler_state="absent")
    assert code == 0 and "changed=1" in said and there(fleet) == []
