# SPDX-License-Identifier: Apache-2.0
"""Makes one certificate authority for the cluster, and a certificate for each program and user, with the command
openssl.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

DAYS = "30"
CURVE = ["ecparam", "-name", "prime256v1", "-genkey", "-noout"]


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


class Authority:
    """``ca.crt`` and its signed certificates in one folder. Each certificate is created once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if not self.certificate.exists():
            openssl(*CURVE, "-out", str(folder / "ca.key"))
            openssl(
                *("req", "-x509", "-new", "-key", str(folder / "ca.key"), "-subj", "/CN=kubebox", "-days", DAYS),
                *("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"),
                *("-out", str(self.certificate)),
            )
            # The key that signs service account tokens.
            openssl("genrsa", "-out", str(folder / "tokens.key"), "2048")

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def token_key(self) -> Path:
        return self.folder / "tokens.key"

    def pair(self, name: str, subject: str, names: str = "") -> tuple[Path, Path]:
        """Returns (certificate, key) of a subject such as ``/O=system:nodes/CN=system:node:a``, for servers and
        clients.

        ``names``: addresses of a server, such as ``IP:10.96.0.1,DNS:localhost``.
        """
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        if not certificate.exists():
            extensions = self.folder / f"{name}.ext"
            lines = ["keyUsage=digitalSignature", "extendedKeyUsage=serverAuth,clientAuth"]
            extensions.write_text("\n".join(lines + ([f"subjectAltName={names}"] if names else [])) + "\n")
            request = str(self.folder / f"{name}.csr")
            openssl(*CURVE, "-out", str(key))
            openssl("req", "-new", "-key", str(key), "-subj", subject, "-out", request)
            openssl(
                *("x509", "-req", "-in", request, "-CA", str(self.certificate), "-CAkey", str(self.folder / "ca.key")),
                *("-CAcreateserial", "-days", DAYS, "-extfile", str(extensions), "-out", str(certificate)),
            )
        return certificate, key

    def kubeconfig(self, name: str, server: str, subject: str, names: str = "") -> Path:
        """Writes a kubeconfig for ``subject``. ``names``: addresses, if a server uses the certificate too."""
        certificate, key = self.pair(name, subject, names)
        path = self.folder / f"{name}.conf"
        cluster = {"server": server, "certificate-authority": str(self.certificate)}
        user = {"client-certificate": str(certificate), "client-key": str(key)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "kubebox", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "kubebox", "context": {"cluster": "kubebox", "user": name}}],
            "current-context": "kubebox",
        }
        path.write_text(yaml.safe_dump(content))
        return path
