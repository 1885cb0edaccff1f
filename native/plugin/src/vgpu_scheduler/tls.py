# SPDX-License-Identifier: Apache-2.0
"""Installs the webhook's certificates in the Secret, in the webhook configurations and on this program's socket. Every
replica checks them once a minute. If two replicas renew them at once, the second uses what the first wrote.
"""

from __future__ import annotations

import base64
import logging
import ssl
import tempfile
from collections.abc import Sequence
from typing import Any

from . import certificates
from .api import Api, ApiError
from .certificates import Certificates

log = logging.getLogger(__name__)

FIELDS = {
    "ca.crt": "authority",
    "ca.key": "authority_key",
    "tls.crt": "certificate",
    "tls.key": "key",
    "bundle.crt": "bundle",
}
KINDS = ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")


class Tls:
    def __init__(self, api: Api, secret: str, names: Sequence[str], configurations: Sequence[str]) -> None:
        """``secret`` is namespace/name; ``configurations`` are the names of webhook configurations whose CA bundle must
        contain our authority.
        """
        self._api, self._names, self._configurations = api, list(names), list(configurations)
        self._namespace, _slash, self._secret = secret.partition("/")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._now: Certificates | None = None

    async def keep(self) -> None:
        """Renews and installs the certificates where needed. Raises ApiError if the Secret or a webhook configuration
        cannot be read or written.
        """
        found = await self._ensure()
        await self._trust(found.bundle)
        if found != self._now:
            load(self.context, found)
            self._now = found

    async def _ensure(self) -> Certificates:
        path = f"/api/v1/namespaces/{self._namespace}/secrets"
        for _attempt in range(3):
            try:
                secret = await self._api.json("GET", f"{path}/{self._secret}")
            except ApiError as fault:
                if fault.status != 404:
                    raise
                secret = {}
            old = read(secret)
            new = certificates.renewed(old, self._names)
            if new == old:
                return new
            body = self._body(secret, new)
            try:
                if secret:
                    await self._api.call("PUT", f"{path}/{self._secret}", body)
                else:
                    await self._api.call("POST", path, body)
            except ApiError as fault:
                if fault.status == 409:
                    continue
                raise
            log.info("new certificates in secret %s/%s", self._namespace, self._secret)
            return new
        raise ApiError(f"secret {self._namespace}/{self._secret}: other programs changed it during each attempt")

    def _body(self, secret: dict[str, Any], new: Certificates) -> dict[str, Any]:
        metadata = secret.get("metadata") or {"name": self._secret, "namespace": self._namespace}
        data = {name: base64.b64encode(getattr(new, field)).decode() for name, field in FIELDS.items()}
        return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}

    async def _trust(self, bundle: bytes) -> None:
        wanted = base64.b64encode(bundle).decode()
        for kind in KINDS:
            for name in self._configurations:
                await self._trust_one(f"/apis/admissionregistration.k8s.io/v1/{kind}/{name}", wanted)

    async def _trust_one(self, path: str, wanted: str) -> None:
        for _attempt in range(3):
            try:
                found = await self._api.json("GET", path)
                webhooks = found.get("webhooks") or []
                if all((one.get("clientConfig") or {}).get("caBundle") == wanted for one in webhooks):
                    return
                for one in webhooks:
                    one.setdefault("clientConfig", {})["caBundle"] = wanted
                version = (found.get("metadata") or {}).get("resourceVersion")
                # The API server refuses the patch if the object has another resource version by now. So a list of
                # webhooks that another program has changed meanwhile is not overwritten.
                await self._api.call("PATCH", path, {"metadata": {"resourceVersion": version}, "webhooks": webhooks})
                log.info("%s trusts the current certificates", path)
                return
            except ApiError as fault:
                if fault.status == 404:
                    return
                if fault.status != 409:
                    raise
        raise ApiError(f"{path}: other programs changed it during each attempt")


def read(secret: dict[str, Any]) -> Certificates | None:
    """Returns the certificates of the Secret; None if a field is missing or invalid, so that all are created again."""
    data = secret.get("data") or {}
    try:
        found = Certificates(**{field: base64.b64decode(data[name]) for name, field in FIELDS.items()})
        certificates.refuse_broken(found)
        load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), found)
    except (KeyError, ValueError, TypeError, ssl.SSLError):
        return None
    return found


def load(context: ssl.SSLContext, found: Certificates) -> None:
    """Loads the certificate into the context. A socket that already listens presents it from the next handshake on."""
    with tempfile.NamedTemporaryFile("wb", suffix=".pem") as both:
        both.write(found.certificate + found.key)
        both.flush()
        context.load_cert_chain(both.name)
