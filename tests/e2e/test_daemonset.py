# SPDX-License-Identifier: Apache-2.0
"""Tests the device plugin as a DaemonSet that the project's module deploys at the real API server. The image is loaded
without a registry. Pods get their slices (parts of a GPU) from the plugin's pod, and the plugin's account has only the
needed rights.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kubebox.api import ApiError
from kubebox.cluster import PODS, SERVER
from kubebox.gpunode import LIBRARIES, MIB, PROFILE, STATE
from kubebox.modules import run_module
from kubebox.pods import WORKER
from kubebox.process import until
from kubebox.programs import PLUGIN_IMAGE

ROOT = Path(__file__).resolve().parents[2]
GPUS = ["T4"]
SPLIT = SLICES = 4
SLICE = 15360 // SPLIT * MIB
CONFIGURATION = {"vcuda": {"libraryRoot": str(LIBRARIES), "splitCount": SPLIT}}
BIG = {"version": "v1", "sharing": {"vcuda": {"libraryRoot": str(LIBRARIES), "splitCount": 2}}}
SYSTEM = "/api/v1/namespaces/kube-system"
DAEMON_SET = "/apis/apps/v1/namespaces/kube-system/daemonsets/vgpu-device-plugin"
MOUNT_POLICY = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/vgpu-device-plugin-mounts"
OTHER = "/api/v1/nodes/other-1"
LABEL = "nvidia.com/device-plugin.config"
# The simulated driver is a file on the host, which the plugin's container sees below /host.
ENVIRONMENT = {"GPUSIM_STATE": f"/host{STATE}", "GPUSIM_PROFILE": f"/host{PROFILE}"}


def call(cluster, check=False, module="kube_device_plugin", **params):
    kubeconfig = cluster.authority.kubeconfig("admin-of-module", SERVER, "/O=system:masters/CN=module")
    given = {"kubeconfig": str(kubeconfig), "nodes": [cluster.node], **params}
    if module == "kube_device_plugin" and params.get("state") != "absent":
        configs = {"gpu-1": {"big.yaml": json.dumps(BIG)}}
        given = {"image": PLUGIN_IMAGE, "pull_policy": "Never", "environment": ENVIRONMENT, "configs": configs, **given}
    return run_module(module, check, **given)


def plugin_pods(cluster) -> list[dict]:
    selector = "labelSelector=app.kubernetes.io/name%3Dvgpu-device-plugin"
    return cluster.api.get(f"{SYSTEM}/pods?{selector}")["items"]


def status(node) -> dict:
    try:
        return node.status()
    except subprocess.CalledProcessError:
        return {}


def serves(cluster, node, slices: int) -> bool:
    return bool(status(node).get("registered")) and (cluster.capacity(), cluster.allocatable()) == (slices, slices)


def wait_until_it_serves(cluster, node, slices: int, about: str) -> None:
    try:
        until(lambda: serves(cluster, node, slices), about, limit_s=120)
    except Exception as fault:
        logs = [one.read_text()[-3000:] for one in sorted(cluster.pod_logs.glob("kube-system_*/*/*.log"))]
        states = [one["status"] for one in plugin_pods(cluster)]
        raise AssertionError(f"{fault}\npods: {states}\nlogs: {logs}") from None


@pytest.fixture(scope="module")
def deployed(cluster, node):
    """Stops the plugin's service and runs the DaemonSet in its place; removes the DaemonSet afterwards."""
    node.plugin.stop()
    cluster.ctr("images", "import", str(cluster.programs.plugin_image))
    cluster.ctr("images", "label", PLUGIN_IMAGE, "io.cri-containerd.pinned=pinned")
    controllers = cluster.start_controllers("daemonset-controller", "root-ca-certificate-publisher-controller")
    try:
        found = call(cluster)
        assert found.get("changed"), found
        wait_until_it_serves(cluster, node, SLICES, "slices offered by the plugin's pod")
        yield node
    finally:
        call(cluster, state="absent")
        end_pods(cluster)
        call(cluster, state="absent")  # This call removes the plugin's data on the node, now that no pod runs.
        controllers.stop()


def test_api_server_takes_every_object_and_check_mode_changes_nothing(cluster, node):
    """The API server refuses unknown fields, as the last object shows, and accepts all of our objects."""
    from vgpu_plugin._shared.kube import device_plugin_manifests as ours

    objects = ours.manifests(ours.Desired("image", configs={"a.yaml": "{}"}, options=["--labels"]))
    for one in objects:
        path = path_of_kind(one) + "?dryRun=All&fieldValidation=Strict"
        assert cluster.api.create(path, one)["kind"] == one["kind"]
    wrong = json.loads(json.dumps(objects[-1]))
    wrong["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(ApiError, match="hostPid"):
        cluster.api.create(path_of_kind(wrong) + "?dryRun=All&fieldValidation=Strict", wrong)
    found = call(cluster, check=True)
    kubelet = subprocess.run(["kubelet", "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
    assert (found["changed"], found["kubernetes"]) == (True, kubelet)
    assert cluster.api.get_or_none(DAEMON_SET) is None
    assert "vgpu.fleet/device-plugin" not in cluster.node_object()["metadata"]["labels"]
    missing = call(cluster, nodes=["nowhere"])
    assert "the cluster has no node nowhere" in missing["msg"]
    assert cluster.api.get_or_none("/api/v1/nodes/nowhere") is None


def path_of_kind(one: dict) -> str:
    from vgpu_plugin._shared.kube import apply as kube_apply

    return kube_apply.path_of(one).rpartition("/")[0]


def test_pod_gets_its_slice_from_the_pod_of_the_plugin(cluster, deployed, pod):
    (plugin,) = plugin_pods(cluster)
    assert plugin["spec"]["nodeName"] == cluster.node
    assert not call(cluster)["changed"]
    found = status(deployed)
    assert found["config_path"] == "/etc/vgpu/node.yaml"
    one = pod("full", [WORKER, "fill", "take", "1"]).wait_running()
    assert int(one.wait_log(r"^total (\d+)$").group(1)) == SLICE
    assert one.wait_log(r"^took 1: (\d+)$").group(1) == "2"
    (pid,) = one.pids()
    used = {
        each["pid"]: each["total"] for gpu in deployed.gpusimctl("usage", "--json")["gpus"] for each in gpu["processes"]
    }
    assert used[pid] == SLICE


def test_deleted_pod_of_the_plugin_is_replaced_and_allocations_stay(cluster, deployed, pod):
    one = pod("stays", [WORKER, "take", "500"]).wait_running()
    one.wait_log(r"^took 500: 0$")
    held = deployed.held()
    (before,) = plugin_pods(cluster)
    cluster.api.delete(f"{SYSTEM}/pods/{before['metadata']['name']}", grace_s=1)
    until(
        lambda: [p["metadata"]["uid"] for p in plugin_pods(cluster)] not in ([], [before["metadata"]["uid"]]),
        "new pod of the plugin in place of the deleted one",
    )
    wait_until_it_serves(cluster, deployed, SLICES, "new pod of the plugin that serves")
    assert deployed.held() == held
    assert one.running() and one.restarts() == 0
    again = pod("second", [WORKER, "take", "500"]).wait_running()
    again.wait_log(r"^took 500: 0$")
    assert len({each for ids in deployed.held().values() for each in ids}) == 2


def test_label_names_a_key_of_the_config_map(cluster, deployed):
    """A node's label selects a configuration; the plugin's client watches it and writes a condition and an event."""
    path = f"/api/v1/nodes/{cluster.node}"

    def condition() -> dict:
        found = cluster.node_object()["status"]["conditions"]
        return next((one for one in found if one["type"] == "VgpuConfiguration"), {})

    try:
        cluster.api.patch(path, {"metadata": {"labels": {LABEL: "big"}}})
        until(lambda: cluster.capacity() == 2, "capacity of the named configuration")
        until(lambda: "big" in condition().get("message", ""), "condition that names the configuration")
        # The condition reports waiting as long as a deleted pod still uses its slice.
        until(
            lambda: (condition()["status"], condition()["reason"]) == ("True", "Applied"),
            "condition with the reason Applied",
            limit_s=180,
        )
        assert status(deployed)["config_path"] == "/etc/vgpu/configs/big.yaml"
        cluster.api.patch(path, {"metadata": {"labels": {LABEL: "nowhere"}}})
        until(lambda: condition().get("reason") == "Refused", "condition with the reason Refused")
        selector = "fieldSelector=reason%3DVgpuConfigurationRefused"
        events = until(
            lambda: cluster.api.get(f"/api/v1/namespaces/default/events?{selector}")["items"], "event of the refusal"
        )
        assert (events[-1]["involvedObject"]["name"], events[-1]["type"]) == (cluster.node, "Warning")
        assert cluster.capacity() == 2
    finally:
        cluster.api.patch(path, {"metadata": {"labels": {LABEL: None}}})
    until(
        lambda: (cluster.capacity(), cluster.allocatable()) == (SLICES, SLICES),
        "capacity of the node's own configuration",
    )


def test_a_changed_template_reaches_the_named_nodes_alone(cluster, deployed):
    """With OnDelete the DaemonSet controller replaces only deleted pods; the module deletes the pods of named nodes."""
    more = {"environment": {**ENVIRONMENT, "VGPU_TRIED": "1"}, "rollout": "OnDelete"}
    (before,) = plugin_pods(cluster)
    found = call(cluster, nodes=[], **more)
    assert "DaemonSet kube-system/vgpu-device-plugin" in found["objects"], found
    until(lambda: seen(cluster), "controller that has observed the changed template")
    (still,) = plugin_pods(cluster)
    assert still["metadata"]["uid"] == before["metadata"]["uid"] and "deletionTimestamp" not in still["metadata"]
    found = call(cluster, **more)
    assert found["objects"] == [f"Pod kube-system/{before['metadata']['name']}"], found
    until(
        lambda: (
            [p["metadata"]["uid"] for p in plugin_pods(cluster)] not in ([], [before["metadata"]["uid"]])
            and len(plugin_pods(cluster)) == 1
        ),
        "new pod of the plugin with the changed template",
    )
    wait_until_it_serves(cluster, deployed, SLICES, "all slices offered by the pod with the changed template")
    (after,) = plugin_pods(cluster)
    assert {"name": "VGPU_TRIED", "value": "1"} in after["spec"]["containers"][0]["env"]
    assert not call(cluster, **more)["changed"]


def seen(cluster) -> bool:
    found = cluster.api.get(DAEMON_SET)
    return found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"]


def token(cluster) -> str:
    """Returns a token bound to the plugin's pod, so that the server knows on which node the pod runs."""
    (plugin,) = plugin_pods(cluster)
    bound = {"kind": "Pod", "apiVersion": "v1", "name": plugin["metadata"]["name"], "uid": plugin["metadata"]["uid"]}
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"boundObjectRef": bound}}
    answer = cluster.api.create(f"{SYSTEM}/serviceaccounts/vgpu-device-plugin/token", request)
    return answer["status"]["token"]


def as_plugin(cluster, word: str, method: str, path: str, body: dict | None = None) -> tuple[int, str]:
    context = ssl.create_default_context(cafile=str(cluster.authority.certificate))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    headers = {"Authorization": f"Bearer {word}", "Content-Type": "application/merge-patch+json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with opener.open(urllib.request.Request(SERVER + path, data, headers, method=method), timeout=30) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as fault:
        return fault.code, json.loads(fault.read())["message"]


def test_plugin_writes_its_own_node_and_no_other(cluster, deployed):
    cluster.api.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "other-1"}})
    try:
        word, mine = token(cluster), f"/api/v1/nodes/{cluster.node}"
        change = {"metadata": {"annotations": {"vgpu.fleet/tried": "1"}}}
        # A policy becomes active some seconds after its creation.
        until(
            lambda: as_plugin(cluster, word, "PATCH", OTHER, change)[0] != 200,
            "refusal of a patch to another node by the active policy",
        )
        code, said = as_plugin(cluster, word, "PATCH", OTHER, change)
        assert code in (403, 422) and "and no other" in said, (code, said)
        assert as_plugin(cluster, word, "PATCH", f"{OTHER}/status", change)[0] in (403, 422)
        assert as_plugin(cluster, word, "PATCH", mine, change)[0] == 200
        assert (
            as_plugin(cluster, word, "PATCH", mine, {"metadata": {"annotations": {"vgpu.fleet/tried": None}}})[0] == 200
        )
        assert as_plugin(cluster, word, "GET", f"{SYSTEM}/secrets")[0] == 403
        assert as_plugin(cluster, word, "DELETE", OTHER)[0] == 403
    finally:
        cluster.api.delete(OTHER)


def test_removed_without_a_trace(cluster, deployed):
    from vgpu_plugin._shared.kube import apply as kube_apply
    from vgpu_plugin._shared.kube import device_plugin_manifests as ours

    def traces() -> list[str]:
        found = cluster.node_object()
        names = [*(found["metadata"].get("annotations") or {}), *found["metadata"]["labels"]]
        return [one for one in names if one.startswith("vgpu.fleet/")] + [
            one["type"] for one in found["status"]["conditions"] if one["type"].startswith("Vgpu")
        ]

    assert "VgpuConfiguration" in traces()
    assert call(cluster, check=True, state="absent")["changed"]
    assert cluster.api.get_or_none(DAEMON_SET) is not None
    found = call(cluster, state="absent")
    assert found["changed"], found
    assert [one for one in ours.manifests(ours.Desired("")) if cluster.api.get_or_none(kube_apply.path_of(one))] == []
    end_pods(cluster)
    call(cluster, state="absent")
    assert traces() == []
    assert not call(cluster, state="absent")["changed"]


def end_pods(cluster) -> None:
    """Deletes the plugin's pods, because no garbage collector runs here."""
    for one in plugin_pods(cluster):
        cluster.api.delete(f"{SYSTEM}/pods/{one['metadata']['name']}", grace_s=1)
    until(lambda: plugin_pods(cluster) == [], "deletion of the plugin's pod")


# ---- another plugin on the node

CONFLICTING = "localhost/k8s-device-plugin:1"
CONFLICTING_SET = "/apis/apps/v1/namespaces/kube-system/daemonsets/nvidia-device-plugin"


@pytest.fixture
def conflict(cluster, deployed):
    """Creates a DaemonSet with the name of NVIDIA's image; its pods serve nothing."""
    cluster.ctr("images", "tag", "--force", "localhost/kubebox:1", CONFLICTING)
    labels = {"name": "nvidia-device-plugin"}
    container = {"name": "c", "image": CONFLICTING, "imagePullPolicy": "Never"}
    spec = {"hostNetwork": True, "terminationGracePeriodSeconds": 1, "containers": [container]}
    body = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "nvidia-device-plugin", "namespace": "kube-system"},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": spec}},
    }
    until(
        lambda: cluster._created(f"{SYSTEM}/serviceaccounts", {"metadata": {"name": "default"}}),
        "API server that creates a service account",
    )
    cluster.api.create(CONFLICTING_SET.rpartition("/")[0], body)
    until(lambda: conflicts(cluster)["conflicting_plugins"], "pod of the other plugin")
    yield "DaemonSet kube-system/nvidia-device-plugin"
    if cluster.api.get_or_none(CONFLICTING_SET):
        cluster.api.delete(CONFLICTING_SET)


def conflicts(cluster, check=False, **params):
    return call(cluster, check, module="kube_conflicting_plugins", **params)


def test_another_plugin_is_named_refused_and_removed_with_consent(cluster, conflict):
    found = conflicts(cluster)
    assert found["failed"] and conflict in found["msg"] and "nvidia.com/gpu on gpu-1" in found["msg"], found
    assert cluster.api.get_or_none(CONFLICTING_SET)
    assert conflicts(cluster, resources=["example.com/gpu"])["removed"] == []
    assert conflicts(cluster, remove=["DaemonSet kube-system/other"])["failed"]
    assert conflicts(cluster, check=True, remove=[conflict])["removed"] == [conflict]
    assert cluster.api.get_or_none(CONFLICTING_SET)
    # The garbage collector, which would delete the DaemonSet's pod, does not run here.
    selector = "labelSelector=name%3Dnvidia-device-plugin"
    ending = [one["metadata"]["name"] for one in cluster.api.get(f"{SYSTEM}/pods?{selector}")["items"]]
    with ThreadPoolExecutor(1) as other:
        removal = other.submit(conflicts, cluster, remove=[conflict])
        until(lambda: not cluster.api.get_or_none(CONFLICTING_SET), "deletion of the other DaemonSet")
        for name in ending:
            cluster.api.delete(f"{SYSTEM}/pods/{name}", grace_s=1)
        assert removal.result()["removed"] == [conflict]
    assert conflicts(cluster)["conflicting_plugins"] == []


# ---- the role

PLAY = """
- hosts: gpu-1
  connection: local
  gather_facts: false
  vars:
    ansible_python_interpreter: {python}
    vgpu_split_count: 4
    vgpu_configs: {{big: {{split_count: 2}}}}
    device_plugin_deploy: daemonset
    device_plugin_api_kubeconfig: {kubeconfig}
    device_plugin_version: {version}
    device_plugin_image: {image}
    device_plugin_image_build: false
    device_plugin_environment: {environment}
    device_plugin_node_name: gpu-1
  roles:
    - vgpu.fleet.device_plugin
"""


def play(cluster, version: str, *words: str) -> tuple[str, int]:
    """Runs the role on this node and returns (output, number of changed tasks)."""
    kubeconfig = cluster.authority.kubeconfig("admin-of-module", SERVER, "/O=system:masters/CN=module")
    path = cluster.folder / "play.yml"
    environment = json.dumps(ENVIRONMENT)
    names = {"python": sys.executable, "kubeconfig": kubeconfig, "version": version, "image": PLUGIN_IMAGE}
    path.write_text(PLAY.format(environment=environment, **names))
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    done = subprocess.run(
        [program, "-i", "gpu-1,", str(path), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".build" / "collections"), "no_proxy": "*"},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout, int(done.stdout.rpartition("changed=")[2].split()[0])


def test_role_check_apply_repeat_undo(cluster, deployed):
    """Runs the role in check mode, to install, again without changes, and to remove everything from this node."""
    (archive,) = (ROOT / ".build" / "plugin-image").glob("vgpu-plugin-*.pyz")
    version = archive.name.removeprefix("vgpu-plugin-").rpartition("-cp")[0]
    # Install the program first from a local archive, because the role would download packages.
    subprocess.run(["/usr/bin/python3", str(archive), "--root", "/opt/vgpu/plugin"], check=True, capture_output=True)
    play(cluster, version, "--check")
    assert cluster.api.get_or_none(DAEMON_SET) is None and cluster.api.get_or_none(MOUNT_POLICY) is None
    _said, changed = play(cluster, version)
    assert changed > 0
    assert serves(cluster, deployed, SLICES)
    assert list(cluster.api.get(f"{SYSTEM}/configmaps/vgpu-configs")["data"]) == ["big.yaml"]
    annotations = cluster.api.get(MOUNT_POLICY)["metadata"]["annotations"]
    assert json.loads(annotations["vgpu.fleet/nodes"]) == {"gpu-1": ["nvidia.com/gpu"]}
    said, changed = play(cluster, version)
    assert changed == 0, said
    with ThreadPoolExecutor(1) as other:
        removal = other.submit(play, cluster, version, "-e", "device_plugin_state=absent")
        until(lambda: not cluster.api.get_or_none(DAEMON_SET), "deletion of the DaemonSet")
        end_pods(cluster)
        removal.result()
    for one in ("/etc/vgpu/daemonset.json", "/opt/vgpu/plugin", "/usr/local/bin/vgpuctl"):
        assert not Path(one).exists(), one
    assert "vgpu.fleet/device-plugin" not in cluster.node_object()["metadata"]["labels"]
    assert cluster.api.get_or_none(MOUNT_POLICY) is None


def test_service_of_the_plugin_serves_again_after_the_removal(cluster, deployed):
    deployed.reset()  # The role has removed our folders, so the test creates them again.
    deployed.configure(CONFIGURATION)
    deployed.start()
    assert cluster.api.get(PODS)["items"] == []
