# SPDX-License-Identifier: Apache-2.0
"""Tests that after a reboot of the host a container of docker or podman gets the same slice (part of a GPU), whether
the engine or the device plugin starts first. If the engine starts first, the slice's files do not exist yet, and docker
creates a directory in place of each file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import SLICE_MIB, until
from .slice_containers import ENGINES, Engine, Mounts, Place, Work
from .test_reboot import Machine, machine  # noqa: F401  # pylint: disable=unused-import # a fixture

pytestmark = pytest.mark.slow

MIB = 1 << 20
FILES = ("/dev/vgpu/0/ledger", "/dev/vgpu/0/tenant", "/etc/ld.so.preload")


@pytest.fixture(params=["podman", "docker"])
def engine(request: Any, machine: Machine) -> Iterator[Engine]:  # noqa: F811
    with ENGINES[request.param](Place.make(machine.node)) as found:
        yield found


def mounts_of(machine: Machine, slice_id: str) -> Mounts:  # noqa: F811
    """Returns the mounts of a slice from its CDI device, without the driver's mounts, because the container already has
    this machine's driver files."""
    spec = json.loads((machine.node.folder / "cdi/vgpu-vgpu.fleet-slice.json").read_text())
    (device,) = [one for one in spec["devices"] if one["name"] == slice_id]
    found = device["containerEdits"]["mounts"]
    return [(one["containerPath"], one["hostPath"], "ro" in one["options"]) for one in found]


def docker_makes_directories(mounts: Mounts, slice_id: str) -> None:
    """Creates a directory in place of each missing mount source, as docker does. This includes the single files that a
    former version mounted."""
    hosts = [host for _inside, host, _read_only in mounts]
    folder = next(Path(host) for inside, host, _read_only in mounts if inside == "/dev/vgpu/0").parent
    former = [str(folder / name) for name in ("limits", "ld.so.preload", f"gpu-{slice_id.partition('::')[0]}")]
    for host in (*hosts, *former):
        if not os.path.exists(host):
            os.makedirs(host, 0o755)


def had(work: Work) -> int:
    assert work.context == 0
    _said, taken = work.take()
    return taken


@pytest.mark.parametrize("first", ["plugin", "engine"])
def test_container_starts_again_in_its_slice(machine, engine, first):  # noqa: F811
    node = machine.node
    slice_id = next(iter(node.kubelet.endpoints[next(iter(node.kubelet.endpoints))].devices))
    mounts = mounts_of(machine, slice_id)
    created = engine.create(mounts, {})
    try:
        work = engine.start(created)
        before = had(work)
        assert SLICE_MIB * MIB - 64 * MIB < before <= SLICE_MIB * MIB
        work.end()
        machine.halt()
        assert not any(os.path.exists(host) for inside, host, _read_only in mounts if inside in FILES)
        if first == "engine":
            docker_makes_directories(mounts, slice_id)
            assert all(os.path.isdir(host) for _inside, host, _read_only in mounts)
        machine.boot_up("plugin")
        until(
            lambda: all(Path(host).is_file() for inside, host, _ro in mounts if inside in FILES),
            "the files of the slice",
        )
        os.chmod(node.environment["GPUSIM_STATE"], 0o666)
        work = engine.start(created)
        assert had(work) == before
        assert "/dev/vgpu/0/ledger" in work.ledgers()
        until(
            lambda: {one["id"]: one["in_use"] for one in node.vgpuctl("status")["slices"]}[slice_id],
            "report of the plugin that the slice is in use",
        )
        assert node.vgpuctl("status")["warnings"] == []
        work.end()
    finally:
        engine.remove(created)
