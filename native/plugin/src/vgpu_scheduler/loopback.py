# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 for the kube-scheduler beside us, which asks three times for each pod.

A general server costs more for each of these calls than the answer itself, so requests are taken from the socket here:
one after the other on a connection, with a Content-Length, and an answer in one write. What another server would do for
strangers (chunked bodies, TLS, compression) has no place on a loopback address; the webhook has such a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple

MAX_HEAD = 32 << 10
HEAD = "HEAD"
JSON, TEXT = "application/json", "text/plain; charset=utf-8"


class Answer(NamedTuple):
    status: int
    body: bytes
    kind: str = JSON


# (method, path without its query, body) → the answer, now or later. It raises nothing.
Handle = Callable[[str, str, bytes], "Answer | Awaitable[Answer]"]


class Head(NamedTuple):
    method: str
    path: str
    length: int
    keep: bool
    goes_on: bool  # the client waits for a 100 before it sends the body


class BadHead(Exception):
    """A request that cannot be read: its status and a sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.answer = say(status, text)


def say(status: int, text: str) -> Answer:
    return Answer(status, (text + "\n").encode(), TEXT)


class Loopback:
    def __init__(self, handle: Handle, max_body: int, shutdown: float) -> None:
        """``shutdown``: seconds in which answers that are on the way may still come."""
        self.handle, self.max_body, self._shutdown = handle, max_body, shutdown
        self.connections: set[Connection] = set()
        self.late: set[asyncio.Task[None]] = set()
        self.ends = False
        self._server: asyncio.Server | None = None
        self.addresses: list[tuple[str, int]] = []

    async def start(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), host or None, port)
        self.addresses = [one.getsockname() for one in self._server.sockets]

    async def cleanup(self) -> None:
        if self._server is not None:
            self._server.close()
        # What waits for an answer ends with it. The others end now: a bind that came in the meantime would be cut off.
        self.ends = True
        for one in list(self.connections):
            if not one.busy:
                one.close()
        if self.late:
            await asyncio.wait(self.late, timeout=self._shutdown)
        for task in list(self.late):
            task.cancel()
        for one in list(self.connections):
            one.close()


class Connection(asyncio.Protocol):
    def __init__(self, server: Loopback) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._head: Head | None = None
        self.busy = self._ended = False
        # Bytes of a body that nobody reads; the connection ends after them. None: it does not end.
        self._lost: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections.add(self)
        # An answer is one write, and the client waits for it.
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, _fault: Exception | None) -> None:
        self._server.connections.discard(self)
        self._transport = None

    def eof_received(self) -> bool:
        """Whether the connection stays open: for an answer that is on the way, and no longer."""
        self._ended = True
        return self.busy

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._lost is not None:
            self._drop(len(data))
            return
        self._buffer += data
        while not self.busy and self._lost is None and self._transport is not None and self._one():
            pass

    def _one(self) -> bool:
        """Answer the first request, once it is whole. Returns whether another may be looked for."""
        try:
            head = self._head or self._take_head()
        except BadHead as fault:
            self._write(fault.answer, keep=False)
            self._lose(0)
            return False
        if head is None:
            return False
        if head.length > self._server.max_body:
            text = f"{head.path}: expected a body of at most {self._server.max_body} bytes"
            self._write(say(413, text), keep=False)
            self._lose(head.length)
            return False
        if len(self._buffer) < head.length:
            if head.goes_on and self._head is None and self._transport is not None:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._head = head
            return False
        body = bytes(self._buffer[: head.length])
        del self._buffer[: head.length]
        self._head = None
        found = self._server.handle("GET" if head.method == HEAD else head.method, head.path, body)
        if isinstance(found, Answer):
            return self._end(head, found)
        self.busy = True
        if self._transport is not None:
            self._transport.pause_reading()
        task = asyncio.ensure_future(self._later(head, found))
        self._server.late.add(task)
        task.add_done_callback(self._server.late.discard)
        return False

    async def _later(self, head: Head, found: Awaitable[Answer]) -> None:
        answer = await found
        self.busy = False
        # The client may be gone: what was asked for is done all the same.
        if self._transport is None or not self._end(head, answer):
            return
        self._transport.resume_reading()
        self.data_received(b"")

    def _end(self, head: Head, answer: Answer) -> bool:
        keep = head.keep and not self._ended and not self._server.ends
        self._write(answer, keep, head.method != HEAD)
        if not keep:
            self.close()
        return keep

    def _write(self, answer: Answer, keep: bool, whole: bool = True) -> None:
        """``whole``: with its body, which nobody expects who asked for the head alone."""
        if self._transport is None or self._transport.is_closing():
            return
        lines = f"HTTP/1.1 {answer.status} {phrase(answer.status)}\r\nContent-Type: {answer.kind}\r\n"
        lines += f"Content-Length: {len(answer.body)}\r\n" + ("\r\n" if keep else "Connection: close\r\n\r\n")
        self._transport.write(lines.encode() + (answer.body if whole else b""))

    def _lose(self, length: int) -> None:
        """Read and drop the rest of a body: to close on unread bytes would reset the connection under the answer."""
        self._lost = length
        self._drop(len(self._buffer))
        self._buffer.clear()

    def _drop(self, count: int) -> None:
        assert self._lost is not None
        self._lost -= count
        if self._lost <= 0:
            self.close()

    def _take_head(self) -> Head | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end > MAX_HEAD or (end < 0 and len(self._buffer) > MAX_HEAD):
            raise BadHead(431, f"expected a head of at most {MAX_HEAD} bytes")
        if end < 0:
            return None
        head = read_head(bytes(self._buffer[:end]))
        del self._buffer[: end + 4]
        return head


def phrase(status: int) -> str:
    """Empty for what no standard knows: a status of the API server is handed on, and it may be that of a proxy."""
    with contextlib.suppress(ValueError):
        return HTTPStatus(status).phrase
    return ""


def read_head(text: bytes) -> Head:
    """A request's head without its empty line. Raises BadHead."""
    first, *lines = text.split(b"\r\n")
    words = first.split(b" ")
    if len(words) != 3 or words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadHead(400, "expected a request of HTTP/1.1")
    length, keep, goes_on = -1, words[2] == b"HTTP/1.1", False
    for line in lines:
        name, colon, value = line.partition(b":")
        name, value = name.lower(), value.strip()
        if not colon or name != name.strip():
            raise BadHead(400, "expected header fields, each with a name and a colon")
        if name == b"content-length":
            # More digits than any body has, or two lengths: two readers would see two requests.
            if not value.isdigit() or len(value) > 12 or length not in (-1, int(value)):
                raise BadHead(400, "expected one Content-Length, a whole number")
            length = int(value)
        elif name == b"transfer-encoding":
            raise BadHead(411, "expected a Content-Length, found a Transfer-Encoding")
        elif name == b"connection":
            keep = value.lower() != b"close" and (keep or value.lower() == b"keep-alive")
        elif name == b"expect":
            goes_on = value.lower() == b"100-continue"
    path = words[1].decode(errors="replace").partition("?")[0]
    return Head(words[0].decode(errors="replace"), path, max(length, 0), keep, goes_on)
