# SPDX-License-Identifier: Apache-2.0
"""Tests the requests to docker's API socket, which need no docker client on the host. A small server on a socket of the
test answers them.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import docker_api

INFO = b'{"ServerVersion": "20.10.24", "DefaultRuntime": "nvidia", "Runtimes": {}, "Images": 3}'
ROWS = b'[{"Names": ["/zebra"]}, {"Names": [], "Id": "abc"}, {"Names": ["/ape", "/other/ape"]}]'


def serve(path: Path, answer: bytes) -> threading.Thread:
    """Serves one connection on the socket ``path`` with these bytes as the response."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen(1)

    def run() -> None:
        with server:
            line, _address = server.accept()
            with line:
                line.recv(65536)
                line.sendall(answer)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def http(body: bytes, status: bytes = b"200 OK", length: bool = True) -> bytes:
    head = b"HTTP/1.1 " + status + b"\r\nContent-Type: application/json\r\n"
    if length:
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    return head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"


# columns: response of the daemon; expected docker version (None: the response is invalid)
ANSWERS = [
    (http(INFO), "20.10.24"),
    (http(INFO, length=False), "20.10.24"),
    (http(b'{"message": "no"}', b"500 Internal Server Error"), None),
    (http(b"not json"), None),
    (http(b"[]"), None),
    (b"nonsense\r\n\r\n", None),
    (b"", None),
]


@pytest.mark.parametrize(("answer", "version"), ANSWERS)
def test_version_in_the_response_of_docker(tmp_path: Path, answer: bytes, version: str | None) -> None:
    path = tmp_path / "s"
    thread = serve(path, answer)
    found = docker_api.info(str(path))
    thread.join(10)
    assert (found and found["ServerVersion"]) == version
    if found:
        assert set(found) == set(docker_api.FIELDS)


def test_missing_socket_gives_no_response(tmp_path: Path) -> None:
    assert docker_api.info(str(tmp_path / "nothing")) is None
    assert docker_api.containers(str(tmp_path / "nothing")) is None


def test_names_of_running_containers(tmp_path: Path) -> None:
    serve(tmp_path / "s", http(ROWS))
    assert docker_api.containers(str(tmp_path / "s")) == ["abc", "ape", "zebra"]
