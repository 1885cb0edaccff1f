# SPDX-License-Identifier: Apache-2.0
"""Serves the kubelet's stream DRAResourceHealth. It sends the health of every device at each change, and again before
the last message expires.

The kubelet only shows the health in the status of pods. New pods are kept away from an unhealthy device by the taint of
the device in the ResourceSlice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import grpc

from .._proto import dra_health_pb2 as api
from .._proto import dra_health_pb2_grpc as rpc
from ..offer.pool import Pool
from .names import device_names

VERSION = "v1alpha1.DRAResourceHealth"
# If the kubelet receives no message for this time, it shows the health as Unknown.
TIMEOUT_S = 30
REPEAT_S = 10.0
MOST_STREAMS = 8


class Health(rpc.DRAResourceHealthServicer):
    def __init__(self, pool: Pool, pool_name: str, wall: Callable[[], float] = time.time) -> None:
        self._pool = pool
        self._pool_name = pool_name
        self._wall = wall
        self._stopping = threading.Event()
        self._streams = threading.BoundedSemaphore(MOST_STREAMS)

    def stop(self) -> None:
        """Ends all streams, so that the server can stop."""
        self._stopping.set()
        self._pool.wake()

    def NodeWatchResources(
        self, request: api.NodeWatchResourcesRequest, context: grpc.ServicerContext
    ) -> Iterator[api.NodeWatchResourcesResponse]:
        if not self._streams.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_STREAMS} streams are open already; end one first")
        try:
            context.add_callback(self._pool.wake)
            while not self._ended(context):
                generation, _offers = self._pool.offers()
                yield self.now()
                if not self._pool.wait_beyond(generation, lambda: self._ended(context), REPEAT_S):
                    return
        finally:
            self._streams.release()

    def _ended(self, context: grpc.ServicerContext) -> bool:
        return self._stopping.is_set() or not context.is_active()

    def now(self) -> api.NodeWatchResourcesResponse:
        """Returns the message with the health of each published device."""
        names = device_names(self._pool.gpus)
        out = api.NodeWatchResourcesResponse()
        for device, uuid in dict.fromkeys((one.device, one.uuid) for one in self._pool.slices):
            if device not in names:
                continue
            reason = self._pool.unhealthy_reason(uuid)
            out.devices.add(
                device=api.DeviceIdentifier(pool_name=self._pool_name, device_name=names[device]),
                health=api.UNHEALTHY if reason else api.HEALTHY,
                last_updated_time=int(self._wall()),
                health_check_timeout_seconds=TIMEOUT_S,
                message=reason,
            )
        return out
