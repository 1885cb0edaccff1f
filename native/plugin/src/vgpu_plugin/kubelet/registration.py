# SPDX-License-Identifier: Apache-2.0
"""Serves on our socket in the kubelet's folder and registers, again whenever the kubelet starts.

A kubelet empties its folder when it starts, our socket included, and forgets every plugin; then it makes kubelet.sock.
It connects back inside Register, so the service must be up before.

A kubelet that was killed leaves kubelet.sock behind, and one that lost its plugin does not ask for it again. So
registered means that a stream of ListAndWatch is open; where it ends, we register again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from .. import lean
from .._proto import deviceplugin_pb2 as api
from .._proto import deviceplugin_pb2_grpc as rpc
from ..node.inotify import FolderWatch
from .service import WORKERS, DevicePlugin, options

API_VERSION = "v1beta1"
# The kubelet itself waits 10 s for the connection back.
REGISTER_TIMEOUT_S = 15.0
# Between its answer to Register and its ListAndWatch the kubelet does nothing that takes time.
FIRST_STREAM_S = 15.0
FIRST_RETRY_S, LAST_RETRY_S = 0.05, 5.0

log = logging.getLogger(__name__)


class Registration:
    """Owns the server of the kubelet-facing service. ``run`` is one thread; ``state`` may be asked by any."""

    def __init__(
        self,
        kubelet_socket: Path,
        endpoint: Path,
        resource: str,
        make_service: Callable[[Callable[[], None]], DevicePlugin],
    ) -> None:
        """``make_service`` takes what the service calls when a stream of ListAndWatch begins or ends."""
        self._kubelet_socket = kubelet_socket
        self._endpoint = endpoint
        self._resource = resource
        self._make_service = make_service
        self._watch = FolderWatch(kubelet_socket.parent)
        self._stopping = threading.Event()
        self._server: grpc.Server | None = None
        self._service: DevicePlugin | None = None
        self._served: tuple[int, int] | None = None
        self._registered_with: tuple[int, int] | None = None
        # Of the registration of now: since when, and whether the kubelet has opened its stream.
        self._registered_at = 0.0
        self._streamed = False
        self._fault = f"{kubelet_socket} does not exist yet; waiting for the kubelet"
        self.first_attempt = threading.Event()

    def state(self) -> tuple[bool, str]:
        """Whether the kubelet of now listens to us, and the last fault where it does not."""
        known = self._registered_with is not None and self._registered_with == _identity(self._kubelet_socket)
        registered = known and self._listens()
        return registered, "" if registered else self._fault

    def _listens(self) -> bool:
        service = self._service
        return service is not None and service.streams > 0

    def registered(self) -> bool:
        return self.state()[0]

    def run(self) -> None:
        retry_s: float | None = None
        while not self._stopping.is_set():
            done = self._step()
            self.first_attempt.set()
            retry_s = None if done else min(LAST_RETRY_S, FIRST_RETRY_S if retry_s is None else retry_s * 2)
            self._watch.wait(retry_s)
        self._stop_serving()
        self._watch.close()

    def stop(self) -> None:
        self._stopping.set()
        self._watch.wake()

    def _step(self) -> bool:
        """Brings serving and registration in line with the folder; False where it must be tried again soon."""
        kubelet = _identity(self._kubelet_socket)
        if kubelet is None:
            self._registered_with = None
            self._fault = f"{self._kubelet_socket} does not exist; waiting for the kubelet"
            return True
        if self._served is not None and self._served != _identity(self._endpoint):
            log.info("%s was removed; the kubelet starts again", self._endpoint)
            self._stop_serving()
        if kubelet == self._registered_with and self._served is not None:
            if self._listens():
                self._streamed = True
                return True
            if not self._streamed and time.monotonic() - self._registered_at < FIRST_STREAM_S:
                return False
            log.warning("%s; registering again", self._fault)
        self._registered_with = None
        try:
            if self._served is None:
                self._serve()
            self._register()
        except (OSError, RuntimeError, grpc.RpcError) as fault:
            self._note(fault)
            return False
        if _identity(self._kubelet_socket) != kubelet:
            return False
        self._fault = f"the kubelet of {self._kubelet_socket} holds no stream of ListAndWatch to {self._endpoint}"
        self._registered_at, self._streamed = time.monotonic(), False
        self._registered_with = kubelet
        log.info("registered %s with %s", self._resource, self._kubelet_socket)
        return self._listens()

    def _note(self, fault: Exception) -> None:
        text = fault.details() if isinstance(fault, grpc.RpcError) and hasattr(fault, "details") else str(fault)
        message = f"{self._kubelet_socket} did not register {self._resource}: {text}"
        if message != self._fault:
            log.warning("%s; trying again", message)
        self._fault = message

    def _serve(self) -> None:
        # gRPC removes the file of a stopped server late; a new server must not lose its file to the old one.
        self._endpoint.unlink(missing_ok=True)
        service = self._make_service(self._watch.wake)
        workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="kubelet", initializer=lean.own_timers())
        server = grpc.server(workers)
        rpc.add_DevicePluginServicer_to_server(service, server)
        server.add_insecure_port(f"unix:{self._endpoint}")
        server.start()
        self._server, self._service, self._served = server, service, _identity(self._endpoint)

    def _register(self) -> None:
        with grpc.insecure_channel(f"unix:{self._kubelet_socket}") as channel:
            rpc.RegistrationStub(channel).Register(
                api.RegisterRequest(
                    version=API_VERSION, endpoint=self._endpoint.name, resource_name=self._resource, options=options()
                ),
                timeout=REGISTER_TIMEOUT_S,
            )

    def _stop_serving(self) -> None:
        if self._server is None or self._service is None:
            return
        self._service.stop()
        self._server.stop(grace=1.0).wait()
        self._server = self._service = self._served = None
        self._registered_with = None


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells a file from a later one of the same name; the inode number alone is soon used again."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns
