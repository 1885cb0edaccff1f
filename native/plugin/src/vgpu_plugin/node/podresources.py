# SPDX-License-Identifier: Apache-2.0
"""Asks the kubelet's PodResources service which pod and container hold each device id."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import grpc

from .._proto import podresources_pb2 as api
from .._proto import podresources_pb2_grpc as rpc

TIMEOUT_S = 2.0


class Holder(NamedTuple):
    namespace: str
    pod: str
    container: str


def holders(socket: Path) -> dict[str, Holder] | None:
    """Maps each device id of all resources to the pod and container that hold it. Returns None if the kubelet does not
    respond."""
    if not socket.exists():
        return None
    try:
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            answer = rpc.PodResourcesListerStub(channel).List(api.ListPodResourcesRequest(), timeout=TIMEOUT_S)
    except grpc.RpcError:
        return None
    return {
        one: Holder(pod.namespace, pod.name, container.name)
        for pod in answer.pod_resources
        for container in pod.containers
        for devices in container.devices
        for one in devices.device_ids
    }
