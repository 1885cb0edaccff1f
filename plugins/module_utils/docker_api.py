# SPDX-License-Identifier: Apache-2.0
"""What a running Docker daemon says of itself, asked over its socket: no client program, no library."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

SOCKET = "/run/docker.sock"
# What of the daemon's long answer the plan compares.
FIELDS = ("ServerVersion", "DefaultRuntime", "Runtimes", "CgroupDriver", "LiveRestoreEnabled", "ContainersRunning")


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("docker", timeout=timeout)
        self.socket_path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.socket_path)


def info(path: str = SOCKET, timeout: float = 10.0) -> dict[str, Any] | None:
    """The fields of ``docker info`` that matter here, None where no daemon answers."""
    connection = _SocketConnection(path, timeout)
    try:
        connection.request("GET", "/info")
        answer = json.loads(connection.getresponse().read().decode("utf-8"))
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return {field: answer.get(field) for field in FIELDS} if isinstance(answer, dict) else None
