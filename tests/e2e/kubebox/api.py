# SPDX-License-Identifier: Apache-2.0
"""A client of the API server that sends and returns plain JSON objects."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

CALL_S = 30


class ApiError(Exception):
    """The API server refused a call; ``code`` is the HTTP status, the text is the server's message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Api:
    """Client of the API server with one client certificate."""

    def __init__(self, server: str, authority: Path, certificate: Path, key: Path) -> None:
        self.server = server
        self._context = ssl.create_default_context(cafile=str(authority))
        self._context.load_cert_chain(str(certificate), str(key))
        # The machine's proxy variables do not apply to addresses of the box (separate namespaces on this machine).
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._context)
        )

    def call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """Makes one call. Raises ApiError if the server refuses it, OSError if no server answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server + path, data, {"Content-Type": kind}, method=method)
        try:
            with self._opener.open(request, timeout=CALL_S) as answer:
                text = answer.read()
        except urllib.error.HTTPError as fault:
            text = fault.read()
            try:
                message = json.loads(text)["message"]
            except (ValueError, KeyError, TypeError):
                message = text.decode(errors="replace")
            raise ApiError(fault.code, message) from None
        try:
            return json.loads(text)
        except ValueError:
            return text.decode(errors="replace")

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def get_or_none(self, path: str) -> Any:
        try:
            return self.call("GET", path)
        except ApiError as fault:
            if fault.code == 404:
                return None
            raise

    def create(self, path: str, body: dict[str, Any]) -> Any:
        return self.call("POST", path, body)

    def delete(self, path: str, grace_s: int | None = None) -> Any:
        options = None if grace_s is None else {"gracePeriodSeconds": grace_s}
        return self.call("DELETE", path, options)

    def patch(self, path: str, body: Any) -> Any:
        return self.call("PATCH", path, body, "application/merge-patch+json")
