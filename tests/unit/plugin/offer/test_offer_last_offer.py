# SPDX-License-Identifier: Apache-2.0
"""Tests a restart of the device plugin with another split (number of slices per GPU): which devices the kubelet gets,
and that the slices of a GPU never exceed its memory.
"""

from __future__ import annotations

import json

import pytest
from vgpu_kubelet_double import podresources
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.purge import purge

from ..conftest import FakeGpus
from ..samples import node_yaml, until

RESOURCE = "nvidia.com/gpu"


@pytest.fixture
def begin(node, running):
    """Returns a function: ``begin(split)`` stops the running program and starts it with this split."""
    alive = []

    def start(**vcuda):
        while alive:
            daemon, thread = alive.pop()
            daemon.stop()
            thread.join(30)
            assert not thread.is_alive()
        node.paths.config.write_text(node_yaml(node.library_root, **vcuda))
        daemon = Daemon(node.setup(), lambda: FakeGpus(node.gpus))
        alive.append((daemon, running(daemon)))

    return start


def offered(kubelet, node) -> list[int]:
    """Returns for each GPU the number of slices that the kubelet may allocate."""
    endpoint = kubelet.endpoints.get(RESOURCE)
    ids = endpoint.healthy() if endpoint else []
    return [sum(one.startswith(gpu.uuid) for one in ids) for gpu in node.gpus]


def read_status(node, capsys) -> dict:
    assert ctl.main(["--socket", str(node.paths.admin_socket), "status", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def bytes_of(answer: dict) -> int:
    path = next(one["host_path"] for one in answer["mounts"] if one["container_path"] == "/dev/vgpu/0") + "/limits"
    with open(path, "rb") as stream:
        return int(abi_files.parse_limits(stream.read())["devices"][0]["memory_bytes"])


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (3, 7)])
def test_gpu_in_use_keeps_its_split_over_a_restart(node, kubelet, begin, capsys, before, after):
    begin(splitCount=before)
    until(lambda: offered(kubelet, node) == [before, before], "the first split")
    first = node.gpus[0].uuid
    promised = [bytes_of(kubelet.run_pod("holds", ids=[f"{first}::0"])["answer"])]
    begin(splitCount=after)
    until(lambda: offered(kubelet, node) == [before, after], "only the free GPU's new split")
    status = read_status(node, capsys)
    assert status["waiting"] == [first]
    assert [first in one for one in status["warnings"]] == [True]
    # Pods take the remaining slices of this GPU; all slices together must not exceed the GPU's memory.
    for number in range(1, before):
        pod = kubelet.run_pod(f"other-{number}", ids=[f"{first}::{number}"])
        promised.append(bytes_of(pod["answer"]))
    assert sum(promised) <= node.gpus[0].memory_mib << 20


def test_new_split_waits_for_the_pod_over_restarts(node, kubelet, begin, capsys, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.offer.health.LOOK_S", 0.05)
    monkeypatch.setattr("vgpu_plugin.allocation.collector.GRACE_S", 0.0)
    monkeypatch.setattr("vgpu_plugin.daemon.HOUSEKEEPING_S", 0.05)
    begin(splitCount=4)
    until(lambda: offered(kubelet, node) == [4, 4], "the first split")
    kubelet.run_pod("holds", ids=[f"{node.gpus[0].uuid}::3"])
    for _time in range(2):
        begin(splitCount=2)
        until(lambda: offered(kubelet, node) == [4, 2], "only the free GPU's new split")
    kubelet.delete_pod("holds")
    server = podresources.serve(kubelet, node.paths.pod_resources)
    try:
        until(lambda: offered(kubelet, node) == [2, 2], "the new split of the second GPU")
    finally:
        server.stop(grace=0).wait()
    assert read_status(node, capsys)["waiting"] == []
    begin(splitCount=3)
    until(lambda: offered(kubelet, node) == [3, 3], "the new split, because no slice is in use")


# Unusable texts of the file in which the plugin saves its last offer. None means that the file does not exist.
@pytest.mark.parametrize(
    "text", [None, "", "[]", '{"version": 9, "pieces": []}', '{"version": 1, "pieces": [{"id": 1}]}']
)
def test_gpus_are_offered_without_a_remembered_offer(node, kubelet, begin, text):
    begin(splitCount=4)
    until(lambda: offered(kubelet, node) == [4, 4], "the first split")
    kubelet.run_pod("holds", ids=[f"{node.gpus[0].uuid}::3"])
    if text is None:
        node.paths.last_offer.unlink()
    else:
        node.paths.last_offer.write_text(text)
    begin(splitCount=2)
    until(lambda: offered(kubelet, node) == [2, 2], "both GPUs' new split")


def test_removed_gpu_stays_until_the_user_forgets_it(node, kubelet, begin):
    begin(splitCount=4)
    until(lambda: offered(kubelet, node) == [4, 4], "the first split")
    gone = node.gpus.pop()
    begin(splitCount=2)
    until(lambda: offered(kubelet, node) == [2], "the slices of the remaining GPU")
    assert gone.uuid in node.paths.last_offer.read_text()
    assert ctl.main(["--socket", str(node.paths.admin_socket), "forget", gone.uuid]) == 0
    until(lambda: gone.uuid not in node.paths.last_offer.read_text(), "the file without the removed GPU")


def test_purge_removes_the_remembered_offer(node):
    """A purge also removes the temporary file of a program that was killed during the write."""
    node.paths.state_dir.mkdir(parents=True, exist_ok=True)
    node.paths.last_offer.write_text("{}")
    node.paths.last_offer.with_suffix(".new").write_text("{")
    node.paths.run_dir.mkdir(parents=True, exist_ok=True)
    for name in ("plugin.sock", "new.sock"):
        (node.paths.run_dir / name).touch()
    (node.paths.run_dir / "root/lib").mkdir(parents=True)
    purge(node.setup())
    assert not node.paths.state_dir.exists() and not node.paths.run_dir.exists()
