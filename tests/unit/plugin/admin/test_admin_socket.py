# SPDX-License-Identifier: Apache-2.0
"""Tests the admin socket, the Unix socket on which the device plugin answers vgpuctl: every call over a real socket,
and callers that send invalid requests.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from vgpu_plugin import errors
from vgpu_plugin._proto import admin_pb2 as api
from vgpu_plugin.admin import admin_socket
from vgpu_plugin.admin import answers as admin_answers
from vgpu_plugin.admin.admin_socket import Client, Fault, Server

from ..samples import until


class Service:
    """A service that returns its version. The calls Status and Lease wait until the event ``gate`` is set, and then
    raise the exception ``fault`` if it is not None.
    """

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.inside = 0
        self.leased: list[str] = []
        self.released: list[str] = []

    def Status(self, request: api.StatusRequest) -> api.StatusResponse:
        self.inside += 1
        self.gate.wait(60)
        if self.fault is not None:
            raise self.fault
        return api.StatusResponse(version="v" * 300_000)

    def Lease(self, request: api.LeaseRequest) -> api.LeaseResponse:
        self.Status(api.StatusRequest())
        self.leased.append(f"lease-{len(self.leased)}")
        return api.LeaseResponse(allocation=self.leased[-1])

    def Release(self, request: api.ReleaseRequest) -> api.ReleaseResponse:
        self.released.append(request.allocation)
        return api.ReleaseResponse()


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def path(tmp_path: Path, monkeypatch) -> Path:
    # The path of a socket is limited in length, and the path of pytest's folder may be longer.
    monkeypatch.chdir(tmp_path)
    return Path("plugin.sock")


@pytest.fixture
def server(path: Path, service: Service):
    out = Server(path, service)
    yield out
    service.gate.set()
    out.stop()


def ask(path: Path, timeout_s: float = 30.0) -> api.StatusResponse:
    return Client(path, timeout_s).call("Status", api.StatusRequest())


def test_calls_match_the_proto_file():
    methods = api.DESCRIPTOR.services_by_name["Admin"].methods_by_name
    expected = {name: (one.input_type.name, one.output_type.name) for name, one in methods.items()}
    found = {name: tuple(one.DESCRIPTOR.name for one in messages) for name, messages in admin_socket.METHODS.items()}
    assert found == expected
    assert all(callable(getattr(admin_answers.Admin, name)) for name in expected)


def test_root_only_socket_sends_a_long_response(server, path):
    assert len(ask(path).version) == 300_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in Path().iterdir()] == ["plugin.sock"]


# columns: the exception that the service raises; expected code and expected message at the caller
@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        (errors.BadRequest("no such id"), "INVALID_ARGUMENT", "no such id"),
        (errors.Refused("distinct"), "FAILED_PRECONDITION", "distinct"),
        (errors.Taken("held"), "UNAVAILABLE", "held"),
        (errors.NoFreeSlice("none"), "RESOURCE_EXHAUSTED", "none"),
        (errors.Unknown("gone – ü"), "NOT_FOUND", "gone – ü"),
        (errors.PluginError("else"), "UNKNOWN", "else"),
        (KeyError("x"), "INTERNAL", "Status failed in the plugin: KeyError('x'); see its log"),
    ],
)
def test_every_error_has_a_code_and_a_message(server, service, path, fault, code, text):
    service.fault = fault
    with pytest.raises(Fault) as found:
        ask(path)
    assert (found.value.code, str(found.value)) == (code, text)
    service.fault = None
    assert ask(path).version


# Invalid requests to which the server sends no response: the case → the bytes that the caller sends.
SAID = {
    "no request": b"",
    "name without a line end": b"Status",
    "name of 1000 bytes": b"x" * 1000,
    "not ASCII": b"\xff\xfe\n\0\0\0\0",
    "truncated length": b"Status\n\0\0",
    "truncated message": b"Status\n\0\0\0\x09abc",
    "length of 4 GiB": b"Status\n\xff\xff\xff\xff",
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}
# Invalid requests that get an error: the case → the bytes that the caller sends, the expected start of the response.
ANSWERED = {
    "unknown method": (b"Reboot\n\0\0\0\0", b"INVALID_ARGUMENT\n"),
    "private method": (b"__init__\n\0\0\0\0", b"INVALID_ARGUMENT\n"),
    "invalid message": (b"Lease\n\0\0\0\x02\x0a\x7f", b"INVALID_ARGUMENT\n"),
}


@pytest.mark.parametrize("said", [*SAID, *ANSWERED])
def test_invalid_requests_do_not_stop_the_server(server, path, said):
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(30)
        caller.connect(str(path))
        caller.sendall(SAID[said] if said in SAID else ANSWERED[said][0])
        caller.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while part := caller.recv(4096):
                answer += part
        except ConnectionResetError:
            pass  # The server closed the connection before it had read everything that the caller sent.
    assert answer.startswith(ANSWERED[said][1] if said in ANSWERED else b"")
    assert bool(answer) is (said in ANSWERED)
    assert ask(path).version, "the server still responds to a valid request"


def test_silent_callers_are_disconnected(path, service, monkeypatch):
    monkeypatch.setattr(admin_socket, "SILENT_S", 0.2)
    server = Server(path, service)
    silent = [socket.socket(socket.AF_UNIX) for _number in range(2 * admin_socket.MOST_CALLS)]
    try:
        for one in silent:
            one.connect(str(path))
        assert ask(path).version
    finally:
        for one in silent:
            one.close()
        server.stop()


def test_number_of_concurrent_calls_is_limited(server, service, path):
    service.gate.clear()
    answers: list[int] = []
    callers = [
        threading.Thread(target=lambda: answers.append(len(ask(path, 60).version)), daemon=True)
        for _number in range(admin_socket.MOST_CALLS + 2)
    ]
    for one in callers:
        one.start()
    until(lambda: service.inside == admin_socket.MOST_CALLS, "the maximum number of running calls")
    # The pause gives the server time to start one call too many. On a slow machine the pause may be too short to show
    # such a fault, but it never causes a wrong failure.
    time.sleep(0.2)
    assert service.inside == admin_socket.MOST_CALLS
    service.gate.set()
    for one in callers:
        one.join(60)
    assert len(answers) == len(callers)


def test_stop_does_not_wait_for_running_calls(server, service, path):
    service.gate.clear()
    for _number in range(admin_socket.MOST_CALLS):
        threading.Thread(target=request_without_answer, args=(path,), daemon=True).start()
    until(lambda: service.inside == admin_socket.MOST_CALLS, "the maximum number of running calls")
    ending = threading.Thread(target=server.stop, daemon=True)
    ending.start()
    ending.join(30)  # If stop waited for the running calls, it would block for 60 s.
    assert not ending.is_alive() and not path.exists()


def request_without_answer(path: Path) -> None:
    with contextlib.suppress(Fault):
        ask(path)


@pytest.mark.parametrize("why", ["caller killed", "caller timed out"])
def test_lease_ends_if_its_caller_is_gone(server, service, path, why):
    """A Lease call reserves a slice of a GPU. If the caller leaves while the service waits for the kubelet, the lease
    is released; a caller that stays keeps its lease.
    """
    kept = Client(path, 30.0).call("Lease", api.LeaseRequest()).allocation
    service.gate.clear()
    if why == "caller killed":
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))
            caller.sendall(b"Lease\n\0\0\0\0")
            until(lambda: service.inside == 2, "the start of the Lease call")
    else:
        with pytest.raises(Fault, match="no response to Lease"):
            Client(path, 0.1).call("Lease", api.LeaseRequest())
        until(lambda: service.inside == 2, "the start of the Lease call")
    service.gate.set()
    until(lambda: service.released, "the release of the lease")
    assert (kept, service.leased, service.released) == ("lease-0", ["lease-0", "lease-1"], ["lease-1"])


@pytest.mark.parametrize("what", ["no file descriptor", "no thread"])
def test_calls_are_served_once_descriptors_or_threads_are_available(path, service, monkeypatch, what):
    monkeypatch.setattr(admin_socket, "AGAIN_S", 0.01)
    refused = []

    class Scarce(socket.socket):
        def accept(self):
            if what == "no file descriptor" and len(refused) < 2 * admin_socket.MOST_CALLS:
                refused.append(what)
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    class Thread(threading.Thread):
        def start(self):
            if what == "no thread" and self.name == "admin call" and len(refused) < 2 * admin_socket.MOST_CALLS:
                refused.append(what)
                raise RuntimeError("can't start new thread")
            super().start()

    with monkeypatch.context() as patched:
        patched.setattr(admin_socket.socket, "socket", Scarce)
        patched.setattr(admin_socket.threading, "Thread", Thread)
        server = Server(path, service)
        try:
            for _number in range(2 * admin_socket.MOST_CALLS + 1):
                request_without_answer(path)
            assert len(refused) == 2 * admin_socket.MOST_CALLS
        finally:
            server.stop()
    assert service.inside


# columns: what is at the path of the socket; expected words of vgpuctl's error
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no socket", "does not exist: the plugin does not run"),
        ("socket without a server", "does not respond: "),
        ("regular file", "does not respond: "),
        ("server without a response", "no response to Status within 0 s"),
        ("gRPC server", "does not respond: no line end"),
    ],
)
def test_vgpuctl_names_the_fault_of_the_socket(path, what, text):
    listening = socket.socket(socket.AF_UNIX)
    answered: threading.Thread | None = None
    if what == "regular file":
        path.write_text("no socket")
    elif what != "no socket":
        listening.bind(str(path))
    if what in ("server without a response", "gRPC server"):
        listening.listen(1)
    if what == "gRPC server":

        def settings() -> None:
            caller = listening.accept()[0]
            # The first bytes that an HTTP/2 server sends: a SETTINGS frame.
            caller.sendall(struct.pack(">BHBBI", 0, 96, 4, 0, 0) + b"\0" * 96)
            caller.recv(4096)
            caller.close()

        answered = threading.Thread(target=settings, daemon=True)
        answered.start()
    if what == "socket without a server":
        listening.close()
    with pytest.raises(Fault) as found:
        ask(path, 0.3 if what == "server without a response" else 30)
    assert found.value.code == "UNAVAILABLE"
    assert text in str(found.value)
    assert str(path) in str(found.value)
    listening.close()
    if answered is not None:
        answered.join(30)


def test_socket_is_removed_at_stop_and_stale_socket_replaced(path, service):
    first = Server(path, service)
    first.stop()
    assert list(Path().iterdir()) == []
    for left in ("plugin.sock", "new.sock"):  # A killed program leaves the files of its sockets behind.
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(left)
    second = Server(path, service)
    assert ask(path).version
    second.stop()
    assert list(Path().iterdir()) == []


def test_vgpuctl_loads_no_grpc():
    """vgpuctl does not need grpc, and loading it would take most of a call's time."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import vgpu_plugin.ctl.main; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
