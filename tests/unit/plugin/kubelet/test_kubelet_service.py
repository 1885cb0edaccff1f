# SPDX-License-Identifier: Apache-2.0
"""Tests many concurrent ListAndWatch streams, by which the kubelet gets the list of devices. Each stream must get each
change, other calls must be served meanwhile, and too many streams must be refused.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from vgpu_plugin._proto import deviceplugin_pb2 as api
from vgpu_plugin._proto import deviceplugin_pb2_grpc as rpc
from vgpu_plugin.kubelet import service

from ..samples import until

MANY = 60


@pytest.fixture
def served(node, tmp_path):
    """Starts only the gRPC service, on a socket; yields (pool of slices, service, client stub)."""
    pool, allocator, _files = node.parts(splitCount=2)
    one = service.DevicePlugin(pool, allocator)
    server = grpc.server(ThreadPoolExecutor(max_workers=service.WORKERS))
    rpc.add_DevicePluginServicer_to_server(one, server)
    server.add_insecure_port(f"unix:{tmp_path}/s")
    server.start()
    with grpc.insecure_channel(f"unix:{tmp_path}/s") as channel:
        yield pool, one, rpc.DevicePluginStub(channel)
        one.stop()
        server.stop(grace=1.0).wait()


def healths(answer: api.ListAndWatchResponse) -> list[str]:
    return [one.health for one in answer.devices]


def test_all_streams_get_all_changes_and_calls_are_served(served):
    pool, one, stub = served
    streams = [stub.ListAndWatch(api.Empty()) for _number in range(MANY)]
    assert {tuple(healths(next(stream))) for stream in streams} == {("Healthy",) * 4}
    until(lambda: one.streams == MANY, "all streams")
    ids = [piece.id for piece in pool.slices]
    asked = api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=ids[:1])])
    assert stub.Allocate(asked, timeout=60).container_responses
    pool.mark_unhealthy(pool.gpus[0].uuid, "Xid 79")
    assert {tuple(healths(next(stream))) for stream in streams} == {("Unhealthy",) * 2 + ("Healthy",) * 2}
    for stream in streams[:-1]:
        stream.cancel()
    until(lambda: one.streams == 1, "the end of all streams but one")
    pool.mark_healthy(pool.gpus[0].uuid)
    assert healths(next(streams[-1])) == ["Healthy"] * 4


def test_too_many_streams_are_refused(served, monkeypatch):
    pool, one, stub = served
    monkeypatch.setattr(service, "MAX_STREAMS", 3)
    streams = [stub.ListAndWatch(api.Empty()) for _number in range(3)]
    for stream in streams:
        next(stream)
    with pytest.raises(grpc.RpcError) as fault:
        next(stub.ListAndWatch(api.Empty()))
    assert fault.value.code().name == "RESOURCE_EXHAUSTED"
    assert "3 streams of ListAndWatch are open already" in fault.value.details()
    pool.send_again()
    for stream in streams:
        next(stream)
    streams[0].cancel()
    until(lambda: one.streams == 2, "the end of one stream")
    assert next(stub.ListAndWatch(api.Empty()))


def test_very_many_streams_do_not_block_other_calls():
    """Each stream occupies a thread. Other calls have their own threads, so many streams cannot block them."""
    assert service.MAX_STREAMS >= 256
    assert service.WORKERS > service.MAX_STREAMS
