# SPDX-License-Identifier: Apache-2.0
"""A device plugin that only records the kubelet's calls, some of them with the current PodResources response.

It shares only the gRPC code ``vgpu_plugin._proto`` with the project's device plugin, so that only the kubelet's
behaviour is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from vgpu_plugin._proto import deviceplugin_pb2 as api
from vgpu_plugin._proto import deviceplugin_pb2_grpc as rpc
from vgpu_plugin._proto import podresources_pb2 as pods
from vgpu_plugin._proto import podresources_pb2_grpc as pods_rpc

RESOURCE = "example.com/traced"
DEVICES = ("d0", "d1", "d2", "d3")
# d2 and d3 have no NUMA node, so that the trace has both kinds: the checkpoint and PodResources treat them differently.
NUMA_NODE = {"d0": 0, "d1": 0}
CALL_S = 10


def plain(message: Any) -> Any:
    """Converts a message to plain data. Lists of ids are sorted, because the kubelet keeps them in unordered sets."""
    return _sorted(MessageToDict(message, preserving_proto_field_name=True))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(one) for key, one in sorted(value.items())}
    if isinstance(value, list):
        plain_values = all(isinstance(one, str) for one in value)
        return sorted(value) if plain_values else [_sorted(one) for one in value]
    return value


class Recorder(rpc.DevicePluginServicer):
    """A device plugin that serves in the kubelet's folder. ``calls``: calls since the last ``take``."""

    def __init__(self, folder: Path, pod_resources: Path) -> None:
        self.folder, self.pod_resources = folder, pod_resources
        self.calls: list[dict[str, Any]] = []
        self.refuse: dict[str, str] = {}  # Name of a call → error message with which the plugin refuses it.
        self.health = dict.fromkeys(DEVICES, "Healthy")
        self._changed = threading.Condition()
        self._generation = 0
        self._server: grpc.Server | None = None

    # ---- the plugin's own actions

    def serve(self) -> None:
        server = grpc.server(ThreadPoolExecutor(max_workers=8))
        rpc.add_DevicePluginServicer_to_server(self, server)
        server.add_insecure_port(f"unix:{self.folder / 'traced.sock'}")
        server.start()
        self._server = server

    def stop(self) -> None:
        if self._server is not None:
            with self._changed:
                self._generation = -1
                self._changed.notify_all()
            self._server.stop(grace=0).wait()
            self._server = None
            self._generation = 0

    def register(self, resource: str = RESOURCE, version: str = "v1beta1") -> str:
        """Registers the device plugin at the kubelet; returns the kubelet's refusal, or "" if it accepts."""
        request = api.RegisterRequest(
            version=version,
            endpoint="traced.sock",
            resource_name=resource,
            options=api.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True),
        )
        with grpc.insecure_channel(f"unix:{self.folder / 'kubelet.sock'}") as channel:
            try:
                rpc.RegistrationStub(channel).Register(request, timeout=CALL_S)
            except grpc.RpcError as fault:
                return f"{fault.code().name}: {fault.details()}"
        return ""

    def set_health(self, device: str, health: str) -> None:
        with self._changed:
            self.health[device] = health
            self._generation += 1
            self._changed.notify_all()

    def listed(self) -> list[dict[str, Any]]:
        """Returns the devices of RESOURCE of each pod and container by the PodResources API, pods sorted by name."""
        with grpc.insecure_channel(f"unix:{self.pod_resources}") as channel:
            answer = pods_rpc.PodResourcesListerStub(channel).List(pods.ListPodResourcesRequest(), timeout=CALL_S)
        found = []
        for pod in sorted(answer.pod_resources, key=lambda one: one.name):
            containers = []
            for container in pod.containers:
                devices = [plain(one) for one in container.devices if one.resource_name == RESOURCE]
                devices.sort(key=lambda one: one["device_ids"])
                containers.append({"name": container.name, "devices": devices})
            found.append({"name": pod.name, "namespace": pod.namespace, "containers": containers})
        return found

    def allocatable(self) -> list[str]:
        with grpc.insecure_channel(f"unix:{self.pod_resources}") as channel:
            stub = pods_rpc.PodResourcesListerStub(channel)
            answer = stub.GetAllocatableResources(pods.AllocatableResourcesRequest(), timeout=CALL_S)
        return sorted(id for one in answer.devices if one.resource_name == RESOURCE for id in one.device_ids)

    def take(self) -> list[dict[str, Any]]:
        taken, self.calls = self.calls, []
        return taken

    # ---- the kubelet's calls

    def _note(self, call: str, request: Any, context: grpc.ServicerContext, **more: Any) -> None:
        self.calls.append({"call": call, "request": plain(request), **more})
        if call in self.refuse:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuse[call])

    def GetDevicePluginOptions(self, request: api.Empty, context: grpc.ServicerContext) -> api.DevicePluginOptions:
        self._note("GetDevicePluginOptions", request, context)
        return api.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    def ListAndWatch(self, request: api.Empty, context: grpc.ServicerContext) -> Iterator[api.ListAndWatchResponse]:
        self._note("ListAndWatch", request, context)
        context.add_callback(self._wake)
        sent = None
        while context.is_active() and self._generation >= 0:
            with self._changed:
                if sent == self._generation:
                    self._changed.wait(1)
                    continue
                sent = self._generation
                devices = [self._device(name) for name in DEVICES]
            yield api.ListAndWatchResponse(devices=devices)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _device(self, name: str) -> api.Device:
        device = api.Device(ID=name, health=self.health[name])
        if name in NUMA_NODE:
            device.topology.nodes.add(ID=NUMA_NODE[name])
        return device

    def GetPreferredAllocation(
        self, request: api.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> api.PreferredAllocationResponse:
        """Prefers the last devices by name, which the kubelet itself would not choose."""
        self._note("GetPreferredAllocation", request, context)
        answer = api.PreferredAllocationResponse()
        for one in request.container_requests:
            free = sorted(set(one.available_deviceIDs) - set(one.must_include_deviceIDs), reverse=True)
            wanted = list(one.must_include_deviceIDs) + free
            answer.container_responses.add(deviceIDs=wanted[: one.allocation_size])
        return answer

    def Allocate(self, request: api.AllocateRequest, context: grpc.ServicerContext) -> api.AllocateResponse:
        self._note("Allocate", request, context)
        answer = api.AllocateResponse()
        for one in request.container_requests:
            answer.container_responses.add(envs={"TRACED": ",".join(sorted(one.devices_ids))})
        return answer

    def PreStartContainer(
        self, request: api.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> api.PreStartContainerResponse:
        """Records the call with the current PodResources response, which may not name the container yet."""
        self._note("PreStartContainer", request, context, pod_resources=self.listed())
        return api.PreStartContainerResponse()
