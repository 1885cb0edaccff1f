# SPDX-License-Identifier: Apache-2.0
"""Runs the two playbooks as a user does: site.yml prepares the node, and cluster.yml installs the scheduler.

Then a pod that requests ``nvidia.com/gpumem: 3000`` runs with this limit. The tests call no module directly and load no
image themselves. The host is the box, a set of namespaces on this machine: it has a driver, a kubelet and containerd,
and its ``systemctl`` runs unit files (kubebox/systemctl.py). The stock kube-scheduler comes from an archive, because no
registry exists.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kubebox import deployments, pods
from kubebox.api import ApiError
from kubebox.cluster import PODS, SERVER
from kubebox.gpunode import MIB
from kubebox.pods import WORKER
from kubebox.process import until

ROOT = Path(__file__).resolve().parents[2]
GPUS, SLOTS = ["T4"], 10
NAME = "vgpu-scheduler"
DEPLOYMENT = f"/apis/apps/v1/namespaces/kube-system/deployments/{NAME}"
SYSTEM_PODS = f"/api/v1/namespaces/kube-system/pods?labelSelector=app.kubernetes.io/name%3D{NAME}"
REPOSITORY = "localhost/kube-scheduler"
MEM, CORES = "nvidia.com/gpumem", "nvidia.com/gpucores"


class Run(NamedTuple):
    code: int
    said: str

    @property
    def changed(self) -> int:
        return sum(int(one) for one in re.findall(r"changed=(\d+)", self.said))


class Controller:
    """A controller with an inventory and a kubeconfig that runs ansible-playbook."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        folder.mkdir()
        self.kubeconfig = cluster.authority.kubeconfig("admin-of-playbooks", SERVER, "/O=system:masters/CN=person")
        self.archive = folder / "kube-scheduler.tar"
        host = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "device_plugin_node_name": cluster.node,
        }
        group = {
            "vgpu_kubeconfig": str(self.kubeconfig),
            "vgpu_slice_sizing": "requested",
            "vgpu_verify": "never",
            "container_runtime_engine": "containerd",
            "container_runtime_runtimes": {"nvidia": {"path": "/usr/local/bin/nvidia-container-runtime"}},
            # The box has a driver and NVIDIA's runtime that no package installed.
            "nvidia_driver_source": "present",
            "nvidia_driver_kernel_module": "none",
            "nvidia_docker_packages": [],
            "nvidia_docker_config": {"accept-nvidia-visible-devices-as-volume-mounts": True},
            "scheduler_kube_scheduler_repository": REPOSITORY,
            "scheduler_kube_scheduler_archive": str(self.archive),
        }
        inventory = {"all": {"children": {"gpu_nodes": {"hosts": {"gpu-host-1": host}, "vars": group}}}}
        (folder / "hosts.json").write_text(json.dumps(inventory))

    def run(self, name: str, *words: str, **variables: Any) -> Run:
        program = str(Path(sys.executable).with_name("ansible-playbook"))
        more = ["-e", json.dumps(variables)] if variables else []
        done = subprocess.run(
            [program, "-i", str(self.folder / "hosts.json"), f"vgpu.fleet.{name}", *words, *more],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env={
                **{key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")},
                "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".build" / "collections"),
                "ANSIBLE_NOCOLOR": "1",
                "XDG_CACHE_HOME": str(self.cluster.programs.cache),
                "no_proxy": "*",
            },
        )
        return Run(done.returncode, done.stdout + done.stderr)

    def must(self, name: str, *words: str, **variables: Any) -> Run:
        found = self.run(name, *words, **variables)
        assert found.code == 0, found.said[-8000:]
        return found


@pytest.fixture(scope="module")
def person(machine: Any) -> Iterator[Controller]:
    cluster, node = machine
    node.exchange(GPUS)
    # The device plugin of an earlier module may have left its annotations on the node.
    left = [
        name for name in cluster.node_object()["metadata"].get("annotations") or {} if name.startswith("vgpu.fleet/")
    ]
    cluster.api.patch(f"/api/v1/nodes/{cluster.node}", {"metadata": {"annotations": dict.fromkeys(left)}})
    pids = {"containerd": cluster.containerd.pid, "kubelet": cluster.kubelet.pid}
    deployments.write_network(cluster)
    program = Path("/usr/local/bin/systemctl")
    text = (Path(__file__).parent / "kubebox" / "systemctl.py").read_text()
    program.write_text(f"#!/usr/bin/python3 -I\n{text}")
    program.chmod(0o755)
    for name, pid in pids.items():
        Path(f"/etc/systemd/system/{name}.service").write_text(f"[Service]\nX-Pid={pid}\n")
    ctr = Path("/usr/local/bin/ctr")
    ctr.symlink_to(cluster.programs.system / "ctr")
    # kubeadm installs the file at this path.
    own = Path("/etc/kubernetes/kubelet.conf")
    own.parent.mkdir(exist_ok=True)
    shutil.copy2(cluster.authority.folder / "kubelet.conf", own)
    made = Controller(cluster, cluster.folder / "controller")
    name = f"{REPOSITORY}:{deployments.version(cluster)}"
    deployments.pack_program(cluster.programs.kubernetes / "kube-scheduler", name, made.archive)
    controllers = cluster.start_controllers(*deployments.CONTROLLERS)
    try:
        yield made
    finally:
        made.run("cluster", scheduler_state="absent")
        made.run("teardown", teardown_roles=["device_plugin", "vcuda"])
        controllers.stop()
        deployments.network_file(cluster).unlink()
        for one in (program, ctr, own, *Path("/etc/systemd/system").glob("*.service")):
            one.unlink(missing_ok=True)
        node.reset()
        node.furnish_library()


def gpu_pod(name: str, limits: dict[str, int]) -> dict[str, Any]:
    container = pods.container([WORKER, "fill"], slices=0)
    container["resources"] = {"limits": {key: str(value) for key, value in limits.items()}}
    return pods.manifest(name, container)


def scheduler_images(cluster: Any) -> list[str]:
    found = cluster.ctr("images", "ls", "--quiet").stdout.split()
    return sorted(one for one in found if one.startswith((f"localhost/{NAME}:", REPOSITORY)))


def test_cluster_before_site_names_what_is_missing(person):
    """cluster.yml before site.yml names what is missing and changes nothing in the cluster or on the node."""
    found = person.run("cluster")
    assert found.code != 0
    assert f"gpu-host-1: node {person.cluster.node} has no annotation vgpu.fleet/gpus" in found.said, found.said
    assert "run site.yml with vgpu_slice_sizing: requested" in found.said
    assert found.changed == 0 and person.cluster.api.get_or_none(DEPLOYMENT) is None
    assert scheduler_images(person.cluster) == []


def test_site_makes_a_node_of_requested_sizes(person):
    person.must("site", "--check")
    person.must("site")
    until(lambda: person.cluster.allocatable() == SLOTS, f"{SLOTS} allocatable slices")
    again = person.must("site")
    assert again.changed == 0, again.said


def test_cluster_installs_the_scheduler(person):
    checked = person.must("cluster", "--check", "--diff")
    assert "would be loaded on gpu-host-1" in checked.said
    assert person.cluster.api.get_or_none(DEPLOYMENT) is None and scheduler_images(person.cluster) == []
    person.must("cluster")
    status = person.cluster.api.get(DEPLOYMENT)["status"]
    assert (status["readyReplicas"], status["updatedReplicas"]) == (2, 2)
    assert len(scheduler_images(person.cluster)) == 2
    again = person.must("cluster")
    assert again.changed == 0, again.said


# columns: limits of the pod; expected MiB
@pytest.mark.parametrize(("limits", "mib"), [({MEM: 3000}, 3000), ({MEM: 2000, CORES: 30}, 2000)])
def test_a_pod_has_what_it_asks_for(person, limits, mib):
    one = pods.create(person.cluster, gpu_pod(f"asks-{mib}", limits))
    try:
        assert one.object()["spec"]["schedulerName"] == NAME
        one.wait_running()
        assert int(one.wait_log(r"^total (\d+)$").group(1)) == mib * MIB
    finally:
        one.delete()


def test_another_setting_is_an_upgrade(person):
    """A second run of cluster.yml with a changed variable is an upgrade.

    When the playbook ends, the new configuration is active and the image of a former version is removed.
    """
    images = scheduler_images(person.cluster)
    (ours,) = (one for one in images if NAME in one)
    person.cluster.ctr("images", "tag", ours, f"localhost/{NAME}:former")
    found = person.must("cluster", scheduler_default_memory=700)
    assert found.changed == 2, found.said
    assert scheduler_images(person.cluster) == images
    one = pods.create(person.cluster, gpu_pod("asks-cores", {CORES: 20}))
    try:
        assert int(one.wait_running().wait_log(r"^total (\d+)$").group(1)) == 700 * MIB
    finally:
        one.delete()


def test_a_missing_image_is_named(person):
    """The play fails early, because waiting would not help, and running pods continue."""
    found = person.run("cluster", scheduler_image="registry.invalid/vgpu-scheduler:1", scheduler_rollout=150)
    assert found.code != 0
    assert "vgpu-scheduler does not run" in found.said and "registry.invalid/vgpu-scheduler:1" in found.said
    assert person.cluster.api.get(DEPLOYMENT)["status"]["readyReplicas"] == 2
    person.must("cluster")


RIGHTS = [
    # columns: the user's kubeconfig; expected text of the message
    ("/nowhere/kubeconfig", "/nowhere/kubeconfig: no such file here; set vgpu_kubeconfig"),
    ("closed", "cannot be reached"),
    ("reader", "Nothing was changed: the API server would refuse; use the kubeconfig of a cluster administrator"),
]


@pytest.mark.parametrize(("name", "words"), RIGHTS, ids=["missing", "unreachable", "without rights"])
def test_an_unusable_kubeconfig_is_named(person, name, words):
    path = name if name.startswith("/") else str(kubeconfigs(person)[name])
    found = person.run("cluster", vgpu_kubeconfig=path)
    assert found.code != 0 and words in " ".join(found.said.split()), found.said
    assert found.changed == 0


def kubeconfigs(person: Controller) -> dict[str, Path]:
    authority, api = person.cluster.authority, person.cluster.api
    rule = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}
    kind = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "reads-nodes"}}
    subject = {"kind": "User", "name": "reader", "apiGroup": "rbac.authorization.k8s.io"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "reads-nodes"}
    base = "/apis/rbac.authorization.k8s.io/v1"
    for path, body in (
        (f"{base}/clusterroles", {**kind, "kind": "ClusterRole", "rules": [rule]}),
        (
            f"{base}/clusterrolebindings",
            {**kind, "kind": "ClusterRoleBinding", "roleRef": reference, "subjects": [subject]},
        ),
    ):
        try:
            api.create(path, body)
        except ApiError as fault:
            assert fault.code == 409
    return {
        "closed": authority.kubeconfig("closed", "https://127.0.0.1:1", "/CN=reader"),
        "reader": authority.kubeconfig("reader", SERVER, "/CN=reader"),
    }


def test_cluster_is_removed_without_a_trace(person):
    cluster = person.cluster
    person.must("cluster", "--check", scheduler_state="absent")
    assert cluster.api.get_or_none(DEPLOYMENT)
    person.must("cluster", scheduler_state="absent")
    assert cluster.api.get_or_none(DEPLOYMENT) is None and scheduler_images(cluster) == []
    until(lambda: cluster.api.get(SYSTEM_PODS)["items"] == [], "deletion of the scheduler's pods")
    left = [
        one["metadata"]["name"] for one in cluster.api.get("/apis/rbac.authorization.k8s.io/v1/clusterroles")["items"]
    ]
    assert [one for one in left if "vgpu" in one] == []
    assert not Path("/var/lib/vgpu-incoming").exists()
    assert person.must("cluster", scheduler_state="absent").changed == 0
    # A pod that requests memory is not scheduled now; other pods are not affected.
    plain = pods.manifest("plain", pods.container(["true"], slices=0))
    assert cluster.api.create(f"{PODS}?dryRun=All", plain)["spec"]["schedulerName"] == "default-scheduler"
