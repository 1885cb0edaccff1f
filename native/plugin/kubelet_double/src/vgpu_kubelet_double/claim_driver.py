# SPDX-License-Identifier: Apache-2.0
"""One driver for claims (Dynamic Resource Allocation) that is registered with the kubelet double: its connection, the
calls to it, and its stream of device health.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
from vgpu_plugin._proto import (
    dra_health_pb2,
    dra_health_pb2_grpc,
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
)
from vgpu_plugin._proto import plugin_registration_pb2 as registration

from .manager import go_name, quoted

CALL_S, STREAM_AGAIN_S = 45.0, 5.0
TYPE = "DRAPlugin"
OURS = ("gpu.vgpu.fleet",)
VERSIONS: dict[str, tuple[ModuleType, Any]] = {
    "v1.DRAPlugin": (dra_v1_pb2, dra_v1_pb2_grpc.DRAPluginStub),
    "v1beta1.DRAPlugin": (dra_v1beta1_pb2, dra_v1beta1_pb2_grpc.DRAPluginStub),
}


class Refused(Exception):
    """Raised if a request fails. The text is the one that a kubelet gives."""


@dataclass(frozen=True)
class ClaimRef:
    """A ResourceClaim. ``drivers``: names of the drivers whose devices are allocated to the claim."""

    namespace: str
    name: str
    uid: str
    drivers: tuple[str, ...] = OURS


def identity(path: Path) -> tuple[int, int] | None:
    """Returns inode and change time of a socket, which differ for a later socket of the same name."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


class Driver:
    """A registered driver. ``connected`` is called each time the connection is made or lost."""

    def __init__(self, info: registration.PluginInfo, socket: Path, connected: Callable[[bool], None]) -> None:
        """Raises Refused if this kubelet cannot use the driver."""
        self.name, self.socket, self.identity = info.name, socket, identity(socket)
        self.version = _version(info, socket)
        self._messages, stub = VERSIONS[self.version]
        self._report = connected
        self._was_ready = False
        self._closed = threading.Event()
        self._stream: Any = None
        self._health: dict[tuple[str, str], dict[str, str]] = {}
        self._channel = grpc.insecure_channel(f"unix:{info.endpoint or socket}")
        self._calls = stub(self._channel)
        self._channel.subscribe(self._changed, try_to_connect=True)
        threading.Thread(target=self._follow, daemon=True).start()

    # ---- calls

    def prepare(self, claims: Sequence[ClaimRef]) -> dict[str, list[dict[str, Any]]]:
        """Prepares claims. Returns uid of each claim → its devices, in the form of the state file. Raises Refused."""
        answer = self._call("NodePrepareResources", claims)
        return {
            uid: [
                {
                    "PoolName": one.pool_name,
                    "DeviceName": one.device_name,
                    "ShareID": one.share_id if one.HasField("share_id") else None,
                    "RequestNames": list(one.request_names) or None,
                    "CDIDeviceIDs": list(one.cdi_device_ids) or None,
                }
                for one in result.devices
            ]
            for uid, result in answer.items()
        }

    def unprepare(self, claims: Sequence[ClaimRef]) -> None:
        """Asks the driver to release the claims. Raises Refused."""
        self._call("NodeUnprepareResources", claims)

    def _call(self, name: str, claims: Sequence[ClaimRef]) -> Any:
        """Calls the driver. Returns the responses by the claims' uids. Raises Refused if a response is missing or
        contains an error.
        """
        api: Any = self._messages
        asked = [api.Claim(namespace=one.namespace, name=one.name, uid=one.uid) for one in claims]
        try:
            answer = getattr(self._calls, name)(getattr(api, f"{name}Request")(claims=asked), timeout=CALL_S)
        except grpc.RpcError as fault:
            raise Refused(f"{name}: rpc error: code = {go_name(fault.code())} desc = {fault.details()}") from fault
        names = {one.uid: one.name for one in claims}
        for uid, result in answer.claims.items():
            if uid not in names:
                raise Refused(f"{name} returned result for unknown claim UID {uid}")
            if result.error:
                raise Refused(f"{name} failed for ResourceClaim {names[uid]}: {result.error}")
        if len(answer.claims) < len(claims):
            raise Refused(f"{name} skipped {len(claims) - len(answer.claims)} ResourceClaims")
        return answer.claims

    # ---- health and connection

    @property
    def health(self) -> dict[str, str]:
        """Device → its state HEALTHY, UNHEALTHY or UNKNOWN."""
        return {device: one["health"].upper() for (_pool, device), one in self._health.items()}

    def health_of(self, device: dict[str, Any]) -> dict[str, str]:
        """Returns the health of a device in the form of a pod's status."""
        known = self._health.get((device["PoolName"], device["DeviceName"]), {"health": "Unknown"})
        ids: Iterable[str] = device["CDIDeviceIDs"] or (f"{self.name}/{device['PoolName']}/{device['DeviceName']}",)
        return {**known, "resourceID": next(iter(ids))}

    def _changed(self, state: grpc.ChannelConnectivity) -> None:
        ready = state is grpc.ChannelConnectivity.READY
        if ready != self._was_ready and not self._closed.is_set():
            self._was_ready = ready
            self._report(ready)

    def _follow(self) -> None:
        """Reads the stream of device health. If the stream ends or the driver does not serve it, opens it again. A new
        stream also restores the connection.
        """
        stub = dra_health_pb2_grpc.DRAResourceHealthStub(self._channel)
        while not self._closed.is_set():
            try:
                self._stream = stub.NodeWatchResources(dra_health_pb2.NodeWatchResourcesRequest())
                for one in self._stream:
                    self._health = {_key(device): _shown(device) for device in one.devices}
            except (grpc.RpcError, ValueError):  # ValueError means that the channel was closed.
                pass
            self._health = {}
            self._closed.wait(STREAM_AGAIN_S)

    def close(self) -> None:
        self._closed.set()
        if self._stream is not None:
            self._stream.cancel()
        self._channel.unsubscribe(self._changed)
        self._channel.close()


def _version(info: registration.PluginInfo, socket: Path) -> str:
    """Returns the first version in the plugin's list that this double supports."""
    if info.type != TYPE:
        raise Refused(f"no handler registered for plugin type: {info.type} at socket {socket}")
    offered = list(info.supported_versions)
    for one in offered:
        if one in VERSIONS:
            return one
    why = f"none of services supported by the plugin ([{' '.join(map(quoted, offered))}]) are supported by the kubelet"
    why = f"{why} ([{' '.join(map(quoted, VERSIONS))}])" if offered else "empty list of supported gRPC services"
    raise Refused(
        "plugin validation failed with err: invalid supported gRPC versions of DRA driver plugin "
        f"{info.name} at endpoint {info.endpoint}: {why}{'' if offered else ' (aka supported versions)'}"
    )


def _key(device: dra_health_pb2.DeviceHealth) -> tuple[str, str]:
    return device.device.pool_name, device.device.device_name


def _shown(device: dra_health_pb2.DeviceHealth) -> dict[str, str]:
    health = dra_health_pb2.HealthStatus.Name(device.health).capitalize()
    return {"health": health, **({"message": device.message} if device.message else {})}
