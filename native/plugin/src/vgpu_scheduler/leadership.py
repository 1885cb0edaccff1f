# SPDX-License-Identifier: Apache-2.0
"""Whether this replica may bind: the kube-scheduler beside it leads, and the ledger is newer than its leadership.

There is no election of our own. Each replica is a kube-scheduler with this program beside it, and the kube-schedulers
elect one by a Lease whose holder is "<host name>_<uuid>". Following that very Lease, the one that is called and the
one that may answer are never two. A former leader ends its binds before its lease does: the rest of the lease must be
longer than a call to the API server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from .api import TIMEOUT, Api, ApiError
from .cluster import Cluster

log = logging.getLogger(__name__)

LOOK = 2.0


class Leadership:
    def __init__(
        self, api: Api, cluster: Cluster, lease: str, identity: str, now: Callable[[], float] = time.time
    ) -> None:
        """``lease`` is namespace/name, empty: this program is the only one. ``identity`` begins the holder's name."""
        self._api, self._cluster, self._identity, self._now = api, cluster, identity, now
        self._path = ""
        if lease:
            namespace, _slash, name = lease.partition("/")
            self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        self._until = 0.0
        self._looked = -LOOK
        self.leads = not lease
        self._since = -1.0
        self.why = ""

    async def may_bind(self) -> str:
        """ "" or the reason."""
        if self._path:
            await self.look()
            if not self.leads:
                return self.why
            if self._now() + TIMEOUT > self._until:
                return "the lease is about to end; it is tried again"
        if not self._cluster.synced or self._cluster.pods.listed_at < self._since:
            return "pods and nodes are being listed; it is tried again"
        return ""

    async def look(self) -> None:
        """Read the lease, at most every two seconds."""
        if not self._path or time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        try:
            spec = (await self._api.json("GET", self._path)).get("spec") or {}
        except ApiError as fault:
            # What was known stands until the lease ends; then nobody leads for all we know.
            if self._now() > self._until:
                self._set(False, f"the lease cannot be read: {fault}")
            return
        holder, until = str(spec.get("holderIdentity") or ""), ends(spec)
        if not holder.startswith(self._identity + "_"):
            self._set(False, f"this is {self._identity}, and the kube-scheduler that leads is {holder or 'none'}")
        elif until <= self._now():
            self._set(False, "the lease of the kube-scheduler beside has ended")
        else:
            self._until = until
            self._set(True, "")

    def _set(self, leads: bool, why: str) -> None:
        if leads and not self.leads:
            # Binds of the former leader may be newer than what was seen here.
            self._since = time.monotonic()
            self._cluster.pods.list_again()
        if leads != self.leads:
            log.info("this replica %s: %s", "leads" if leads else "follows", why or self._identity)
        self.leads, self.why = leads, why


def ends(spec: dict[str, Any]) -> float:
    """When a lease ends, seconds since 1970; 0 where it says nothing."""
    try:
        renewed = datetime.fromisoformat(str(spec["renewTime"]).replace("Z", "+00:00"))
        return renewed.timestamp() + float(spec["leaseDurationSeconds"])
    except (KeyError, ValueError, TypeError):
        return 0.0
