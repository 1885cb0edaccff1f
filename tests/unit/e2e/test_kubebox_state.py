# SPDX-License-Identifier: Apache-2.0
"""Tests that each test file of tests/e2e starts from the same state of its small cluster (pods, programs, folders),
whatever the earlier test files left behind. The cluster is simulated, so no Kubernetes is started.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

E2E = Path(__file__).resolve().parents[2] / "e2e"
if str(E2E) not in sys.path:
    sys.path.insert(0, str(E2E))

from kubebox import cluster as clusters  # noqa: E402
from kubebox import state  # noqa: E402
from kubebox.cluster import DEBIAN, PODS, WITH_CDI, Cluster  # noqa: E402
from kubebox.gpunode import GpuNode  # noqa: E402


class FakeApi:
    """A simulated API server with the pods of one namespace. A deleted pod disappears at once, but its slice of a GPU
    is still held at the next query."""

    def __init__(self, steps: list[str]) -> None:
        self.steps = steps
        self.pods: list[str] = []
        self.held: list[str] = []

    def get(self, path: str) -> Any:
        assert path == PODS
        return {"items": [{"metadata": {"name": name}} for name in self.pods]}

    def get_or_none(self, path: str) -> Any:
        return {} if path.rpartition("/")[2] in self.pods else None

    def delete(self, path: str, grace_s: int | None = None) -> None:
        name = path.rpartition("/")[2]
        self.steps.append(f"delete {name}")
        if name in self.pods:
            self.pods.remove(name)
            self.held.append(name)

    def held_slices(self) -> list[str]:
        found, self.held = self.held, self.held[1:]
        return found


class FakeService:
    """A simulated service, which starts no program and only records its starts and stops."""

    steps: list[str] = []

    def __init__(self, name: str, command: list[str], *_more: object) -> None:
        self.name, self.command, self.running = name, command, False

    def start(self) -> None:
        self.running = True
        self.steps.append(f"start {self.name}")

    def stop(self, kill: bool = False) -> None:
        if self.running:
            self.steps.append(f"stop {self.name}")
        self.running = False

    def tail(self, lines: int = 30) -> str:
        return ""


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Returns a started cluster and node, in which all programs, images and files are simulated."""
    steps: list[str] = []
    monkeypatch.setattr(FakeService, "steps", steps)
    monkeypatch.setattr(clusters, "Service", FakeService)
    monkeypatch.setattr("kubebox.gpunode.Service", FakeService)
    monkeypatch.setattr(clusters, "RUN", tmp_path)
    authority = SimpleNamespace(
        certificate="", token_key="", folder=tmp_path, pair=lambda *_: ("", ""), kubeconfig=lambda *_: ""
    )
    monkeypatch.setattr(clusters, "Authority", lambda _folder: authority)
    api = FakeApi(steps)
    monkeypatch.setattr(clusters, "Api", lambda *_: api)
    monkeypatch.setattr(clusters.images, "archive", lambda *_: None)
    monkeypatch.setattr(Cluster, "node_ready", lambda _self: True)
    monkeypatch.setattr(Cluster, "_write_containerd", lambda self: steps.append(f"configure {self.runtime}"))
    monkeypatch.setattr(Cluster, "ctr", lambda _self, *_words, check=True: SimpleNamespace(returncode=0))
    monkeypatch.setattr(GpuNode, "held", staticmethod(api.held_slices))
    monkeypatch.setattr("kubebox.gpunode.Path", lambda path: tmp_path / Path(path).name)
    programs: Any = SimpleNamespace(
        system=Path("/debian"), containerd_with_cdi=Path("/newer"), kubernetes=Path("/kubernetes"), image=Path("/image")
    )
    cluster = Cluster(programs, "cgroup")
    node = GpuNode(programs, ["T4"], tmp_path)
    cluster.containerd.start()
    cluster.kubelet.start()
    steps.clear()
    return SimpleNamespace(cluster=cluster, node=node, api=api, steps=steps, folder=tmp_path)


def disturb(box: SimpleNamespace) -> None:
    """Changes the state as a test file may leave it: with pods, with programs started with other arguments, without a
    folder."""
    box.api.pods = ["a", "b"]
    box.node.plugin.command = ["other"]
    box.node.plugin.start()
    box.node.arbiter.start()
    if (box.folder / "vgpu").exists():
        (box.folder / "vgpu").rmdir()
    box.steps.clear()


@pytest.mark.parametrize("order", list(itertools.product([DEBIAN, WITH_CDI], repeat=2)))
def test_every_file_finds_the_same_state_in_any_order(box: SimpleNamespace, order: tuple[str, ...]) -> None:
    command = list(box.node.plugin.command)
    for runtime in order:
        disturb(box)
        state.reset(box.cluster, box.node, runtime)
        assert (box.api.pods, box.api.held) == ([], [])
        assert not box.node.plugin.running and not box.node.arbiter.running
        assert box.node.plugin.command == command
        assert (box.folder / "vgpu").is_dir()
        assert (box.cluster.runtime, box.cluster.containerd.name) == (runtime, runtime)
        assert box.cluster.containerd.running and box.cluster.kubelet.running
        folder = "/newer" if runtime == WITH_CDI else "/debian"
        assert f"{folder}/containerd" in box.cluster.containerd.command


def test_pods_and_kubelet_stop_before_the_runtime_changes(box: SimpleNamespace) -> None:
    disturb(box)
    state.reset(box.cluster, box.node, WITH_CDI)
    assert [one for one in box.steps if not one.startswith("delete")] == [
        *("stop vgpu-device-plugin", "stop vgpu-arbiter"),
        *("stop kubelet", "stop containerd", f"configure {WITH_CDI}", f"start {WITH_CDI}", "start kubelet"),
    ]
    assert box.steps[:2] == ["delete a", "delete b"], "expected the pods to end before the kubelet stops"


def test_running_runtime_is_not_restarted(box: SimpleNamespace) -> None:
    state.reset(box.cluster, box.node, DEBIAN)
    assert box.steps == []


def test_test_files_are_sorted_by_runtime_only() -> None:
    def item(name: str, **names: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, module=SimpleNamespace(**names))

    items = [item("a", RUNTIME=WITH_CDI), item("b"), item("c", RUNTIME=WITH_CDI), item("d", RUNTIME=DEBIAN)]
    state.by_runtime(items)
    assert [one.name for one in items] == ["b", "d", "a", "c"]


@pytest.mark.parametrize("folder", ["e2e", "e2e_scheduler"])
def test_no_test_file_has_a_name_that_makes_it_run_last(folder: str) -> None:
    assert [one.name for one in (E2E.parent / folder).glob("test_z*.py")] == []
