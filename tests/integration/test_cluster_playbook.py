# SPDX-License-Identifier: Apache-2.0
"""Tests cluster.yml, which installs the scheduler, against an API server in this process. The playbook must refuse
mistakes before any change, load images on each node, and change nothing in a second run. tests/e2e/test_playbooks.py
shows that the scheduler works.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from doubles.kube_api import KubeApi, write_kubeconfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOK = yaml.safe_load((ROOT / "playbooks" / "cluster.yml").read_text())
GPUS = "vgpu.fleet/gpus"
DEPLOYMENT = "/apis/apps/v1/namespaces/kube-system/deployments/vgpu-scheduler"
IMAGE, KUBE = "registry.example/vgpu-scheduler:1", "registry.k8s.io/kube-scheduler:v1.34.2"
# A stand-in for containerd's client ctr, whose images are lines of a file.
CTR = """#!/bin/sh
images=${0%/*}/images
touch "$images"
[ "$1 $2 $3" = "--namespace k8s.io images" ] || exit 9
case $4 in
ls) case $6 in
    name==*) grep -xF "${6#name==}" "$images" ;;
    name~=*) grep -E "${6#name~=}" "$images" ;;
    esac; exit 0 ;;
import) cat "$5" >> "$images" ;;
label) grep -qxF "$5" "$images" && echo "$5 $6" >> "$images.labels" ;;
rm) grep -vxF "$5" "$images" > "$images.new"; mv "$images.new" "$images" ;;
*) exit 9 ;;
esac
"""


def node(name, engine="containerd://2.1.5", made=True, arch="amd64"):
    info = {"containerRuntimeVersion": engine, "kubeletVersion": "v1.34.2", "architecture": arch}
    notes = {GPUS: "{}"} if made else {}
    return {"kind": "Node", "metadata": {"name": name, "annotations": notes}, "status": {"nodeInfo": info}}


@pytest.fixture
def cluster(tmp_path):
    with KubeApi() as api:
        for name in ("a1", "a2"):
            api.put(f"/api/v1/nodes/{name}", node(name))
        api.kubeconfig = str(write_kubeconfig(tmp_path / "kubeconfig", api.url))
        yield api


@pytest.fixture
def person(place, cluster, tmp_path, monkeypatch):
    """Returns a function that runs cluster.yml as a user does, on the hosts a1 and a2, with the given group
    variables."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ctr").write_text(CTR)
    (tmp_path / "bin" / "ctr").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    archive = tmp_path / "kube-scheduler.tar"
    archive.write_text(KUBE + "\n")

    def run(*options, group="gpu_nodes", **variables):
        place.hosts({"a": ["a1", "a2"]})
        for host in ("a1", "a2"):
            place.host(host, device_plugin_node_name=host)
        usual = {
            "vgpu_kubeconfig": cluster.kubeconfig,
            "vgpu_slice_sizing": "requested",
            "scheduler_image": IMAGE,
            "scheduler_kube_scheduler_archive": str(archive),
            "scheduler_rollout": 0,
            "ansible_become": False,
        }
        place.group("gpu_nodes", **{**usual, **(variables if group == "gpu_nodes" else {})})
        if group != "gpu_nodes":
            (place.folder / "host_vars" / f"{group}.yml").write_text(
                yaml.safe_dump({"device_plugin_node_name": group, **variables})
            )
        # The role copies files into a folder of the host before it uses them. The hosts are this machine, so the test
        # sets a folder of its own.
        elsewhere = ["-e", json.dumps({"__scheduler_incoming": str(tmp_path / "incoming")})]
        return place.play(PLAYBOOK, *elsewhere, *options)

    run.images = lambda: (tmp_path / "bin" / "images").read_text().split()
    return run


def unmade(api):
    api.put("/api/v1/nodes/a2", node("a2", made=False))


def gone(api):
    api.remove("/api/v1/nodes/a2")


def forbidden(api):
    said = 'clusterroles.rbac.authorization.k8s.io is forbidden: User "x" cannot patch resource "clusterroles"'
    api.fault = lambda method, path: (403, said) if method == "PATCH" and "clusterroles/" in path else None


def foreign(api):
    api.put("/api/v1/nodes/a1", node("a1", engine="rkt://1"))


def arm(api):
    api.put("/api/v1/nodes/a1", node("a1", arch="arm64"))


REFUSED = [
    # columns: the case; variables of the group; function that changes the cluster before the run; expected text of the
    # message
    ("no kubeconfig", {"vgpu_kubeconfig": ""}, None, "vgpu_kubeconfig is empty for a1; expected a kubeconfig file"),
    ("no such file", {"vgpu_kubeconfig": "/none/x"}, None, "/none/x: no such file here; set vgpu_kubeconfig"),
    (
        "no such file and a misspelt variable",
        {"vgpu_kubeconfig": "/none/x", "vgpu_slice_sizin": "equal"},
        None,
        "The variables hold 2 mistakes. No host was changed.",
    ),
    (
        "equal slices",
        {"vgpu_slice_sizing": "equal"},
        None,
        "vgpu_slice_sizing is equal on a1, a2; pods get the sizes",
    ),
    ("misspelt variable", {"vgpu_slice_sizin": "equal"}, None, "did you mean"),
    (
        "no node",
        {},
        gone,
        "a2: the cluster has no node a2; join the host to the cluster, or set device_plugin_node_name",
    ),
    ("node not prepared by site.yml", {}, unmade, "a2: node a2 has no annotation vgpu.fleet/gpus"),
    ("no rights", {}, forbidden, "Nothing was changed: the API server would refuse; use the kubeconfig of a cluster"),
    ("no archive", {"scheduler_kube_scheduler_archive": "/none/y"}, None, "/none/y: no such file on the controller"),
    ("no host", {"scheduler_hosts": ["a9"]}, None, 'scheduler_hosts is ["a9"]; expected hosts of the inventory'),
    ("unknown engine", {}, foreign, "a1: its kubelet runs containers with rkt://1; expected containerd"),
    ("another architecture", {}, arm, "a1: its architecture is arm64, and the image is built for x86_64"),
]


@pytest.mark.parametrize(("about", "variables", "prepare", "words"), REFUSED, ids=[one[0] for one in REFUSED])
def test_cluster_playbook_refuses_a_mistake_before_any_change(person, cluster, about, variables, prepare, words):
    if prepare:
        prepare(cluster)
    run = person(**variables)
    assert run.code != 0 and words in " ".join(run.output.split()).replace('\\"', '"'), run.output
    assert cluster.writes == [] and "changed=0" in run.output


# The controller has no podman, docker and mmdebstrap. columns: variables of the group; two expected texts of the
# message
BARE = [
    ({}, "the image of the scheduler", "expected podman, mmdebstrap on this controller"),
    ({"scheduler_image_base": "debian:12"}, "the image of the scheduler", "expected podman on this controller"),
    ({"vgpu_kubeconfig": "/none/x"}, "/none/x: no such file here", "set vgpu_kubeconfig"),
    ({"vgpu_kubeconfig": ""}, "vgpu_kubeconfig is empty for a1", "expected a kubeconfig file"),
    ({"scheduler_kube_scheduler_archive": "/none/y"}, "/none/y: no such file on the controller", "docker save"),
]


@pytest.mark.parametrize(("variables", "what", "words"), BARE, ids=["base", "engine", "file", "empty", "archive"])
def test_a_bare_controller_is_refused_before_any_host_is_read(
    person, cluster, tmp_path, monkeypatch, variables, what, words
):
    (tmp_path / "few").mkdir()
    for name in ("sh", "env", "mkdir", "rm", "chmod", "echo", "sleep"):
        (tmp_path / "few" / name).symlink_to(f"/bin/{name}" if name != "env" else "/usr/bin/env")
    monkeypatch.setenv("PATH", str(tmp_path / "few"))
    run = person(**{"scheduler_image": "localhost/vgpu-scheduler:1", **variables})
    said = " ".join(run.output.split())
    assert run.code != 0 and what in said and words in said, run.output
    assert cluster.calls == [] and sum(run.calls.values()) == 0


def test_check_mode_predicts_a_refusal_of_the_api_server(person, cluster):
    forbidden(cluster)
    run = person("--check")
    assert run.code != 0 and "the API server would refuse" in run.output, run.output


def test_hosts_of_two_clusters_are_refused(person, tmp_path):
    other = tmp_path / "other"
    other.touch()
    run = person(group="a2", vgpu_kubeconfig=str(other))
    assert run.code != 0 and "the hosts of this play differ in" in run.output, run.output
    assert "-e site_hosts=GROUP" in run.output


def test_check_mode_installation_repetition_and_removal(person, cluster):
    assert person("--check", "--diff").code == 0
    assert cluster.writes == [] and person.images() == []
    run = person()
    assert run.code == 0, run.output
    spec = cluster.objects[DEPLOYMENT]["spec"]["template"]["spec"]
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [one["matchFields"][0]["values"] for one in terms] == [["a1"], ["a2"]]
    assert [one["image"] for one in spec["containers"]] == [IMAGE, KUBE]
    # Both hosts are this machine, so the image exists already for the second host.
    assert person.images() == [KUBE]
    again = person()
    assert again.code == 0 and again.output.count("changed=0") == 2, again.output
    assert person("-e", "scheduler_state=absent").code == 0
    assert DEPLOYMENT not in cluster.objects and person.images() == []
    assert person("-e", "scheduler_state=absent").output.count("changed=0") == 2


def test_pulled_image_adds_no_node_selector(person, cluster):
    run = person(scheduler_kube_scheduler_archive="", scheduler_hosts=[])
    assert run.code == 0, run.output
    assert "nodeAffinity" not in cluster.objects[DEPLOYMENT]["spec"]["template"]["spec"]["affinity"]


CLASS = "/apis/resource.k8s.io/v1/deviceclasses/vgpu"
CLAIM_POLICY = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/vgpu-claim-parameters"


def test_claims_need_neither_the_scheduler_nor_an_image(person, cluster):
    """The playbook runs on a controller that cannot build images."""
    bare = {"vgpu_allocation": "dra", "scheduler_image": "localhost/vgpu-scheduler:1", "scheduler_image_base": "none:1"}
    claims = {**bare, "scheduler_claims_resource": "nvidia.com/gpu", "scheduler_image_builder": "docker"}
    assert person("--check", **claims).code == 0 and cluster.writes == []
    run = person(**claims)
    assert run.code == 0, run.output
    assert cluster.objects[CLASS]["spec"]["extendedResourceName"] == "nvidia.com/gpu"
    assert CLAIM_POLICY in cluster.objects and DEPLOYMENT not in cluster.objects
    again = person(**claims)
    assert again.code == 0 and again.output.count("changed=0") == 2, again.output
    gone = person("-e", "scheduler_state=absent", **claims)
    assert gone.code == 0, gone.output
    assert CLASS not in cluster.objects and CLAIM_POLICY not in cluster.objects


def test_device_class_of_dialects_is_created_for_any_hosts(person, cluster):
    """The DeviceClass is created even if no host of the play uses claims (ResourceClaims, another way to request GPUs).
    Hosts with claims may be in another play or join later, and without the DeviceClass their pods would wait."""
    run = person(scheduler_claims=True)
    assert run.code == 0, run.output
    assert {CLASS, CLAIM_POLICY, DEPLOYMENT} <= set(cluster.objects)


def test_hosts_with_and_without_claims_share_a_cluster(person, cluster):
    """Node a1 uses claims, so it needs no annotation of its GPUs and has none."""
    cluster.put("/api/v1/nodes/a1", node("a1", made=False))
    run = person(group="a1", vgpu_allocation="dra", device_plugin_kubeconfig="/etc/kubernetes/kubelet.conf")
    assert run.code == 0, run.output
    assert CLASS in cluster.objects and DEPLOYMENT in cluster.objects
