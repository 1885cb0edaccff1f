# SPDX-License-Identifier: Apache-2.0
"""Tests the project's Helm chart, installed with Helm and kubectl alone on a node that no playbook has prepared. A pod
with a slice (part of a GPU) runs, changed values reach the node, and a label removes everything from the node again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kubebox import pods
from kubebox.cluster import PODS, SERVER
from kubebox.gpunode import LIBRARIES, MIB, PROFILE, STATE
from kubebox.pods import WORKER
from kubebox.process import until
from kubebox.programs import PLUGIN_IMAGE, ROOT

GPUS = ["T4"]
SPLIT = SLICES = 4
SLICE = 15360 // SPLIT * MIB
SYSTEM = "/api/v1/namespaces/kube-system"
CONTROLLERS = ("daemonset-controller", "root-ca-certificate-publisher-controller")
LABEL = "vgpu.fleet/device-plugin"
NAME, REMOVAL = "vgpu-device-plugin", "vgpu-device-plugin-removal"
# The simulated driver is a file on the host, which the plugin's container sees below /host.
VALUES = {
    "image": PLUGIN_IMAGE,
    "imagePullPolicy": "Never",
    "environment": {"GPUSIM_STATE": f"/host{STATE}", "GPUSIM_PROFILE": f"/host{PROFILE}"},
    "variables": {"vgpu_split_count": SPLIT, "vgpu_unhealthy_taint": "any"},
    "options": ["--health-clean-period=3"],
}
# Folders of a host in which the project's programs might leave files.
PLACES = ("/etc", "/usr/local", "/opt", "/var/lib/vgpu", "/run/vgpu", "/run/cdi", "/etc/ld.so.preload")


def kubectl(cluster, *words: str, check: bool = True, text: str | None = None) -> str:
    config = cluster.authority.kubeconfig("admin-of-chart", SERVER, "/O=system:masters/CN=chart")
    command = [str(cluster.programs.kubernetes / "kubectl"), f"--kubeconfig={config}", *words]
    environment = {**os.environ, "HOME": str(cluster.folder), "no_proxy": "*"}
    done = subprocess.run(command, capture_output=True, text=True, input=text, env=environment, check=False)
    assert not check or done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout


@pytest.fixture(scope="module")
def chart(cluster) -> Path:
    out = cluster.folder / "chart"
    subprocess.run([sys.executable, str(ROOT / "tools" / "chart"), f"--out={out}"], check=True, capture_output=True)
    return out


def rendered(cluster, chart: Path, **values) -> str:
    file = cluster.folder / "values.yaml"
    file.write_text(json.dumps({**VALUES, **values}))
    words = [str(cluster.programs.helm), "template", "vgpu", str(chart / "vgpu-fleet"), "--namespace=kube-system"]
    words += [f"--values={file}", "--kube-version=1.34.2"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def files() -> set[str]:
    """Returns every file and folder below PLACES. The tests run in their own namespaces (the box), which have copies of
    the machine's /etc and /usr/local."""
    return {str(one) for place in PLACES for one in [Path(place), *Path(place).rglob("*")] if os.path.lexists(one)}


def mounts() -> list[str]:
    return [line for line in Path("/proc/mounts").read_text().splitlines() if "/run/vgpu" in line]


def traces(cluster) -> list[str]:
    """Returns our annotations, labels, taints and conditions on the node's object."""
    found = cluster.node_object()
    names = [*(found["metadata"].get("annotations") or {}), *found["metadata"]["labels"]]
    names = [one for one in names if one.startswith(("vgpu.fleet/", "nvidia.com/")) and one != LABEL]
    names += [one["key"] for one in found["spec"].get("taints") or [] if one["key"].startswith("vgpu.fleet/")]
    return names + [one["type"] for one in found["status"]["conditions"] if one["type"].startswith("Vgpu")]


def plugin_pods(cluster, name: str = NAME) -> list[dict]:
    return cluster.api.get(f"{SYSTEM}/pods?labelSelector=app.kubernetes.io/name%3D{name}")["items"]


def serves(cluster, slices: int, limit_s: float = 180) -> None:
    try:
        until(
            lambda: (cluster.capacity(), cluster.allocatable()) == (slices, slices),
            f"number of {slices} slices in the node's capacity",
            limit_s,
        )
    except Exception as fault:
        logs = [f"{one}: {one.read_text()[-2000:]}" for one in sorted(cluster.pod_logs.glob("kube-system_*/*/*.log"))]
        states = [one["status"] for one in plugin_pods(cluster)]
        raise AssertionError(f"{fault}\npods: {states}\nlogs: {logs}") from None


@pytest.fixture(scope="module")
def bare(cluster, machine, request):
    """Returns a node with a driver and an engine, without any of our files, and starts the module's ``CONTROLLERS``.

    Installs the project's files in the box again afterwards.
    """
    node = machine[1]
    node.exchange(GPUS)
    for place in (LIBRARIES, Path("/etc/vgpu"), Path("/run/vgpu"), Path("/var/lib/vgpu"), Path("/run/cdi")):
        shutil.rmtree(place, ignore_errors=True)
    cluster.ctr("images", "import", str(cluster.programs.plugin_image))
    cluster.ctr("images", "label", PLUGIN_IMAGE, "io.cri-containerd.pinned=pinned")
    controllers = cluster.start_controllers(*request.module.CONTROLLERS)
    yield node
    kubectl(cluster, "label", "node", cluster.node, f"{LABEL}-")
    end_pods(cluster)
    controllers.stop()
    node.furnish_library()
    node.reset()


@pytest.fixture(scope="module")
def before(bare) -> set[str]:
    return files()


@pytest.fixture(scope="module")
def installed(cluster, chart, bare, before):
    """Installs the chart as a person does: applies what Helm renders, labels the node, and waits."""
    kubectl(cluster, "apply", "--server-side", "--filename=-", text=rendered(cluster, chart))
    kubectl(cluster, "label", "node", cluster.node, f"{LABEL}=daemonset")
    serves(cluster, SLICES)
    yield bare
    pods.delete_all(cluster)


@pytest.fixture
def pod(cluster, installed):
    """Creates pods on the node on which the chart is installed, and deletes them after the test."""

    def make(name: str, command: list[str]) -> pods.Pod:
        return pods.create(cluster, pods.manifest(name, pods.container(command)))

    yield make
    pods.delete_all(cluster)


def test_api_server_takes_every_object_strictly(cluster, chart):
    """The API server accepts all objects, also the scheduler's, in a dry run that refuses unknown fields."""
    text = rendered(cluster, chart, scheduler={"enabled": True, "kubeSchedulerImage": "localhost/kube-scheduler:1"})
    objects = [one for one in yaml.safe_load_all(text) if one]
    said = kubectl(
        cluster, "apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename=-", text=text
    )
    assert len(said.splitlines()) == len(objects) > 25
    for one in objects:
        if one["kind"] == "DaemonSet":
            one["spec"]["template"]["spec"]["hostPid"] = True
    wrong = yaml.safe_dump_all(objects)
    words = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename=-")
    config = kubectl(cluster, *words, check=False, text=wrong)
    assert len(config.splitlines()) < len(objects)


def test_kustomize_makes_the_same_objects(cluster, chart):
    """kubectl's Kustomize makes the same objects; the ConfigMap's name has a digest, and the DaemonSet refers to it."""
    found = list(yaml.safe_load_all(kubectl(cluster, "kustomize", str(chart / "kustomize" / "node"))))
    (made,) = [one for one in found if one["kind"] == "ConfigMap"]
    assert made["metadata"]["name"].startswith("vgpu-variables-") and made["data"] == {"variables.json": "{}\n"}
    text = subprocess.run(
        [str(cluster.programs.helm), "template", "vgpu", str(chart / "vgpu-fleet"), "--namespace=kube-system"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    expected = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text) if one}
    for one in found:
        plain = json.loads(json.dumps(one).replace(made["metadata"]["name"], "vgpu-variables"))
        if plain["kind"] == "ConfigMap":
            plain["data"] = {name: value.strip() for name, value in plain["data"].items()}
        assert plain == expected.pop((plain["kind"], plain["metadata"]["name"]))
    assert expected == {}


def test_pod_is_limited_on_a_node_that_only_had_a_driver(cluster, installed, pod):
    one = pod("full", [WORKER, "fill", "take", "1"]).wait_running()
    assert int(one.wait_log(r"^total (\d+)$").group(1)) == SLICE
    # The worker prints "took MIB: RESULT" for an allocation. The slice is full, so the result is 2, out of memory.
    assert one.wait_log(r"^took 1: (\d+)$").group(1) == "2"
    (pid,) = one.pids()
    used = {
        each["pid"]: each["total"]
        for gpu in installed.gpusimctl("usage", "--json")["gpus"]
        for each in gpu["processes"]
    }
    assert used[pid] == SLICE
    # The arbiter, which balances compute time, runs in the plugin's pod and writes the shared pages that the library in
    # the container reads.
    status = [str(LIBRARIES / "current" / "vgpu-arbiter"), "--json-status"]
    until(lambda: json.loads(subprocess.check_output(status))["arbiter"] is True, "shared pages written by the arbiter")
    # The arbiter also writes the pages of slices for containers outside Kubernetes.
    tenants = until(
        lambda: every_tenant(status),
        f"arbiter status with {SLICES + 1} tenants: the pod and all slices outside Kubernetes",
    )
    assert all(each["arbiter"] for each in tenants)


def every_tenant(status: list[str]) -> list[dict]:
    found = json.loads(subprocess.check_output(status))["tenants"]
    return found if len(found) == SLICES + 1 else []


def test_library_lies_in_a_folder_of_its_version(cluster, installed):
    """The library's files are in a folder of their version with a manifest, and nothing is in the host's /etc."""
    version = os.readlink(LIBRARIES / "current")
    assert sorted(one.name for one in LIBRARIES.iterdir()) == sorted([version, "current"])
    listed = json.loads((LIBRARIES / version / "manifest.json").read_text())
    assert listed["version"] == version and {"libvgpu.so", "vgpu-arbiter", "vgpu-probe"} <= set(listed["files"])
    assert not Path("/etc/vgpu").exists() and not Path("/etc/ld.so.preload").exists()


def test_killed_arbiter_is_restarted(cluster, installed, pod):
    one = pod("works", [WORKER, "take", "500"]).wait_running()
    one.wait_log(r"^took 500: 0$")

    def restarts() -> dict[str, int]:
        return {
            each["name"]: each["restartCount"]
            for found in plugin_pods(cluster)
            for each in found["status"]["containerStatuses"]
        }

    before = restarts()
    pid = subprocess.check_output(["pgrep", "-f", "vgpu-arbiter --run /run/vgpu"], text=True).split()
    for each in pid:
        os.kill(int(each), 9)
    until(lambda: restarts()["vgpu-arbiter"] == before["vgpu-arbiter"] + 1, "restart of the arbiter")
    assert restarts()[NAME] == before[NAME] and one.running() and one.restarts() == 0


def test_fatal_xid_is_a_condition_and_a_taint_and_is_cleared(cluster, installed):
    """The chart gives the plugin the rights to set a condition and a taint on the node. The plugin's pod stays, because
    it tolerates the taint.
    """

    def condition() -> dict:
        found = cluster.node_object()["status"]["conditions"]
        return next((one for one in found if one["type"] == "VgpuGpusHealthy"), {})

    def tainted() -> bool:
        return "vgpu.fleet/gpu-unhealthy" in traces(cluster)

    until(lambda: condition().get("status") == "True", "condition VgpuGpusHealthy with status True")
    assert not tainted()
    (before,) = plugin_pods(cluster)
    installed.gpusimctl("xid", "0", "79")
    until(
        lambda: condition()["status"] == "False" and tainted(),
        "condition VgpuGpusHealthy with status False, and the taint",
    )
    assert condition()["message"].endswith("Xid 79")
    until(lambda: cluster.allocatable() == 0, "node without allocatable slices after the Xid error")
    until(
        lambda: condition()["status"] == "True" and not tainted(),
        "condition VgpuGpusHealthy with status True, without the taint",
        60,
    )
    serves(cluster, SLICES)
    (after,) = plugin_pods(cluster)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]


def test_other_values_reach_the_node(cluster, chart, installed, pod):
    """After a change of values, a running pod keeps its slice, and the library's file on the node is not replaced."""
    pods.delete_all(cluster)
    until(lambda: not installed.held(), "kubelet without allocated devices")
    library = (LIBRARIES / "current" / "libvgpu.so").resolve()
    inode = library.stat().st_ino
    (former,) = plugin_pods(cluster)
    kubectl(
        cluster,
        "apply",
        "--server-side",
        "--filename=-",
        text=rendered(cluster, chart, variables={"vgpu_split_count": 2}),
    )
    serves(cluster, 2)
    (now,) = [one for one in plugin_pods(cluster) if "deletionTimestamp" not in one["metadata"]]
    assert now["metadata"]["uid"] != former["metadata"]["uid"] and library.stat().st_ino == inode
    one = pod("half", [WORKER, "fill"]).wait_running()
    assert int(one.wait_log(r"^total (\d+)$").group(1)) == 15360 // 2 * MIB


def wait_until_clean(cluster) -> None:
    """Waits until the node is clean. `rollout status` could return before the controller has seen the label."""
    ready = "--for=jsonpath={.status.numberReady}=1"
    kubectl(cluster, "--namespace=kube-system", "wait", f"daemonset/{REMOVAL}", ready, "--timeout=180s")


def test_labelled_node_is_emptied(cluster, installed, before):
    pods.delete_all(cluster)
    until(lambda: not installed.held(), "kubelet without allocated devices")
    wanted = {"VgpuConfiguration", "VgpuGpusHealthy", "nvidia.com/gpu.product", "vgpu.fleet/labels"}
    until(lambda: wanted <= set(traces(cluster)), "annotations, labels and conditions of the plugin on its node")
    assert files() - before
    kubectl(cluster, "label", "node", cluster.node, f"{LABEL}=absent", "--overwrite")
    wait_until_clean(cluster)
    until(lambda: plugin_pods(cluster) == [], "deletion of the plugin's pod")
    assert files() - before == set()
    assert mounts() == [] and traces(cluster) == []
    until(lambda: cluster.allocatable() == 0, "node without allocatable slices")


def test_label_installs_the_node_again_and_empties_it(cluster, installed, before):
    """After a removal, the label installs the plugin on the same node again; another value removes it again."""
    kubectl(cluster, "label", "node", cluster.node, f"{LABEL}=daemonset", "--overwrite")
    serves(cluster, 2)
    kubectl(cluster, "label", "node", cluster.node, f"{LABEL}=absent", "--overwrite")
    wait_until_clean(cluster)
    assert files() - before == set() and traces(cluster) == []


def test_objects_go_with_the_chart(cluster, chart, installed, before):
    """Deletes the objects as `helm uninstall` does. No garbage collector runs, so the test deletes the pods itself."""
    text = rendered(cluster, chart)
    kubectl(cluster, "delete", "--wait=false", "--filename=-", text=text)
    end_pods(cluster)
    left = kubectl(cluster, "get", "--ignore-not-found", "--filename=-", "--output=name", text=text, check=False)
    assert left == ""
    assert files() - before == set() and traces(cluster) == []
    assert cluster.api.get(PODS)["items"] == []


def end_pods(cluster) -> None:
    for name in (NAME, REMOVAL):
        for one in plugin_pods(cluster, name):
            cluster.api.delete(f"{SYSTEM}/pods/{one['metadata']['name']}", grace_s=1)
        until(lambda name=name: plugin_pods(cluster, name) == [], f"deletion of the pods of {name}")
