# SPDX-License-Identifier: Apache-2.0
"""Serves one resource on a socket in the kubelet's folder, and registers it with the kubelet. It registers again after
each start of the kubelet.

When a kubelet starts, it empties its folder, including this socket, and forgets every plugin. Then it creates
kubelet.sock. During the call Register it connects back to the plugin, so the plugin's server must listen before that
call.

The file kubelet.sock does not prove that the plugin is registered: a killed kubelet leaves it behind, and a kubelet
that lost the connection to its plugin does not reconnect. So the plugin counts as registered only while a ListAndWatch
stream of the kubelet is open. When the stream ends, the plugin registers again.
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
from ..node.paths import CHECKPOINT
from .service import WORKERS, DevicePlugin, options

API_VERSION = "v1beta1"
# Timeout of Register. It is longer than the 10 s that the kubelet itself waits for its connection back to the plugin.
REGISTER_TIMEOUT_S = 15.0
# Maximum wait for the kubelet's call ListAndWatch after Register. The kubelet does nothing slow in between.
FIRST_STREAM_S = 15.0
FIRST_RETRY_S, LAST_RETRY_S = 0.05, 5.0

log = logging.getLogger(__name__)


class Registration:
    """Runs the server for one resource and keeps it registered. One thread executes ``run``. Any thread may call
    ``state``.
    """

    def __init__(
        self,
        kubelet_socket: Path,
        endpoint: Path,
        resource: str,
        make_service: Callable[[Callable[[], None]], DevicePlugin],
    ) -> None:
        """``make_service`` creates the service. Its argument is a function that the service calls when a ListAndWatch
        stream begins or ends.
        """
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
        # The time at which the plugin registered with the current kubelet.
        self._registered_at = 0.0
        # True if the kubelet has opened a ListAndWatch stream since that registration.
        self._streamed = False
        self._fault = self._missing()
        self.first_attempt = threading.Event()

    def state(self) -> tuple[bool, str]:
        """Returns whether the current kubelet has a stream open, and the last error if it has not."""
        known = self._registered_with is not None and self._registered_with == _identity(self._kubelet_socket)
        registered = known and self._listens()
        return registered, "" if registered else self._fault

    def no_kubelet(self) -> bool:
        """Returns whether this host never had a kubelet. If the kubelet's checkpoint exists, a kubelet ran before and
        will come back.
        """
        return not self._kubelet_socket.exists() and not self._kubelet_socket.with_name(CHECKPOINT).exists()

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
        """Starts the server and registers, if this is not done yet. Returns False if this function must be called again
        soon.
        """
        kubelet = _identity(self._kubelet_socket)
        if kubelet is None:
            self._registered_with = None
            self._fault = self._missing()
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

    def _missing(self) -> str:
        """Returns a text that says why the kubelet's socket is missing."""
        # A vgpuctl of version 0.1 searches this text for the words "this host runs no kubelet".
        why = ": this host runs no kubelet" if self.no_kubelet() else "; waiting for the kubelet"
        return f"{self._kubelet_socket} does not exist{why}"

    def _note(self, fault: Exception) -> None:
        text = fault.details() if isinstance(fault, grpc.RpcError) and hasattr(fault, "details") else str(fault)
        message = f"{self._kubelet_socket} did not register {self._resource}: {text}"
        if message != self._fault:
            log.warning("%s; trying again", message)
        self._fault = message

    def _serve(self) -> None:
        # Remove the socket of a stopped server now. Otherwise gRPC removes the path later, when it may already be the
        # socket of the new server.
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
    """Returns inode and change time of a file. The inode alone is not enough, because a later file may reuse it."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns
