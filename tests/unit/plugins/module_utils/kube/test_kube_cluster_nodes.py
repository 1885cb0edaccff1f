# SPDX-License-Identifier: Apache-2.0
"""Tests which nodes are ready for the scheduler of this collection, and the commands that load its image on a node,
which depend on the container engine of the node's kubelet.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import cluster_nodes, node_images


def node(runtime="containerd://2.1.5", kubelet="v1.34.2", arch="amd64", notes=None):
    info = {"containerRuntimeVersion": runtime, "kubeletVersion": kubelet, "architecture": arch}
    return {"metadata": {"name": "n", "annotations": notes}, "status": {"nodeInfo": info}}


@pytest.mark.parametrize(
    ("runtime", "kubelet", "engine"),
    [
        ("containerd://1.6.20~ds1", "v1.34.2", "containerd"),
        ("containerd://2.1.5-k3s1", "v1.34.2+k3s1", "k3s"),
        ("containerd://2.1.5-k3s1", "v1.34.2+rke2r1", "rke2"),
        ("docker://28.5.2", "v1.34.2", "docker"),
        ("docker://28.5.2", "v1.34.2+k3s1", "docker"),
        ("cri-o://1.34.0", "v1.34.2", "crio"),
        ("rkt://1", "v1.9.0", ""),
        ("", "", ""),
    ],
)
def test_engine_of_a_kubelet_is_found(runtime, kubelet, engine):
    assert node_images.engine_of(node(runtime, kubelet)) == engine


def test_engine_of_a_node_without_a_status():
    assert node_images.engine_of({"metadata": {}}) == ""


IMAGE = "localhost/vgpu-scheduler:1"
COMMANDS = [
    (
        "docker",
        ["docker", "image", "ls", "--quiet", IMAGE],
        ["docker", "load", "--quiet", "--input"],
        ["docker", "image", "rm"],
    ),
    (
        "crio",
        ["podman", "image", "ls", "--quiet", IMAGE],
        ["podman", "load", "--quiet", "--input"],
        ["podman", "image", "rm"],
    ),
    (
        "containerd",
        ["ctr", "--namespace", "k8s.io", "images", "ls", "--quiet", f"name=={IMAGE}"],
        ["ctr", "--namespace", "k8s.io", "images", "import"],
        ["ctr", "--namespace", "k8s.io", "images", "rm"],
    ),
    (
        "k3s",
        ["k3s", "ctr", "--namespace", "k8s.io", "images", "ls", "--quiet", f"name=={IMAGE}"],
        ["k3s", "ctr", "--namespace", "k8s.io", "images", "import"],
        ["k3s", "ctr", "--namespace", "k8s.io", "images", "rm"],
    ),
]


@pytest.mark.parametrize(("engine", "find", "load", "remove"), COMMANDS, ids=[one[0] for one in COMMANDS])
def test_commands_depend_on_the_engine(engine, find, load, remove):
    found = node_images.commands(engine, "localhost/vgpu-scheduler", [IMAGE])
    assert (found["images"][IMAGE]["find"], found["load"], found["remove"]) == (find, load, remove)
    assert bool(found["images"][IMAGE]["pin"]) == (engine not in ("docker", "crio"))
    assert "localhost/vgpu-scheduler" in found["all"][-1]


def test_every_engine_has_commands():
    for engine in ("containerd", "k3s", "rke2", "docker", "crio"):
        assert node_images.commands(engine, "r", ["r:1"])["images"]["r:1"]["find"]


# columns: nodes of the cluster; expected faults. The inventory has one host h, which should be node n.
@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ({"n": node(notes={"vgpu.fleet/gpus": "{}"})}, []),
        ({}, ["h: the cluster has no node n; join the host"]),
        ({"n": node()}, ["h: node n has no annotation vgpu.fleet/gpus"]),
        # After the device plugin is removed, the annotation remains with an empty value. So it counts as missing.
        ({"n": node(notes={"vgpu.fleet/gpus": ""})}, ["h: node n has no annotation vgpu.fleet/gpus"]),
    ],
)
def test_node_without_a_device_plugin_is_a_fault(nodes, words):
    found = cluster_nodes.faults(nodes, {"h": "n"})
    assert len(found) == len(words) and all(one.startswith(word) for one, word in zip(found, words))


# columns: node n of host h (None: not in the cluster); expected words of the fault ("": the image can be loaded)
@pytest.mark.parametrize(
    ("one", "words"),
    [
        (node(), ""),
        (node(arch=""), ""),
        (node("rkt://1"), "h: its kubelet runs containers with rkt://1; expected containerd, CRI-O or docker"),
        (node(""), "h: its kubelet runs containers with an unknown engine"),
        (node(arch="arm64"), "h: its architecture is arm64, and the image is built for x86_64"),
        (None, "h: the cluster has no node n"),
    ],
)
def test_node_that_cannot_load_an_image_is_a_fault(one, words):
    found, lines = cluster_nodes.loading({"n": one} if one else {}, {"h": "n"}, "x86_64", "r", ["r:1"])
    assert [words in line for line in lines] == ([True] if words else [])
    assert list(found) == ([] if words else ["h"]) and (words or found["h"]["node"] == "n")
