# SPDX-License-Identifier: Apache-2.0
"""A driver for ResourceClaims (Dynamic Resource Allocation) that prepares nothing and records the kubelet's calls.

It shares only the gRPC code ``vgpu_plugin._proto`` with the project's driver, so that only the kubelet's behaviour is
recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
from vgpu_plugin._proto import dra_health_pb2 as health_api
from vgpu_plugin._proto import dra_health_pb2_grpc as health_rpc
from vgpu_plugin._proto import dra_v1_pb2, dra_v1_pb2_grpc, dra_v1beta1_pb2, dra_v1beta1_pb2_grpc
from vgpu_plugin._proto import plugin_registration_pb2 as registration
from vgpu_plugin._proto import plugin_registration_pb2_grpc as registration_rpc

DRIVER = "traced.example.com"
KIND = f"{DRIVER}/claim"
POOL = "traced"
HEALTH = "v1alpha1.DRAResourceHealth"
SERVICES = ("v1.DRAPlugin", "v1beta1.DRAPlugin", HEALTH)
PREPARE, UNPREPARE = "NodePrepareResources", "NodeUnprepareResources"
NOBODY = "uid-nobody"


def cdi_id(claim: str, request: str) -> str:
    return f"{KIND}={claim}.{request}"


def device_name(claim: str, request: str) -> str:
    return f"{claim}-{request}"


class ClaimRecorder:
    """A claims driver that serves a kubelet and records its calls.

    ``calls``: the calls since the last ``take``. ``faults``: name of a call → kind of wrong response: "status" (the
    gRPC call fails), "error" (an error for each claim), "unknown claim" (an entry for another claim only) or "nothing"
    (no entry).
    """

    def __init__(self, root: Path) -> None:
        """``root``: the kubelet's folder."""
        self.registry, self.folder = root / "plugins_registry", root / "plugins" / DRIVER
        self.requests: dict[str, tuple[str, ...]] = {}  # requests: name of a claim → its requests.
        self.names: dict[str, str] = {}  # names: uid of a claim → its name.
        self.calls: list[dict[str, Any]] = []
        self.faults: dict[str, str] = {}
        self.unhealthy: set[str] = set()
        self.registered: bool | None = None
        self.watched = 0
        self.lock = threading.Condition()
        self._failed: list[dict[str, Any]] = []
        self._servers: list[grpc.Server] = []
        self._generation = 0

    @property
    def registration_socket(self) -> Path:
        return self.registry / f"{DRIVER}-reg.sock"

    @property
    def socket(self) -> Path:
        return self.folder / "dra.sock"

    # ---- the driver's own actions

    def serve(self, services: tuple[str, ...] = SERVICES) -> None:
        self.registered = None
        self._generation = 0
        driver, registrar = (grpc.server(ThreadPoolExecutor(max_workers=8)) for _each in range(2))
        dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(Service(self, "v1", dra_v1_pb2), driver)
        dra_v1beta1_pb2_grpc.add_DRAPluginServicer_to_server(Service(self, "v1beta1", dra_v1beta1_pb2), driver)
        if HEALTH in services:
            health_rpc.add_DRAResourceHealthServicer_to_server(Health(self), driver)
        registration_rpc.add_RegistrationServicer_to_server(Registrar(self, services), registrar)
        for server, socket in ((driver, self.socket), (registrar, self.registration_socket)):
            socket.parent.mkdir(parents=True, exist_ok=True)
            socket.unlink(missing_ok=True)
            # gRPC removes a stopped server's socket file; rename the file, so that it stays as after a kill.
            bound = socket.with_name(f".{socket.name}")
            server.add_insecure_port(f"unix:{bound}")
            server.start()
            bound.rename(socket)
            self._servers.append(server)

    def stop(self, killed: bool = False) -> None:
        """Stops the driver; with ``killed`` its socket files stay."""
        if not killed:
            self.registration_socket.unlink(missing_ok=True)
            self.socket.unlink(missing_ok=True)
        with self.lock:
            self._generation = -1
            self.lock.notify_all()
        for server in reversed(self._servers):
            server.stop(grace=0).wait()
        self._servers = []

    def set_unhealthy(self, *devices: str) -> None:
        with self.lock:
            self.unhealthy = set(devices)
            self._generation += 1
            self.lock.notify_all()

    def take(self, mend: bool = False) -> list[dict[str, Any]]:
        """Returns the recorded calls and clears them for the next step. ``mend``: calls succeed from now on."""
        with self.lock:
            taken, self.calls = self.calls, []
            if mend:
                self.faults = {}
            return taken

    def asked(self, call: str, claim: str) -> bool:
        """Returns whether the current step has recorded this call for the claim."""
        with self.lock:
            return any(one["call"] == call and claim in one["claims"] for one in self.calls)

    # ---- the kubelet's calls

    def note(self, entry: dict[str, Any], failed: bool = False) -> None:
        """Records a call; a failing call, which the kubelet repeats, is recorded once."""
        with self.lock:
            if failed and entry in self._failed:
                return
            self._failed += [entry] if failed else []
            self.calls.append(entry)

    def claims_of(self, request: Any) -> list[str]:
        """Returns the names of the request's claims, marked if name, namespace and uid do not belong to one claim."""
        found = []
        for one in request.claims:
            known = self.names.get(one.uid) == one.name and one.namespace == "default"
            found.append(one.name if known else f"{one.namespace}/{one.name} with a wrong uid")
        return found


class Registrar(registration_rpc.RegistrationServicer):
    def __init__(self, recorder: ClaimRecorder, services: tuple[str, ...]) -> None:
        self._recorder, self._services = recorder, services

    def GetInfo(self, request: registration.InfoRequest, context: grpc.ServicerContext) -> registration.PluginInfo:
        # The kubelet repeats the call periodically after a refused registration.
        if self._recorder.registered is not False:
            self._recorder.note({"call": "GetInfo", "answer": list(self._services)})
        return registration.PluginInfo(
            type="DRAPlugin",
            name=DRIVER,
            endpoint=str(self._recorder.socket),
            supported_versions=self._services,
        )

    def NotifyRegistrationStatus(
        self, request: registration.RegistrationStatus, context: grpc.ServicerContext
    ) -> registration.RegistrationStatusResponse:
        if self._recorder.registered is not False:
            error = request.error.replace(str(self._recorder.folder), "<folder>")
            entry = {"call": "NotifyRegistrationStatus", "registered": request.plugin_registered, "error": error}
            self._recorder.note(entry)
        self._recorder.registered = request.plugin_registered
        return registration.RegistrationStatusResponse()


class Service:
    """Implements one version of the gRPC service DRAPlugin; ``api``: the module with this version's messages."""

    def __init__(self, recorder: ClaimRecorder, version: str, api: ModuleType) -> None:
        self._recorder, self._version = recorder, version
        self._api: Any = api

    def NodePrepareResources(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = self._api.NodePrepareResourcesResponse()
        if self._wrong(PREPARE, request, answer, context):
            return answer
        for one in request.claims:
            name = self._recorder.names.get(one.uid, "")
            devices = answer.claims[one.uid].devices
            for wanted in self._recorder.requests.get(name, ()):
                devices.add(
                    request_names=[wanted],
                    pool_name=POOL,
                    device_name=device_name(name, wanted),
                    cdi_device_ids=[cdi_id(name, wanted)],
                )
        return answer

    def NodeUnprepareResources(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = self._api.NodeUnprepareResourcesResponse()
        if not self._wrong(UNPREPARE, request, answer, context):
            for one in request.claims:
                answer.claims[one.uid].SetInParent()
        return answer

    def _wrong(self, call: str, request: Any, answer: Any, context: grpc.ServicerContext) -> bool:
        """Records the call. If a fault is configured for it, makes the response wrong and returns True."""
        fault = self._recorder.faults.get(call, "")
        claims = self._recorder.claims_of(request)
        entry = {"call": call, "service": self._version, "claims": claims, "answer": fault or "ok"}
        self._recorder.note(entry, failed=bool(fault))
        if fault == "status":
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not now")
        elif fault == "error":
            for one in request.claims:
                answer.claims[one.uid].error = "refused by the test"
        elif fault == "unknown claim":
            answer.claims[NOBODY].SetInParent()
        else:
            assert fault in ("", "nothing"), fault
        return bool(fault)


class Health(health_rpc.DRAResourceHealthServicer):
    def __init__(self, recorder: ClaimRecorder) -> None:
        self._recorder = recorder

    def NodeWatchResources(
        self, request: health_api.NodeWatchResourcesRequest, context: grpc.ServicerContext
    ) -> Iterator[health_api.NodeWatchResourcesResponse]:
        recorder = self._recorder
        recorder.watched += 1
        sent = None
        while context.is_active() and recorder._generation >= 0:
            with recorder.lock:
                # Send again before the kubelet treats the last message as outdated after 30 s.
                if sent == recorder._generation and recorder.lock.wait(10) and sent == recorder._generation:
                    continue
                sent = recorder._generation
            yield self._now()

    def _now(self) -> health_api.NodeWatchResourcesResponse:
        out = health_api.NodeWatchResourcesResponse()
        for claim, requests in list(self._recorder.requests.items()):
            for one in requests:
                name = device_name(claim, one)
                ill = name in self._recorder.unhealthy
                out.devices.add(
                    device=health_api.DeviceIdentifier(pool_name=POOL, device_name=name),
                    health=health_api.UNHEALTHY if ill else health_api.HEALTHY,
                    last_updated_time=int(time.time()),
                    message="too hot" if ill else "",
                )
        return out
