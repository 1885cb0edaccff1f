# SPDX-License-Identifier: Apache-2.0
"""The calls of the Kubernetes API that this program needs, over HTTPS.

The library ``kubernetes`` is not used, because it takes 60 MB and a second to import, while the program on a node reads
only the objects of this node. This module is imported only if an API server is configured.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import urllib.parse
from collections.abc import Iterator
from typing import Any

from .kube_access import Access

TIMEOUT_S = 30.0
# The server ends a watch after WATCH_S. If it sends nothing for this time plus a grace time, the connection is dead.
WATCH_S, WATCH_GRACE_S = 240, 30.0
JSON = "application/json"
STRATEGIC = "application/strategic-merge-patch+json"
LONGEST_LINE = 4 << 20
# Content type that requests objects without spec and status. Such an object has a hundredth of the size of a pod.
METADATA = "application/json;as=PartialObjectMetadata{};g=meta.k8s.io;v=v1,application/json"


class ApiError(Exception):
    """The server returned an error or no response. ``status`` is the HTTP status, or 0 without a response."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Api:
    """A client of the API server. It opens one connection for each call, and every error is an ApiError."""

    def __init__(self, access: Access, timeout: float = TIMEOUT_S) -> None:
        self._access = access
        self._timeout = timeout
        self._url = urllib.parse.urlsplit(access.server)
        self._watched: socket.socket | None = None

    @property
    def server(self) -> str:
        return self._access.server

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path)

    def list_metadata(self, path: str) -> dict[str, Any]:
        """Returns a list with only the metadata of each item. The server may answer from its cache."""
        return self._call("GET", f"{path}&resourceVersion=0", accept=METADATA.format("List"))

    def patch(self, path: str, body: dict[str, Any], kind: str = STRATEGIC) -> dict[str, Any]:
        return self._call("PATCH", path, body, kind)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._call("POST", path, body)

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._call("PUT", path, body)

    def delete(self, path: str) -> dict[str, Any]:
        return self._call("DELETE", path)

    def watch(self, path: str, metadata: bool = False) -> Iterator[dict[str, Any]]:
        """Yields the events of a watch until the server ends it. With ``metadata``, the objects contain only their
        metadata.
        """
        accept = METADATA.format("") if metadata else JSON
        with self._reported(), contextlib.closing(self._connect(WATCH_S + WATCH_GRACE_S)) as connection:
            answer = self._ask(connection, "GET", f"{path}&watch=true&timeoutSeconds={WATCH_S}", accept=accept)
            try:
                while line := answer.readline(LONGEST_LINE):
                    event = json.loads(line)
                    if not isinstance(event, dict):
                        raise ApiError(0, f"{self.server}: expected an object as event of a watch")
                    yield event
            finally:
                self._watched = None

    def stop(self) -> None:
        """Ends a watch that another thread runs."""
        watched = self._watched
        if watched is not None:
            with contextlib.suppress(OSError):
                watched.shutdown(socket.SHUT_RDWR)

    def _call(self, method: str, path: str, body: Any = None, kind: str = JSON, accept: str = JSON) -> dict[str, Any]:
        with self._reported(), contextlib.closing(self._connect(self._timeout)) as connection:
            found = json.loads(self._ask(connection, method, path, body, kind, accept).read())
        if not isinstance(found, dict):
            raise ApiError(0, f"{method} {self.server}{path}: expected an object as response")
        return found

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException, ValueError) as fault:
            raise ApiError(0, f"{self.server}: {fault or type(fault).__name__}") from None

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "http":
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
            connection.connect()
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=timeout)
            plain = socket.create_connection((host, port or 443), timeout)
            try:
                name = self._access.server_name or host
                connection.sock = self._access.context().wrap_socket(plain, server_hostname=name)
            except BaseException:
                plain.close()
                raise
        return connection

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Any = None,
        kind: str = "",
        accept: str = JSON,
    ) -> http.client.HTTPResponse:
        headers = {"Accept": accept, "User-Agent": "vgpu-device-plugin"}
        if authorization := self._access.authorization():
            headers["Authorization"] = authorization
        if body is not None:
            headers["Content-Type"] = kind
        if "watch=true" in path:
            self._watched = connection.sock
        connection.request(method, self._url.path + path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status >= 300:
            text = answer.read(2000).decode(errors="replace")
            with contextlib.suppress(ValueError, AttributeError):
                text = json.loads(text).get("message") or text
            raise ApiError(answer.status, f"{method} {self.server}{path}: {answer.status}: {' '.join(text.split())}")
        return answer
