# SPDX-License-Identifier: Apache-2.0
"""Tests changes of the configuration while the device plugin runs. The tests check the device lists that the kubelet
gets.
"""

from __future__ import annotations

import json
import os

import pytest
from vgpu_kubelet_double import podresources
from vgpu_kubelet_double.endpoint import Endpoint
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.kubelet.registrations import Registrations
from vgpu_plugin.offer import settings as node_settings

from ..conftest import FakeGpus
from ..samples import node_yaml, until

RESOURCE = "nvidia.com/gpu"


@pytest.fixture
def daemon(node, kubelet, running, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.offer.health.LOOK_S", 0.05)
    node.configure(splitCount=4)
    source = FakeGpus(node.gpus)
    out = Daemon(node.setup(), lambda: source)
    running(out)
    until(lambda: capacity(kubelet) == 8, "8 slices at the kubelet")
    return out


def capacity(kubelet, resource: str = RESOURCE) -> int:
    found = kubelet.state()["resources"].get(resource)
    return found["allocatable"] if found and found["connected"] else -1


def put(node, text: str) -> None:
    """Replaces the file node.yaml by a rename, as the role does."""
    fresh = node.paths.config.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, node.paths.config)


def status(node, capsys) -> dict:
    assert ctl.main(["--socket", str(node.paths.admin_socket), "status", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("split", "slices"), [(2, 4), (7, 14)])
def test_new_split_is_applied_without_a_restart(node, kubelet, daemon, monkeypatch, split, slices):
    seen = []
    healthy = Endpoint.healthy

    def watched(self):
        out = healthy(self)
        seen.append(len(out))
        return out

    monkeypatch.setattr(Endpoint, "healthy", watched)
    put(node, node_yaml(node.library_root, splitCount=split))
    until(lambda: capacity(kubelet) == slices, "the new slices")
    assert min(seen) >= min(8, slices)
    pod = kubelet.run_pod("one")
    limits = (
        next(one["host_path"] for one in pod["answer"]["mounts"] if one["container_path"] == "/dev/vgpu/0") + "/limits"
    )
    with open(limits, "rb") as stream:
        assert abi_files.parse_limits(stream.read())["devices"][0]["memory_bytes"] == (15360 // split) << 20


# columns: the new text of node.yaml; expected words of the warning
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"version": "v1", "sharing": {"vcuda": {"splitCuont": 2}}}', 'did you mean "splitCount"'),
        ("{", "not valid JSON"),
        (
            '{"version": "v1", "sharing": {"vcuda": {"devices": [{"match": {"index": 9}, "splitCount": 1}]}}}',
            "no GPU with index 9",
        ),
    ],
)
def test_invalid_file_changes_nothing_and_is_reported(node, kubelet, daemon, capsys, text, words):
    before = status(node, capsys)["config_sha256"]
    put(node, text)
    found = until(lambda: [one for one in status(node, capsys)["warnings"] if words in one], "the warning")
    assert "was not applied, the one before stays" in found[0]
    assert (capacity(kubelet), status(node, capsys)["config_sha256"]) == (8, before)
    put(node, node_yaml(node.library_root, splitCount=3))
    until(lambda: capacity(kubelet) == 6, "the next valid file")
    assert status(node, capsys)["warnings"] == []


def test_missing_file_changes_nothing(node, kubelet, daemon, capsys):
    node.paths.config.unlink()
    until(lambda: status(node, capsys)["warnings"], "the warning")
    assert capacity(kubelet) == 8


def test_slices_in_use_are_kept(node, kubelet, daemon, capsys):
    held = kubelet.run_pod("one", ids=[f"{node.gpus[0].uuid}::3"])
    put(node, node_yaml(node.library_root, splitCount=2))
    until(lambda: capacity(kubelet) == 6, "the free GPU's new split, the old split of the GPU in use")
    offered = {one.partition("::")[0]: 0 for one in kubelet.endpoints[RESOURCE].devices}
    for one in kubelet.endpoints[RESOURCE].devices:
        offered[one.partition("::")[0]] += 1
    assert offered == {node.gpus[0].uuid: 4, node.gpus[1].uuid: 2}
    assert [node.gpus[0].uuid in one for one in status(node, capsys)["warnings"]] == [True]
    kubelet.restart_container("one")  # The restart makes the container's files again, with the former limits.
    limits = (
        next(one["host_path"] for one in held["answer"]["mounts"] if one["container_path"] == "/dev/vgpu/0") + "/limits"
    )
    with open(limits, "rb") as stream:
        assert abi_files.parse_limits(stream.read())["devices"][0]["memory_bytes"] == 3840 << 20


def test_new_split_waits_for_the_last_slice(node, kubelet, daemon, capsys, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.allocation.collector.GRACE_S", 0.0)
    monkeypatch.setattr("vgpu_plugin.daemon.HOUSEKEEPING_S", 0.05)
    kubelet.run_pod("one", ids=[f"{node.gpus[0].uuid}::3"])
    put(node, node_yaml(node.library_root, splitCount=2))
    until(lambda: capacity(kubelet) == 6, "the free GPU's new split")
    # A split is the number of slices of a GPU. The name of the container's slice exists in both splits, but with
    # different sizes. So the container's GPU keeps the old split until the slice is free.
    kubelet.delete_pod("one")
    # The kubelet's checkpoint still names the deleted pod; its PodResources service shows that the pod has ended.
    server = podresources.serve(kubelet, node.paths.pod_resources)
    try:
        until(lambda: capacity(kubelet) == 4, "the new split of the second GPU")
    finally:
        server.stop(grace=0).wait()
    assert status(node, capsys)["warnings"] == []


def test_running_container_keeps_its_files_after_a_mode_change(node, kubelet, daemon):
    """After a change of the sharing mode the GPU has the same device name as before, but the running container keeps
    its former limits.
    """
    kubelet.run_pod("one", ids=[f"{node.gpus[0].uuid}::3"])
    put(node, json.dumps({"version": "v1"}))
    until(lambda: f"{node.gpus[1].uuid}" in kubelet.endpoints[RESOURCE].devices, "the free GPU as a whole")
    kubelet.restart_container("one")


def test_new_resource_name_is_registered_before_the_old_one_ends(node, kubelet, daemon):
    put(node, node_yaml(node.library_root, splitCount=4, resourceName="example.com/gpu"))
    until(lambda: capacity(kubelet, "example.com/gpu") == 8, "the slices under the new name")
    until(lambda: capacity(kubelet) == -1, "the end of the old resource name")


def test_file_replaced_during_the_start_is_applied(node, kubelet, running, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.offer.health.LOOK_S", 0.05)
    node.configure(splitCount=4)
    source = FakeGpus(node.gpus)
    load = node_settings.load

    def replaced(*arguments):
        found = load(*arguments)
        monkeypatch.setattr(node_settings, "load", load)
        put(node, node_yaml(node.library_root, splitCount=3))
        return found

    monkeypatch.setattr(node_settings, "load", replaced)
    running(Daemon(node.setup(), lambda: source))
    until(lambda: capacity(kubelet) == 6, "the slices of the new file")


def test_nothing_is_registered_after_shutdown():
    """A check of the configuration may still run while the program ends; it must not register a resource again."""
    made, stopped = [], []

    class One:
        def run(self):
            pass

        def stop(self):
            stopped.append(self)

    def make(resource):
        made.append(resource)
        return One()

    registrations = Registrations(make)
    registrations.bring_in_line(["nvidia.com/gpu"])
    registrations.stop()
    registrations.bring_in_line(["nvidia.com/gpu", "nvidia.com/gpu.light"])
    assert (made, len(stopped)) == (["nvidia.com/gpu"], 1)
    assert registrations.state() == (False, "")
