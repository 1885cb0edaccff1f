# SPDX-License-Identifier: Apache-2.0
"""Elects the replica that writes, by a Lease (coordination.k8s.io). All replicas answer admission and filter; only the
holder of the Lease binds pods and restores plans (annotations with the pods' GPUs).

The kube-schedulers have a Lease of their own, and only the replica next to the leading kube-scheduler is called. So
this Lease must follow theirs. A replica that is called without holding the Lease requests it by an annotation. A holder
that is not called any more then hands the Lease over. If the holder is dead, the Lease must expire first.

Clocks of two machines are never compared. The holder counts the duration of the Lease from before its renewal request;
the other replicas count from when they saw the Lease change. So the Lease always expires first for its holder. The
holder binds only while the remaining time is longer than a call to the API server takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from .api import TIMEOUT, Api, ApiError
from .cluster import Cluster

log = logging.getLogger(__name__)

RETRY = 2.0
# Minimum seconds between two requests to the API server.
LEAST = 0.25
# A holder that was not called for this many seconds hands the Lease over on request.
QUIET = 3.0
# A replica that was called within this many seconds requests the Lease.
RECENT = 10.0
WANTED = "vgpu.fleet/wanted-by"


@dataclass(frozen=True)
class Candidacy:
    """How this replica takes part in the election. ``lease`` is namespace/name; it is empty if this program is the only
    replica. ``identity`` is unique to this process. ``duration``: seconds for which a renewed Lease is valid.
    """

    lease: str
    identity: str
    duration: float = 15.0


class Leadership:
    def __init__(
        self,
        api: Api,
        cluster: Cluster,
        candidacy: Candidacy,
        busy: Callable[[], bool] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``busy``: whether a bind request is under way; then the Lease is not handed over."""
        self._api, self._cluster, self._busy, self._now = api, cluster, busy, now
        lease, self.identity, self._duration = candidacy.lease, candidacy.identity, candidacy.duration
        self._folder, self._name, self._path = "", "", ""
        if lease:
            namespace, _slash, self._name = lease.partition("/")
            self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
            self._path = f"{self._folder}/{self._name}"
        # The Lease as last read from the API server, and the time at which this state was first seen.
        self._lease: dict[str, Any] | None = None
        self._seen: tuple[Any, ...] = ()
        self._seen_at = 0.0
        self._called = self._asked = float("-inf")
        self._wake = asyncio.Event()
        self._until = 0.0
        self.leads = not lease
        self._since = -1.0
        self.why = "" if self.leads else "the lease has not been read yet"

    def called(self) -> None:
        """Records that the kube-scheduler next to this replica has called it."""
        self._called = self._now()
        if not self.leads:
            self._wake.set()

    async def may_bind(self) -> str:
        """Returns "" if this replica may bind, otherwise the reason."""
        if self._path:
            if not self.leads:
                self.called()
                return self.why
            if self._now() + TIMEOUT > self._until:
                return "the lease is about to end; the bind is tried again"
        if not self._cluster.synced or self._cluster.pods.listed_at < self._since:
            return "pods and nodes are being listed; the bind is tried again"
        return ""

    def writes(self) -> bool:
        """Returns whether this replica may restore plans now."""
        return not self._path or (self.leads and self._now() + TIMEOUT <= self._until)

    def since(self) -> float:
        """Returns when this replica became the holder. It restores no plan by a list of pods from before then."""
        return self._since

    async def run(self) -> None:
        """Renews or requests the Lease until it is cancelled."""
        while self._path:
            try:
                await self.round()
            except ApiError as fault:
                self._lease = None
                if not self.leads:
                    self.why = f"the lease cannot be read: {fault}"
                log.warning("lease %s: %s", self._path, fault)
            if self.leads and self._now() > self._until:
                self._set(False, "the lease ended, because it was not renewed in time")
            await self._pause()

    async def round(self) -> None:
        """Does the next step: renews, takes, requests or hands over the Lease. Raises ApiError; after a conflict the
        caller tries again.
        """
        if self._lease is None:
            await self._read()
        lease = self._lease
        if lease is None:
            return await self._write(None, self.identity)
        spec = lease.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        wanted = str(((lease["metadata"].get("annotations")) or {}).get(WANTED) or "")
        if holder == self.identity:
            idle = self._now() - self._called > QUIET and not (self._busy and self._busy())
            if wanted not in ("", self.identity) and idle:
                self._set(False, f"the kube-scheduler now calls {wanted}, which gets the lease")
                return await self._write(lease, "")
            return await self._write(lease, self.identity)
        # Another replica holds the Lease, so this replica's copy must be read again next time.
        self._lease = None
        ended = self._now() - self._seen_at > float(spec.get("leaseDurationSeconds") or 0)
        recent = self._now() - self._called < RECENT
        if (holder and ended) or (not holder and (wanted in ("", self.identity) or recent or ended)):
            return await self._write(lease, self.identity)
        self._set(False, f"this replica is {self.identity}, and the replica that binds is {holder or 'none'}")
        if recent and wanted != self.identity:
            patch = {"metadata": {"resourceVersion": self._version(lease), "annotations": {WANTED: self.identity}}}
            try:
                await self._api.json("PATCH", self._path, patch)
            except ApiError as fault:
                if fault.status != 409:
                    raise
        return None

    async def release(self) -> None:
        """Releases the Lease at shutdown, so that another replica need not wait until it expires."""
        if self._path and self.leads:
            self._set(False, "this replica is shutting down")
            with contextlib.suppress(ApiError):
                await self._read()
                if self._lease is not None and self._lease["spec"].get("holderIdentity") == self.identity:
                    await self._write(self._lease, "")

    # --- internal

    async def _read(self) -> None:
        try:
            self._look(await self._api.json("GET", self._path))
        except ApiError as fault:
            if fault.status != 404:
                raise
            self._lease = None

    def _look(self, lease: dict[str, Any]) -> None:
        spec = lease.get("spec") or {}
        seen = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._now()
        self._lease = lease

    async def _write(self, lease: dict[str, Any] | None, holder: str) -> None:
        """Makes ``holder`` the holder, unless the Lease was changed since it was read."""
        before = (lease or {}).get("spec") or {}
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        changes = int(before.get("leaseTransitions") or 0)
        spec: dict[str, Any] = {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(self._duration)),
            "renewTime": stamp,
            "acquireTime": before.get("acquireTime") or stamp,
            "leaseTransitions": changes,
        }
        if holder and before.get("holderIdentity") != holder:
            spec.update(acquireTime=stamp, leaseTransitions=changes + bool(before))
        meta: dict[str, Any] = {"name": self._name}
        if lease is not None:
            # A handover keeps the annotation that requests the Lease, so that the replica named in it gets the Lease.
            kept = {} if holder else {WANTED: (lease["metadata"].get("annotations") or {}).get(WANTED, "")}
            meta.update(resourceVersion=self._version(lease), annotations=kept)
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec}
        began = self._now()
        self._lease = None
        try:
            made = await self._api.json(*(("POST", self._folder) if lease is None else ("PUT", self._path)), body)
        except ApiError as fault:
            if fault.status != 409:
                raise
            # Another replica wrote first; read the current state.
            self._wake.set()
            return
        self._look(made)
        if holder:
            self._until = began + self._duration
            self._set(True, "")

    @staticmethod
    def _version(lease: dict[str, Any]) -> str:
        return str(lease["metadata"].get("resourceVersion") or "")

    def _set(self, leads: bool, why: str) -> None:
        if leads and not self.leads:
            # The former holder may have bound pods after this replica's last list, so pods are listed again.
            self._since = time.monotonic()
            self._cluster.pods.list_again()
        if leads != self.leads:
            log.info("this replica %s: %s", "binds" if leads else "no longer binds", why or self.identity)
        self.leads, self.why = leads, why

    async def _pause(self) -> None:
        # wait_for of Python 3.11 loses a cancellation that arrives together with the awaited event, so a replica that
        # is stopped at the moment of a call would run on for ever.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY):
                await self._wake.wait()
        self._wake.clear()
        left = self._asked + LEAST - time.monotonic()
        if left > 0:
            await asyncio.sleep(left)
        self._asked = time.monotonic()
