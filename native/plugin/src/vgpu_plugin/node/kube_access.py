# SPDX-License-Identifier: Apache-2.0
"""Credentials for the Kubernetes API, from a kubeconfig file or from the pod's service account. The clients of the
device plugin (``kube_api``) and of ``vgpu_scheduler`` use them.

This module is not shared with the Ansible collection. Shared modules may use only the standard library, which cannot
read YAML, the format of a kubeconfig. The Ansible modules read kubeconfigs with the library ``kubernetes``.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
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


@dataclass(frozen=True)
class Access:
    """Address and credentials of the API server. Their files are read at each call, because credentials are replaced in
    place when they are rotated.
    """

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
    """Yields a file that contains the data, because OpenSSL reads a client certificate only from files."""
    if isinstance(what, Path):
        yield what
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(what)
        file.flush()
        yield Path(file.name)


def read(kubeconfig: str, service_account: Path = SERVICE_ACCOUNT) -> Access:
    """Reads the credentials. ``kubeconfig`` is a file, or ``in-cluster`` for the pod's service account. Raises Fatal;
    its text names the file and the position in it.
    """
    if kubeconfig == IN_CLUSTER:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (service_account / "token").exists():
            missing = f"{service_account}/token" if host else "KUBERNETES_SERVICE_HOST"
            raise Fatal(f"{missing} is missing, so this program does not run in a pod; name a file with --kubeconfig")
        host = f"[{host}]" if ":" in host else host
        return Access(f"https://{host}:{port}", service_account / "ca.crt", token=service_account / "token")
    path = Path(kubeconfig)
    import yaml

    try:
        config = yaml.safe_load(path.read_text())
    except OSError as fault:
        raise Fatal(f"{path}: {fault.strerror}; --kubeconfig must name a readable kubeconfig file") from None
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
    """Returns the entry of the list ``many`` (clusters, users or contexts) whose name is in ``holder``: in the current
    context for clusters and users, in the kubeconfig itself for contexts.
    """
    wanted = holder.get("current-context" if one == "context" else one)
    entries = config.get(many) if isinstance(config, dict) else None
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("name") == wanted and isinstance(entry.get(one), dict):
            found: dict[str, Any] = entry[one]
            return found
    raise Fatal(f'{path}: {many}: no entry named "{wanted}"; the kubeconfig file is incomplete')


def _data(path: Path, section: dict[str, Any], key: str) -> Path | bytes | None:
    if text := section.get(f"{key}-data"):
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError, TypeError):
            raise Fatal(f"{path}: {key}-data: not base64") from None
    return path.parent / section[key] if section.get(key) else None
