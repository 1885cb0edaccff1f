# SPDX-License-Identifier: Apache-2.0
"""Tests that a running container survives ``rm -rf /run/vgpu`` and damaged records of the device plugin, with real
mounts and a real engine. A lease is a slice (a part of a GPU) for a container outside Kubernetes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import RESOURCE, SLICE_MIB, RealNode, until
from .slice_containers import Engine, Mounts, Place, podman

pytestmark = pytest.mark.slow

MIB = 1 << 20
# A program that runs the device plugin with a cleanup interval of 0.2 s instead of ten seconds.
SOON = """\
import sys
from vgpu_plugin import daemon
daemon.HOUSEKEEPING_S = 0.2
from vgpu_plugin.main import main
sys.exit(main())
"""


@pytest.fixture
def quick(node_at_rest: RealNode) -> RealNode:
    node_at_rest.program = [node_at_rest.program[0], "-c", SOON]
    node_at_rest.options += ["--watch-interval", "0.2"]
    node_at_rest.start()
    return node_at_rest


@pytest.fixture
def engine(quick: RealNode) -> Iterator[Engine]:
    with podman(Place.make(quick)) as found:
        yield found


def leased(node: RealNode) -> tuple[dict, Mounts]:
    lease = node.vgpuctl("lease", "--ttl", "3000")
    return lease, [(one["container_path"], one["host_path"], one["read_only"]) for one in lease["mounts"]]


def rm_rf(folder: Path) -> None:
    """Runs rm -rf on the folder. rm fails on mount points, so the mounts stay."""
    subprocess.run(["rm", "-rf", str(folder)], check=False, capture_output=True)


def free(node: RealNode) -> set[str]:
    return set(node.kubelet.endpoints[RESOURCE].healthy())


def watched(node: RealNode) -> dict:
    return node.vgpuctl("watch")


def test_container_survives_the_removal_and_starts_again(quick, engine):
    node = quick
    lease, mounts = leased(node)
    created = engine.create(mounts, {})
    try:
        work = engine.start(created)
        assert work.context == 0
        before = work.take()[1]
        rm_rf(node.folder / "run")
        assert not node.socket.exists()
        until(node.socket.exists, "the socket of the plugin")
        until(lambda: all(Path(host).exists() for _inside, host, _ro in mounts), "all files of the slice")
        # The watcher, which looks for bypasses, cannot read the ledger, the container's file of memory counts, and
        # reports this. It reports no process as a bypass, and the slice does not become free.
        until(lambda: lease["allocation"] in watched(node)["fault"], "a fault in the watcher's state")
        assert watched(node)["findings"] == []
        assert any(lease["allocation"] in one for one in node.vgpuctl("status")["warnings"])
        assert not set(lease["ids"]) & free(node)
        (row,) = [one for one in node.vgpuctl("top", "--once")["usages"] if one["allocation"] == lease["allocation"]]
        assert row["memory_driver"] >= before
        work.end()
        work = engine.start(created)
        assert work.context == 0
        assert SLICE_MIB * MIB - 64 * MIB < work.take()[1] <= SLICE_MIB * MIB
        until(lambda: watched(node)["fault"] == "", "a watcher's state without a fault")
        assert node.vgpuctl("status")["warnings"] == []
        work.end()
    finally:
        engine.remove(created)


def test_slice_in_use_is_not_allocated_twice(quick, engine):
    node = quick
    slice_id = sorted(free(node))[0]
    folder = node.folder / "run/allocations" / f"slice-{slice_id.replace('::', '-')}"
    lease, found = leased(node)
    mounts = [(inside, host.replace(f"/{lease['allocation']}/", f"/{folder.name}/"), ro) for inside, host, ro in found]
    node.vgpuctl("release", lease["allocation"])
    one, other = engine.create(mounts, {}), engine.create(mounts, {})
    try:
        work = engine.start(one)
        assert work.context == 0
        work.take()
        until(lambda: slice_id not in free(node), "the slice's state: in use")
        rm_rf(node.folder / "run")
        until(node.socket.exists, "the socket of the plugin")
        until((folder / "limits").exists, "the files of the slice")
        until(
            lambda: any(folder.name in said for said in node.vgpuctl("status")["warnings"]),
            "a warning of the plugin that names the allocation",
        )
        assert slice_id not in free(node)
        refused = engine.start(other)
        assert refused.context != 0
        refused.client.communicate("", timeout=60)
        work.end()
        until(lambda: slice_id in free(node), "the slice's state: free")
    finally:
        engine.remove(one)
        engine.remove(other)


@pytest.mark.parametrize("records", ["torn", "gone"])
def test_lease_of_a_container_survives_a_damaged_record(quick, engine, records):
    node = quick
    lease, mounts = leased(node)
    created = engine.create(mounts, {})
    try:
        work = engine.start(created)
        work.take()
        node.end(kill=True)
        path = node.folder / "state/allocations.json"
        path.write_bytes(path.read_bytes()[:50]) if records == "torn" else path.unlink()
        node.start()
        status = node.vgpuctl("status")
        assert [one["id"] for one in status["allocations"]] == [lease["allocation"]]
        assert not set(lease["ids"]) & free(node)
        assert any("recovered" in one for one in status["warnings"])
        work.end()
        node.vgpuctl("release", lease["allocation"])
        until(lambda: set(lease["ids"]) <= free(node), "the slice's state: free")
    finally:
        engine.remove(created)
