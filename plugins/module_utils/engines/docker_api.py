# SPDX-License-Identifier: Apache-2.0
"""Reads the state of a running Docker daemon over its socket, without a client program or library."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

# Seconds to wait for one reply. A daemon on a loaded node may take more than ten seconds, and the role restarts a
# daemon that does not answer.
ANSWER_S = 60.0
# Fields of the reply to /info that the plan (the list of coming changes) compares.
FIELDS = ("ServerVersion", "DefaultRuntime", "Runtimes", "CgroupDriver", "LiveRestoreEnabled", "ContainersRunning")


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("docker", timeout=timeout)
        self.socket_path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.socket_path)


def get(target: str, path: str, timeout: float = ANSWER_S) -> Any:
    """Returns the daemon's reply to a GET, None if no daemon answers or it refuses."""
    connection = _SocketConnection(path, timeout)
    try:
        connection.request("GET", target)
        answer = connection.getresponse()
        text = answer.read().decode("utf-8")
        return json.loads(text) if answer.status == 200 else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def info(path: str, timeout: float = ANSWER_S) -> dict[str, Any] | None:
    """Returns the fields of ``docker info`` that the plan compares, None if no daemon answers."""
    answer = get("/info", path, timeout)
    return {field: answer.get(field) for field in FIELDS} if isinstance(answer, dict) else None


def containers(path: str, timeout: float = ANSWER_S) -> list[str] | None:
    """Returns the names of the running containers, None if no daemon answers."""
    rows = get("/containers/json", path, timeout)
    if not isinstance(rows, list):
        return None
    return sorted(str((row.get("Names") or [row.get("Id", "")])[0]).lstrip("/") for row in rows)
