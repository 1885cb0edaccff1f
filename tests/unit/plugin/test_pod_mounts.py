# SPDX-License-Identifier: Apache-2.0
"""Tests that PreStartContainer refuses a pod that mounts a volume over the files by which this project limits
containers. The tests run the whole program with doubles of the API server and the kubelet. tests/doubles/mount_cases.py
has the full table of paths; this file tests a few of them.
"""

from __future__ import annotations

import copy
import logging
import re

import pytest
from doubles.kube_api import write_kubeconfig
from doubles.mount_cases import ASKS, container
from vgpu_kubelet_double import podresources
from vgpu_kubelet_double.manager import PodError
from vgpu_plugin import assembly
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods.annotations import Device, Part
from vgpu_plugin.allocation.pod_mounts import MountCheck
from vgpu_plugin.allocation.pod_sizes import Owner
from vgpu_plugin.assembly import Extras
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.node import kube_api

from .conftest import FakeGpus
from .node_api import NodeApi, pod_path
from .samples import until

RESOURCE = "nvidia.com/gpu"
OVER, FINE = "/dev/vgpu/0/limits", "/dev/shm"


@pytest.fixture
def api():
    with NodeApi() as double:
        yield double


@pytest.fixture
def start(node, kubelet, api, running, tmp_path, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.node.kube_api.TIMEOUT_S", 1.0)
    monkeypatch.setattr("vgpu_plugin.assembly.POD_ANSWER_S", 0.6)
    monkeypatch.setattr("vgpu_plugin.assembly.MOUNTS_ANSWER_S", 0.3, raising=False)
    server = podresources.serve(kubelet, node.paths.pod_resources)
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api.url)

    def begin(sizing="equal", known=True):
        node.configure(splitCount=4, sliceSizing=sizing)
        extras = Extras(kubeconfig=str(kubeconfig), node_name="node-1") if known else Extras()
        daemon = Daemon(node.setup(extras), lambda: FakeGpus(node.gpus))
        running(daemon)
        until(lambda: kubelet.state()["resources"].get(RESOURCE, {}).get("allocatable"), "the slices")
        return daemon

    yield begin
    server.stop(grace=0).wait()


def put(node, api, *containers, name="one", **spec):
    """Stores a pod of this node. The pod has a plan (the scheduler's choice of GPUs and sizes), which a node with
    requested sizes needs.
    """
    plan = [Part("main", pod_annotations.APP, (Device(node.gpus[0].uuid, 1000, 10),))]
    annotations = {pod_annotations.PLAN: pod_annotations.write_plan(plan)}
    api.add_pod(name, f"uid-{name}", annotations, spec={"containers": list(copy.deepcopy(containers)), **spec})


def run(kubelet, name="one", **more):
    return kubelet.run_pod(name, uid=f"uid-{name}", **more)


def reasons(api):
    return [one["reason"] for one in api.of("events") if one["involvedObject"]["kind"] == "Pod"]


@pytest.fixture
def unchecked(node, capsys):
    """Returns a function that reads with vgpuctl how many containers started with unchecked mounts."""

    def read() -> int:
        capsys.readouterr()
        assert ctl.main(["--socket", str(node.paths.admin_socket), "metrics"]) == 0
        text = capsys.readouterr().out
        return int(re.search(r"^vgpu_plugin_mounts_unchecked_total (\d+)$", text, re.MULTILINE).group(1))

    return read


@pytest.mark.parametrize("sizing", ["equal", "requested"])
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (container("main", ASKS, OVER), OVER),
        (container("main", ASKS, "/data", "/etc/"), "/etc/"),
        (container("main", ASKS, terminationMessagePath="/etc/ld.so.preload"), "/etc/ld.so.preload"),
        # The check depends on the mounts, not on the resource name, because the node may have another resource name by
        # now.
        (container("main", {"example.com/gpu": "1"}, OVER), OVER),
    ],
)
def test_pod_that_mounts_over_the_products_files_does_not_start(node, kubelet, api, start, sizing, made, words):
    start(sizing)
    put(node, api, made)
    with pytest.raises(PodError, match=rf'pod default/one, container main: "{words}" lies at, above or below /'):
        run(kubelet)
    assert reasons(api) == ["VgpuMountConflict"]
    with pytest.raises(PodError, match="mount it elsewhere"):
        kubelet.restart_container("one")


@pytest.mark.parametrize("sizing", ["equal", "requested"])
def test_valid_pod_starts_with_one_api_request(node, kubelet, api, start, unchecked, sizing):
    start(sizing)
    put(node, api, container("main", ASKS, FINE), container("side", None, "/dev"))
    run(kubelet)
    asked = api.count("GET", pod_path("one"))
    assert asked == 1 and reasons(api) == []
    kubelet.restart_container("one")
    assert api.count("GET", pod_path("one")) == asked and unchecked() == 0


def test_init_container_is_identified_by_name(node, kubelet, api, start):
    start()
    put(node, api, container("main", ASKS), initContainers=[container("init", ASKS, OVER)])
    with pytest.raises(PodError, match="container init: "):
        run(kubelet, init_container=True)


@pytest.mark.parametrize("fault", [503, 403, "hang"])
def test_unresponsive_api_server_does_not_stop_pods(node, kubelet, api, start, unchecked, caplog, fault):
    start()
    put(node, api, container("main", ASKS, OVER))
    api.fault = lambda method, path: fault if "/pods" in path else None
    with caplog.at_level(logging.WARNING):
        run(kubelet)
    assert unchecked() == 1 and "without a check of its pod's mounts" in caplog.text
    api.fault = None
    with pytest.raises(PodError, match=OVER):
        kubelet.restart_container("one")
    assert unchecked() == 1


def test_mount_check_has_a_short_timeout(node, kubelet, api, start, unchecked, monkeypatch):
    start()
    waits = []
    get = kube_api.Api.get

    # Records only the reads of this pod, because the program also reads the node meanwhile, with other timeouts.
    def noted(one, path):
        if path == pod_path("one"):
            waits.append(one._timeout)
        return get(one, path)

    monkeypatch.setattr(kube_api.Api, "get", noted)
    put(node, api, container("main", ASKS, FINE))
    run(kubelet)
    assert waits == [assembly.MOUNTS_ANSWER_S] and unchecked() == 0


def test_no_api_request_without_credentials(node, kubelet, api, start, unchecked):
    start(known=False)
    put(node, api, container("main", ASKS, OVER))
    run(kubelet)
    assert api.calls == [] and unchecked() == 0


def test_pod_is_read_again_after_its_allocation_ends(node):
    _pool, allocator, _files = node.parts(splitCount=4)
    (answer,) = allocator.allocate([[f"{node.gpus[0].uuid}::0"]])
    asked = []

    class Pods:
        def owner(self, record):
            asked.append(record.id)
            return Owner({"metadata": {}, "spec": {"containers": [container("main", ASKS, FINE)]}}, "main")

    allocator.sizer.mounts = MountCheck(Pods())
    record = allocator.records.get(answer.allocation)
    for _start in range(3):
        allocator.prestart(list(record.kubelet_ids))
    assert asked == [record.id]
    allocator.forget(record.id)
    allocator.sizer.mounts.check(record)
    assert asked == [record.id] * 2
