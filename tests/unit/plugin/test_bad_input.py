# SPDX-License-Identifier: Apache-2.0
"""Tests that faults around the device plugin cause a gRPC error status or a message, and never end the program."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from pathlib import Path

import grpc
import pytest
from vgpu_kubelet_double.manager import Manager
from vgpu_plugin._proto import deviceplugin_pb2 as api
from vgpu_plugin._proto import deviceplugin_pb2_grpc as rpc
from vgpu_plugin.allocation.collector import GRACE_S, Collector
from vgpu_plugin.allocation.leases import Leases
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.daemon import Daemon
from vgpu_plugin.errors import Fatal
from vgpu_plugin.node.clock import Clock
from vgpu_plugin.offer.health import HealthWatch

from .conftest import PLUGIN, FakeGpus
from .samples import until

RESOURCE = "nvidia.com/gpu"


@pytest.fixture
def daemon(node, kubelet, running, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.offer.health.LOOK_S", 0.05)
    node.configure(splitCount=2)
    source = FakeGpus(node.gpus)
    out = Daemon(node.setup(), lambda: source)
    out.source = source
    running(out)
    until(lambda: allocatable(kubelet) == 4, "the slices")
    return out


@pytest.fixture
def stub(node, daemon):
    with grpc.insecure_channel(f"unix:{node.paths.endpoint(RESOURCE)}") as channel:
        yield rpc.DevicePluginStub(channel)


def allocatable(kubelet) -> int:
    return kubelet.state()["resources"].get(RESOURCE, {}).get("allocatable", -1)


def status(node, capsys) -> dict:
    assert ctl.main(["--socket", str(node.paths.admin_socket), "status", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


FIRST = "GPU-00000000-0000-0000-0000-000000000000"
LONG = "x" * 100_000


def allocate(*containers: list[str]):
    requests = [api.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
    return "Allocate", api.AllocateRequest(container_requests=requests)


def prefer(available: list[str], must: list[str], size: int):
    one = api.ContainerPreferredAllocationRequest(
        available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
    )
    return "GetPreferredAllocation", api.PreferredAllocationRequest(container_requests=[one])


def prestart(*ids: str):
    return "PreStartContainer", api.PreStartContainerRequest(devices_ids=list(ids))


# columns: the case, the call with the invalid request; expected gRPC status, expected words of the error
REQUESTS = [
    ("no container", allocate(), "INVALID_ARGUMENT", "names no container"),
    ("no id", allocate([]), "INVALID_ARGUMENT", "names no slice"),
    ("an id that was never offered", allocate(["GPU-x::0"]), "INVALID_ARGUMENT", "was never offered"),
    ("an id with a slice number beyond the split", allocate([f"{FIRST}::2"]), "INVALID_ARGUMENT", "was never offered"),
    ("a negative id", allocate([f"{FIRST}::-1"]), "INVALID_ARGUMENT", "was never offered"),
    ("an empty id", allocate([""]), "INVALID_ARGUMENT", "was never offered"),
    ("a path", allocate(["../../../etc/passwd"]), "INVALID_ARGUMENT", "was never offered"),
    ("a very long id", allocate([LONG]), "INVALID_ARGUMENT", "was never offered"),
    ("one id twice", allocate([f"{FIRST}::0", f"{FIRST}::0"]), "INVALID_ARGUMENT", "is in the request twice"),
    ("two slices of one GPU", allocate([f"{FIRST}::0", f"{FIRST}::1"]), "FAILED_PRECONDITION", "distinct"),
    ("one invalid container of two", allocate([f"{FIRST}::0"], ["GPU-x::0"]), "INVALID_ARGUMENT", "was never offered"),
    ("more ids requested than available", prefer([f"{FIRST}::0"], [], 2), "INVALID_ARGUMENT", "found 1 available"),
    ("an id that is available twice", prefer([f"{FIRST}::0"] * 2, [], 2), "INVALID_ARGUMENT", "found 1 available"),
    (
        "a required id that is not available",
        prefer([f"{FIRST}::0"], ["GPU-x::0"], 1),
        "INVALID_ARGUMENT",
        "is not available",
    ),
    ("a start without an allocation", prestart(f"{FIRST}::1"), "FAILED_PRECONDITION", "contains an allocation"),
    ("a start with an id that was never offered", prestart("GPU-x::0"), "INVALID_ARGUMENT", "was never offered"),
    ("a start without ids", prestart(), "INVALID_ARGUMENT", "names no slice"),
]


@pytest.mark.parametrize(("about", "call", "code", "words"), REQUESTS, ids=[row[0] for row in REQUESTS])
def test_invalid_request_has_an_error_status(node, kubelet, stub, about, call, code, words):
    method, request = call
    with pytest.raises(grpc.RpcError) as fault:
        getattr(stub, method)(request, timeout=30)
    assert (fault.value.code().name, words in fault.value.details()) == (code, True), fault.value.details()[:300]
    assert (
        not node.paths.allocations.exists()
        or [one.name for one in node.paths.allocations.iterdir() if not one.name.startswith("slice-")] == []
    )
    assert kubelet.run_pod("after")["ids"]  # The plugin continues to serve other pods.


@pytest.mark.parametrize("how", ["sick", "vanished"])
def test_allocate_fails_while_the_driver_does_not_find_the_gpu(node, kubelet, daemon, stub, how):
    if how == "sick":
        daemon.source.xids.put((FIRST, 79))
    else:
        daemon.source.faults[FIRST] = "the driver says: not found"
        daemon.source.listed = node.gpus[1:]
    until(lambda: allocatable(kubelet) == 2, "only the slices of the second GPU")
    with pytest.raises(grpc.RpcError) as fault:
        stub.Allocate(allocate([f"{FIRST}::0"])[1], timeout=30)
    assert (fault.value.code().name, "is unhealthy" in fault.value.details()) == ("UNAVAILABLE", True)


def test_invalid_grpc_message_gets_an_error_status(node, stub):
    with grpc.insecure_channel(f"unix:{node.paths.endpoint(RESOURCE)}") as channel:
        call = channel.unary_unary("/v1beta1.DevicePlugin/Allocate")
        with pytest.raises(grpc.RpcError) as fault:
            call(b"\xff\xff\xff\xff", timeout=30)
    assert fault.value.code().name in ("INTERNAL", "INVALID_ARGUMENT", "UNKNOWN")
    assert stub.GetDevicePluginOptions(api.Empty(), timeout=30).pre_start_required


# ---- the kubelet's socket


class Deaf:
    """A server that accepts connections and never responds."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(8)

    def close(self) -> None:
        self._socket.close()


# What is at the path of the kubelet's socket while no kubelet answers there.
KUBELET_SOCKETS = ["no socket", "regular file", "folder", "socket without a server", "server without a response"]


@pytest.mark.parametrize("what", KUBELET_SOCKETS)
def test_plugin_waits_for_a_kubelet_behind_the_socket(node, running, capsys, monkeypatch, what):
    monkeypatch.setattr("vgpu_plugin.kubelet.registration.REGISTER_TIMEOUT_S", 0.3)
    monkeypatch.setattr("vgpu_plugin.kubelet.registration.LAST_RETRY_S", 0.2)
    path = node.paths.kubelet_socket
    deaf = None
    if what == "regular file":
        path.write_text("no socket")
    elif what == "folder":
        path.mkdir()
    elif what in ("socket without a server", "server without a response"):
        deaf = Deaf(path)
        if what == "socket without a server":
            deaf.close()
    node.configure()
    running(Daemon(node.setup(), lambda: FakeGpus(node.gpus)))
    # The admin socket's file exists shortly before the program listens on it, so the first calls may fail.
    until(
        lambda: ctl.main(["--socket", str(node.paths.admin_socket), "status", "--json"]) == 0,
        "a response to status",
    )
    capsys.readouterr()
    found = status(node, capsys)
    assert found["registered"] is False
    until(lambda: str(path) in status(node, capsys)["kubelet_error"], "the fault with the socket's path")
    if deaf is not None:
        deaf.close()
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    manager = Manager(node.paths.kubelet_dir)
    manager.start()
    try:
        until(lambda: allocatable(manager) == 4, "the registration of the slices at the new kubelet")
    finally:
        manager.stop()


# ---- files


@pytest.mark.parametrize("what", ["a folder", "not UTF-8", "empty", "a number", "a list", "endless nesting"])
def test_invalid_configuration_file_is_named_in_the_error(node, what):
    path = node.paths.config
    contents = {
        "not UTF-8": b'{"version": "\xff"}',
        "empty": b"",
        "a number": b"7",
        "a list": b"[]",
        "endless nesting": b"[" * 5000,
    }
    if what == "a folder":
        path.mkdir()
    else:
        path.write_bytes(contents[what])
    with pytest.raises(Fatal, match=r"node\.yaml") as fault:
        Daemon(node.setup(), lambda: FakeGpus(node.gpus)).run()
    assert len(str(fault.value)) < 2000


def test_clock_change_ends_no_lease_or_allocation(node, monkeypatch):
    """Leases (temporary allocations on this host) and the collection of ended allocations use a clock that nobody can
    set."""
    monkeypatch.setattr("time.time", lambda: 0.0)
    first = Clock().now()
    monkeypatch.setattr("time.time", lambda: 4e9)
    assert 0 <= Clock().now() - first < GRACE_S


DAY_S = 86400.0


@pytest.mark.parametrize("jump", [-DAY_S, DAY_S])
def test_clock_jump_does_not_change_waits(node, monkeypatch, jump):
    """The wall clock jumps by a day while three waits run: the time without errors after which a GPU is healthy again,
    the grace period of an ended allocation, and a lease. The monotonic clock does not jump, so no wait ends early or
    late.
    """
    pool, allocator, files = node.parts()
    began, since, shift = time.time(), [500.0], [0.0]
    monkeypatch.setattr("time.time", lambda: began + since[0] + shift[0])
    watch = HealthWatch(FakeGpus(node.gpus), pool, clean_s=300.0, monotonic=lambda: since[0])
    collector = Collector(allocator, files, node.paths.checkpoint, monotonic=lambda: since[0])
    leases = Leases(allocator, pool, node.paths.checkpoint, lambda: False, node.clock)
    (gone,) = allocator.allocate([[f"{FIRST}::0"]])
    node.paths.checkpoint.write_text(json.dumps({"Data": {"PodDeviceEntries": [], "RegisteredDevices": {}}}))
    leases.lease(node.gpus[1].uuid, 400)
    watch.saw(FIRST, 79)
    assert collector.collect() == []

    def later(seconds: float) -> tuple[bool, int, int]:
        """Advances the monotonic clock; returns whether the GPU is healthy, the number of containers' allocations, and
        the number of leases.
        """
        since[0] += seconds
        node.clock.seconds += seconds
        watch.recover()
        collector.collect()
        leases.expire()
        kinds = [one.kind for one in allocator.records.all()]
        return not pool.unhealthy_reason(FIRST), kinds.count("kubelet"), kinds.count("lease")

    shift[0] = jump
    assert later(GRACE_S - 1) == (False, 1, 1)
    assert later(2) == (False, 0, 1)
    shift[0] = -jump
    assert later(299 - GRACE_S - 1) == (False, 0, 1)
    assert later(2) == (True, 0, 1)
    assert later(98) == (True, 0, 1)
    assert later(2) == (True, 0, 0)
    assert not files.folder(gone.allocation).exists()


def test_no_wait_uses_the_wall_clock():
    """All waits use a monotonic clock. Only three files read the wall clock, and only to report the time: in labels, in
    a condition and in the log.
    """
    asks = re.compile(r"\btime\.time(_ns)?\(|datetime\.|CLOCK_REALTIME|time\.localtime|time\.gmtime")
    found = {path.name for path in (PLUGIN / "src/vgpu_plugin").rglob("*.py") if asks.search(path.read_text())}
    assert found == {"labels.py", "logs.py", "node_label.py"}


def test_second_plugin_is_refused_at_a_concurrent_start(node, kubelet, running):
    node.configure()
    faults: list[Fatal] = []
    daemons = [Daemon(node.setup(), lambda: FakeGpus(node.gpus)) for _time in range(2)]
    barrier = threading.Barrier(2)

    class Started:
        def __init__(self, daemon: Daemon) -> None:
            self.daemon, self.stop = daemon, daemon.stop

        def run(self) -> None:
            barrier.wait()
            try:
                self.daemon.run()
            except Fatal as fault:
                faults.append(fault)

    for one in daemons:
        running(Started(one))
    until(lambda: faults, "the end of one of the two plugins")
    # The first plugin may hold the lock before it has written its pid, so the error may say "unknown".
    assert re.search(rf"another vgpu-device-plugin runs already \(pid ({os.getpid()}|unknown)\)", str(faults[0]))
    until(lambda: allocatable(kubelet) == 4, "the remaining plugin to serve")
    assert len(faults) == 1
