# SPDX-License-Identifier: Apache-2.0
"""The kubelet's service DevicePlugin v1beta1. It only translates messages for the allocator, which gives slices (parts
of GPUs) to containers.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from .._proto import deviceplugin_pb2 as api
from .._proto import deviceplugin_pb2_grpc as rpc
from ..allocation.allocator import Allocator
from ..allocation.answer import Answer
from ..errors import BadRequest, NoFreeSlice, NotNow, PluginError, Refused, Unknown
from ..node.gpus import NO_NUMA
from ..node.topology import nearest
from ..offer.pool import Offer, Pool
from ..offer.preference import preferred

# Maximum number of ListAndWatch streams. Each stream occupies a thread of the server, and a free thread must remain for
# Allocate.
MAX_STREAMS = 256
WORKERS = MAX_STREAMS + 8

STATUS = (
    (BadRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Refused, grpc.StatusCode.FAILED_PRECONDITION),
    (NotNow, grpc.StatusCode.UNAVAILABLE),
    (NoFreeSlice, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unknown, grpc.StatusCode.NOT_FOUND),
)

LONGEST_TEXT = 2000

log = logging.getLogger(__name__)


def answered(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that turns every exception of a call into a gRPC status with a message."""

    @functools.wraps(method)
    def call(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return method(self, request, context)
        except PluginError as fault:
            code = next((code for kind, code in STATUS if isinstance(fault, kind)), grpc.StatusCode.UNKNOWN)
            # The message is cut, because gRPC sends it as a header of limited length. An uncut message with all ids of
            # a request might be lost.
            text = str(fault) if len(str(fault)) <= LONGEST_TEXT else str(fault)[: LONGEST_TEXT - 1] + "…"
            log.warning("%s: %s", method.__name__, text)
            context.abort(code, text)
        except Exception as fault:
            if context.is_active():
                log.exception("%s failed", method.__name__)
            context.abort(grpc.StatusCode.INTERNAL, f"{method.__name__} failed in the plugin: {fault!r}; see its log")

    return call


def to_message(answer: Answer) -> api.ContainerAllocateResponse:
    return api.ContainerAllocateResponse(
        envs=answer.envs,
        mounts=[api.Mount(container_path=inside, host_path=host, read_only=ro) for inside, host, ro in answer.mounts],
        devices=[
            api.DeviceSpec(container_path=inside, host_path=host, permissions=mode)
            for inside, host, mode in answer.devices
        ],
        cdi_devices=[api.CDIDevice(name=name) for name in answer.cdi_devices],
        annotations=answer.annotations,
    )


def to_device(offer: Offer) -> api.Device:
    device = api.Device(ID=offer.slice.id, health="Healthy" if offer.healthy else "Unhealthy")
    if offer.gpu.numa_node != NO_NUMA:
        device.topology.nodes.add(ID=offer.gpu.numa_node)
    return device


class DevicePlugin(rpc.DevicePluginServicer):
    """Serves one resource to the kubelet. ``on_streams`` is called when a ListAndWatch stream begins or ends.
    ``streams`` is the number of open streams.
    """

    def __init__(
        self, pool: Pool, allocator: Allocator, on_streams: Callable[[], None] = lambda: None, resource: str = ""
    ) -> None:
        """Only slices of ``resource`` are offered; an empty string means all slices."""
        self._resource = resource
        self._pool = pool
        self._allocator = allocator
        self._on_streams = on_streams
        self._stopping = threading.Event()
        self._counting = threading.Lock()
        self.streams = 0

    def stop(self) -> None:
        """Ends all streams, so that the server can stop."""
        self._stopping.set()
        self._pool.wake()

    def GetDevicePluginOptions(self, request: api.Empty, context: grpc.ServicerContext) -> api.DevicePluginOptions:
        return options()

    def ListAndWatch(self, request: api.Empty, context: grpc.ServicerContext) -> Iterator[api.ListAndWatchResponse]:
        if not self._count_stream(1):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{MAX_STREAMS} streams of ListAndWatch are open already; end one first",
            )
        try:
            context.add_callback(self._pool.wake)
            while not self._ended(context):
                generation, offers = self._pool.offers(self._resource)
                yield api.ListAndWatchResponse(devices=[to_device(offer) for offer in offers])
                if not self._pool.wait_beyond(generation, lambda: self._ended(context)):
                    return
        finally:
            self._count_stream(-1)

    def _count_stream(self, change: int) -> bool:
        with self._counting:
            if self.streams + change > MAX_STREAMS:
                return False
            self.streams += change
        self._on_streams()
        return True

    def _ended(self, context: grpc.ServicerContext) -> bool:
        return self._stopping.is_set() or not context.is_active()

    @answered
    def GetPreferredAllocation(
        self, request: api.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> api.PreferredAllocationResponse:
        shape = self._pool.shape()
        packed = self._allocator.settings.packed
        self._allocator.asked_for_preference()
        answers = []
        for one in request.container_requests:
            available, must, size = list(one.available_deviceIDs), list(one.must_include_deviceIDs), one.allocation_size
            if shape.whole and shape.whole.issuperset(available):
                answers.append(nearest(available, must, size, shape.links, shape.order))
                continue
            must = self._allocator.sizer.planned(available, size, must)
            answers.append(preferred(available, must, size, shape.totals, shape.order, packed))
        return api.PreferredAllocationResponse(
            container_responses=[api.ContainerPreferredAllocationResponse(deviceIDs=ids) for ids in answers]
        )

    @answered
    def Allocate(self, request: api.AllocateRequest, context: grpc.ServicerContext) -> api.AllocateResponse:
        if not request.container_requests:
            raise BadRequest("the request names no container; send one container request for each container")
        answers = self._allocator.allocate(one.devices_ids for one in request.container_requests)
        return api.AllocateResponse(container_responses=[to_message(answer) for answer in answers])

    @answered
    def PreStartContainer(
        self, request: api.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> api.PreStartContainerResponse:
        self._allocator.prestart(list(request.devices_ids))
        return api.PreStartContainerResponse()


def options() -> api.DevicePluginOptions:
    return api.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
