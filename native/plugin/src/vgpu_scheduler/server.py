# SPDX-License-Identifier: Apache-2.0
"""The HTTP front end: decodes request bodies, calls the other modules and encodes responses. If a body is unreadable,
the response is an error status with a text.

The extender listens on the loopback address, for the kube-scheduler next to it; the webhook listens on all addresses,
with TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from . import explain, metrics, webhook, wire
from .api import Api, ApiError
from .cluster import Cluster
from .extender import Extender, runtime_class_of
from .leadership import Leadership
from .pod_claims import PodClaims

log = logging.getLogger(__name__)

# Maximum bytes of a request body. A call may name 5 000 nodes of 253 letters, which are 1.3 MB, and a preemption also
# names pods.
MAX_BODY = 8 << 20
# A body of more bytes than this counts as large; a usual review has some 10 KiB. Only a few large bodies are read at
# a time, because anybody in the cluster can call the webhook, and a client with many large bodies must not fill the
# program's memory.
SMALL_BODY = 64 << 10
# Maximum number of large bodies that are read at a time.
AT_ONCE = 4
# Maximum seconds for reading a whole body, because the API server does not wait longer for the response.
BODY_SECONDS = 5.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    def __init__(
        self,
        api: Api,
        extender: Extender,
        cluster: Cluster,
        leadership: Leadership,
        admission: webhook.Settings,
        claims: PodClaims,
    ) -> None:
        self._api, self._extender, self._cluster, self._leadership = api, extender, cluster, leadership
        self._admission, self._claims = admission, claims
        self._durations = metrics.Durations()
        self._drains = False
        self._large = asyncio.Semaphore(AT_ONCE)

    def drain(self) -> None:
        """Starts the shutdown: this replica is no longer ready, and each connection is closed after its
        next response.
        """
        self._drains = True

    def extender_app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app.router.add_post("/filter", self._filter)
        app.router.add_post("/prioritize", self._prioritize)
        app.router.add_post("/bind", self._bind)
        app.router.add_post("/preempt", self._preempt)
        app.router.add_get("/explain/{namespace}/{name}", self._explain)
        app.router.add_get("/metrics", self._metrics)
        self._about(app)
        return app

    def webhook_app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app.router.add_post("/mutate", self._mutate)
        # The API server calls this path for pods of namespaces whose label vgpu.fleet/allocation is neither empty nor
        # ``extender``: pods that get claims (Dynamic Resource Allocation), or are refused because the value is unknown.
        app.router.add_post("/mutate/{allocation}", self._mutate)
        app.router.add_post("/validate", self._validate)
        self._about(app)
        return app

    def metrics_app(self) -> web.Application:
        """Serves metrics on a port of its own, because callers of the webhook should not see other
        namespaces' quotas.
        """
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app.router.add_get("/metrics", self._metrics)
        return app

    def _about(self, app: web.Application) -> None:
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        began = time.perf_counter()
        try:
            response = await handler(request)
            if self._drains:
                response.force_close()
            return response
        except web.HTTPRequestEntityTooLarge:
            return say(413, f"{request.path}: expected a body of at most {MAX_BODY} bytes")
        except (msgspec.DecodeError, RecursionError, UnicodeError) as fault:
            return say(400, f"{request.path}: expected JSON as the API server sends it: {fault}")
        except web.HTTPException as fault:
            return say(fault.status, f"{request.path}: {fault.reason}")
        except ConnectionError:
            raise
        except Exception:
            log.exception("%s failed", request.path)
            return say(500, f"{request.path}: internal error; see the log of vgpu-scheduler")
        finally:
            verb = request.path.strip("/").split("/")[0]
            if verb in ("filter", "prioritize", "bind", "preempt", "mutate", "validate"):
                self._durations.add(verb, time.perf_counter() - began)

    async def _filter(self, request: web.Request) -> web.Response:
        self._leadership.called()
        if not self._cluster.synced:
            # The call gets an error, which the kube-scheduler retries soon. The answer "no node has GPUs" would make
            # the pod wait until a node changes.
            return answer(wire.FilterResult(Error="nodes and pods are being listed; trying again"))
        return answer(await self._extender.filter_with_news(await body(request, wire.ExtenderArgs)))

    async def _prioritize(self, request: web.Request) -> web.Response:
        return answer(self._extender.prioritize(await body(request, wire.ExtenderArgs)))

    async def _bind(self, request: web.Request) -> web.Response:
        return answer(await self._extender.bind(await body(request, wire.BindArgs)))

    async def _preempt(self, request: web.Request) -> web.Response:
        if not self._cluster.synced:
            # The call is refused until pods are listed: nodes whose pods are not listed yet would look free, so the
            # kube-scheduler's victims would be deleted needlessly.
            return say(503, "nodes and pods are being listed; trying again")
        return answer(self._extender.preempt(await body(request, wire.PreemptArgs)))

    async def _mutate(self, request: web.Request) -> web.Response:
        review = await self._review(request)
        way = webhook.Way(request.match_info.get("allocation", ""), True)
        return answer(about(self._judge(review, None, way)))

    async def _validate(self, request: web.Request) -> web.Response:
        """Checks the pod again after all other webhooks have changed it, and changes nothing."""
        review = await self._review(request)
        # The quota is checked only here, because only now the pod is complete and has its uid.
        response = self._judge(review, self._extender.quotas.admit)
        response.pop("patch", None)
        response.pop("patchType", None)
        return answer(about(response))

    async def _review(self, request: web.Request) -> wire.AdmissionRequest:
        size = request.content_length
        large = size is None or size > SMALL_BODY
        try:
            async with asyncio.timeout(BODY_SECONDS), self._large if large else contextlib.nullcontext():
                found: wire.AdmissionReview = await body(request, wire.AdmissionReview)
        except TimeoutError:
            raise web.HTTPRequestTimeout(reason=f"expected the whole body within {BODY_SECONDS:g} s") from None
        return found.request

    def _judge(
        self,
        review: wire.AdmissionRequest,
        quota: webhook.Quota | None = None,
        way: webhook.Way | None = None,
    ) -> dict[str, Any]:
        extender = self._extender
        nodes = extender.ledger if self._cluster.nodes.listed_at >= 0 else None
        return webhook.mutate(review, self._admission, nodes, quota, extender.classes, way)

    async def _explain(self, request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        try:
            pod = await self._api.pod(namespace, name)
        except ApiError as fault:
            return say(fault.status or 502, str(fault))
        extender = self._extender
        untried = extender.classes.refusal(f"{namespace}/{name}", runtime_class_of(pod))
        lines = explain.explain(pod, extender.ledger, extender.config, extender.quotas, untried)
        refusal = await self._leadership.may_bind()
        if refusal:
            lines.append(f"  this replica does not bind pods now: {refusal}")
        return web.Response(text="\n".join(lines) + "\n")

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        """Answers whether this replica is ready: nodes and pods are listed, and it is not shutting down. It need not
        hold the Lease, because all replicas answer admission.
        """
        if self._drains:
            return say(503, "this replica is shutting down")
        if self._cluster.synced:
            return web.Response(text="ok\n")
        faults = [one.fault for one in self._cluster.reflectors if one.fault]
        return say(503, "; ".join(faults) or "nodes and pods are being listed")

    async def _metrics(self, _request: web.Request) -> web.Response:
        text = metrics.render(
            self._extender, self._cluster, self._leadership, self._claims, self._durations, self._api.calls
        )
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4"})


async def body(request: web.Request, kind: type[Any]) -> Any:
    return msgspec.json.decode(await request.read(), type=kind)


def about(response: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def answer(result: Any) -> web.Response:
    return web.Response(body=wire.encode(result), content_type="application/json")


def say(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n")
