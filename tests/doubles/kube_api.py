# SPDX-License-Identifier: Apache-2.0
"""A double of a Kubernetes API server that stores objects by their path.

``Cluster`` is the store, ``KubeApi`` serves it over HTTP, and ``KubeClient`` calls it without HTTP. These rules of the
real server are simulated:

- Every write raises the resourceVersion. A resourceVersion or uid in a write is a precondition; a mismatch gets a 409.
- Lists support pages and selectors.
- A watch ends after timeoutSeconds. If its resourceVersion was compacted, it gets an event ERROR with code 410.
- A strategic merge patch merges conditions by type.
- Server-side apply removes the fields that the last apply set and the new apply omits.
- An eviction obeys the PodDisruptionBudgets of the store (only matchLabels). A dry run does not count as a disruption.
- A pod can be bound only once. The annotations of the Binding are copied to the pod.
- Deleting an object also deletes the objects that it owns.
"""

from __future__ import annotations

import contextlib
import copy
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from .kube_rights import Access, access_of

Object = dict[str, Any]
MERGE, STRATEGIC, APPLY = (
    f"application/{kind}" for kind in ("merge-patch+json", "strategic-merge-patch+json", "apply-patch+yaml")
)


class Place(NamedTuple):
    """The parts of an API path. ``group`` includes the prefix and the version: "api/v1" or "apis/apps/v1"."""

    group: str
    namespace: str
    resource: str
    name: str
    subresource: str


@lru_cache(maxsize=None)
def place_of(path: str) -> Place:
    words = path.strip("/").split("/")
    start = 2 if words[0] == "api" else 3
    group, rest = "/".join(words[:start]), words[start:]
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    return Place(group, namespace, *[*rest, "", "", ""][:3])


class Cluster:
    """The store of objects.

    ``fault``: set by a test; ``KubeApi`` calls it with (method, path) before each request. It returns None, a status, a
    (status, message), "hang" (send no response), or "done" (carry out the request, then close without a response).
    """

    def __init__(self, server_version: str = "v1.34.2") -> None:
        self.server_version = server_version
        self.objects: dict[str, Object] = {}
        self.version = 10
        self.calls: list[tuple[str, str]] = []  # calls: (method, path without the query) of every request.
        self.writes: list[tuple[str, str]] = []  # writes: (method, path) of each request that changed an object.
        self.fault: Callable[[str, str], Any] | None = None
        self.controllers: list[Callable[[str, str], None]] = []  # controllers: called after each write.
        self.page = 0  # page: items per page of a list. If 0, only the request's limit counts.
        self.silent = False  # silent: if true, watches get no events.
        self.compacted = 0  # compacted: a watch from a resourceVersion below this number gets a 410.
        self.watches = 0  # watches: the number of watches since the start.
        self.keeps_dependents = False  # keeps_dependents: if true, deleting an object keeps the objects that it owns.
        self.budget = 0  # budget: the number of evictions that get status 429 before an eviction succeeds.
        self.stuck = False  # stuck: if true, an evicted pod is not deleted.
        self.graceful = False  # graceful: if true, an evicted pod only gets a deletionTimestamp.
        self.keeps: Callable[[Object], Object] = lambda sent: sent  # keeps: returns the object to store.
        self.closed = threading.Event()
        self._applied: dict[str, Object] = {}
        self._log: list[tuple[int, str, str, Object]] = []  # The events as (version, type, path, object).
        self._ended, self._end_code = 0, 0
        self._changed = threading.Condition(threading.RLock())

    # ---- functions for tests: change the cluster

    def put(self, path: str, made: Object) -> Object:
        """Stores an object without copying it, and returns it."""
        with self._changed:
            self.version += 1
            made["metadata"]["resourceVersion"] = str(self.version)
            kind = "MODIFIED" if path in self.objects else "ADDED"
            self.objects[path] = made
            self._report(kind, path, made)
        return made

    def remove(self, path: str) -> None:
        with self._changed:
            self.version += 1
            gone = self.objects.pop(path)
            self._applied.pop(path, None)
            gone["metadata"]["resourceVersion"] = str(self.version)
            self._report("DELETED", path, gone)
            if not self.keeps_dependents:
                for one, found in list(self.objects.items()):
                    owners = found["metadata"].get("ownerReferences") or []
                    if any((owner["kind"], owner["name"]) == _identity(path, gone) for owner in owners):
                        self.remove(one)

    @contextlib.contextmanager
    def edit(self, path: str) -> Iterator[Object]:
        with self._changed:
            yield self.objects[path]
            self.put(path, self.objects[path])

    def end_watches(self, code: int = 0) -> None:
        """Ends all watches as timeoutSeconds would. If ``code`` is set, they end with an event ERROR of this code."""
        with self._changed:
            self._ended, self._end_code = self._ended + 1, code
            self._changed.notify_all()

    def close(self) -> None:
        self.fault = None
        self.closed.set()
        self.end_watches()

    # ---- functions for tests: read the cluster

    def count(self, method: str, part: str) -> int:
        return sum(one == method and part in path for one, path in self.calls)

    def of(self, resource: str) -> list[Object]:
        """Returns the objects of a resource in all namespaces, oldest first."""
        return [one for path, one in list(self.objects.items()) if place_of(path).resource == resource]

    # ---- requests

    def request(self, method: str, target: str, body: Any = None, kind: str = MERGE) -> tuple[int, Object]:
        """Carries out any request except a watch; returns (HTTP status, document)."""
        url = urlsplit(target)
        query = dict(parse_qsl(url.query))
        with self._changed:
            status, document = self._carry_out(method, url.path, query, body, kind)
            changes = method != "GET" and status < 300 and "dryRun" not in query
            if changes:
                self.writes.append((method, url.path))
            answer = status, copy.deepcopy(document)
            for controller in self.controllers if changes else ():
                controller(method, url.path)
        return answer

    def _carry_out(self, method: str, path: str, query: dict[str, str], body: Any, kind: str) -> tuple[int, Object]:
        fixed = {"/version": {"major": "1", "gitVersion": self.server_version}, "/api": {"versions": ["v1"]}}
        fixed["/apis"] = {"kind": "APIGroupList", "groups": []}
        if path in fixed:
            return 200, fixed[path]
        place = place_of(path)
        if place.subresource:
            path = path.rpartition("/")[0]
        if method == "POST" and not place.name:
            name = body["metadata"].get("name") or f"{body['metadata']['generateName']}{self.version}"
            if f"{path}/{name}" in self.objects:
                return failure(409, f"{name} already exists")
            body = self.keeps(body)
            return 201, body if "dryRun" in query else self.put(f"{path}/{name}", body)
        if method == "GET" and not place.name:
            return 200, self._list(path, query)
        if method == "PATCH" and kind == APPLY:
            if refused := conflict(self.objects.get(path), body["metadata"]):
                return refused
            return self._apply(path, body, "dryRun" in query)
        if path not in self.objects:
            return failure(404, f"{path} not found")
        found = self.objects[path]
        if method == "GET":
            return 200, found
        if method == "DELETE":
            if refused := conflict(found, (body or {}).get("preconditions") or {}):
                return refused
            self.remove(path)
            return 200, {"kind": "Status", "status": "Success"}
        if method == "POST":
            return self._evict(path, found, body) if place.subresource == "eviction" else self._bind(path, found, body)
        if refused := conflict(found, body.get("metadata") or {}):
            return refused
        if method == "PUT" and "dryRun" in query:
            return 200, self.keeps(body)
        return 200, self.put(path, self.keeps(body) if method == "PUT" else merge(found, body, kind == STRATEGIC))

    def _list(self, path: str, query: dict[str, str]) -> Object:
        items = [one for key, one in sorted(self.objects.items()) if is_in(key, path) and selects(one, query)]
        start = int(query.get("continue") or 0)
        size = self.page or int(query.get("limit") or 0) or len(items)
        more = str(start + size) if start + size < len(items) else ""
        metadata = {"resourceVersion": str(self.version), "continue": more}
        return {"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items[start : start + size]}

    def _apply(self, path: str, body: Object, dry_run: bool) -> tuple[int, Object]:
        found = self.objects.get(path)
        body = dict(body, metadata={key: one for key, one in body["metadata"].items() if key != "resourceVersion"})
        made = merge(without(found or {}, self._applied.get(path, {}), body), body)
        made["metadata"]["managedFields"] = [{"operation": "Apply", "time": str(len(self.calls) + len(self.writes))}]
        if dry_run:
            return 200, made
        self._applied[path] = copy.deepcopy(body)
        if found is not None and _content(found) == _content(made):
            found["metadata"]["managedFields"] = made["metadata"]["managedFields"]
            return 200, found
        return (200 if found else 201), self.put(path, made)

    def _evict(self, path: str, pod: Object, body: Object) -> tuple[int, Object]:
        options = (body or {}).get("deleteOptions") or {}
        if refused := conflict(pod, options.get("preconditions") or {}):
            return refused
        budgets = self._budgets(path, pod)
        if len(budgets) > 1:
            return failure(500, "This pod has more than one PodDisruptionBudget, which is not supported.")
        budgets = [one for one in budgets if not is_free(pod, one)]
        if self.budget > 0 or any(one["status"]["disruptionsAllowed"] < 1 for one in budgets):
            self.budget = max(0, self.budget - 1)
            return failure(429, "Cannot evict pod as it would violate the pod's disruption budget.", "TooManyRequests")
        for one in budgets if not options.get("dryRun") else ():
            one["status"]["disruptionsAllowed"] -= 1
        if self.graceful and not options.get("dryRun"):
            reason = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
            ends = {"metadata": {"deletionTimestamp": "2026-11-22T00:00:00Z"}, "status": {"conditions": [reason]}}
            self.put(path, merge(pod, ends, strategic=True))
        elif not self.stuck and not options.get("dryRun"):
            self.remove(path)
        return 201, {"kind": "Status", "status": "Success"}

    def _budgets(self, path: str, pod: Object) -> list[Object]:
        """Returns the disruption budgets that protect a pod. A pod that waits or ends has none."""
        phase = (pod.get("status") or {}).get("phase")
        if phase in ("Pending", "Succeeded", "Failed") or pod["metadata"].get("deletionTimestamp"):
            return []
        labels = (pod["metadata"].get("labels") or {}).items()
        return [
            one
            for key, one in self.objects.items()
            if (place_of(key).resource, place_of(key).namespace) == ("poddisruptionbudgets", place_of(path).namespace)
            and one["spec"]["selector"]["matchLabels"].items() <= labels
        ]

    def _bind(self, path: str, pod: Object, body: Object) -> tuple[int, Object]:
        if body["metadata"].get("uid") != pod["metadata"]["uid"]:
            return failure(409, "the uid of the Binding is not the uid of the pod")
        if pod["spec"].get("nodeName"):
            return failure(409, f"pod is already assigned to node {pod['spec']['nodeName']}")
        pod = copy.deepcopy(pod)
        pod["spec"]["nodeName"] = body["target"]["name"]
        pod["metadata"].setdefault("annotations", {}).update(body["metadata"]["annotations"])
        self.put(path, pod)
        return 201, {"kind": "Status", "status": "Success"}

    # ---- watches

    def _report(self, kind: str, path: str, made: Object) -> None:
        if not self.silent:
            self._log.append((self.version, kind, path, copy.deepcopy(made)))
        self._changed.notify_all()

    def watch(self, target: str) -> Iterator[Object]:
        """Yields the events after a resourceVersion. Ends after timeoutSeconds or by ``end_watches``."""
        url = urlsplit(target)
        query = dict(parse_qsl(url.query))
        since, read = int(query["resourceVersion"]), 0
        end = time.monotonic() + float(query["timeoutSeconds"])
        with self._changed:
            self.watches += 1
            ended = self._ended
        if since < self.compacted:
            yield {"type": "ERROR", "object": failure(410, "too old resource version")[1]}
            return
        while True:
            with self._changed:
                while len(self._log) == read and self._ended == ended and (left := end - time.monotonic()) > 0:
                    self._changed.wait(left)
                entries, read = self._log[read:], len(self._log)
                over, code = self._ended != ended or time.monotonic() >= end, self._end_code
            for version, kind, path, one in entries:
                if version > since and is_in(path, url.path) and selects(one, query):
                    yield {"type": kind, "object": one}
            if over:
                if code:
                    yield {"type": "ERROR", "object": failure(code, "too old resource version")[1]}
                return


class Refusal(Exception):
    """Raised by ``KubeClient`` for a 409; replaces the client's ApiException."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class KubeClient(Cluster):
    """Replaces the modules' API client: reads and writes objects of the store without HTTP. Raises Refusal for a 409.

    ``meanwhile`` is called with (method, path) before each request; in it a test simulates changes by other clients.
    """

    meanwhile: Callable[[str, str], None] | None = None

    def _answer(self, method: str, target: str, body: Any = None, kind: str = MERGE) -> Object | None:
        self.calls.append((method, target.partition("?")[0]))
        if self.meanwhile is not None:
            self.meanwhile(method, target.partition("?")[0])
        status, document = self.request(method, target, body, kind)
        if status == 409:
            raise Refusal(status)
        assert status in (200, 201, 404), document
        return None if status == 404 else document

    def get(self, path: str) -> Object | None:
        return self._answer("GET", path)

    def list(self, path: str) -> list[Object]:
        return (self._answer("GET", path) or {}).get("items") or []

    def refusal(self, path: str, body: Object) -> str:
        fault = self.fault("PATCH", path) if self.fault is not None else None
        if isinstance(fault, tuple):
            return fault[1]
        self._answer("PATCH", f"{path}?dryRun=All", body, APPLY)
        return ""

    def apply(self, path: str, body: Object, dry_run: bool) -> Object | None:
        return self._answer("PATCH", path + ("?dryRun=All" if dry_run else ""), body, APPLY)

    def patch(self, path: str, body: Object) -> Object | None:
        return self._answer("PATCH", path, body, STRATEGIC)

    def post(self, path: str, body: Object, refusals: tuple[int, ...] = ()) -> int:
        try:
            self._answer("POST", path, body)
        except Refusal as fault:
            if fault.status in refusals:
                return fault.status
            raise
        return 201

    def delete(self, path: str, version: str = "") -> None:
        self._answer("DELETE", path, {"preconditions": {"resourceVersion": version}} if version else None)


class KubeApi(Cluster):
    """Serves the store over HTTP, from ``start`` to ``close``.

    ``token``: the bearer token that clients must send, if any. ``accesses``: the RBAC rights that the requests so far
    needed. ``may``: returns whether a right is granted; without the right a request gets 403. None grants all rights.
    """

    may: Callable[[Access], bool] | None = None

    def __init__(self, token: str = "", tls: ssl.SSLContext | None = None, **more: Any) -> None:
        super().__init__(**more)
        self.accesses: set[Access] = set()
        handler = type("Handler", (_Handler,), {"cluster": self, "token": token})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        super().close()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> KubeApi:
        self.start()
        return self

    def __exit__(self, *_about: object) -> None:
        self.close()

    async def __aenter__(self) -> KubeApi:
        return self.__enter__()

    async def __aexit__(self, *_about: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    cluster: KubeApi
    token: str
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.cluster.calls.append((self.command, url.path))
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            return self._answer(*failure(401, "Unauthorized"))
        access = access_of(self.command, self.path)
        if access is not None:
            self.cluster.accesses.add(access)
            if self.cluster.may is not None and not self.cluster.may(access):
                return self._answer(*failure(403, f"{access} is forbidden", "Forbidden"))
        fault = self.cluster.fault(self.command, url.path) if self.cluster.fault else None
        if fault == "hang":
            self.cluster.closed.wait()
            fault = 503
        if fault and fault != "done":
            return self._answer(*(failure(fault, "fault of the test") if isinstance(fault, int) else failure(*fault)))
        if self.command == "GET" and dict(parse_qsl(url.query)).get("watch") in ("1", "true"):
            return self._watch()
        kind = self.headers.get("Content-Type") or MERGE
        answer = self.cluster.request(self.command, self.path, json.loads(text or "null"), kind)
        if fault == "done":
            self.close_connection = True
            return None
        return self._answer(*answer)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _answer(self, status: int, document: Object) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data)

    def _watch(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            for event in self.cluster.watch(self.path):
                data = json.dumps(event).encode() + b"\n"
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *_arguments: Any) -> None:
        return


def conflict(found: Object | None, expected: Object) -> tuple[int, Object] | None:
    """Returns a 409 if a write expects another resourceVersion or uid than the object has, otherwise None."""
    known = (found or {}).get("metadata") or {}
    for key in ("resourceVersion", "uid"):
        if expected.get(key) not in (None, known.get(key)):
            return failure(409, f"precondition {key}: expected {expected[key]}, found {known.get(key)}")
    return None


def failure(code: int, message: str, reason: str = "") -> tuple[int, Object]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    return code, {**status, "metadata": {}, "reason": reason}


def is_free(pod: Object, budget: Object) -> bool:
    """Returns whether a pod that is not ready may be evicted without a count against its disruption budget."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    if any((one["type"], one["status"]) == ("Ready", "True") for one in conditions):
        return False
    desired = budget["status"].get("desiredHealthy", 0)
    enough = desired > 0 and budget["status"].get("currentHealthy", 0) >= desired
    return enough or budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow"


def refusing(method: str, start: str, code: int, message: str) -> Callable[[str, str], Any]:
    """Returns a value for ``fault``: requests with this method and a path with this start fail with (code, message)."""
    return lambda given, path: (code, message) if given == method and path.startswith(start) else None


def is_in(path: str, collection: str) -> bool:
    one, whole = place_of(path), place_of(collection)
    return one[::2][:2] == whole[::2][:2] and whole.namespace in ("", one.namespace)


def selects(one: Object, query: dict[str, str]) -> bool:
    """Returns whether an object matches a query's fieldSelector (a.b=c) and labelSelector (key or key=value)."""
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        path, _equals, value = term.partition("=")
        found: Any = one
        for key in path.split("."):
            found = found.get(key) or {}
        if (found or "") != value:
            return False
    labels = one["metadata"].get("labels") or {}
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True


def merge(old: Object, patch: Object, strategic: bool = False) -> Object:
    """Returns the object after a JSON merge patch. ``strategic``: merge the list ``conditions`` by type."""
    out = copy.deepcopy(old)
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        elif isinstance(value, dict):
            out[key] = merge(out[key] if isinstance(out.get(key), dict) else {}, value, strategic)
        elif strategic and key == "conditions":
            named = {one["type"] for one in value}
            kept = [one for one in out.get(key) or [] if one["type"] not in named]
            out[key] = kept + [one for one in value if one.get("$patch") != "delete"]
        else:
            out[key] = copy.deepcopy(value)
    return out


def without(found: Object, applied: Object, body: Object) -> Object:
    """Returns an object without the fields that the former apply set (``applied``) and the new ``body`` omits."""
    out = dict(found)
    for key, value in applied.items():
        if isinstance(value, dict) and isinstance(out.get(key), dict):
            out[key] = without(out[key], value, body.get(key) or {})
        elif key not in body:
            out.pop(key, None)
    return out


def _content(one: Object) -> Object:
    metadata = {key: value for key, value in one["metadata"].items() if key not in ("managedFields", "resourceVersion")}
    return {**one, "metadata": metadata}


def _identity(path: str, one: Object) -> tuple[str, str]:
    """Returns (kind, name) of an object, the two fields by which an owner reference names it."""
    return one.get("kind") or place_of(path).resource, one["metadata"].get("name", place_of(path).name)


def write_kubeconfig(path: Path, cluster: str | Object, user: Object | None = None) -> Path:
    """Writes a kubeconfig file with one context. ``cluster``: the server's URL, or a whole section ``cluster``."""
    section = {"server": cluster} if isinstance(cluster, str) else cluster
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": section}],
        "users": [{"name": "u", "user": user or {"token": "t"}}],
    }
    path.write_text(json.dumps(document))
    return path
