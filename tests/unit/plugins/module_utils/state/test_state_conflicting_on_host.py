# SPDX-License-Identifier: Apache-2.0
"""Tests the search on a host for device plugins of other projects that advertise the same resource as ours. Their
sockets are real; their processes and static pods are simulated by files.
"""

from __future__ import annotations

import os
import socket

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Host
from ansible_collections.vgpu.fleet.plugins.module_utils.state import conflicting_on_host
from doubles.host import write

MANIFEST = """apiVersion: v1
kind: Pod
spec:
  containers:
    - name: plugin
      image: "nvcr.io/nvidia/k8s-device-plugin:v0.17.1"
    - image: busybox
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Returns the folder of a simulated host. The test runs in its socket folder and uses names without a path, because
    a socket's path has at most 107 characters."""
    folder = tmp_path / "var/lib/kubelet/device-plugins"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(conflicting_on_host, "_answers", _beside(conflicting_on_host._answers))
    return tmp_path


def _beside(answers):
    return lambda path: answers(os.path.basename(path))


@pytest.fixture
def serve():
    opened = []

    def begin(name, listening=True):
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.bind(name)
        if listening:
            one.listen()
        opened.append(one)

    yield begin
    for one in opened:
        one.close()


def test_bare_host_and_our_own_sockets_do_not_conflict(host, serve):
    serve("kubelet.sock")
    serve("vgpu-nvidia.com_gpu.sock")
    assert conflicting_on_host.find(Host(str(host))) == []
    assert conflicting_on_host.find(Host(str(host / "nothing"))) == []


def test_socket_that_no_process_serves_does_not_conflict(host, serve):
    serve("nvidia-gpu.sock", listening=False)
    assert conflicting_on_host.find(Host(str(host))) == []


def test_conflicting_plugin_is_found_by_socket_process_and_manifest(host, serve):
    serve("nvidia-gpu.sock")
    write(host, "proc/812/comm", "nvidia-device-p\n")
    write(host, "proc/812/cgroup", "0::/kubepods.slice/kubepods-pod1.slice/x.scope\n")
    write(host, "proc/813/comm", "nvidia-persiste\n")
    write(host, "etc/kubernetes/manifests/gpu.yaml", MANIFEST)
    assert conflicting_on_host.find(Host(str(host))) == [
        {
            "socket": "/var/lib/kubelet/device-plugins/nvidia-gpu.sock",
            "resource": "nvidia.com/gpu",
            "owner": "nvidia-device-plugin, pid 812, in a pod; static pod /etc/kubernetes/manifests/gpu.yaml with "
            "image nvcr.io/nvidia/k8s-device-plugin:v0.17.1",
        }
    ]


SAID = [
    # columns: name of the socket, resources of our plugin; expected number of errors, of warnings
    ("nvidia-gpu.sock", ["nvidia.com/gpu"], 1, 0),
    ("nvidia-gpu.sock", ["example.com/gpu"], 0, 1),
    ("nvidia-mig-1g.5gb.sock", ["nvidia.com/gpu"], 0, 1),
    ("nvidia-mig-1g.5gb.sock", ["nvidia.com/mig-1g.5gb"], 1, 0),
    ("aliyungpushare.sock", ["nvidia.com/gpu"], 0, 1),
    ("rdma.sock", ["nvidia.com/gpu"], 0, 0),
]


@pytest.mark.parametrize(("name", "resources", "errors", "warnings"), SAID)
def test_errors_and_warnings_of_a_conflicting_socket(host, serve, name, resources, errors, warnings):
    serve(name)
    told = conflicting_on_host.findings(conflicting_on_host.find(Host(str(host))), resources)
    assert [len(one) for one in told] == [errors, warnings]
    assert all(name in text for texts in told for text in texts)
