# SPDX-License-Identifier: Apache-2.0
"""Tests the metrics server of the device plugin: responses to GET /metrics, and the start while another program uses
the configured port.
"""

from __future__ import annotations

import http.client
import logging
import socket
import subprocess
import sys
import threading

import pytest
from vgpu_plugin.admin.metrics_server import Server

from ..conftest import PLUGIN
from ..samples import until

TEXT = 'a{b="c"} 1\n'


@pytest.fixture
def serve():
    servers: list[Server] = []

    def make(address: str, text=lambda: TEXT) -> Server:
        servers.append(Server(address, text))
        return servers[-1]

    yield make
    for one in servers:
        one.stop()


def get(port: int, path: str = "/metrics", method: str = "GET", host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def broken() -> str:
    raise RuntimeError("no metrics today")


REQUESTS = [
    ("GET", "/metrics", 200),
    ("GET", "/metrics?name[]=x", 200),
    ("GET", "/", 404),
    ("GET", "/metricsx", 404),
    ("POST", "/metrics", 501),
]


@pytest.mark.parametrize(("method", "path", "status"), REQUESTS)
def test_http_status_depends_on_method_and_path(serve, method, path, status):
    found, body = get(serve("127.0.0.1:0").port, path, method)
    assert found == status
    assert (body == TEXT) == (status == 200)


def test_error_is_sent_as_a_response(serve):
    server = serve("127.0.0.1:0", broken)
    for _time in range(2):
        status, body = get(server.port)
        assert status == 500 and "no metrics today" in body


ADDRESSES = [("127.0.0.1:0", "127.0.0.1"), ("localhost:0", "localhost"), (":0", "127.0.0.1"), ("[::1]:0", "::1")]


@pytest.mark.parametrize(("address", "host"), ADDRESSES)
def test_server_listens_on_the_configured_address(serve, address, host):
    if host == "::1":
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
    assert get(serve(address).port, host=host) == (200, TEXT)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "no.such.host.invalid:9410", ":"])
def test_invalid_listen_address_is_an_error(address):
    with pytest.raises((OSError, ValueError)):
        Server(address, lambda: TEXT)


def test_server_listens_once_another_program_frees_the_port(serve, caplog):
    """A port that is in use must not stop the plugin: it starts without metrics and listens once the port is free."""
    other = socket.create_server(("127.0.0.1", 0))
    port = other.getsockname()[1]
    with caplog.at_level(logging.WARNING):
        server = serve(f"127.0.0.1:{port}")
        for _time in range(3):
            server.renew()
    assert len(caplog.records) == 1, "expected one log record for all attempts"
    assert [str(port) in one and "in use" in one for one in server.notes()] == [True]
    other.close()
    server.renew()
    assert server.notes() == []
    assert get(port) == (200, TEXT)


def test_silent_connection_does_not_delay_others(serve):
    server = serve("127.0.0.1:0")
    with socket.create_connection(("127.0.0.1", server.port)):
        assert get(server.port) == (200, TEXT)


def test_stop_frees_the_port():
    server = Server("127.0.0.1:0", lambda: TEXT)
    port = server.port
    assert get(port) == (200, TEXT)
    server.stop()
    until(lambda: not any(one.name == "metrics" for one in threading.enumerate()), "the end of the server thread")
    socket.create_server(("127.0.0.1", port)).close()


# A program that starts a metrics server and prints which modules are loaded before the server's first request.
LAZY = """
import sys
sys.path[:0] = {path!r}
from vgpu_plugin.admin.metrics_server import Server
server = Server("127.0.0.1:0", lambda: "")
print([one for one in ("http.server", "http.client", "email") if one in sys.modules])
server.stop()
"""


def test_server_modules_are_loaded_only_when_needed():
    script = LAZY.format(path=[str(PLUGIN / "src")])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
