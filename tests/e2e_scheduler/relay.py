# SPDX-License-Identifier: Apache-2.0
"""Relays connections to a server and delays what the server sends, as a slow network does."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit


class Relay:
    def __init__(self, server: str, seconds: float) -> None:
        """``server``: URL; ``seconds``: delay of each piece of data from the server."""
        where = urlsplit(server)
        self._to, self._seconds = (where.hostname or "", where.port or 443), seconds
        self._listener = socket.create_server((self._to[0], 0))
        self.url = f"{where.scheme}://{self._to[0]}:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_raised: Any) -> None:
        # Without shutdown the thread in accept() would keep the listener open.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _address = self._listener.accept()
                server = socket.create_connection(self._to)
                for source, sink, seconds in ((client, server, 0.0), (server, client, self._seconds)):
                    threading.Thread(target=self._carry, args=(source, sink, seconds), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket, seconds: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(seconds)
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
