# SPDX-License-Identifier: Apache-2.0
"""Fixtures of a real Kubernetes cluster with one GPU node. All tests use one cluster, which is reset for each module; a
module may choose the node's GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

E2E = Path(__file__).resolve().parent
PLUGIN = E2E.parents[1] / "native" / "plugin"
sys.path[:0] = [str(E2E), str(PLUGIN / "src")]
sys.path.append(str(E2E.parent))  # The folder of the module ``former`` (a former release).
# kubetrace needs the gRPC code of the kubelet's interfaces.
subprocess.run(["make", "-s", "-C", str(PLUGIN), "proto", f"PYTHON={sys.executable}"], check=True)

from kubebox import pods, state  # noqa: E402
from kubebox.box import CGROUP_VARIABLE  # noqa: E402
from kubebox.cluster import Cluster  # noqa: E402
from kubebox.gpunode import GpuNode  # noqa: E402
from kubebox.process import until  # noqa: E402
from kubebox.programs import Programs  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    state.by_runtime(items)


@pytest.fixture(scope="session")
def started() -> Iterator[tuple[Cluster, GpuNode]]:
    """Starts cluster and node once for all test files."""
    if CGROUP_VARIABLE not in os.environ:
        pytest.fail("these tests need the box: run `make e2e`, or tests/e2e/run.py pytest tests/e2e")
    programs = Programs.from_environment()
    with Cluster(programs, os.environ[CGROUP_VARIABLE]) as cluster:
        node = GpuNode(programs, ["T4"], cluster.logs)
        node.furnish()
        cluster.start()
        yield cluster, node
        node.stop()


@pytest.fixture(scope="module")
def machine(started: tuple[Cluster, GpuNode], request: pytest.FixtureRequest) -> tuple[Cluster, GpuNode]:
    """Returns cluster and node in the initial state: no pod, none of our programs, the module's ``RUNTIME``."""
    state.reset(*started, state.runtime_of(request.module))
    return started


@pytest.fixture(scope="module")
def cluster(machine: tuple[Cluster, GpuNode]) -> Cluster:
    return machine[0]


def offer(cluster: Cluster, node: GpuNode, count: int) -> None:
    """Starts our programs and waits until the API server reports ``count`` slices (parts of GPUs)."""
    node.start()
    until(lambda: (cluster.capacity(), cluster.allocatable()) == (count, count), f"{count} allocatable slices")


@pytest.fixture(scope="module")
def node(machine: tuple[Cluster, GpuNode], request: pytest.FixtureRequest) -> Iterator[GpuNode]:
    """Sets the node up with the module's ``GPUS``, ``CONFIGURATION`` (``sharing``) and ``SLICES``."""
    cluster, node = machine
    node.exchange(request.module.GPUS)
    node.configure(request.module.CONFIGURATION)
    offer(cluster, node, request.module.SLICES)
    yield node
    pods.delete_all(cluster)
    until(lambda: not node.held(), "kubelet without allocated devices")


@pytest.fixture
def pod(cluster: Cluster, node: GpuNode) -> Iterator[Callable[..., pods.Pod]]:
    """Makes pods: ``pod("a", ["gpu-worker", "fill"])``; all are deleted after the test."""

    def make(name: str, command: list[str], slices: int = 1, restart: str = "Never", **spec: Any) -> pods.Pod:
        return pods.create(cluster, pods.manifest(name, pods.container(command, slices), restart=restart, **spec))

    yield make
    pods.delete_all(cluster)
