# SPDX-License-Identifier: Apache-2.0
"""The double of the kubelet's device manager: registers plugins, tracks their devices, admits and starts pods."""

from __future__ import annotations

import json
import re
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from vgpu_plugin._proto import deviceplugin_pb2 as api
from vgpu_plugin._proto import deviceplugin_pb2_grpc as rpc

from . import checkpoint
from .checkpoint import Held
from .endpoint import Endpoint

CHECKPOINT = "kubelet_internal_checkpoint"
VERSIONS = ("v1beta1",)
RESOURCE = re.compile(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")


def quoted(text: str) -> str:
    return json.dumps(text)


def go_name(code: grpc.StatusCode) -> str:
    """Returns the Go name of a status code: FailedPrecondition for FAILED_PRECONDITION."""
    return code.name.title().replace("_", "")


class PodError(Exception):
    """Raised if a pod does not run. The text is the kubelet's or the scheduler's message; ``reason`` is the reason in
    the pod's status.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Manager(rpc.RegistrationServicer):
    """The device manager. ``start`` and ``stop`` start and stop the kubelet; both keep the checkpoint file."""

    def __init__(self, folder: Path, asks: bool = True) -> None:
        """``asks`` is true if the kubelet calls GetPreferredAllocation. A kubelet before 1.19 does not call it, and
        takes any free id.
        """
        self.folder = folder
        self._asks = asks
        self.lock = threading.RLock()
        self.endpoints: dict[str, Endpoint] = {}
        self.held: list[Held] = []
        # Devices of deleted pods. Like the real kubelet, the double forgets them only when the next pod is admitted or
        # PodResources is called. The checkpoint file contains them until its first write after that.
        self._ended: list[Held] = []
        self._server: grpc.Server | None = None

    # ---- life cycle

    def start(self) -> None:
        """Empties the folder except the checkpoint, then listens, as the real kubelet does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for entry in self.folder.iterdir():
            if entry.name not in (CHECKPOINT, "pods.json") and not entry.is_dir():
                entry.unlink()
        with self.lock:
            self.endpoints = {}
            names = self._names()
            known = checkpoint.read(self.folder / CHECKPOINT, names)
            self.held = [one for one in known if one.pod_uid in names]
            self._ended = [one for one in known if one.pod_uid not in names]
        server = grpc.server(ThreadPoolExecutor(max_workers=8))
        rpc.add_RegistrationServicer_to_server(self, server)
        server.add_insecure_port(f"unix:{self.folder / 'kubelet.sock'}")
        server.start()
        self._server = server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(grace=0.2).wait()
            self._server = None
        with self.lock:
            for endpoint in self.endpoints.values():
                endpoint.stop()
            self.endpoints = {}

    # ---- service Registration

    def Register(self, request: api.RegisterRequest, context: grpc.ServicerContext) -> api.Empty:
        if request.version not in VERSIONS:
            context.abort(
                grpc.StatusCode.UNKNOWN,
                f"requested API version {quoted(request.version)} is not supported by kubelet. "
                f"Supported version is [{' '.join(map(quoted, VERSIONS))}]",
            )
        if not RESOURCE.match(request.resource_name):
            context.abort(grpc.StatusCode.UNKNOWN, f"the ResourceName {quoted(request.resource_name)} is invalid")
        endpoint = Endpoint(request.resource_name, self.folder / request.endpoint, self._listed)
        try:
            endpoint.connect()
        except (ConnectionError, grpc.RpcError) as fault:
            context.abort(grpc.StatusCode.UNKNOWN, f"failed to dial device plugin: {fault}")
        with self.lock:
            old = self.endpoints.get(request.resource_name)
            self.endpoints[request.resource_name] = endpoint
        if old is not None:
            old.stop()
        endpoint.watch()
        return api.Empty()

    def _listed(self, endpoint: Endpoint) -> None:
        with self.lock:
            if self.endpoints.get(endpoint.resource) is endpoint:
                self._save()

    # ---- pods

    def run_pod(
        self,
        name: str,
        namespace: str = "default",
        resource: str = "nvidia.com/gpu",
        count: int = 1,
        ids: list[str] | None = None,
        init_container: bool = False,
        uid: str = "",
    ) -> dict[str, Any]:
        """Admits a pod with one container and starts it. ``ids``: the devices to use. The plugin's preference is then
        ignored, as a kubelet may do.

        With ``init_container`` the pod also has an init container, which runs first and has the same devices.
        """
        with self.lock:
            if any(one.pod == name and one.namespace == namespace for one in self.held):
                raise PodError("AlreadyExists", f"pod {namespace}/{name} exists already")
            endpoint = self.endpoints.get(resource)
            if endpoint is None or endpoint.stopped:
                raise PodError(
                    "Pending", f"0/1 nodes are available: 1 Insufficient {resource} (no plugin is registered)"
                )
            self.notice()
            taken = {one for held in self.held if held.resource == resource for one in held.ids}
            free = sorted(endpoint.healthy() - taken)
            if ids is None and len(free) < count:
                raise PodError("Pending", f"0/1 nodes are available: 1 Insufficient {resource} ({len(free)} free)")
            chosen = ids if ids is not None else self._choose(endpoint, free, count)
            uid = uid or str(uuid.uuid4())
            names = (["init"] if init_container else []) + ["main"]
            admitted = [self._admit(endpoint, uid, name, namespace, container, chosen) for container in names]
            self.held += admitted
            self._save()
        for held in admitted:
            self._start(endpoint, held)
        return self._shown(admitted[-1])

    def _choose(self, endpoint: Endpoint, free: list[str], count: int) -> list[str]:
        """Chooses devices for a container. The plugin's preference is used if it is valid; otherwise, as it is only
        advice, the first free devices are used. As with a kubelet, the plugin is asked even if there is no choice.
        """
        if self._asks and endpoint.options.get_preferred_allocation_available:
            preferred = endpoint.preferred(free, count)
            if len(set(preferred)) == count and set(preferred) <= set(free):
                return preferred
        return free[:count]

    @staticmethod
    def _admit(endpoint: Endpoint, uid: str, pod: str, namespace: str, container: str, ids: list[str]) -> Held:
        try:
            answer = endpoint.allocate(ids)
        except (grpc.RpcError, ValueError) as fault:
            text = str(fault)
            if isinstance(fault, grpc.RpcError):
                text = f"rpc error: code = {go_name(fault.code())} desc = {fault.details()}"
            message = f"Pod was rejected: Allocate failed due to {text}, which is unexpected"
            raise PodError("UnexpectedAdmissionError", message) from fault
        by_numa: dict[int, list[str]] = {}
        for one in ids:
            device = endpoint.devices.get(one)
            nodes = [node.ID for node in device.topology.nodes] if device is not None else []
            by_numa.setdefault(nodes[0] if nodes else checkpoint.NO_NUMA, []).append(one)
        return Held(uid, pod, namespace, container, endpoint.resource, by_numa, answer)

    @staticmethod
    def _start(endpoint: Endpoint, held: Held) -> None:
        try:
            endpoint.prestart(held.ids)
        except grpc.RpcError as fault:
            raise PodError("CreateContainerConfigError", f"PreStartContainer failed: {fault.details()}") from fault

    def restart_container(self, name: str, namespace: str = "default") -> dict[str, Any]:
        """Restarts a container. It keeps its devices, so the plugin gets PreStartContainer and no Allocate."""
        held = self._find(name, namespace)[-1]
        endpoint = self.endpoints.get(held.resource)
        if endpoint is None or endpoint.stopped:
            raise PodError("CreateContainerConfigError", f"no plugin is registered for {held.resource}")
        self._start(endpoint, held)
        return self._shown(held)

    def delete_pod(self, name: str, namespace: str = "default") -> dict[str, Any]:
        with self.lock:
            gone = self._find(name, namespace)
            self.held = [one for one in self.held if one not in gone]
            self._ended += gone
            self._save_names()
        return {"deleted": f"{namespace}/{name}", "ids": sorted({one for held in gone for one in held.ids})}

    def notice(self) -> None:
        """Forgets the devices of deleted pods, without writing the checkpoint."""
        with self.lock:
            self._ended = []

    def _find(self, name: str, namespace: str) -> list[Held]:
        found = [one for one in self.held if one.pod == name and one.namespace == namespace]
        if not found:
            raise PodError("NotFound", f"pod {namespace}/{name} does not exist")
        return found

    # ---- state

    def state(self) -> dict[str, Any]:
        with self.lock:
            resources = {
                name: {
                    "capacity": len(one.devices),
                    "allocatable": len(one.healthy()),
                    "in_use": sum(len(held.ids) for held in self.held if held.resource == name),
                    "connected": not one.stopped,
                }
                for name, one in self.endpoints.items()
            }
            return {"resources": resources, "pods": [self._shown(one) for one in self.held]}

    @staticmethod
    def _shown(held: Held) -> dict[str, Any]:
        return {
            "pod": held.pod,
            "namespace": held.namespace,
            "uid": held.pod_uid,
            "container": held.container,
            "resource": held.resource,
            "ids": held.ids,
            "answer": MessageToDict(
                held.answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            ),
        }

    def _save(self) -> None:
        registered = {name: sorted(one.healthy()) for name, one in self.endpoints.items()}
        checkpoint.write(self.folder / CHECKPOINT, self.held + self._ended, registered)
        self._save_names()

    def _save_names(self) -> None:
        names = {one.pod_uid: [one.pod, one.namespace] for one in self.held}
        (self.folder / "pods.json").write_text(json.dumps(names))

    def _names(self) -> dict[str, tuple[str, str]]:
        """Returns a dict from the uid to the name and namespace of each pod that existed before a restart. The real
        kubelet asks the API server for them.
        """
        path = self.folder / "pods.json"
        return (
            {uid: (pod, space) for uid, (pod, space) in json.loads(path.read_text()).items()} if path.exists() else {}
        )
