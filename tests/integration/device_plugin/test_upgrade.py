# SPDX-License-Identifier: Apache-2.0
"""An upgrade from the release that mounted single files, under a container: of that release's own device plugin, with
its own library, in real containers.

The kubelet keeps an answer for all restarts of a container, podman and docker keep a container's volumes; a device of
CDI is looked up at each start.
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
# Of the watcher; it judges time by windows of ten seconds.
INTERVAL_S, WINDOW_S = 0.2, 10.0
OLD_LEDGER, LEDGER = "/run/vgpu/ledger", "/dev/vgpu/0/ledger"
OUT_OF_MEMORY = "error 2"
# CUDA_ERROR_NOT_PERMITTED.
NO_CONTEXT = 800
# Of a third of the GPU's time: what a busy machine leaves of it, and what a short look may show more of it.
SOME, MOST = 0.05, 0.45
# The program as it is, but for seconds in place of the minute for which an allocation of a deleted pod is kept.
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
    """A node of the former release, with a quick watcher. Shares bind although nobody else wants the GPU."""
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
    """The container of one tenant, by one engine. ``source``: where its mounts come from: an answer to the kubelet, the
    volumes that somebody wrote for podman or docker, or a device of CDI.
    """

    host: OldNode
    node: RealNode
    engine: Any
    source: str
    mark: str
    created: str = ""
    allocation: str = ""
    pods: int = 0

    def create(self) -> None:
        """A new container with what the device plugin of this moment answers, in place of the one before."""
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
        """The first slice for containers outside Kubernetes, and its mounts."""
        spec = json.loads((self.node.folder / "cdi/vgpu-vgpu.fleet-slice.json").read_text())
        first = spec["devices"][0]
        edits = first["containerEdits"]["mounts"]
        return first["name"], [(one["containerPath"], one["hostPath"], "ro" in one["options"]) for one in edits]

    @property
    def published(self) -> Path:
        return FOLDER / f"{self.mark}-slice.json"

    def publish(self) -> None:
        """The node's CDI file where podman reads it, its devices under a name that no other run has."""
        spec = json.loads((self.node.folder / "cdi/vgpu-vgpu.fleet-slice.json").read_text())
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.published.write_text(json.dumps({**spec, "kind": f"{self.mark}.vgpu.fleet/slice"}))

    def start(self) -> Work:
        work: Work = self.engine.start(self.created)
        return work

    def start_again(self) -> Work:
        """A container that ended."""
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
    """It gets its slice, to the last piece, and no more: by the driver's account."""
    assert work.context == 0
    error, had = work.take()
    work.free()
    assert error == OUT_OF_MEMORY
    assert (SLICE_MIB - 64) * MIB < had <= SLICE_MIB * MIB


def ran_on(work: Work) -> None:
    """All the while until now, without one call that failed."""
    rounds, failed = work.end()
    assert (rounds > 0, failed) == (True, 0)


def named(node: RealNode) -> list[str]:
    """The allocations whose containers the watcher names as *old mounts*; it has no other word against any."""
    answer = looks(node, 3)
    assert (answer["findings"], answer["past"], answer["fault"]) == ([], [], "")
    return [one["allocation"] for one in answer["old_mounts"]]


KEPT = [("kubelet", "runc"), ("kubelet", "docker"), ("volumes", "podman"), ("volumes", "docker")]


@pytest.mark.parametrize("tenant", KEPT, ids="-".join, indirect=True)
def test_a_container_of_an_old_answer(tenant: Tenant) -> None:
    node = tenant.node
    tenant.create()
    work = tenant.start()
    is_limited(work)
    assert work.ledgers() == {OLD_LEDGER}, "this is none of the former release"

    tenant.host.upgrade()

    # It runs on.
    is_limited(work)
    assert named(node) == [tenant.allocation]
    ran_on(work)
    # It starts again; then once more after a reboot, in files that this release made.
    for happened in (lambda: None, tenant.host.reboot):
        happened()
        work = tenant.start_again()
        is_limited(work)
        assert work.ledgers() == {OLD_LEDGER}
        assert named(node) == [tenant.allocation]
        assert work.end()[1] == 0
    # It is created again.
    tenant.create()
    work = tenant.start()
    is_limited(work)
    assert work.ledgers() == {LEDGER}
    until(lambda: named(node) == [], "an end of old mounts")
    assert work.end()[1] == 0


@pytest.mark.parametrize("tenant", [("kubelet", "runc")], ids="-".join, indirect=True)
def test_limits_that_a_container_of_an_old_answer_forges_are_found(tenant: Tenant) -> None:
    """Its folders can be renamed, as ever: it gets the card, and the new watcher names it by the node's own limit."""
    tenant.create()
    tenant.host.upgrade()
    forge(tenant, Path(tenant.created) / "rootfs" / "evil")
    work = tenant.start_again()
    assert work.take()[1] > (SLICE_MIB + 64) * MIB, "nothing was forged"
    (found,) = until(lambda: tenant.node.vgpuctl("watch")["findings"], "it to be named")
    assert (found["allocation"], found["reason"]) == (tenant.allocation, "more-memory")
    work.free()
    assert work.end()[1] == 0


def forge(tenant: Tenant, folder: Path) -> None:
    """A folder with limits of the whole card, right in all else."""
    own = tenant.node.folder / "run/allocations" / tenant.allocation / "limits"
    found = abi_files.parse_limits(own.read_bytes())
    devices = [{**one, "memory_bytes": 16000 * MIB} for one in found["devices"]]
    folder.mkdir()
    (folder / "limits").write_bytes(abi_files.pack_limits(abi_files.as_packed(found, devices=devices)))


@pytest.mark.parametrize("tenant", [("cdi", "podman")], ids="-".join, indirect=True)
def test_a_container_with_a_device_of_cdi(tenant: Tenant) -> None:
    """It runs on with its old mounts, and has the new ones from its next start."""
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
def test_a_container_that_is_created_between_the_two_gets_nothing(
    tenant: Tenant, half: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Half an upgrade: the answer of one release, the library of the other. It gets no memory, and not all of it."""
    node = tenant.node
    if half == "library":
        tenant.host.use_library(NEW)
    else:
        tenant.host.use_plugin(SOURCES)
    if tenant.source == "volumes":
        # The device plugin looks after it now and then.
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
    # No start mends it: the mounts stay as they are.
    assert half == "plugin" or "create the pod or container again" in said

    tenant.host.upgrade()

    tenant.create()
    work = tenant.start()
    is_limited(work)
    assert work.end()[1] == 0


@pytest.mark.parametrize("tenant", [("kubelet", "runc")], ids="-".join, indirect=True)
def test_the_share_of_a_container_of_an_old_answer(tenant: Tenant) -> None:
    """The new arbiter paces the former library, and the watcher finds no fault with either."""
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
