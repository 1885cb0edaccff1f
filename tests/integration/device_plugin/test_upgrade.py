# SPDX-License-Identifier: Apache-2.0
"""Upgrades a node from the release that mounted single files into containers to this release, which mounts folders,
while a real container runs. Before the upgrade, that release's own device plugin and library run. Usually the
container's old mounts stay in use. The kubelet keeps an Allocate response, the plugin's list of mounts for a
container, for all restarts of this container; podman and docker keep a container's volumes. Only a container with a CDI
device gets the new mounts at its next start, because engines resolve a CDI device at each start.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from former import NO_HISTORY, Former, check_out, has_history
from vgpu_plugin._shared.abi import files as abi_files

from .conftest import SLICE_MIB, SOURCES, RealNode, until
from .old_node import FORMER, NEW, OldNode
from .slice_containers import ENGINES, Mounts, Place, Work, driver_account
from .test_cdi import FOLDER
from .test_watch import looks

pytestmark = pytest.mark.slow

MIB = 1 << 20
# The seconds of the watcher's poll interval, and of the window over which it judges compute time. The watcher is the
# part of the plugin that looks for containers beyond their limits.
INTERVAL_S, WINDOW_S = 0.2, 10.0
OLD_LEDGER, LEDGER = "/run/vgpu/ledger", "/dev/vgpu/0/ledger"
OUT_OF_MEMORY = "error 2"
# The error code is CUDA_ERROR_NOT_PERMITTED.
NO_CONTEXT = 800
# Lower and upper bound for a measured third of the GPU's time: a busy machine gives less, and a short measurement may
# show more.
SOME, MOST = 0.05, 0.45
# A program that runs the device plugin and keeps a deleted pod's allocation for 3 s instead of a minute.
PROGRAM = """\
import sys
try:
    from vgpu_plugin import collector, daemon
except ImportError:
    from vgpu_plugin import daemon
    from vgpu_plugin.allocation import collector
collector.GRACE_S, daemon.HOUSEKEEPING_S = 3.0, 0.2
from vgpu_plugin.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Former:
    if not has_history():
        pytest.skip(NO_HISTORY)
    return check_out(tmp_path_factory.mktemp("former"))


@pytest.fixture
def old_node(node_at_rest: RealNode, former: Former) -> Iterator[OldNode]:
    """Makes a node of the former release whose watcher polls often. The core policy "force" limits a container to its
    share of the GPU's time even if the GPU is otherwise idle.
    """
    node = node_at_rest
    node.options += ["--watch-interval", str(INTERVAL_S)]
    node.program = [sys.executable, "-c", PROGRAM]
    config = json.loads((node.folder / "node.yaml").read_text())
    config["sharing"]["vcuda"]["corePolicy"] = "force"
    (node.folder / "node.yaml").write_text(json.dumps(config))
    out = OldNode(node, former)
    yield out
    out.stop_arbiter()


@dataclass
class Tenant:
    """The container of one tenant, by one engine. ``source``: the origin of its mounts: an Allocate response, volumes
    written for podman or docker, or a CDI device."""

    host: OldNode
    node: RealNode
    engine: Any
    source: str
    mark: str
    created: str = ""
    allocation: str = ""
    pods: int = 0

    def create(self) -> None:
        """Replaces the container by a new container, which gets its mounts from the running device plugin."""
        if self.created:
            self.engine.remove(self.created)
            self.created = ""
        if self.source == "kubelet":
            if self.pods:
                self.node.kubelet.delete_pod(f"pod-{self.pods}")
            self.pods += 1
            answer = self.node.kubelet.run_pod(f"pod-{self.pods}")["answer"]
            self._create(of_answer(answer), dict(answer["envs"]))
            return
        device, mounts = self.slice()
        if self.source == "volumes":
            self._create(mounts, {})
        else:
            self.publish()
            self._create(mounts, {}, f"{self.mark}.vgpu.fleet/slice={device}")

    def _create(self, mounts: Mounts, env: dict[str, str], device: str = "") -> None:
        ledger = next(host for inside, host, _ro in mounts if inside in (OLD_LEDGER, LEDGER))
        self.allocation = Path(ledger).parent.parent.name
        self.created = self.engine.create([] if device else mounts, env, device)

    def slice(self) -> tuple[str, Mounts]:
        """Returns the first slice (part of a GPU) for containers outside Kubernetes, and its mounts."""
        spec = json.loads((self.node.folder / "cdi/vgpu-vgpu.fleet-slice.json").read_text())
        first = spec["devices"][0]
        edits = first["containerEdits"]["mounts"]
        return first["name"], [(one["containerPath"], one["hostPath"], "ro" in one["options"]) for one in edits]

    @property
    def published(self) -> Path:
        return FOLDER / f"{self.mark}-slice.json"

    def publish(self) -> None:
        """Copies the node's CDI file to podman's folder, with device names unique to this run."""
        spec = json.loads((self.node.folder / "cdi/vgpu-vgpu.fleet-slice.json").read_text())
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.published.write_text(json.dumps({**spec, "kind": f"{self.mark}.vgpu.fleet/slice"}))

    def start(self) -> Work:
        work: Work = self.engine.start(self.created)
        return work

    def start_again(self) -> Work:
        """Starts a container again after its program has ended; returns the new program."""
        if self.source == "kubelet":
            self.node.kubelet.restart_container(f"pod-{self.pods}")
        if self.source == "cdi":
            self.publish()
        return self.start()


def of_answer(answer: dict[str, Any]) -> Mounts:
    return [(one["container_path"], one["host_path"], one["read_only"]) for one in answer["mounts"]]


@pytest.fixture
def tenant(old_node: OldNode, request: pytest.FixtureRequest) -> Iterator[Tenant]:
    source, engine = request.param
    with ExitStack() as stack:
        made = stack.enter_context(ENGINES[engine](Place.make(old_node.node)))
        out = Tenant(old_node, old_node.node, made, source, f"t{uuid.uuid4().hex[:8]}")
        try:
            yield out
        finally:
            out.published.unlink(missing_ok=True)
            for one in driver_account(old_node.node):
                subprocess.run(["kill", "-KILL", str(one["pid"])], check=False)
            if out.created:
                out.engine.remove(out.created)


def is_limited(work: Work) -> None:
    """Checks that the container can use its slice to the last byte and no more, as the simulated driver reports it."""
    assert work.context == 0
    error, had = work.take()
    work.free()
    assert error == OUT_OF_MEMORY
    assert (SLICE_MIB - 64) * MIB < had <= SLICE_MIB * MIB


def ran_on(work: Work) -> None:
    """Checks that the container has run until now without a failed call."""
    rounds, failed = work.end()
    assert (rounds > 0, failed) == (True, 0)


def named(node: RealNode) -> list[str]:
    """Returns the allocations whose containers the watcher lists as *old mounts*, after checking that it reports
    nothing else."""
    answer = looks(node, 3)
    assert (answer["findings"], answer["past"], answer["fault"]) == ([], [], "")
    return [one["allocation"] for one in answer["old_mounts"]]


# columns: origin of the container's mounts, the engine that starts it
KEPT = [("kubelet", "runc"), ("kubelet", "docker"), ("volumes", "podman"), ("volumes", "docker")]


@pytest.mark.parametrize("tenant", KEPT, ids="-".join, indirect=True)
def test_container_of_an_old_allocate_response_survives_the_upgrade(tenant: Tenant) -> None:
    node = tenant.node
    tenant.create()
    work = tenant.start()
    is_limited(work)
    assert work.ledgers() == {OLD_LEDGER}, "expected the mounts of the former release in the response"

    tenant.host.upgrade()

    # The container continues to run after the upgrade.
    is_limited(work)
    assert named(node) == [tenant.allocation]
    ran_on(work)
    # The container restarts, and restarts again after a reboot with the files that the new release creates.
    for happened in (lambda: None, tenant.host.reboot):
        happened()
        work = tenant.start_again()
        is_limited(work)
        assert work.ledgers() == {OLD_LEDGER}
        assert named(node) == [tenant.allocation]
        assert work.end()[1] == 0
    # A new container has the new mounts.
    tenant.create()
    work = tenant.start()
    is_limited(work)
    assert work.ledgers() == {LEDGER}
    until(lambda: named(node) == [], "a report of the watcher without old mounts")
    assert work.end()[1] == 0


@pytest.mark.parametrize("tenant", [("kubelet", "runc")], ids="-".join, indirect=True)
def test_forged_limits_with_old_mounts_are_found(tenant: Tenant) -> None:
    """With old mounts a tenant can still replace its files and get the whole GPU. The new watcher compares usage with
    the limit on the node, so it names the tenant.
    """
    tenant.create()
    tenant.host.upgrade()
    forge(tenant, Path(tenant.created) / "rootfs" / "evil")
    work = tenant.start_again()
    assert work.take()[1] > (SLICE_MIB + 64) * MIB, (
        "expected more memory than the slice, because the tenant forged its limits"
    )
    (found,) = until(lambda: tenant.node.vgpuctl("watch")["findings"], "a finding that names the process")
    assert (found["allocation"], found["reason"]) == (tenant.allocation, "more-memory")
    work.free()
    assert work.end()[1] == 0


def forge(tenant: Tenant, folder: Path) -> None:
    """Creates a folder of forged files: they are valid, but their limits allow the whole card."""
    own = tenant.node.folder / "run/allocations" / tenant.allocation / "limits"
    found = abi_files.parse_limits(own.read_bytes())
    devices = [{**one, "memory_bytes": 16000 * MIB} for one in found["devices"]]
    folder.mkdir()
    (folder / "limits").write_bytes(abi_files.pack_limits(abi_files.as_packed(found, devices=devices)))


@pytest.mark.parametrize("tenant", [("cdi", "podman")], ids="-".join, indirect=True)
def test_container_with_a_cdi_device_gets_the_new_mounts_at_its_next_start(tenant: Tenant) -> None:
    """The running container keeps its old mounts, and gets the new mounts at its next start."""
    node = tenant.node
    tenant.create()
    work = tenant.start()
    is_limited(work)
    assert work.ledgers() == {OLD_LEDGER}

    tenant.host.upgrade()

    is_limited(work)
    assert named(node) == [tenant.allocation]
    ran_on(work)
    work = tenant.start_again()
    is_limited(work)
    assert work.ledgers() == {LEDGER}
    assert named(node) == []
    assert work.end()[1] == 0


@pytest.mark.parametrize("tenant", [("kubelet", "runc"), ("volumes", "podman")], ids="-".join, indirect=True)
@pytest.mark.parametrize("half", ["library", "plugin"])
def test_container_created_during_the_upgrade_gets_no_memory(
    tenant: Tenant, half: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """During an upgrade, the Allocate response and the library may be of different releases. The container gets no
    memory."""
    node = tenant.node
    if half == "library":
        tenant.host.use_library(NEW)
    else:
        tenant.host.use_plugin(SOURCES)
    if tenant.source == "volumes":
        # The device plugin polls the library link periodically.
        expected = NEW if half == "library" else FORMER
        until(
            lambda: any(expected in host for _inside, host, _ro in tenant.slice()[1]),
            f"slices with the library {expected}",
        )
    tenant.create()
    work = tenant.start()
    assert work.context == NO_CONTEXT
    assert driver_account(node) == []
    assert work.client.wait(60) == 1
    said = capfd.readouterr().err
    assert "no context is created" in said
    # After a restart the container still has these mounts, so it still gets no memory.
    assert half == "plugin" or "create the pod or container again" in said

    tenant.host.upgrade()

    tenant.create()
    work = tenant.start()
    is_limited(work)
    assert work.end()[1] == 0


@pytest.mark.parametrize("tenant", [("kubelet", "runc")], ids="-".join, indirect=True)
def test_new_arbiter_throttles_the_former_library(tenant: Tenant) -> None:
    """The container keeps the former library after the upgrade. The new arbiter, which balances compute time, still
    throttles it, and the watcher reports nothing except the container's old mounts."""
    tenant.create()
    work = tenant.start()
    work.keep_busy()
    assert SOME < work.share(2) < MOST
    tenant.host.upgrade()
    assert SOME < work.share(2) < MOST
    looks(tenant.node, int(1.5 * WINDOW_S / INTERVAL_S))
    assert named(tenant.node) == [tenant.allocation]
    assert SOME < work.share(2) < MOST
    ran_on(work)
    work = tenant.start_again()
    work.keep_busy()
    assert SOME < work.share(4) < MOST
    ran_on(work)
