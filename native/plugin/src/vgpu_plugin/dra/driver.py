# SPDX-License-Identifier: Apache-2.0
"""The driver for claims (Dynamic Resource Allocation) of one node: creates its parts and runs their threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import grpc

from .._proto import dra_health_pb2_grpc
from ..allocation.allocation_files import AllocationFiles
from ..allocation.allocator import Allocator
from ..allocation.claim_shares import ClaimShares
from ..allocation.records import KUBELET
from ..inject.driver_files import DriverFiles
from ..node.gpus import Driver as GpuDriver
from ..node.gpus import GpuError, GpuSource
from ..node.paths import Paths
from ..offer.settings import Settings
from . import service
from .claim_files import ClaimFiles
from .claims import Claims, Reader
from .devices import NodeView, slices_of
from .health import Health
from .names import DRIVER
from .publish import Publisher, Server
from .registration import Registration

JOIN_S = 10.0
UNKNOWN = GpuDriver("0.0.0", (0, 0), {})

log = logging.getLogger(__name__)


class Connections(NamedTuple):
    """Connections to the API server, one for each use, because a watch occupies its connection and no request should
    wait for another.
    """

    claims: Reader
    writer: Server
    watcher: Server


class ClaimDriver:
    """The driver for claims. ``start`` starts its threads and ``stop`` ends them. Any thread may call
    ``registration.state``.
    """

    def __init__(
        self,
        paths: Paths,
        node: str,
        allocator: Allocator,
        files: AllocationFiles,
        source: GpuSource,
        connections: Connections,
    ) -> None:
        self._node = node
        self._allocator = allocator
        self._pool = allocator.pool
        self._source = source
        self._driver = UNKNOWN
        self._claim_files = ClaimFiles(paths, files, allocator.enforcement.hooks)
        shares = ClaimShares(allocator, files)
        self.claims = Claims(
            connections.claims, node, self._pool, shares, self._claim_files, lambda: allocator.settings
        )
        self._health = Health(self._pool, node)
        self.publisher = Publisher(connections.writer, connections.watcher, node, self.slices)
        self.registration = Registration(
            paths.plugins_registry, paths.driver_folder(DRIVER), self._health, self._add_services
        )
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def _add_services(self, server: grpc.Server) -> None:
        service.add_to(server, self.claims, self._node)
        dra_health_pb2_grpc.add_DRAResourceHealthServicer_to_server(self._health, server)

    def configure(self, settings: Settings, driver: DriverFiles) -> None:
        self._claim_files.configure(driver, settings.dev_root)
        self.publisher.ask()

    def slices(self) -> Sequence[Mapping[str, Any]]:
        """Returns the ResourceSlices that the node should publish now."""
        try:
            self._driver = self._source.driver()
        except GpuError as fault:
            log.debug("the version of the NVIDIA driver is unknown: %s", fault)
        gpus = tuple(self._pool.gpus)
        records = self._allocator.records.all()
        # The kube-scheduler, which allocates devices to claims, does not know which GPUs the device plugin gave
        # to pods. So these GPUs get a taint, and claims can use such a GPU only after these pods have ended.
        moving = {one.partition("::")[0] for record in records if record.kind == KUBELET for one in record.slice_ids}
        return slices_of(
            NodeView(
                self._node,
                gpus,
                tuple(self._pool.slices),
                self._allocator.settings.config,
                self._driver,
                {gpu.uuid: reason for gpu in gpus if (reason := self._pool.unhealthy_reason(gpu.uuid))},
                frozenset(moving),
                frozenset(gpu.uuid for gpu in gpus if self._pool.is_drained(gpu.uuid)),
            )
        )

    def start(self) -> None:
        self.claims.restore(self._allocator.records.all())
        tasks: list[tuple[str, Callable[[], None]]] = [
            ("claims", self.registration.run),
            ("slices", self.publisher.run),
            ("slices watched", self.publisher.follow),
            ("slices changed", self._follow_pool),
        ]
        for name, task in tasks:
            thread = threading.Thread(target=task, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _follow_pool(self) -> None:
        """Publishes the devices again after each change of their health or of the GPUs' division into slices."""
        while not self._stopping.is_set():
            generation, _offers = self._pool.offers()
            self.publisher.ask()
            if not self._pool.wait_beyond(generation, self._stopping.is_set):
                return

    def poll(self) -> None:
        """Notices when the last pod that got a GPU from the device plugin has ended, so that claims may use this GPU.
        Called regularly.
        """
        self.publisher.poll()

    def notes(self) -> list[str]:
        """Returns warnings for the node's administrator."""
        registered, fault = self.registration.state()
        return [*([] if registered else [fault]), *self.publisher.notes()]

    def stop(self) -> None:
        self._stopping.set()
        self.registration.stop()
        self.publisher.stop()
        self._pool.wake()
        for thread in self._threads:
            thread.join(JOIN_S)
