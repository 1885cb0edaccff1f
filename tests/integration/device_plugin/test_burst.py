# SPDX-License-Identifier: Apache-2.0
"""Tests burst memory. A container may use more memory than the amount that it is promised, up to its limit. When a new
container needs this additional memory, the first container must return it. The device plugin, the library and the
containers are real; a double of the API server has the scheduler's plans (its choices of GPUs and sizes). The simulated
driver reports the memory usage.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from doubles.kube_api import KubeApi, write_kubeconfig
from vgpu_kubelet_double import podresources
from vgpu_kubelet_double.manager import PodError

from .conftest import RealNode, until
from .slice_containers import Mounts, Place, Runc, Work, driver_account, runc

pytestmark = pytest.mark.slow

MIB = 1 << 20
CARD = 16160
# The size of one allocation in MiB. The program also allocates and frees a second allocation repeatedly.
PIECE = 64
SLICES = 10


@dataclass
class Pods:
    """The test's pods on the node. ``took`` lists the seconds that each container start took."""

    node: RealNode
    api: KubeApi
    engine: Runc
    took: list[float] = field(default_factory=list)

    @property
    def uuid(self) -> str:
        return str(self.node.vgpuctl("status")["gpus"][0]["uuid"])

    def plan(self, name: str, promised: int, burst: int = 0) -> None:
        part = {"name": "main", "kind": "app", "gpus": [[self.uuid, promised, 0]]}
        if burst:
            part["burst"] = [burst]
        notes = {"vgpu.fleet/plan": json.dumps({"version": 1, "containers": [part]})}
        metadata = {"namespace": "default", "name": name, "uid": f"uid-{name}", "annotations": notes}
        pod = {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": "node-1"}, "status": {}}
        self.api.put(f"/api/v1/namespaces/default/pods/{name}", pod)

    def admit(self, name: str, promised: int, burst: int = 0) -> dict:
        """Makes a pod with a plan and runs the kubelet's calls for it, up to and including PreStartContainer."""
        self.plan(name, promised, burst)
        return self._timed(lambda: self.node.kubelet.run_pod(name, uid=f"uid-{name}"))

    def again(self, name: str) -> dict:
        """Restarts the pod's container once, as the kubelet does after a failure."""
        return self._timed(lambda: self.node.kubelet.restart_container(name))

    def at_last(self, name: str) -> dict:
        """Restarts the pod's container until the start succeeds. The plugin polls the driver every 2 s and sees freed
        memory only at its next poll."""

        def starts() -> dict | None:
            try:
                return self.again(name)
            except PodError:
                return None

        return until(starts, f"the start of the container of pod {name}")

    def _timed(self, start) -> dict:
        begin = time.monotonic()
        pod = start()
        self.took.append(time.monotonic() - begin)
        return pod

    def run(self, pod: dict) -> tuple[Work, int]:
        """Starts a program in the pod's container; returns the program and its pid."""
        before = {one["pid"] for one in driver_account(self.node)}
        found = pod["answer"]["mounts"]
        mounts: Mounts = [(each["container_path"], each["host_path"], each["read_only"]) for each in found]
        work = self.engine.start(self.engine.create(mounts, {}))
        assert work.context == 0
        (pid,) = {one["pid"] for one in driver_account(self.node)} - before
        return work, pid

    def end(self, name: str) -> None:
        self.node.kubelet.delete_pod(name)
        self.api.remove(f"/api/v1/namespaces/default/pods/{name}")

    def holds(self, pid: int) -> int:
        return next(one["total"] for one in driver_account(self.node) if one["pid"] == pid) // MIB

    def fills(self, work: Work, pid: int, mib: int) -> None:
        """Checks that a program can use this many MiB, and no more."""
        until(lambda: work._ask("take") and self.holds(pid) > mib - PIECE, f"the use of {mib} MiB by the program")
        assert self.holds(pid) <= mib

    def limit(self, name: str) -> int:
        (row,) = [one for one in self.node.vgpuctl("top", "--once")["usages"] if one["pod"] == name]
        return int(row["memory_limit"]) // MIB


@pytest.fixture
def pods(node_at_rest: RealNode) -> Iterator[Pods]:
    node = node_at_rest
    text = json.loads((node.folder / "node.yaml").read_text())
    text["sharing"]["vcuda"].update(splitCount=SLICES, sliceSizing="requested")
    (node.folder / "node.yaml").write_text(json.dumps(text))
    lister = podresources.serve(node.kubelet, node.folder / "pod-resources/kubelet.sock")
    with KubeApi() as api:
        status = {"conditions": [{"type": "Ready", "status": "True"}]}
        api.put("/api/v1/nodes/node-1", {"kind": "Node", "metadata": {"name": "node-1", "uid": "n"}, "status": status})
        kubeconfig = write_kubeconfig(node.folder / "kubeconfig", api.url)
        node.options += ["--kubeconfig", str(kubeconfig), "--node-name", "node-1"]
        node.start()
        with runc(Place.make(node)) as engine:
            yield Pods(node, api, engine)
        node.end()
    lister.stop(grace=0).wait()


def test_program_bursts_and_returns_memory_without_disturbing_its_neighbour(pods):
    other, neighbour = pods.run(pods.admit("quiet", 3000))
    pods.fills(other, neighbour, 3000)
    had = pods.holds(neighbour)
    one, pid = pods.run(pods.admit("bursts", 2000, 20000))
    pods.fills(one, pid, CARD - 3000)

    # The bursting program still uses memory that is promised to the new pod: the new pod's start fails with a reason,
    # and the bursting program continues.
    with pytest.raises(PodError, match=r"MiB of GPU .* are promised to it, but still used"):
        pods.admit("comes", 6000)
    assert pods.holds(pid) > CARD - 3000 - PIECE
    assert 0 <= pods.limit("bursts") - pods.holds(pid) <= 1, "expected a limit equal to the current usage"
    one.free()
    third, newcomer = pods.run(pods.at_last("comes"))
    pods.fills(third, newcomer, 6000)
    pods.fills(one, pid, CARD - 9000)

    # A new pod gets free memory at once, although other programs run.
    pods.end("comes")
    third.client.communicate("", timeout=60)
    until(lambda: pods.limit("bursts") == CARD - 3000, "the deleted pod's memory in the limit of the bursting pod")
    one.free()
    pods.took.clear()
    for n in range(3):
        name = f"quick-{n}"
        pods.admit(name, 6000)
        assert pods.limit("bursts") == CARD - 9000
        pods.end(name)
        until(lambda: pods.limit("bursts") == CARD - 3000, "the deleted pod's memory in the limit of the bursting pod")
    print("container starts that reduced another pod's limit took", ", ".join(f"{one:.2f} s" for one in pods.took))
    pods.took.clear()
    pods.end("bursts")
    one.client.communicate("", timeout=60)
    until(lambda: len(driver_account(pods.node)) == 1, "a GPU that only the neighbour uses")
    for n in range(3):
        pods.admit(f"plain-{n}", 100)
    print("container starts that changed no other limit took", ", ".join(f"{one:.2f} s" for one in pods.took))

    assert pods.holds(neighbour) == had, "expected unchanged memory of the neighbour"
    other.free()
    pods.fills(other, neighbour, 3000)
    (row,) = [each for each in pods.node.vgpuctl("top", "--once")["usages"] if each["pod"] == "quiet"]
    assert row["memory_limit"] == 3000 * MIB and row["violations"] == 0
    other.client.communicate("", timeout=60)
    assert pods.node.vgpuctl("watch")["findings"] == []


def test_oom_killer_ends_a_process_above_its_reduced_limit(pods):
    """With the option vgpu_oom_killer, a process that uses more than its reduced limit may be killed at its next CUDA
    call."""
    path = Path(pods.node.folder / "node.yaml")
    text = json.loads(path.read_text())
    text["sharing"]["vcuda"]["oomKiller"] = True
    path.write_text(json.dumps(text))
    pods.node.end()
    pods.node.start()
    one, pid = pods.run(pods.admit("bursts", 2000, 20000))
    pods.fills(one, pid, CARD)
    with pytest.raises(PodError, match="still used as burst memory"):
        pods.admit("comes", 6000)
    assert one._ask("take") == ""
    until(
        lambda: pid not in [each["pid"] for each in driver_account(pods.node)], "the end of the process over its limit"
    )
    third, newcomer = pods.run(pods.at_last("comes"))
    pods.fills(third, newcomer, 6000)
    third.client.communicate("", timeout=60)
    one.client.communicate("", timeout=60)
