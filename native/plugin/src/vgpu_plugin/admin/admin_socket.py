# SPDX-License-Identifier: Apache-2.0
"""The Unix socket over which vgpuctl sends requests to the device plugin. Only root may use it. Each connection carries
one call.

The socket does not use gRPC, for two reasons. A second gRPC server would poll for calls every 200 ms, which is a
quarter of an idle plugin's processor time. And vgpuctl would load all of gRPC for a single request.

A request is the name of a method, a line end, the length of the message (four bytes, big endian), and the message. A
response is OK or the name of a gRPC status, a line end, the length, and a message or an error text. The messages are
defined in admin.proto.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message

from .._proto import admin_pb2 as api
from ..errors import BadRequest, NoFreeSlice, NotNow, PluginError, Refused, Unknown

METHODS: Mapping[str, tuple[type[Message], type[Message]]] = {
    "Status": (api.StatusRequest, api.StatusResponse),
    "Lease": (api.LeaseRequest, api.LeaseResponse),
    "Release": (api.ReleaseRequest, api.ReleaseResponse),
    "Forget": (api.ForgetRequest, api.ForgetResponse),
    "Usage": (api.UsageRequest, api.UsageResponse),
    "Watch": (api.WatchRequest, api.WatchResponse),
    "Resize": (api.ResizeRequest, api.ResizeResponse),
}
OK, INTERNAL, UNAVAILABLE, EXHAUSTED, NOT_FOUND = "OK", "INTERNAL", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "NOT_FOUND"
CODES = (
    (BadRequest, "INVALID_ARGUMENT"),
    (Refused, "FAILED_PRECONDITION"),
    (NotNow, UNAVAILABLE),
    (NoFreeSlice, EXHAUSTED),
    (Unknown, NOT_FOUND),
)
MOST_CALLS = 4
# The timeout for a client that sends nothing, in seconds, the maximum bytes of a method's name, and the maximum bytes
# of a message.
SILENT_S, LONGEST_NAME, LONGEST_CALL = 10.0, 64, 1 << 16
AGAIN_S = 1.0
EARLY = "new.sock"

log = logging.getLogger(__name__)


class Fault(Exception):
    """Raised in vgpuctl if the plugin returns an error or does not respond. ``code`` is the name of a gRPC status."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Server:
    """Accepts calls and runs each in a thread of its own. ``service`` has a method for each name in METHODS; the method
    takes the request message, and returns the response message or raises PluginError.
    """

    def __init__(self, path: Path, service: Any) -> None:
        self._path, self._service = path, service
        self._free = threading.Semaphore(MOST_CALLS)
        self._stopping = threading.Event()
        self._socket, self._served = _listen(path)
        self._thread = threading.Thread(target=self._serve, name="admin", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Creates the socket again if its file was deleted or replaced. Raises OSError."""
        if self._served == _identity(self._path):
            return
        log.warning("the socket %s was deleted or replaced; it is created again", self._path)
        former = self._socket
        self._socket, self._served = _listen(self._path)
        with contextlib.suppress(OSError):
            former.shutdown(socket.SHUT_RDWR)  # Wakes the thread that waits in accept.

    def stop(self) -> None:
        """Accepts no more calls. It does not wait for calls in progress, because a call that creates a lease (slices
        reserved for a client) may take most of a minute.
        """
        self._stopping.set()
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # Wakes the thread that waits in accept.
        self._free.release()  # Wakes the same thread if it waits for one of the MOST_CALLS calls to end.
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            self._free.acquire()
            caller, listening = None, self._socket
            try:
                caller = listening.accept()[0]
                threading.Thread(target=self._answer, args=(caller,), name="admin call", daemon=True).start()
            except (OSError, RuntimeError) as fault:
                if caller is not None:
                    caller.close()
                if self._stopping.is_set():
                    return
                if listening is not self._socket:
                    listening.close()
                    self._free.release()
                    continue
                # The process has no free file descriptor or thread now. Waiting clients stay in the socket's queue and
                # are served later.
                log.warning("%s: a call cannot be accepted: %s; trying again in %.0f s", self._path, fault, AGAIN_S)
                self._free.release()
                self._stopping.wait(AGAIN_S)

    def _answer(self, caller: socket.socket) -> None:
        try:
            with caller:
                caller.settimeout(SILENT_S)
                method = _line(caller)
                code, body = self._call(method, _body(caller, LONGEST_CALL))
                try:
                    caller.sendall(_frame(code, body))
                except OSError:
                    if method == "Lease" and code == OK:
                        self._end_unheard(body)
                    raise
        except (OSError, ValueError) as fault:
            log.debug("a client of %s disconnected or sent no valid call: %s", self._path, fault)
        finally:
            self._free.release()

    def _end_unheard(self, answer: bytes) -> None:
        """Ends a lease (slices reserved for this client) if its client disconnected before it received the response.
        Creating a lease may take seconds. A client that was killed or gave up meanwhile does not know its lease and
        cannot release it.
        """
        lease = api.LeaseResponse.FromString(answer).allocation
        log.warning("lease %s ends now, because its client is gone", lease)
        self._call("Release", api.ReleaseRequest(allocation=lease).SerializeToString())

    def _call(self, method: str, data: bytes) -> tuple[str, bytes]:
        try:
            if method not in METHODS:
                raise BadRequest(
                    f'this plugin does not know the call "{method}"; use the vgpuctl of the plugin\'s version'
                )
            try:
                request = METHODS[method][0].FromString(data)
            except DecodeError as fault:
                raise BadRequest(f"{method}: the message cannot be read: {fault}") from None
            call: Callable[[Message], Message] = getattr(self._service, method)
            return OK, call(request).SerializeToString()
        except PluginError as fault:
            log.warning("%s: %s", method, fault)
            code = next((code for kind, code in CODES if isinstance(fault, kind)), "UNKNOWN")
            return code, str(fault).encode()
        except Exception as fault:
            log.exception("%s failed", method)
            return INTERNAL, f"{method} failed in the plugin: {fault!r}; see its log".encode()


def _listen(path: Path) -> tuple[socket.socket, tuple[int, int]]:
    """Returns a listening socket, and the device and inode of its file. Raises OSError."""
    # The socket listens before its file is renamed to the final name, so a client that finds the file is served. The
    # temporary name is as long as the final one at most, because the length of a socket's path is limited (unix(7)).
    early = path.with_name(EARLY)
    early.unlink(missing_ok=True)
    out = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        out.bind(str(early))
        os.chmod(early, 0o600)
        out.listen(16)
        os.replace(early, path)
        return out, _identity(path)
    except OSError:
        out.close()
        raise


def _identity(path: Path) -> tuple[int, int]:
    """Returns device and inode of a file, or zeros if the file does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


class Client:
    """Sends calls of vgpuctl to the plugin's socket. Every call may raise Fault."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path, self._timeout_s = path, timeout_s

    def call(self, method: str, request: Message) -> Any:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as channel:
                channel.settimeout(self._timeout_s)
                channel.connect(str(self._path))
                channel.sendall(_frame(method, request.SerializeToString()))
                code, body = _line(channel), _body(channel)
                if code == OK:
                    return METHODS[method][1].FromString(body)
        except FileNotFoundError:
            text = f"{self._path} does not exist: the plugin does not run, or waits for the driver"
            again = "a running plugin creates it again within 10 s; see: systemctl status vgpu-device-plugin"
            raise Fault(UNAVAILABLE, f"{text}; {again}") from None
        except PermissionError:
            raise Fault(
                "PERMISSION_DENIED", f"only root may use {self._path}: run this command as root, or with sudo"
            ) from None
        except TimeoutError:
            raise Fault(UNAVAILABLE, f"{self._path}: no response to {method} within {self._timeout_s:.0f} s") from None
        except (OSError, ValueError, DecodeError) as fault:
            text = f"{self._path} does not respond: {fault}; see: systemctl status vgpu-device-plugin"
            raise Fault(UNAVAILABLE, text) from None
        raise Fault(code, body.decode(errors="replace"))


def _frame(word: str, body: bytes) -> bytes:
    return word.encode() + b"\n" + struct.pack(">I", len(body)) + body


def _line(channel: socket.socket) -> str:
    """Reads a line and returns its text without the line end. Raises OSError, or ValueError if the text is too long or
    not ASCII."""
    out = b""
    while not out.endswith(b"\n"):
        out += _exactly(channel, 1)
        if len(out) > LONGEST_NAME:
            raise ValueError(f"no line end in {LONGEST_NAME} bytes")
    return out[:-1].decode("ascii")


def _body(channel: socket.socket, most: int | None = None) -> bytes:
    length = struct.unpack(">I", _exactly(channel, 4))[0]
    if most is not None and length > most:
        raise ValueError(f"found a message of {length} bytes, expected at most {most}")
    return _exactly(channel, length)


def _exactly(channel: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = channel.recv(min(length, 1 << 16))
        if not part:
            raise ValueError("the connection ended in the middle of a message")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
