# SPDX-License-Identifier: Apache-2.0
"""HTTP: bodies to calls and answers back; it decides nothing. A body that cannot be read gets a status and a sentence.

The extender listens on the loopback address, for the kube-scheduler beside it; the webhook on all, with TLS.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from . import explain, metrics, webhook, wire
from .api import Api, ApiError
from .cluster import Cluster
from .extender import Extender
from .leadership import Leadership
from .loopback import Answer, Loopback, say

log = logging.getLogger(__name__)

# 5 000 names of 253 letters are 1.3 MB, and a preemption names pods beside.
MAX_BODY = 8 << 20
# A bind that is on the way gets its answer.
SHUTDOWN = 6.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

read_asked = msgspec.json.Decoder(wire.ExtenderArgs).decode
read_bind = msgspec.json.Decoder(wire.BindArgs).decode
read_victims = msgspec.json.Decoder(wire.PreemptArgs).decode
read_review = msgspec.json.Decoder(wire.AdmissionReview).decode


class Service:
    def __init__(
        self, api: Api, extender: Extender, cluster: Cluster, leadership: Leadership, admission: webhook.Settings
    ) -> None:
        self._api, self._extender, self._cluster, self._leadership = api, extender, cluster, leadership
        self._admission = admission
        self._durations = metrics.Durations()
        self._verbs = {"filter": self._filter, "prioritize": self._prioritize, "preempt": self._preempt}

    # --- the extender

    def listener(self) -> Loopback:
        return Loopback(self._called, MAX_BODY, SHUTDOWN)

    def _called(self, method: str, path: str, body: bytes) -> Answer | Awaitable[Answer]:
        verb = path[1:]
        if method == "POST" and verb in self._verbs:
            began = time.perf_counter()
            try:
                return Answer(200, wire.encode(self._verbs[verb](body)))
            except Exception as fault:
                return refusal(path, fault)
            finally:
                self._durations.add(verb, time.perf_counter() - began)
        if method == "POST" and verb == "bind":
            return self._bind(body)
        if method == "GET":
            if path.startswith("/explain/"):
                return self._explain(path)
            if path in ABOUT:
                return ABOUT[path](self)
        return say(404, f"{path}: Not Found")

    def _filter(self, body: bytes) -> wire.FilterResult:
        self._leadership.called()
        if not self._cluster.synced:
            # An error is tried again soon; "no node has GPUs" would keep the pod waiting until some node changes.
            return wire.FilterResult(Error="nodes and pods are being listed; it is tried again")
        return self._extender.filter(read_asked(body))

    def _prioritize(self, body: bytes) -> list[wire.HostPriority]:
        return self._extender.prioritize(read_asked(body))

    def _preempt(self, body: bytes) -> wire.PreemptResult:
        return self._extender.preempt(read_victims(body))

    async def _bind(self, body: bytes) -> Answer:
        began = time.perf_counter()
        try:
            return Answer(200, wire.encode(await self._extender.bind(read_bind(body))))
        except Exception as fault:
            return refusal("/bind", fault)
        finally:
            self._durations.add("bind", time.perf_counter() - began)

    async def _explain(self, path: str) -> Answer:
        namespace, slash, name = path.removeprefix("/explain/").partition("/")
        if not slash or "/" in name:
            return say(404, f"{path}: expected /explain/NAMESPACE/POD")
        try:
            pod = await self._api.pod(unquote(namespace), unquote(name))
            lines = explain.explain(pod, self._extender.ledger, self._extender.config, self._extender.quotas)
            reason = await self._leadership.may_bind()
        except ApiError as fault:
            return say(fault.status or 502, str(fault))
        except Exception as fault:
            return refusal(path, fault)
        if reason:
            lines.append(f"  this replica binds nothing now: {reason}")
        return say(200, "\n".join(lines))

    # --- the webhook

    def webhook_app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app.router.add_post("/mutate", self._mutate)
        app.router.add_post("/validate", self._validate)
        for path in ABOUT:
            app.router.add_get(path, self._about)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        began = time.perf_counter()
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return response(say(413, f"{request.path}: expected a body of at most {MAX_BODY} bytes"))
        except web.HTTPException as fault:
            return response(say(fault.status, f"{request.path}: {fault.reason}"))
        except ConnectionError:
            raise
        except Exception as fault:
            return response(refusal(request.path, fault))
        finally:
            verb = request.path.strip("/").split("/")[0]
            if verb in ("mutate", "validate"):
                self._durations.add(verb, time.perf_counter() - began)

    async def _mutate(self, request: web.Request) -> web.Response:
        review = read_review(await request.read())
        return reviewed(self._judge(review.request))

    async def _validate(self, request: web.Request) -> web.Response:
        """The same judgement once all other webhooks have changed the pod; nothing is changed any more."""
        review = read_review(await request.read()).request
        # Here and not before: the pod is whole, has its uid, and counts from now on.
        found = self._judge(review, self._extender.quotas.admit)
        found.pop("patch", None)
        found.pop("patchType", None)
        return reviewed(found)

    def _judge(self, review: wire.AdmissionRequest, quota: webhook.Quota | None = None) -> dict[str, Any]:
        return webhook.mutate(review, self._admission, sorted(self._extender.ledger.shapes), quota)

    async def _about(self, request: web.Request) -> web.Response:
        return response(ABOUT[request.path](self))

    # --- about this program

    def _healthz(self) -> Answer:
        return say(200, "ok")

    def _readyz(self) -> Answer:
        """Ready once nodes and pods were listed. Who leads does not matter: all answer admission."""
        if self._cluster.synced:
            return say(200, "ok")
        faults = [one.fault for one in self._cluster.reflectors if one.fault]
        return say(503, "; ".join(faults) or "nodes and pods are being listed")

    def _metrics(self) -> Answer:
        text = metrics.render(self._extender, self._cluster, self._leadership, self._durations, self._api.calls)
        return Answer(200, text.encode(), "text/plain; version=0.0.4")


ABOUT: dict[str, Callable[[Service], Answer]] = {
    "/healthz": Service._healthz,
    "/readyz": Service._readyz,
    "/metrics": Service._metrics,
}


def refusal(path: str, fault: Exception) -> Answer:
    """Of what was raised while a body was read or answered."""
    if isinstance(fault, (msgspec.DecodeError, RecursionError, UnicodeError)):
        return say(400, f"{path}: expected JSON as the API server sends it: {fault}")
    log.error("%s failed", path, exc_info=fault)
    return say(500, f"{path}: failed inside; the log has more")


def reviewed(found: dict[str, Any]) -> web.Response:
    return response(
        Answer(200, wire.encode({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": found}))
    )


def response(answer: Answer) -> web.Response:
    return web.Response(status=answer.status, body=answer.body, headers={"Content-Type": answer.kind})
