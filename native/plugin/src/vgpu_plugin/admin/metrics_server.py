# SPDX-License-Identifier: Apache-2.0
"""The HTTP server for Prometheus: it serves GET /metrics on one address."""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

# Errors after which a later attempt may succeed: another program uses the address now, or the host does not have the
# address yet.
MAY_END = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
REQUEST_S = 10

log = logging.getLogger(__name__)


class Server:
    """Serves the metrics. ``make`` returns their text. If the address cannot be used yet, each call of ``renew`` tries
    again.
    """

    def __init__(self, address: str, make: Callable[[], str]) -> None:
        """``address`` is host:port, [v6]:port, or :port for all addresses. Raises OSError or ValueError."""
        host, _colon, port = address.rpartition(":")
        if not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{address}: expected host:port, such as 127.0.0.1:9410")
        self._address = address
        self._make = make
        host = host.strip("[]")
        found = socket.getaddrinfo(host or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # IPv4 is preferred, because every scraper can reach it.
        found.sort(key=lambda one: one[0] != socket.AF_INET)
        self._family, self._bound_to = found[0][0], found[0][4]
        self._socket: socket.socket | None = None
        self._fault = ""
        self._waking, self._wake = socket.socketpair()
        self.renew()

    @property
    def port(self) -> int:
        """The port, or 0 while the server does not listen."""
        return int(self._socket.getsockname()[1]) if self._socket is not None else 0

    def notes(self) -> list[str]:
        """Returns the reason why metrics are not served; the list is empty if they are served."""
        return [self._fault] if self._fault else []

    def renew(self) -> None:
        """Starts listening if an earlier attempt failed. Raises OSError if the error is permanent."""
        if self._socket is not None:
            return
        try:
            self._socket = socket.create_server(self._bound_to[:2], family=self._family)
        except OSError as fault:
            if fault.errno not in MAY_END:
                raise
            if not self._fault:
                log.warning("metrics are not served until the address %s is free: %s", self._address, fault)
            self._fault = f"metrics are not served on {self._address} until it is free: {fault}"
            return
        if self._fault:
            log.info("metrics are served on %s", self._address)
            self._fault = ""
        threading.Thread(target=self._run, args=(self._socket,), name="metrics", daemon=True).start()

    def stop(self) -> None:
        self._wake.close()

    def _run(self, listening: socket.socket) -> None:
        """Serves until stopped. The HTTP server is imported at the first connection, because it needs a third of this
        program's memory and most nodes are never scraped.
        """
        server = None
        with listening, self._waking:
            while True:
                ready = select.select([listening, self._waking], [], [])[0]
                if self._waking in ready:
                    return
                if server is None:
                    server = _http_server(listening, self._make)
                server.handle_request()


def _http_server(listening: socket.socket, make: Callable[[], str]) -> Any:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_S

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "only /metrics is served")
                return
            try:
                body = make().encode()
            except Exception as fault:
                log.exception("the metrics could not be collected")
                self.send_error(500, str(fault))
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            log.debug(format, *args)

    server = ThreadingHTTPServer(listening.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    server.daemon_threads = True
    # If a client closes its connection before it is accepted, handle_request waits for the next connection. Without
    # this timeout ``stop`` would have no effect meanwhile.
    server.timeout = 1
    return server
