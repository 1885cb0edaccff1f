# SPDX-License-Identifier: Apache-2.0
"""Resets cluster and node, so that each test file starts in the same state.

A file that needs a container runtime other than Debian's containerd names that runtime: ``RUNTIME = WITH_CDI``.
"""

from __future__ import annotations

from typing import Any

from . import pods
from .cluster import DEBIAN, Cluster
from .gpunode import GpuNode
from .process import until


def runtime_of(module: Any) -> str:
    """Returns the container runtime that the tests of a module need."""
    return str(getattr(module, "RUNTIME", DEBIAN))


def by_runtime(items: list[Any]) -> None:
    """Sorts pytest's items in place by container runtime, Debian's first, and keeps the order within each runtime.

    A change of the runtime takes a minute, so tests of one runtime run together.
    """
    items.sort(key=lambda item: (runtime_of(item.module) != DEBIAN, runtime_of(item.module)))


def reset(cluster: Cluster, node: GpuNode, runtime: str) -> None:
    """Deletes all pods of the namespace default, stops our programs, and switches to this container runtime."""
    if pods.delete_all(cluster):
        until(lambda: not node.held(), "kubelet without allocated devices")
    node.reset()
    cluster.use_runtime(runtime)
