# SPDX-License-Identifier: Apache-2.0
"""Serves the two sockets to which the kubelet connects. One is the socket of the driver for claims (Dynamic Resource
Allocation). The other is a registration socket, in the folder where the kubelet looks for plugins.

The kubelet watches that folder, and reads it when it starts. So a restart of the kubelet needs no action here. If a
socket was deleted, it is created again, which the kubelet notices.

The driver's socket listens first, so that the kubelet can connect to it as soon as it finds the registration socket.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from .. import lean
from .._proto import plugin_registration_pb2 as api
from .._proto import plugin_registration_pb2_grpc as rpc
from .health import MOST_STREAMS, VERSION, Health
from .names import DRIVER
from .service import VERSIONS

TYPE = "DRAPlugin"
WORKERS = MOST_STREAMS + 8
POLL_S = 5.0
GRACE_S = 1.0

log = logging.getLogger(__name__)


class Registration(rpc.RegistrationServicer):
    """Registers the driver with the kubelet. ``run`` is the function of one thread. ``add_services`` is called with the
    gRPC server, to which it adds the driver's services.
    """

    def __init__(
        self, registry: Path, folder: Path, health: Health, add_services: Callable[[grpc.Server], None]
    ) -> None:
        self._registry = registry
        self._folder = folder
        self._health = health
        self._add_services = add_services
        self._stopping = threading.Event()
        self._servers: list[grpc.Server] = []
        self._served: list[tuple[int, int] | None] = []
        self._said = f"{self.endpoint} does not listen yet"
        self._registered = False

    @property
    def endpoint(self) -> Path:
        return self._folder / "dra.sock"

    @property
    def socket(self) -> Path:
        return self._registry / f"{DRIVER}-reg.sock"

    # ---- service Registration

    def GetInfo(self, request: api.InfoRequest, context: grpc.ServicerContext) -> api.PluginInfo:
        versions = [*VERSIONS, VERSION]
        return api.PluginInfo(type=TYPE, name=DRIVER, endpoint=str(self.endpoint), supported_versions=versions)

    def NotifyRegistrationStatus(
        self, request: api.RegistrationStatus, context: grpc.ServicerContext
    ) -> api.RegistrationStatusResponse:
        self._registered = request.plugin_registered
        self._said = "" if request.plugin_registered else f"the kubelet refuses {DRIVER}: {request.error}"
        if request.plugin_registered:
            log.info("the kubelet has registered %s", DRIVER)
        else:
            log.error("%s", self._said)
        return api.RegistrationStatusResponse()

    # ---- life cycle

    def state(self) -> tuple[bool, str]:
        """Returns whether the kubelet has registered the driver, and the last error if it has not."""
        return self._registered, self._said

    def no_kubelet(self) -> bool:
        """Returns False: claims come from Kubernetes, so this host has a kubelet, which may not have started yet."""
        return False

    def run(self) -> None:
        while not self._stopping.is_set():
            self.look()
            self._stopping.wait(POLL_S)
        self._stop_serving()

    def stop(self) -> None:
        self._stopping.set()
        self._health.stop()

    def look(self) -> None:
        """Starts serving both sockets, or serves them again if one was deleted."""
        if self._servers and self._served == self._identities():
            return
        self._stop_serving()
        try:
            self._serve()
        except (OSError, RuntimeError) as fault:
            self._stop_serving()
            said = f"{self.endpoint} and {self.socket} cannot be served: {fault}"
            if said != self._said:
                log.error("%s; trying again every %.0f s", said, POLL_S)
            self._said = said

    def _serve(self) -> None:
        self._folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._registry.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._said = f"the kubelet has not connected to {self.socket} yet"
        self._start(self.endpoint, self._add_services)
        self._start(self.socket, lambda server: rpc.add_RegistrationServicer_to_server(self, server))
        self._served = self._identities()

    def _start(self, socket: Path, add: Callable[[grpc.Server], None]) -> None:
        # The file of an earlier, stopped server is removed before the new server starts. Otherwise gRPC removes it
        # later, when the path may already be the file of the new server.
        socket.unlink(missing_ok=True)
        workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="claims", initializer=lean.own_timers())
        server = grpc.server(workers)
        add(server)
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        self._servers.append(server)

    def _identities(self) -> list[tuple[int, int] | None]:
        return [_identity(self.endpoint), _identity(self.socket)]

    def _stop_serving(self) -> None:
        # The registration socket is closed first, so that the kubelet finds no driver that is about to end.
        for server in reversed(self._servers):
            server.stop(grace=GRACE_S).wait()
        self._servers, self._served, self._registered = [], [], False


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns
