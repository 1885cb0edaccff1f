# SPDX-License-Identifier: Apache-2.0
"""A minimal REST client for the API server, with a timeout for each call.

The general Python client builds a tree of objects for every API object; a list of a hundred thousand pods would not fit
in 300 MB. This client reads lists in pages and parses only the fields that are needed.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import aiohttp
import msgspec

from vgpu_plugin.node.kube_access import Access

from . import wire

PAGE = 500
TIMEOUT = 4.0
# Two kinds of patch. MERGE replaces lists as a whole. STRATEGIC merges lists by key, which keeps the conditions that
# others wrote.
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
MAX_LINE = 8 << 20  # Maximum bytes of one event of a watch. Objects are smaller, because etcd stores at most 1.5 MiB.
T = TypeVar("T")


class ApiError(Exception):
    """An error response of the API server; ``status`` is its HTTP status."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class Unknown(ApiError):
    """The outcome of a call is unknown: there was no response, or a server error, so the request may have
    been applied.
    """


class Api:
    """The client. It is used as ``async with Api(access) as api``. ``calls`` counts requests by method and kind of
    object.
    """

    def __init__(self, access: Access, timeout: float = TIMEOUT) -> None:
        self._access, self._timeout = access, timeout
        # The TLS context is created once, because reading the system's certificates alone takes 20 ms.
        self._tls: ssl.SSLContext | bool = access.context() if access.server.startswith("https:") else True
        self._session: aiohttp.ClientSession | None = None
        self.calls: dict[tuple[str, str], int] = {}

    async def __aenter__(self) -> Api:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64))
        return self

    async def __aexit__(self, *_about: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(self, method: str, path: str, body: Any = None, **query: str | int) -> bytes:
        """Returns the body of a successful response. Raises ApiError with the server's message, or Unknown."""
        assert self._session is not None
        # The name of a pod, which stands before /status, must not become a label of a metric. Only a PATCH is sent to a
        # status; elsewhere the word is the name of a pod.
        words = (path.removesuffix("/status") if method == "PATCH" else path).split("/")
        kind = words[-1] if method in ("POST", "LIST") else words[-2]
        self.calls[method, kind] = self.calls.get((method, kind), 0) + 1
        kinds = {"Accept": "application/json"}
        if body is not None:
            patch = STRATEGIC if path.endswith("/status") else MERGE
            kinds["Content-Type"] = patch if method == "PATCH" else "application/json"
        try:
            async with self._session.request(
                "GET" if method == "LIST" else method,
                self._access.server + path,
                params={key: str(value) for key, value in query.items()},
                data=None if body is None else msgspec.json.encode(body),
                headers={**kinds, **self._authorization()},
                ssl=self._tls,
                server_hostname=self._access.server_name or None,
                timeout=aiohttp.ClientTimeout(total=self._timeout),
            ) as answer:
                text = await answer.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as fault:
            raise Unknown(f"{method} {path}: no answer of the API server ({fault!r})") from None
        if answer.status >= 500:
            raise Unknown(f"{method} {path}: {answer.status}: {_message(text)}", answer.status)
        if answer.status >= 300:
            raise ApiError(f"{method} {path}: {answer.status}: {_message(text)}", answer.status)
        return text

    def _authorization(self) -> dict[str, str]:
        found = self._access.authorization()
        return {"Authorization": found} if found else {}

    async def json(self, method: str, path: str, body: Any = None, **query: str | int) -> dict[str, Any]:
        try:
            found = msgspec.json.decode(await self.call(method, path, body, **query))
        except msgspec.DecodeError as fault:
            raise Unknown(f"{method} {path}: expected JSON of the API server: {fault}") from None
        return found if isinstance(found, dict) else {}

    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: dict[str, str]) -> None:
        """Binds a pod; the annotations of the Binding become the pod's in the same write. Raises ApiError, with status
        409 if the pod is already bound.
        """
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "namespace": namespace, "uid": uid, "annotations": annotations},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        await self.call("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/binding", body)

    async def pod(self, namespace: str, name: str) -> dict[str, Any]:
        return await self.json("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")

    async def annotate(
        self, namespace: str, name: str, uid: str, annotations: Mapping[str, str], version: str = ""
    ) -> None:
        """Writes annotations on a pod. The pod must have this uid and, if given, this version; otherwise the API server
        reports a conflict. The patch goes to the pod's status, because the right to patch pods would allow running any
        image in them.
        """
        metadata = {"uid": uid, "annotations": annotations, **({"resourceVersion": version} if version else {})}
        body = {"metadata": metadata}
        await self.call("PATCH", f"/api/v1/namespaces/{namespace}/pods/{name}/status", body)

    async def nominate(self, namespace: str, name: str, uid: str, node: str) -> None:
        """Sets the nominated node of a pod whose victims are being deleted, as the kube-scheduler does."""
        body = {"metadata": {"uid": uid}, "status": {"nominatedNodeName": node}}
        await self.call("PATCH", f"/api/v1/namespaces/{namespace}/pods/{name}/status", body)

    async def evict(self, namespace: str, name: str, uid: str, dry_run: bool) -> None:
        """Evicts a pod. Raises ApiError, with status 429 if a PodDisruptionBudget protects the pod, 409 if the name
        belongs to another pod now.
        """
        options: dict[str, Any] = {"preconditions": {"uid": uid}, **({"dryRun": ["All"]} if dry_run else {})}
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": options,
        }
        await self.call("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", body)

    async def budgets(self, namespace: str) -> Sequence[wire.Budget]:
        """Returns the PodDisruptionBudgets of a namespace."""
        path = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
        return [one async for page in self.list(path, wire.BudgetList) for one in page.items or []]

    async def pods_of(self, namespace: str, budget: wire.Budget) -> dict[str, dict[str, Any]]:
        """Returns the pods (uid → pod) that may belong to a budget: those with the labels of its selector. Its
        expressions are not evaluated.
        """
        labels = (budget.spec.selector and budget.spec.selector.matchLabels) or {}
        query = {"labelSelector": ",".join(f"{key}={value}" for key, value in labels.items())}
        pages = self.list(f"/api/v1/namespaces/{namespace}/pods", wire.ObjectList, query if labels else None)
        return {one["metadata"]["uid"]: one async for page in pages for one in page.items or []}

    async def preempted(self, namespace: str, name: str, uid: str, message: str) -> None:
        """Sets the condition on a preempted pod that makes a kube-scheduler wait until the pod has ended. It must be
        set after the eviction, because the eviction overwrites the condition's reason.
        """
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "PreemptionByScheduler",
            "message": message,
            "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        body = {"metadata": {"uid": uid}, "status": {"conditions": [condition]}}
        await self.call("PATCH", f"/api/v1/namespaces/{namespace}/pods/{name}/status", body)

    async def event(self, pod: dict[str, str], reason: str, message: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": "vgpu-scheduler-", "namespace": pod["namespace"]},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", **pod},
            "reason": reason,
            "message": message[:1024],
            "type": "Warning",
            "source": {"component": "vgpu-scheduler"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        await self.call("POST", f"/api/v1/namespaces/{pod['namespace']}/events", body)

    async def list(
        self, path: str, kind: type[T], query: Mapping[str, str] | None = None, size: int = PAGE
    ) -> AsyncIterator[T]:
        """Yields the pages of a list, of at most ``size`` items each. The first page shows the newest state that the
        API server has.
        """
        more = ""
        while True:
            page = await self.call("LIST", path, limit=size, **(query or {}), **({"continue": more} if more else {}))
            try:
                found = msgspec.json.decode(page, type=kind)
            except msgspec.DecodeError as fault:
                raise ApiError(f"LIST {path}: expected JSON of the API server: {fault}") from None
            yield found
            # Every list has metadata, but the type variable T does not declare it.
            more = getattr(found, "metadata").more  # noqa: B009
            if not more:
                return

    async def watch(self, path: str, version: str, seconds: int, **query: str) -> AsyncIterator[wire.Event]:
        """Yields the events after a version, until the server ends the stream. Raises ApiError; status 410 means that
        the objects must be listed again.
        """
        assert self._session is not None
        self.calls["WATCH", path.rsplit("/", 1)[-1]] = self.calls.get(("WATCH", path.rsplit("/", 1)[-1]), 0) + 1
        params = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=seconds + 30)
        decode = msgspec.json.Decoder(wire.Event).decode
        try:
            async with self._session.get(
                self._access.server + path,
                params={**params, **query},
                headers=self._authorization(),
                ssl=self._tls,
                server_hostname=self._access.server_name or None,
                timeout=timeout,
            ) as answer:
                if answer.status != 200:
                    raise ApiError(f"WATCH {path}: {answer.status}: {_message(await answer.read())}", answer.status)
                rest = b""
                async for chunk in answer.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    if len(rest) > MAX_LINE:
                        raise ApiError(f"WATCH {path}: an event of more than {MAX_LINE} bytes")
                    for line in lines:
                        if line.strip():
                            yield decode(line)
        except (TimeoutError, aiohttp.ClientError, OSError, msgspec.DecodeError) as fault:
            raise ApiError(f"WATCH {path}: the stream ended with an error ({fault!r})") from None


def _message(text: bytes) -> str:
    """Returns the message of a Status object, otherwise the beginning of the response."""
    try:
        found = msgspec.json.decode(text)
        return str(found["message"])[:500]
    except (msgspec.DecodeError, KeyError, TypeError):
        return text[:200].decode(errors="replace")
