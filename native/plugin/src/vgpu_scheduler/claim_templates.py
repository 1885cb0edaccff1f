# SPDX-License-Identifier: Apache-2.0
"""ResourceClaimTemplates of pods that asked in dialects: made at admission, deleted when no pod names them any more.

A template is named by the digest of what it says. Its namespace is the tenants', who may make or replace one of that
name: one that says something else is never used. Its spec cannot be changed in place, as the API server has it.

Deletion races with admission. So admission renews a time on the template, which makes it another version, and what is
deleted is that very version: old by its time, and after that found to be named by no pod.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from . import wire
from .api import Api, ApiError

log = logging.getLogger(__name__)

LABEL, USED = "vgpu.fleet/made-of", "vgpu.fleet/used"
OF_PODS = "pods"
# Seconds: a time that is younger is not renewed; a template that is older goes; how often that is looked at.
FRESH, OLD, EVERY = 300.0, 3600.0, 600.0
# All calls of one admission; the API server waits for five seconds.
AT_MOST = 4.0
# Of a list: tenants may write as long ones as etcd holds.
PAGE = 50
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")
ALL = "/apis/resource.k8s.io/v1/resourceclaimtemplates"


class TemplateError(ValueError):
    """A template that cannot be used; the text says why and what to do."""


class Templates:
    def __init__(self, api: Api, now: Callable[[], float] = time.time) -> None:
        self._api, self._now = api, now

    async def ensure(self, namespace: str, specs: Mapping[str, Any]) -> None:
        """Each of these is there, and is not about to be deleted. Raises TemplateError or ApiError."""
        if not specs:
            return
        if not NAMESPACE.match(namespace):
            # A client that reaches the port can send any review, and the name becomes part of a path.
            raise TemplateError("the review names no namespace as Kubernetes has them")
        try:
            async with asyncio.timeout(AT_MOST), asyncio.TaskGroup() as group:
                for name, spec in specs.items():
                    group.create_task(self._ensure(namespace, name, spec))
        except TimeoutError:
            raise TemplateError(f"its templates were not made within {AT_MOST:g} s; try again") from None
        except ExceptionGroup as faults:
            first = faults.exceptions[0]
            if isinstance(first, TemplateError):
                raise first from None
            raise TemplateError(f"a template of its claims could not be made: {first}; try again") from None

    async def _ensure(self, namespace: str, name: str, spec: Any) -> None:
        folder = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaimtemplates"
        path = f"{folder}/{name}"
        for _twice in range(2):
            metadata = {"name": name, "labels": {LABEL: OF_PODS}, "annotations": {USED: self._stamp()}}
            body = {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaimTemplate",
                "metadata": metadata,
                "spec": {"spec": spec},
            }
            try:
                found = await self._api.json("POST", folder, body)
            except ApiError as fault:
                if fault.status != 409:
                    raise
            else:
                return _compare(found, spec)
            try:
                found = await self._api.json("GET", path)
                _compare(found, spec)
                return await self._renew(path, found)
            except ApiError as fault:
                # Deleted between the two, or changed by another that renews it.
                if fault.status not in (404, 409):
                    raise
        raise TemplateError(f"{path}: it comes and goes; try again")

    async def _renew(self, path: str, found: Mapping[str, Any]) -> None:
        meta = found["metadata"]
        used = _seconds((meta.get("annotations") or {}).get(USED))
        if (meta.get("labels") or {}).get(LABEL) != OF_PODS or (used and 0 <= self._now() - used < FRESH):
            return
        metadata = {"uid": meta.get("uid"), "annotations": {USED: self._stamp()}}
        await self._api.json("PATCH", path, {"metadata": metadata})

    async def run(self, writes: Callable[[], bool]) -> None:
        """Until it is cancelled. ``writes``: whether this is the replica that writes."""
        while True:
            await asyncio.sleep(EVERY)
            if writes():
                try:
                    await self.clear_up()
                except ApiError as fault:
                    log.warning("templates of claims were not cleared up: %s", fault)

    async def clear_up(self) -> None:
        """Delete the old ones that no pod names, a page of them at a time. Raises ApiError."""
        async for page in self._api.list(ALL, wire.TemplateList, {"labelSelector": f"{LABEL}={OF_PODS}"}, PAGE):
            old: dict[str, dict[str, wire.Meta]] = {}
            for one in page.items or []:
                if self._age(one.metadata) > OLD:
                    old.setdefault(one.metadata.namespace, {})[one.metadata.name] = one.metadata
            for namespace, templates in old.items():
                await self._clear(namespace, templates)

    async def _clear(self, namespace: str, templates: dict[str, wire.Meta]) -> None:
        async for page in self._api.list(f"/api/v1/namespaces/{namespace}/pods", wire.ClaimingPodList):
            for pod in page.items or []:
                for claim in pod.spec.resourceClaims or []:
                    templates.pop(claim.resourceClaimTemplateName or "", None)
        for name, meta in templates.items():
            exactly = {"uid": meta.uid, "resourceVersion": meta.resourceVersion}
            path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaimtemplates/{name}"
            try:
                await self._api.call("DELETE", path, {"preconditions": exactly})
                log.info("template %s/%s: no pod names it; deleted", namespace, name)
            except ApiError as fault:
                # 409: used again since.
                if fault.status not in (404, 409):
                    raise

    def _age(self, meta: wire.Meta) -> float:
        """Since it was last used; by its making where that time is of no use, for tenants may write it too."""
        now = self._now()
        used = _seconds((meta.annotations or {}).get(USED))
        made = _seconds(meta.creationTimestamp) or now
        return now - (max(used, made) if used <= now + FRESH else made)

    def _stamp(self) -> str:
        return datetime.fromtimestamp(self._now(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _compare(found: Mapping[str, Any], spec: Any) -> None:
    meta, kept = found.get("metadata") or {}, found.get("spec") or {}
    where = f"ResourceClaimTemplate {meta.get('namespace')}/{meta.get('name')}"
    if kept.get("spec") != spec or any((kept.get("metadata") or {}).values()):
        text = "says something else than its name stands for, by a hand or by an API server that drops fields of shares"
        raise TemplateError(f"{where} {text} (Kubernetes 1.36 keeps them); delete it, and try again")
    if meta.get("deletionTimestamp"):
        raise TemplateError(f"{where} is being deleted; try again")


def _seconds(text: Any) -> float:
    """Of a time as Kubernetes writes it; 0 where it is none."""
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0
