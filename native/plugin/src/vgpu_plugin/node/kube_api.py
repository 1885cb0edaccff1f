# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes API as this program needs it: four calls over HTTPS, with the credentials of a kubeconfig file or of
the pod's service account.

The library ``kubernetes`` takes 60 MB and a second to import; a node program asks for one node. Imported only where an
API server is named.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import json
import os
import socket
import ssl
import tempfile
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Fatal

IN_CLUSTER = "in-cluster"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 30.0
# The server ends a watch by itself; an answer that is overdue means a connection that is dead.
WATCH_S, WATCH_GRACE_S = 240, 30.0
STRATEGIC = "application/strategic-merge-patch+json"
LONGEST_LINE = 4 << 20


class ApiError(Exception):
    """The server did not do what it was asked; ``status`` is HTTP's, 0 where there was no answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Access:
    """How the server is reached. Files are read anew for each connection, for credentials are rotated in place."""

    server: str
    ca: Path | bytes | None = None
    verify: bool = True
    server_name: str = ""
    token: Path | str = ""
    certificate: Path | bytes | None = None
    key: Path | bytes | None = None

    def authorization(self) -> str:
        token = self.token.read_text() if isinstance(self.token, Path) else self.token
        return f"Bearer {token.strip()}" if token.strip() else ""

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        elif self.ca is not None:
            text = self.ca.read_text() if isinstance(self.ca, Path) else self.ca.decode()
            context = ssl.create_default_context(cadata=text)
        if self.certificate is not None and self.key is not None:
            with _as_file(self.certificate) as certificate, _as_file(self.key) as key:
                context.load_cert_chain(certificate, key)
        return context


@contextlib.contextmanager
def _as_file(what: Path | bytes) -> Iterator[Path]:
    """OpenSSL takes a client's certificate from a file alone."""
    if isinstance(what, Path):
        yield what
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(what)
        file.flush()
        yield Path(file.name)


def access(kubeconfig: str, service_account: Path = SERVICE_ACCOUNT) -> Access:
    """``kubeconfig``: a file, or ``in-cluster``. Raises Fatal naming the file and the place in it."""
    if kubeconfig == IN_CLUSTER:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise Fatal(f"--kubeconfig {IN_CLUSTER}: KUBERNETES_SERVICE_HOST is not set; this is no pod")
        host = f"[{host}]" if ":" in host else host
        return Access(f"https://{host}:{port}", service_account / "ca.crt", token=service_account / "token")
    path = Path(kubeconfig)
    import yaml

    try:
        config = yaml.safe_load(path.read_text())
    except OSError as fault:
        raise Fatal(f"{path}: {fault.strerror}; --kubeconfig names the file that says how the API is reached") from None
    except (yaml.YAMLError, ValueError) as fault:
        raise Fatal(f"{path}: not a kubeconfig file: {' '.join(str(fault).split())}") from None
    return _of_kubeconfig(path, config)


def _of_kubeconfig(path: Path, config: Any) -> Access:
    context = _named(path, config, "contexts", "context", (config or {}) if isinstance(config, dict) else {})
    cluster = _named(path, config, "clusters", "cluster", context)
    user = _named(path, config, "users", "user", context) if context.get("user") else {}
    for section, key in ((user, "exec"), (user, "auth-provider"), (cluster, "proxy-url")):
        if section.get(key):
            raise Fatal(f"{path}: {key} is not supported here; give a token or a client certificate")
    token = user.get("token") or (path.parent / user["tokenFile"] if user.get("tokenFile") else "")
    server = str(cluster.get("server") or "")
    if urllib.parse.urlsplit(server).scheme not in ("http", "https"):
        raise Fatal(f'{path}: clusters: server: expected https://host:port, found "{server}"')
    return Access(
        server.rstrip("/"),
        _data(path, cluster, "certificate-authority"),
        not cluster.get("insecure-skip-tls-verify"),
        str(cluster.get("tls-server-name") or ""),
        token,
        _data(path, user, "client-certificate"),
        _data(path, user, "client-key"),
    )


def _named(path: Path, config: Any, many: str, one: str, holder: dict[str, Any]) -> dict[str, Any]:
    """The entry of a list that the context, or current-context, names."""
    wanted = holder.get("current-context" if one == "context" else one)
    entries = config.get(many) if isinstance(config, dict) else None
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("name") == wanted and isinstance(entry.get(one), dict):
            found: dict[str, Any] = entry[one]
            return found
    raise Fatal(f'{path}: {many}: no entry named "{wanted}"; this is no whole kubeconfig file')


def _data(path: Path, section: dict[str, Any], key: str) -> Path | bytes | None:
    if text := section.get(f"{key}-data"):
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError, TypeError):
            raise Fatal(f"{path}: {key}-data: not base64") from None
    return path.parent / section[key] if section.get(key) else None


class Api:
    """One connection a call. Every fault is an ApiError."""

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

    def patch(self, path: str, body: dict[str, Any], kind: str = STRATEGIC) -> dict[str, Any]:
        return self._call("PATCH", path, body, kind)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._call("POST", path, body)

    def watch(self, path: str) -> Iterator[dict[str, Any]]:
        """The events of a watch until the server ends it."""
        with self._reported(), contextlib.closing(self._connect(WATCH_S + WATCH_GRACE_S)) as connection:
            answer = self._ask(connection, "GET", f"{path}&watch=true&timeoutSeconds={WATCH_S}")
            try:
                while line := answer.readline(LONGEST_LINE):
                    event = json.loads(line)
                    if not isinstance(event, dict):
                        raise ApiError(0, f"{self.server}: an event of a watch is no object")
                    yield event
            finally:
                self._watched = None

    def stop(self) -> None:
        """Ends a watch from another thread."""
        watched = self._watched
        if watched is not None:
            with contextlib.suppress(OSError):
                watched.shutdown(socket.SHUT_RDWR)

    def _call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> dict[str, Any]:
        with self._reported(), contextlib.closing(self._connect(self._timeout)) as connection:
            found = json.loads(self._ask(connection, method, path, body, kind).read())
        if not isinstance(found, dict):
            raise ApiError(0, f"{method} {self.server}{path}: the answer is no object")
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
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, kind: str = ""
    ) -> http.client.HTTPResponse:
        headers = {"Accept": "application/json", "User-Agent": "vgpu-device-plugin"}
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
