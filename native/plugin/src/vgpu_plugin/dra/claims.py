# SPDX-License-Identifier: Apache-2.0
"""Prepares a claim (Dynamic Resource Allocation) for the kubelet: reads the claim from the API server, creates its
shares of GPUs, and returns the CDI devices of its containers.
"""

from __future__ import annotations

import logging
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..allocation.claim_shares import ClaimShares, Wanted
from ..allocation.records import CLAIM, Record
from ..errors import NotNow, PluginError, Refused
from ..node.gpus import Gpu
from ..node.kube_api import ApiError
from ..offer.pool import Pool
from ..offer.settings import Settings
from . import parameters
from .claim_files import ClaimFiles, check_uid, device_id
from .names import device_names
from .shares import Claim, Share, shares_of

NOT_FOUND = 404

log = logging.getLogger(__name__)


class Reader(Protocol):
    """Reads objects from the API server."""

    def get(self, path: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Prepared:
    """A prepared device of a claim, with the fields of the kubelet's response."""

    request: str
    device: str
    cdi_id: str
    share_id: str


class Claims:
    """Prepares and unprepares claims. It is thread-safe. ``settings`` returns the current settings."""

    def __init__(
        self,
        api: Reader,
        node: str,
        pool: Pool,
        shares: ClaimShares,
        files: ClaimFiles,
        settings: Callable[[], Settings],
    ) -> None:
        self._api = api
        self._node = node
        self._pool = pool
        self._shares = shares
        self._files = files
        self._settings = settings

    def prepare(self, claim: Claim) -> list[Prepared]:
        """Prepares the devices of a claim, with all files that a container needs, and returns the devices. A repeated
        call returns the same devices. Raises PluginError.
        """
        check_uid(claim.uid)
        found = self._read(claim)
        shares = shares_of(claim, found, self._node)
        devices = {name: uuid for uuid, name in device_names(self._pool.gpus).items()}
        wanted = [self._wanted(claim, one, devices) for one in shares]

        def publish(records: Sequence[Record]) -> None:
            try:
                self._files.write(claim.uid, records, self._pool.gpus)
            except OSError as fault:
                raise NotNow(f"{claim}: its CDI file cannot be written: {fault}") from fault

        try:
            self._shares.prepare(claim.uid, f"{claim.namespace}/{claim.name}", wanted, publish)
        except PluginError:
            if not self._shares.of(claim.uid):
                self._files.remove(claim.uid)
            raise
        return [
            Prepared(one.request, part.device, device_id(claim.uid, one.request), part.share_id)
            for one in shares
            for part in one.parts
        ]

    def _read(self, claim: Claim) -> Mapping[str, Any]:
        namespace, name = (urllib.parse.quote(one, safe="") for one in (claim.namespace, claim.name))
        path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}"
        try:
            return self._api.get(path)
        except ApiError as fault:
            if fault.status == NOT_FOUND:
                raise Refused(f"{claim} no longer exists; expected a claim with uid {claim.uid}") from None
            raise NotNow(f"{claim} cannot be read: {fault}") from None

    def _wanted(self, claim: Claim, share: Share, devices: Mapping[str, str]) -> Wanted:
        parts = []
        for part in share.parts:
            uuid = devices.get(part.device)
            if uuid is None:
                raise Refused(f"{claim}: this node has no device {part.device}; it has {', '.join(devices) or 'none'}")
            parts.append((uuid, part.memory_mib, part.cores))
        gpus = [self._gpu(uuid) for uuid, _mib, _cores in parts]
        flags = parameters.tightened(self._settings().limit_flags(gpus), share.given)
        return Wanted(share.request, tuple(parts), flags)

    def _gpu(self, uuid: str) -> Gpu:
        for gpu in self._pool.gpus:
            if gpu.uuid == uuid or any(one.uuid == uuid for one in gpu.mig):
                return gpu
        raise Refused(f"this node has no GPU {uuid}")

    def unprepare(self, uid: str) -> None:
        """Ends all shares of a claim. The claim itself may be gone from the API server. Raises PluginError."""
        check_uid(uid)
        try:
            # The CDI file is removed first. Otherwise a container could start with a share that is about to end.
            self._files.remove(uid)
        except OSError as fault:
            raise NotNow(f"the CDI file of claim {uid} cannot be removed: {fault}") from fault
        for allocation in self._shares.end(uid):
            log.info("allocation %s ends, because its claim is unprepared", allocation)

    def restore(self, records: Sequence[Record]) -> None:
        """Writes the CDI files of claims again if they were deleted, and removes the files of ended claims. Called once
        when the plugin starts.
        """
        for fault in self._shares.restore():
            log.error("%s", fault)
        by_uid: dict[str, list[Record]] = {}
        for record in records:
            if record.kind == CLAIM:
                by_uid.setdefault(record.claim, []).append(record)
        try:
            for uid in self._files.names():
                if uid not in by_uid:
                    self._files.remove(uid)
            for uid, mine in by_uid.items():
                self._files.write(uid, mine, self._pool.gpus)
        except (OSError, PluginError) as fault:
            log.error("the CDI files of claims cannot be written again: %s", fault)
