# SPDX-License-Identifier: Apache-2.0
"""One registered device plugin: the double's connection to it, its options, and the stream of its devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import grpc
from vgpu_plugin._proto import deviceplugin_pb2 as api
from vgpu_plugin._proto import deviceplugin_pb2_grpc as rpc

# Maximum seconds for which a kubelet waits for its connection to the plugin during Register.
CONNECT_S = 10.0
PRESTART_S = 30.0
CALL_S = 60.0


class Endpoint:
    def __init__(self, resource: str, socket: Path, on_list: Callable[[Endpoint], None]) -> None:
        self.resource = resource
        self.socket = socket
        self.devices: dict[str, api.Device] = {}
        self.options = api.DevicePluginOptions()
        self.stopped = False
        self._on_list = on_list
        self._channel: grpc.Channel | None = None
        self._stream: grpc.Future | None = None

    def connect(self) -> None:
        """Connects to the plugin and asks for its options. Raises ConnectionError if no process listens on the plugin's
        socket.
        """
        # A kubelet opens a new connection at each registration. Without this option gRPC would reuse the connection to
        # the earlier plugin.
        channel = grpc.insecure_channel(f"unix:{self.socket}", [("grpc.use_local_subchannel_pool", 1)])
        self._stub = rpc.DevicePluginStub(channel)
        try:
            # grpc.channel_ready_future would start a thread, for which close() may wait for ever after a timeout.
            self.options = self._stub.GetDevicePluginOptions(api.Empty(), timeout=CONNECT_S, wait_for_ready=True)
        except grpc.RpcError as fault:
            channel.close()
            if fault.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            raise ConnectionError(f"no connection to {self.socket} within {CONNECT_S:.0f} s") from None
        self._channel = channel

    def watch(self) -> None:
        """Starts a thread that follows the plugin's stream of devices until the stream ends."""
        self._stream = self._stub.ListAndWatch(api.Empty())
        threading.Thread(target=self._follow, name=f"watch {self.resource}", daemon=True).start()

    def _follow(self) -> None:
        assert self._stream is not None
        try:
            for answer in self._stream:
                self.devices = {device.ID: device for device in answer.devices}
                self._on_list(self)
        except grpc.RpcError:
            pass  # The plugin ended or was replaced, so its devices are unhealthy from now on.
        self.stopped = True

    def stop(self) -> None:
        self.stopped = True
        if self._stream is not None:
            self._stream.cancel()
        if self._channel is not None:
            self._channel.close()

    def healthy(self) -> set[str]:
        """Returns the ids of the healthy devices; empty if the plugin's stream has ended."""
        return set() if self.stopped else {one.ID for one in self.devices.values() if one.health == "Healthy"}

    def preferred(self, available: list[str], size: int, must: list[str] | None = None) -> list[str]:
        """Asks the plugin which devices a container should get. ``must``: devices of the pod's init containers, which
        a kubelet gives to the container in any case; they are in ``available`` too.
        """
        request = api.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must or [], allocation_size=size
        )
        answer = self._stub.GetPreferredAllocation(
            api.PreferredAllocationRequest(container_requests=[request]), timeout=CALL_S
        )
        return list(answer.container_responses[0].deviceIDs) if answer.container_responses else []

    def allocate(self, ids: list[str]) -> api.ContainerAllocateResponse:
        request = api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=ids)])
        answer = self._stub.Allocate(request, timeout=CALL_S)
        if not answer.container_responses:
            raise ValueError("the plugin returned an empty list of container responses")
        return answer.container_responses[0]

    def prestart(self, ids: list[str]) -> None:
        if self.options.pre_start_required:
            self._stub.PreStartContainer(api.PreStartContainerRequest(devices_ids=ids), timeout=PRESTART_S)
