# SPDX-License-Identifier: Apache-2.0
"""The double of the kubelet's PodResources service. It reports the devices of containers, which it reads from the
double of the device manager.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from vgpu_plugin._proto import podresources_pb2 as api
from vgpu_plugin._proto import podresources_pb2_grpc as rpc

from .manager import Manager


class PodResources(rpc.PodResourcesListerServicer):
    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def List(self, request: api.ListPodResourcesRequest, context: grpc.ServicerContext) -> api.ListPodResourcesResponse:
        answer = api.ListPodResourcesResponse()
        pods: dict[str, api.PodResources] = {}
        with self._manager.lock:
            self._manager.notice()
            for held in self._manager.held:
                pod = pods.get(held.pod_uid)
                if pod is None:
                    pod = answer.pod_resources.add(name=held.pod, namespace=held.namespace)
                    pods[held.pod_uid] = pod
                if held.container == "init":
                    continue  # The real kubelet lists only running containers; an init container has ended.
                container = pod.containers.add(name=held.container)
                for node, ids in held.by_numa.items():
                    devices = container.devices.add(resource_name=held.resource, device_ids=ids)
                    if node >= 0:
                        devices.topology.nodes.add(ID=node)
        return answer

    def GetAllocatableResources(
        self, request: api.AllocatableResourcesRequest, context: grpc.ServicerContext
    ) -> api.AllocatableResourcesResponse:
        answer = api.AllocatableResourcesResponse()
        with self._manager.lock:
            for name, endpoint in self._manager.endpoints.items():
                for one in sorted(endpoint.healthy()):
                    answer.devices.add(resource_name=name, device_ids=[one])
        return answer


def serve(manager: Manager, socket: Path) -> grpc.Server:
    socket.parent.mkdir(parents=True, exist_ok=True)
    socket.unlink(missing_ok=True)
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    rpc.add_PodResourcesListerServicer_to_server(PodResources(manager), server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    return server
