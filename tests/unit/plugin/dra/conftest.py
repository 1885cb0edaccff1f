# SPDX-License-Identifier: Apache-2.0
"""Fixtures of a node whose pods get GPUs by ResourceClaims: an API server double with claims and ResourceSlices, and a
double of the part of the kubelet that prepares claims (its claim manager).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.kube_api import write_kubeconfig
from vgpu_kubelet_double.claims import ClaimManager, ClaimRef
from vgpu_plugin.assembly import Extras
from vgpu_plugin.daemon import Daemon

from ..conftest import FakeGpus, Node
from ..node_api import NodeApi
from ..samples import until

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
NAME = "0-gpu.vgpu.fleet-node-1"
SLICE = f"{SLICES}/{NAME}"
# The only requests that the API server double allows. The built-in roles of Kubernetes allow them to the user
# system:node:<node>, so they need no role of this project.
GRANTED = {
    ("get", "resource.k8s.io", "resourceclaims"),
    ("get", "", "nodes"),
    ("patch", "", "nodes"),
    ("patch", "", "nodes/status"),
    ("watch", "", "nodes"),
    ("list", "", "nodes"),
    ("get", "", "pods"),
    ("list", "", "pods"),
    *((verb, "resource.k8s.io", "resourceslices") for verb in ("create", "list", "watch", "update", "delete")),
}


def claim_path(name: str) -> str:
    return f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{name}"


class ClaimApi(NodeApi):
    """An API server double. ``allocate`` creates a claim and allocates it, which are the steps of a user and of the
    kube-scheduler.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.may = lambda access: (access.verb, access.group, access.resource) in GRANTED  # type: ignore[method-assign]

    def allocate(self, name: str, *results: dict[str, Any], uid: str = "", config: tuple = ()) -> ClaimRef:
        uid = uid or f"uid-{name}"
        allocation = {"devices": {"results": list(results), "config": list(config)}}
        claim = {"metadata": {"namespace": "default", "name": name, "uid": uid}, "spec": {}}
        self.put(claim_path(name), {**claim, "kind": "ResourceClaim", "status": {"allocation": allocation}})
        return ClaimRef("default", name, uid)

    def slices(self) -> dict[str, Any]:
        """Returns device name → device, from all ResourceSlices of this node."""
        found = [one for path, one in self.objects.items() if path.startswith(SLICES)]
        return {device["name"]: device for one in found for device in one["spec"]["devices"]}

    def wipe(self, driver: str | None) -> None:
        for path, one in list(self.objects.items()):
            if path.startswith(SLICES) and driver in (None, one["spec"]["driver"]):
                self.remove(path)


def part(request: str = "gpu", gpu: int = 0, memory: str = "4Gi", cores: str = "30", **more: Any) -> dict[str, Any]:
    return {
        "driver": "gpu.vgpu.fleet",
        "pool": "node-1",
        "request": request,
        "device": f"gpu-{gpu:08d}",
        "shareID": f"share-{request}-{gpu}",
        "consumedCapacity": {"memory": memory, "cores": cores, "slots": "1"},
        **more,
    }


def configure(node: Node, **vcuda: Any) -> None:
    settings = {"libraryRoot": str(node.library_root), "splitCount": 4, "sliceSizing": "requested", **vcuda}
    flags = {"failOnInitError": True, "allocation": "dra"}
    node.config_text = json.dumps({"version": "v1", "flags": flags, "sharing": {"vcuda": settings}})
    node.configure()


@pytest.fixture
def api() -> Iterator[ClaimApi]:
    with ClaimApi() as server:
        yield server


@pytest.fixture
def manager(node: Node, api: ClaimApi) -> Iterator[ClaimManager]:
    out = ClaimManager(node.paths.kubelet_dir.parent, api.wipe, wipe_s=0.2)
    yield out
    out.stop()


Begin = Callable[..., Daemon]


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Creates empty files in place of the driver's libraries, in a folder of LD_LIBRARY_PATH; returns their paths."""
    folder = tmp_path / "driver"
    folder.mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    out = [folder / name for name in ("libcuda.so.1", "libnvidia-ml.so.1")]
    for one in out:
        one.touch()
    return [str(one) for one in out]


@pytest.fixture
def start(
    node: Node,
    api: ClaimApi,
    manager: ClaimManager,
    running: Any,
    tmp_path: Path,
    libraries: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Begin:
    """Returns a function that starts the device plugin's daemon with the current node.yaml."""
    monkeypatch.setattr("vgpu_plugin.offer.health.LOOK_S", 0.05)
    monkeypatch.setattr("vgpu_plugin.dra.registration.POLL_S", 0.05)
    monkeypatch.setattr("vgpu_plugin.dra.publish.FIRST_RETRY_S", 0.05)
    monkeypatch.setattr("vgpu_plugin.node.persist.FIRST_RETRY_S", 0.05)
    monkeypatch.setattr("vgpu_plugin.daemon.HOUSEKEEPING_S", 0.1)
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api.url)

    def start() -> Daemon:
        source = FakeGpus(node.gpus)
        extras = Extras(kubeconfig=str(kubeconfig), node_name="node-1", watch_s=0)
        out = Daemon(node.setup(extras), lambda: source)
        out.source = source  # type: ignore[attr-defined]
        out.thread = running(out)  # type: ignore[attr-defined]
        return out

    return start


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Returns a function: ``polls(5)`` waits until the daemon has called ClaimDriver.poll five more times."""
    from vgpu_plugin.dra.driver import ClaimDriver

    came: list[ClaimDriver] = []
    poll = ClaimDriver.poll

    def counted(self: ClaimDriver) -> None:
        poll(self)
        came.append(self)

    monkeypatch.setattr(ClaimDriver, "poll", counted)

    def wait(count: int) -> None:
        wanted = len(came) + count
        until(lambda: len(came) >= wanted, "polls")

    return wait


@pytest.fixture
def begin(node: Node, api: ClaimApi, manager: ClaimManager, start: Begin) -> Begin:
    """Returns a function that starts the daemon and waits until it is registered at the kubelet's claim manager, and
    for the node's ResourceSlices unless ``publishes`` is false.
    """

    def begin(publishes: bool = True, **vcuda: Any) -> Daemon:
        configure(node, **vcuda)
        out = start()
        until(manager.find_drivers, "the driver's registration at the kubelet")
        if publishes:
            until(lambda: len(api.slices()) == 2, "the slices of both GPUs")
        return out

    return begin
