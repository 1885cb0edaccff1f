# SPDX-License-Identifier: Apache-2.0
"""An API server with one node and its pods: GET, watch, PATCH of status and annotations, POST of events. Answers have
the form that the API's reference gives: an envelope of type and object a line for a watch, a Status for a refusal.
"""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

LABEL = "nvidia.com/device-plugin.config"


class ApiDouble:
    """``refuse``: (method, start of path) → (status, message) of calls that fail; ``token``: what callers must have."""

    def __init__(self, node: str = "node-1", token: str = "", tls: ssl.SSLContext | None = None) -> None:
        self.node: dict[str, Any] = {
            "kind": "Node",
            "apiVersion": "v1",
            "metadata": {"name": node, "uid": "0ab1", "resourceVersion": "10", "labels": {"kubernetes.io/os": "linux"}},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }
        self.token = token
        self.refuse: dict[tuple[str, str], tuple[int, str]] = {}
        self.events: list[dict[str, Any]] = []
        self.pods: dict[tuple[str, str], dict[str, Any]] = {}
        self.calls: list[tuple[str, str]] = []
        self.watches = 0
        self._changed = threading.Condition()
        self._log: list[dict[str, Any]] = []
        self._ended = 0
        double = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                double.serve(self, "GET")

            def do_PATCH(self) -> None:
                double.serve(self, "PATCH")

            def do_POST(self) -> None:
                double.serve(self, "POST")

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.end_watches()
        self._server.shutdown()
        self._server.server_close()

    # ---- what the cluster does

    def label(self, name: str | None) -> None:
        with self._changed:
            labels = self.node["metadata"]["labels"]
            labels.pop(LABEL, None)
            if name is not None:
                labels[LABEL] = name
            self._bump()

    def _bump(self) -> None:
        self.node["metadata"]["resourceVersion"] = str(int(self.node["metadata"]["resourceVersion"]) + 1)
        self._log.append({"type": "MODIFIED", "object": json.loads(json.dumps(self.node))})
        self._changed.notify_all()

    def end_watches(self, code: int = 0) -> None:
        """As a server does after timeoutSeconds; with a code: by an event ERROR."""
        with self._changed:
            self._ended += 1
            self._code = code
            self._changed.notify_all()

    def condition(self) -> dict[str, Any]:
        return next((one for one in self.node["status"]["conditions"] if one["type"] == "VgpuConfiguration"), {})

    # ---- HTTP

    def serve(self, handler: BaseHTTPRequestHandler, method: str) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        url = urlsplit(handler.path)
        self.calls.append((method, handler.path))
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            return self._answer(handler, 401, status(401, "Unauthorized"))
        for (refused, start), (code, message) in list(self.refuse.items()):
            if method == refused and url.path.startswith(start):
                return self._answer(handler, code, status(code, message))
        path = f"/api/v1/nodes/{self.node['metadata']['name']}"
        if method == "GET" and url.path == path:
            return self._answer(handler, 200, self.node)
        if method == "GET" and url.path == "/api/v1/nodes" and parse_qs(url.query).get("watch") == ["true"]:
            return self._watch(handler, parse_qs(url.query))
        if method == "PATCH" and url.path == f"{path}/status":
            assert handler.headers["Content-Type"] == "application/strategic-merge-patch+json"
            return self._answer(handler, 200, self._patch(json.loads(body)))
        if method == "POST" and url.path.endswith("/events"):
            self.events.append(json.loads(body))
            return self._answer(handler, 201, self.events[-1])
        if method == "PATCH" and url.path == path:
            return self._answer(handler, 200, self._annotate(self.node, json.loads(body)))
        if method == "GET" and url.path == "/api/v1/pods":
            assert parse_qs(url.query)["fieldSelector"] == [f"spec.nodeName={self.node['metadata']['name']}"]
            return self._answer(handler, 200, {"kind": "PodList", "items": list(self.pods.values())})
        return self._pod(handler, method, url.path, body)

    def add_pod(self, name: str, uid: str, annotations: dict[str, str], **more: Any) -> None:
        metadata = {"namespace": "default", "name": name, "uid": uid, "annotations": annotations}
        metadata["creationTimestamp"] = f"2026-11-21T10:00:00.{len(self.pods):09d}Z"
        self.pods["default", name] = {"kind": "Pod", "metadata": metadata, "spec": {}, "status": {}, **more}

    def _pod(self, handler: BaseHTTPRequestHandler, method: str, path: str, body: bytes) -> None:
        words = path.split("/")
        pod = self.pods.get((words[4], words[6])) if len(words) > 6 and words[5] == "pods" else None
        if pod is not None and method == "GET":
            return self._answer(handler, 200, pod)
        if pod is not None and method == "PATCH" and words[7:] == ["status"]:
            change = json.loads(body)
            if change["metadata"].get("uid") != pod["metadata"]["uid"]:
                return self._answer(handler, 409, status(409, "the UID in the precondition does not match"))
            return self._answer(handler, 200, self._annotate(pod, change))
        return self._answer(handler, 404, status(404, f"{path} not found"))

    def _annotate(self, one: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            found = one["metadata"].setdefault("annotations", {})
            for key, text in change["metadata"]["annotations"].items():
                found.pop(key, None)
                if text is not None:
                    found[key] = text
            if one is self.node:
                self._bump()
        return one

    def _patch(self, change: dict[str, Any]) -> dict[str, Any]:
        """Conditions are merged by their type."""
        with self._changed:
            for new in change["status"]["conditions"]:
                kept = [one for one in self.node["status"]["conditions"] if one["type"] != new["type"]]
                self.node["status"]["conditions"] = [*kept, *([] if new.get("$patch") == "delete" else [new])]
            self._bump()
        return self.node

    def _watch(self, handler: BaseHTTPRequestHandler, query: dict[str, list[str]]) -> None:
        assert query["fieldSelector"] == [f"metadata.name={self.node['metadata']['name']}"]
        since, ended = int(query["resourceVersion"][0]), self._ended
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        self.watches += 1
        sent = 0
        while True:
            with self._changed:
                while len(self._log) == sent and self._ended == ended:
                    self._changed.wait()
                events, sent, over = self._log[sent:], len(self._log), self._ended != ended
            lines = [one for one in events if int(one["object"]["metadata"]["resourceVersion"]) > since]
            if over and self._code:
                lines.append({"type": "ERROR", "object": status(self._code, "too old resource version")})
            try:
                for one in lines:
                    data = json.dumps(one).encode() + b"\n"
                    handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                if over:
                    handler.wfile.write(b"0\r\n\r\n")
                    return
                handler.wfile.flush()
            except OSError:
                return

    @staticmethod
    def _answer(handler: BaseHTTPRequestHandler, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        handler.send_response(code)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


def status(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
