# SPDX-License-Identifier: Apache-2.0
"""Tests the Kubernetes objects for nodes that no playbook prepares: a DaemonSet whose init containers set up the node,
and a second DaemonSet that removes everything. tests/chart renders the objects with Helm; tests/e2e applies them to a
cluster.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import chart_manifests as ours
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import device_plugin_manifests as plugin
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import mount_policy, scheduler_desired

DESIRED = plugin.Desired("localhost/vgpu-device-plugin:1", options=["--metrics-listen=:9410"])
CARRIED = ours.Carried('{"vgpu_split_count":7}')


def made(desired=DESIRED, carried=CARRIED) -> dict:
    return {(one["kind"], one["metadata"]["name"]): one for one in ours.node_manifests(desired, carried)}


def pod(name=plugin.NAME, desired=DESIRED, carried=CARRIED) -> dict:
    return made(desired, carried)["DaemonSet", name]["spec"]["template"]["spec"]


def containers(spec: dict) -> dict:
    return {one["name"]: one for one in [*spec.get("initContainers", []), *spec["containers"]]}


@pytest.mark.parametrize("name", [plugin.NAME, ours.REMOVAL])
def test_every_mount_has_its_volume_and_every_volume_a_mount(name):
    spec = pod(name)
    volumes = [one["name"] for one in spec["volumes"]]
    used = {mount["name"] for one in containers(spec).values() for mount in one.get("volumeMounts", [])}
    assert len(volumes) == len(set(volumes)) and set(volumes) == used


def test_node_keeps_no_configuration():
    """The configuration in /etc/vgpu is a volume of the pod, so nothing stays in /etc of the host. The host's own files
    are visible only below /host, and read-only."""
    volumes = {one["name"]: one for one in pod()["volumes"]}
    paths = {one["hostPath"]["path"] for one in volumes.values() if "hostPath" in one}
    assert not [one for one in paths if one.startswith("/etc")]
    assert "emptyDir" in volumes["etc"] and volumes["variables"]["configMap"]["name"] == ours.VARIABLES
    writers = [
        one["name"]
        for one in containers(pod()).values()
        for mount in one["volumeMounts"]
        if mount["name"] == "host" and not mount.get("readOnly")
    ]
    assert writers == []


def test_library_is_written_by_the_setup_alone():
    writers = {
        name
        for name, one in containers(pod()).items()
        for mount in one["volumeMounts"]
        if mount["name"] == "library" and not mount.get("readOnly")
    }
    assert writers == {ours.SETUP}


def test_all_containers_have_one_image_and_no_gpu_of_a_runtime():
    for name in (plugin.NAME, ours.REMOVAL):
        for one in containers(pod(name)).values():
            assert (one["image"], one["imagePullPolicy"]) == (DESIRED.image, DESIRED.pull_policy)
            assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in one["env"]
            assert not one["terminationMessagePath"].startswith("/dev")


def test_arbiter_has_few_rights():
    """The arbiter (the program that shares out compute time on a node) needs only two capabilities: to read files of
    containers of every user, in which they record their use of the GPU, and to run at a higher priority. Mounts that
    appear later, for new allocations, must be visible in its container."""
    arbiter = containers(pod())[ours.ARBITER]
    assert arbiter["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["DAC_OVERRIDE", "SYS_NICE"]}
    assert "privileged" not in arbiter["securityContext"]
    mounts = {one["mountPath"]: one.get("mountPropagation") for one in arbiter["volumeMounts"]}
    assert mounts["/run/vgpu"] == "HostToContainer"
    assert arbiter["command"][-3:] == ["/usr/local/lib/vgpu/current/vgpu-arbiter", "--run", "/run/vgpu"]


def test_two_daemon_sets_never_select_the_same_node():
    """The DaemonSet that installs and the one that removes must never run on the same node, whatever node selector is
    configured."""
    spec = pod(carried=CARRIED._replace(node_selector={"zone": "a"}))
    assert spec["nodeSelector"] == {"zone": "a"}
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms == [{"matchExpressions": [{"key": plugin.NODE_LABEL, "operator": "NotIn", "values": ["absent"]}]}]
    assert pod(ours.REMOVAL)["nodeSelector"] == {plugin.NODE_LABEL: "absent"}
    selectors = [one["spec"]["selector"]["matchLabels"] for key, one in made().items() if key[0] == "DaemonSet"]
    assert selectors[0] != selectors[1]


def test_removal_purges_before_it_removes_the_library():
    spec = pod(ours.REMOVAL)
    purge, remove = spec["initContainers"]
    assert purge["command"][-1] == "--purge" and "--kubeconfig=in-cluster" in purge["command"]
    assert {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}} in purge["env"]
    (run,) = [one for one in purge["volumeMounts"] if one["mountPath"] == "/run/vgpu"]
    assert run["mountPropagation"] == "Bidirectional"  # An unmount in the pod must also reach the host.
    assert remove["command"][1:] == ["remove", "--host-root=/host", "--library-root=/usr/local/lib/vgpu"]
    assert [one.get("readOnly") for one in remove["volumeMounts"]] == [None]
    (rest,) = spec["containers"]
    assert rest["securityContext"]["runAsNonRoot"] and "volumeMounts" not in rest and "ports" not in rest


def test_changed_variables_change_the_pod_template():
    def annotations(text: str) -> dict:
        spec = made(carried=ours.Carried(text))["DaemonSet", plugin.NAME]["spec"]
        return spec["template"]["metadata"]["annotations"]

    assert annotations("{}") != annotations('{"vgpu_split_count":3}')
    assert annotations("{}") == annotations("{}")


def test_variables_are_the_only_configuration():
    found = made()["ConfigMap", ours.VARIABLES]
    assert json.loads(found["data"]["variables.json"]) == {"vgpu_split_count": 7}
    assert [key for key in made() if key[0] == "ConfigMap"] == [("ConfigMap", ours.VARIABLES)]


def test_mount_policy_equals_that_of_the_role():
    found = made(carried=CARRIED._replace(limited=["example.com/gpu"]))
    expected = mount_policy.manifests(mount_policy.OF_DEVICE_PLUGIN, ["example.com/gpu"])
    assert [found[one["kind"], one["metadata"]["name"]] for one in expected] == expected


def test_pods_name_the_image_pull_secrets():
    found = ours.node_manifests(DESIRED, CARRIED._replace(pull_secrets=["one"]))
    found += ours.scheduler_objects(scheduler_desired.Desired("a", "b"), "{}", ["one"])
    specs = [one["spec"]["template"]["spec"] for one in found if one["kind"] in ("DaemonSet", "Deployment")]
    assert [one["imagePullSecrets"] for one in specs] == [[{"name": "one"}]] * 3
    assert "imagePullSecrets" not in pod()


def test_manifests_of_the_role_are_not_changed():
    """The role and the chart use the same DaemonSet definition. The chart must change a copy, not the definition
    itself."""
    before = json.dumps(plugin.manifests(DESIRED))
    ours.node_manifests(DESIRED, CARRIED)
    assert json.dumps(plugin.manifests(DESIRED)) == before
