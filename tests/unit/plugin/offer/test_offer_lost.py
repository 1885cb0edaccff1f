# SPDX-License-Identifier: Apache-2.0
"""Tests lost GPUs, which the driver no longer lists or cannot read. If such a GPU was offered before, it must stay
visible, even after a restart of the program or the host.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
from vgpu_kubelet_double.manager import PodError
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon

from ..conftest import FakeGpus
from ..samples import gpus, until

RESOURCE = "nvidia.com/gpu"
SAYS = "NVML: GPU is lost"


@pytest.fixture
def begin(node, kubelet, running, monkeypatch):
    """Returns a function: ``begin(listed)`` stops the running program and starts it with a driver that lists these
    GPUs.
    """
    monkeypatch.setattr("vgpu_plugin.offer.health.LOOK_S", 0.05)
    node.gpus = gpus("T4", "T4", "T4")
    node.configure(splitCount=2)
    alive = []

    def start(listed, unreadable=()):
        while alive:
            daemon, thread = alive.pop()
            daemon.stop()
            thread.join(30)
            assert not thread.is_alive()
        source = FakeGpus(list(listed))
        lose(source, node.gpus, unreadable)
        daemon = Daemon(node.setup(), lambda: source)
        alive.append((daemon, running(daemon)))
        until(lambda: allocatable(kubelet) == 2 * len(listed), f"the slices of {len(listed)} GPUs")
        return source

    return start


def lose(source: FakeGpus, known, unreadable) -> None:
    here = {one.uuid for one in source.listed}
    source.faults = {one.uuid: "the driver says: not found" for one in known if one.uuid not in here}
    source.lost = dict.fromkeys(unreadable, SAYS)


def allocatable(kubelet) -> int:
    return kubelet.state()["resources"].get(RESOURCE, {}).get("allocatable", -1)


def ask(node, capsys, *words: str) -> dict:
    assert ctl.main(["--socket", str(node.paths.admin_socket), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def healthy_metric(node, capsys) -> dict[tuple[str, str], int]:
    found = [one for one in ask(node, capsys, "metrics")["metrics"] if one["name"] == "vgpu_gpu_healthy"]
    return {(one["labels"]["gpu"], one["labels"]["uuid"]): int(one["value"]) for one in found}


# columns: which of three GPUs is missing (index), whether the driver still counts this GPU
GONE = [(2, True), (2, False), (0, True), (1, False)]


@pytest.mark.parametrize(("index", "counted"), GONE)
def test_lost_gpu_is_seen_after_a_restart(node, kubelet, begin, capsys, index, counted):
    begin(node.gpus)
    left = [one for one in node.gpus if one.index != index]
    begin(left, unreadable=[index] if counted else [])
    lost = node.gpus[index].uuid
    status = ask(node, capsys, "status")
    found = {one["uuid"]: (one["index"], one["healthy"], one["reason"]) for one in status["gpus"]}
    assert {uuid for uuid, (_index, healthy, _reason) in found.items() if not healthy} == {lost}
    assert found[lost][0] == index
    assert found[lost][2] == ("lost: " + (SAYS if counted else "NVML does not list it"))
    assert [one["index"] for one in status["gpus"]] == [0, 1, 2]
    health = {one["id"]: one["health"] for one in status["slices"]}
    assert {one for one, said in health.items() if said == "Unhealthy"} == {f"{lost}::0", f"{lost}::1"}
    (warning,) = status["warnings"]
    assert lost in warning and f"GPU {index} " in warning
    assert "reset or replace" in warning
    assert "restart vgpu" not in warning
    assert healthy_metric(node, capsys)[str(index), lost] == 0
    assert any(lost in one["text"] for one in ask(node, capsys, "explain", str(index))["facts"])
    with pytest.raises(PodError):
        kubelet.run_pod("late", ids=[f"{lost}::0"])


def test_lost_gpu_returns_without_an_action(node, kubelet, begin, capsys):
    begin(node.gpus)
    source = begin(node.gpus[:2], unreadable=[2])
    source.faults, source.lost, source.listed = {}, {}, list(node.gpus)
    until(lambda: allocatable(kubelet) == 6, "all slices")
    status = ask(node, capsys, "status")
    assert [one["healthy"] for one in status["gpus"]] == [True] * 3
    assert status["warnings"] == []


def test_lost_gpu_is_remembered_over_many_restarts(node, begin, capsys):
    begin(node.gpus)
    for _time in range(3):
        begin(node.gpus[:2])
    assert [one["healthy"] for one in ask(node, capsys, "status")["gpus"]] == [True, True, False]


def test_counted_but_never_readable_gpu_is_shown(node, begin, capsys):
    """A GPU that has been unreadable since the boot has no known UUID. The status must show it nevertheless."""
    begin(node.gpus[:2], unreadable=[2])
    status = ask(node, capsys, "status")
    assert [(one["index"], one["uuid"], one["healthy"]) for one in status["gpus"]][2] == (2, "", False)
    assert status["gpus"][2]["reason"] == f"lost: {SAYS}"
    (warning,) = status["warnings"]
    assert "GPU 2 " in warning and "reset or replace" in warning
    assert healthy_metric(node, capsys)["2", ""] == 0
    assert ask(node, capsys, "explain", "2")["facts"]


def test_replaced_gpu_is_not_lost(node, begin, capsys):
    begin(node.gpus)
    fresh = dataclasses.replace(node.gpus[2], uuid="GPU-9999")
    begin([*node.gpus[:2], fresh])
    status = ask(node, capsys, "status")
    assert [one["uuid"] for one in status["gpus"]] == [*(one.uuid for one in node.gpus[:2]), "GPU-9999"]
    assert status["warnings"] == []


def test_user_can_forget_a_removed_gpu(node, begin, capsys):
    begin(node.gpus)
    begin(node.gpus[:2])
    lost = node.gpus[2].uuid
    assert ask(node, capsys, "forget", lost) == {"forgotten": lost}
    until(lambda: len(ask(node, capsys, "status")["gpus"]) == 2, "two GPUs")
    begin(node.gpus[:2])
    status = ask(node, capsys, "status")
    assert (len(status["gpus"]), len(status["slices"]), status["warnings"]) == (2, 4, [])


@pytest.mark.parametrize("which", ["healthy GPU", "none"])
def test_only_a_lost_gpu_is_forgotten(node, begin, capsys, which):
    begin(node.gpus)
    uuid = node.gpus[0].uuid if which == "healthy GPU" else "GPU-none"
    assert ctl.main(["--socket", str(node.paths.admin_socket), "forget", uuid]) == 1
    assert "is not lost" in capsys.readouterr().err
    assert len(ask(node, capsys, "status")["gpus"]) == 3


def test_status_of_a_lost_gpu_is_the_same_after_a_restart(node, kubelet, begin, capsys):
    """If a GPU is lost while the program runs, the status must be the same after a restart of the program."""
    source = begin(node.gpus)
    source.listed = node.gpus[:2]
    lose(source, node.gpus, [2])
    until(lambda: allocatable(kubelet) == 4, "the slices of the other GPUs")
    before = ask(node, capsys, "status")
    begin(node.gpus[:2], unreadable=[2])
    after = ask(node, capsys, "status")
    for key in ("gpus", "slices", "warnings"):
        assert after[key] == before[key], key
