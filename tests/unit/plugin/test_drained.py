# SPDX-License-Identifier: Apache-2.0
"""Tests a GPU that an administrator drains, so that it gets no new pods. The tests run the whole device plugin with
doubles of the API server and the kubelet.
"""

from __future__ import annotations

import json

import pytest
from doubles.kube_api import write_kubeconfig
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin.assembly import Extras
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.purge import purge

from .conftest import FakeGpus
from .node_api import NODE, NodeApi
from .samples import until

NOTE, RESOURCE = "vgpu.fleet/drained-gpus", "nvidia.com/gpu"


@pytest.fixture
def api():
    with NodeApi() as double:
        yield double


@pytest.fixture
def start(node, kubelet, running, monkeypatch, api, tmp_path):
    monkeypatch.setattr("vgpu_plugin.offer.health.LOOK_S", 0.05)
    path = str(write_kubeconfig(tmp_path / "kubeconfig", api.url))

    def begin(**vcuda):
        node.configure(**{"splitCount": 4, **vcuda})
        source = FakeGpus(node.gpus)
        out = Daemon(node.setup(Extras(kubeconfig=path, node_name="node-1")), lambda: source)
        out.source, out.thread = source, running(out)
        return out

    return begin


def annotate(api, text) -> None:
    with api.edit(NODE) as found:
        notes = found["metadata"].setdefault("annotations", {})
        notes.pop(NOTE, None)
        if text is not None:
            notes[NOTE] = text


def allocatable(kubelet) -> int:
    return (kubelet.state()["resources"].get(RESOURCE) or {}).get("allocatable", -1)


def test_drained_gpu_gets_no_more_pods(node, kubelet, api, start, capsys):
    start()
    until(lambda: allocatable(kubelet) == 8, "all slices")
    annotate(api, node.gpus[0].uuid)
    until(lambda: allocatable(kubelet) == 4, "the slices of the other GPU")
    assert ctl.main(["--socket", str(node.paths.admin_socket), "status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one for one in found["warnings"] if f"GPU 0 {node.gpus[0].uuid} is drained" in one]
    assert [gpu["healthy"] for gpu in found["gpus"]] == [True, True], "a drained GPU is not unhealthy"
    annotate(api, None)
    until(lambda: allocatable(kubelet) == 8, "all slices again")


def test_scheduler_sees_the_drained_gpu(node, kubelet, api, start):
    def healthy() -> list[bool]:
        text = api.annotations.get("vgpu.fleet/gpus")
        return [gpu.healthy for gpu in pod_annotations.read_gpus(text)] if text else []

    start(sliceSizing="requested")
    until(lambda: healthy() == [True, True], "the GPUs")
    annotate(api, f"GPU-of-nobody, {node.gpus[1].uuid}")
    until(lambda: healthy() == [True, False], "the drained GPU")


def test_recovered_gpu_stays_drained(node, kubelet, api, start):
    one = start()
    until(lambda: allocatable(kubelet) == 8, "all slices")
    annotate(api, node.gpus[0].uuid)
    until(lambda: allocatable(kubelet) == 4, "the slices of the other GPU")
    one.source.faults[node.gpus[0].uuid] = "gone"
    one._health.lost(node.gpus[0].uuid, "gone")
    one.source.faults.clear()
    one._health.recover()
    assert allocatable(kubelet) == 4
    annotate(api, "")
    until(lambda: allocatable(kubelet) == 8, "all slices again")


def test_gpu_stays_drained_over_a_restart(node, kubelet, api, start):
    one = start()
    annotate(api, node.gpus[0].uuid)
    until(lambda: allocatable(kubelet) == 4, "the slices of the other GPU")
    one.stop()
    one.thread.join(20)
    start()
    until(lambda: allocatable(kubelet) == 4, "the slices of the other GPU after the restart")


def test_removal_of_the_plugin_deletes_the_annotation(node, kubelet, api, start):
    one = start()
    annotate(api, node.gpus[0].uuid)
    until(lambda: allocatable(kubelet) == 4, "the slices of the other GPU")
    one.stop()
    one.thread.join(20)
    purge(one._setup)
    assert NOTE not in api.annotations
