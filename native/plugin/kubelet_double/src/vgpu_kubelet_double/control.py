# SPDX-License-Identifier: Apache-2.0
"""The control socket of the kubelet double. Each line is a JSON object: a request from the double's command line, or
the response to it.
"""

from __future__ import annotations

import json
import socket
import socketserver
from pathlib import Path
from typing import Any

from .manager import Manager, PodError


def carry_out(manager: Manager, request: dict[str, Any]) -> dict[str, Any]:
    operation = request.pop("op", "")
    operations = {
        "run-pod": manager.run_pod,
        "delete-pod": manager.delete_pod,
        "restart-container": manager.restart_container,
        "state": manager.state,
    }
    try:
        if operation == "restart":
            manager.stop()
            manager.start()
            return {"ok": {"restarted": True}}
        if operation not in operations:
            raise PodError("BadRequest", f"unknown operation {operation!r}; known: {', '.join(sorted(operations))}")
        return {"ok": operations[operation](**request)}
    except PodError as fault:
        return {"error": str(fault), "reason": fault.reason}
    except TypeError as fault:
        return {"error": str(fault), "reason": "BadRequest"}


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            answer = carry_out(self.server.manager, json.loads(line))  # type: ignore[attr-defined]
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, manager: Manager) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.manager = manager
        super().__init__(str(path), _Handler)


def ask(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Sends one request. Raises OSError if no double listens on the socket."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(str(path))
        channel.sendall(json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = json.loads(channel.makefile("rb").readline())
        return answer
