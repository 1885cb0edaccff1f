# SPDX-License-Identifier: Apache-2.0
"""Refuses a container if its pod mounts a volume over the files of its allocation (the slices of GPUs that it has),
because the volume would hide the container's limits. The check needs the API server and is skipped if none is
configured.

Normally the webhook of vgpu_scheduler (``kube/mount_policy``) refuses such a pod before it is stored. This check is for
clusters without the webhook, and for pods that are older than the webhook.

If the API server does not respond, the container starts unchecked and is counted, so that a harmless pod does not wait.
The watcher, which compares each container's GPU usage with its limits, still finds a container with hidden limits. It
reads the limits file on the node and not the file that the container sees.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from .._shared.pods.mounts import KINDS, container_conflicts
from ..errors import NotNow, Refused
from .records import Record

if TYPE_CHECKING:
    from .pod_sizes import Owner, PodSizes

EVENT = "VgpuMountConflict"

log = logging.getLogger(__name__)


class MountCheck:
    """Checks the mounts of pods. ``pods`` finds the pods at the API server; it is None if no API server is configured.
    ``unchecked`` is the number of containers that started unchecked because the API server did not respond.
    """

    def __init__(self, pods: PodSizes | None) -> None:
        self._pods = pods
        self._counting = threading.Lock()
        self.unchecked = 0
        # Allocations whose pod has passed the check. A pod's mounts never change, so a restart of its containers needs
        # no further request.
        self._passed: set[str] = set()

    def check(self, record: Record) -> None:
        """Raises Refused if the pod of a record (the saved data of an allocation) mounts a volume over the allocation's
        files. The caller must not hold the records' lock, because the API server is asked.
        """
        if self._pods is None or record.id in self._passed:
            return
        try:
            owner = self._pods.owner(record)
        except NotNow as fault:
            with self._counting:
                self.unchecked += 1
            log.warning("allocation %s: its container starts without a check of its pod's mounts: %s", record.id, fault)
            return
        self.refuse(owner, record)

    def refuse(self, owner: Owner, record: Record) -> None:
        """Raises Refused if the record's container mounts a volume over the allocation's files. In that case it also
        reports an event on the pod.
        """
        spec = owner.pod.get("spec") or {}
        found = [
            conflict
            for kind in KINDS
            for container in spec.get(kind) or ()
            if container.get("name") == owner.container
            for conflict in container_conflicts(container)
        ]
        if not found:
            self._passed.add(record.id)
            return
        text = f"container {owner.container}: " + "; ".join(one.reason for one in found)
        if self._pods is not None:
            self._pods.report(owner, EVENT, text)
        raise Refused(f"pod {owner.name}, {text}")

    def forget(self, allocation: str) -> None:
        self._passed.discard(allocation)
