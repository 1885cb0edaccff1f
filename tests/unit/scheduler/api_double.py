# SPDX-License-Identifier: Apache-2.0
"""An API server in memory: objects by path, versions, watches, bindings; and the faults that a test orders.

It keeps the rules of the real one that matter here: a Binding's annotations become the pod's; a pod is bound once; a
wrong uid is a conflict; a list comes in pages; a version that was compacted away ends a watch with 410.
"""

from __future__ import annotations

import asyncio
import copy
import json

from aiohttp import web

PODS, NODES = "/api/v1/pods", "/api/v1/nodes"


class ApiDouble:
    def __init__(self):
        self.objects = {}  # path of the object → object
        self.version = 1
        self.log = []  # (version, type, path, object)
        self.compacted = 0
        self.changed = asyncio.Condition()
        self.calls = []  # (method, path)
        self.silent = False  # watches tell nothing: lost events
        self.fault = (
            None  # called with (method, path); may return a status, "hang", or "done": carried out, not answered
        )
        self.page = 0
        self.closed = asyncio.Event()

    async def __aenter__(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_about):
        self.fault = None
        self.closed.set()
        async with self.changed:
            self.changed.notify_all()
        await self._runner.cleanup()

    async def put(self, path, made, kind="MODIFIED"):
        self.version += 1
        made["metadata"]["resourceVersion"] = str(self.version)
        new = path not in self.objects
        self.objects[path] = made
        await self._tell("ADDED" if new else kind, path, made)
        return made

    async def delete(self, path):
        self.version += 1
        gone = self.objects.pop(path)
        gone["metadata"]["resourceVersion"] = str(self.version)
        await self._tell("DELETED", path, gone)

    async def _tell(self, kind, path, made):
        if not self.silent:
            self.log.append((self.version, kind, path, copy.deepcopy(made)))
        async with self.changed:
            self.changed.notify_all()

    def count(self, method, part):
        return sum(one == method and part in path for one, path in self.calls)

    async def _handle(self, request):
        path, method = request.path, request.method
        self.calls.append((method, path))
        wrong = self.fault(method, path) if self.fault else None
        if isinstance(wrong, int):
            return refuse(wrong, "the test ordered it")
        if wrong == "hang":
            await self.closed.wait()
            return refuse(503, "too late")
        body = json.loads(await request.text() or "null")
        if method == "GET" and "watch" in request.query:
            return await self._watch(request, path)
        done = await self._do(request, method, path, body)
        if wrong == "done":
            request.transport.close()
        return done

    async def _do(self, request, method, path, body):
        if path.endswith("/binding"):
            return await self._bind(path.removesuffix("/binding"), body)
        if method == "GET":
            if path in self.objects:
                return web.json_response(self.objects[path])
            if path in (PODS, NODES) or path.endswith(("/pods", "/nodes", "/resourcequotas")):
                return self._list(request, path)
            return refuse(404, f"{path} not found")
        if method == "POST":
            name = body["metadata"].get("name") or f"{body['metadata']['generateName']}{self.version}"
            if f"{path}/{name}" in self.objects:
                return refuse(409, "already exists")
            return web.json_response(await self.put(f"{path}/{name}", body), status=201)
        if path not in self.objects:
            return refuse(404, f"{path} not found")
        now = self.objects[path]["metadata"]
        meta = body["metadata"]
        for key in ("resourceVersion", "uid"):
            if meta.get(key) not in (None, now.get(key)):
                return refuse(409, f"{key} is {now.get(key)}")
        made = body if method == "PUT" else merge(self.objects[path], body)
        return web.json_response(await self.put(path, made))

    async def _bind(self, path, body):
        pod = self.objects.get(path)
        if pod is None:
            return refuse(404, f"{path} not found")
        if body["metadata"].get("uid") != pod["metadata"]["uid"]:
            return refuse(409, "another uid")
        if pod["spec"].get("nodeName"):
            return refuse(409, f"pod is already assigned to node {pod['spec']['nodeName']}")
        pod = copy.deepcopy(pod)
        pod["spec"]["nodeName"] = body["target"]["name"]
        pod["metadata"].setdefault("annotations", {}).update(body["metadata"]["annotations"])
        await self.put(path, pod)
        return web.json_response({"status": "Success"}, status=201)

    def _of(self, path):
        """Objects of a list; pods of all namespaces lie at their own paths."""
        kind = path.rsplit("/", 1)[-1]
        return [(key, one) for key, one in sorted(self.objects.items()) if key.split("/")[-2] == kind]

    def _selects(self, request, one):
        for term in filter(None, request.query.get("fieldSelector", "").split(",")):
            key, value = term.split("=", 1)
            assert key == "spec.schedulerName", key
            if one["spec"].get("schedulerName") != value:
                return False
        return True

    def _list(self, request, path):
        items = [one for _key, one in self._of(path) if self._selects(request, one)]
        begin = int(request.query.get("continue") or 0)
        size = self.page or int(request.query.get("limit") or 10**9)
        more = str(begin + size) if begin + size < len(items) else ""
        meta = {"resourceVersion": str(self.version), "continue": more}
        return web.json_response({"metadata": meta, "items": items[begin : begin + size]})

    async def _watch(self, request, path):
        sent = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        kind = path.rsplit("/", 1)[-1]
        if sent < self.compacted:
            status = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version", "metadata": {}}}
            await response.write(json.dumps(status).encode() + b"\n")
            return response
        end = asyncio.get_running_loop().time() + float(request.query["timeoutSeconds"])
        while (left := end - asyncio.get_running_loop().time()) > 0 and not self.closed.is_set():
            for version, what, key, one in self.log:
                if version > sent and key.split("/")[-2] == kind and self._selects(request, one):
                    sent = version
                    await response.write(json.dumps({"type": what, "object": one}).encode() + b"\n")
            async with self.changed:
                try:
                    await asyncio.wait_for(self.changed.wait(), min(left, 0.2))
                except TimeoutError:
                    continue
        return response


def merge(old, new):
    """JSON merge patch."""
    out = copy.deepcopy(old)
    for key, value in new.items():
        if value is None:
            out.pop(key, None)
        elif isinstance(value, dict) and isinstance(out.get(key), dict):
            out[key] = merge(out[key], value)
        else:
            out[key] = value
    return out


def refuse(status, message):
    return web.json_response({"kind": "Status", "code": status, "message": message}, status=status)
