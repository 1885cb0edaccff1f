# SPDX-License-Identifier: Apache-2.0
"""Implements vgpuctl resize, which changes the GPU memory and the share of GPU time of a running container. It finds
the container's allocation (the slices that it has), resizes it, and writes the new size into an annotation of the
container's pod.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .._proto import admin_pb2 as api
from .._shared.pods import resizes
from .._shared.pods.annotations import Device
from ..allocation import sizing
from ..allocation.records import KUBELET, Record
from ..allocation.resize_rules import Publish, Resized, Wanted
from ..allocation.resizer import Resizer
from ..errors import BadRequest, NotNow, Refused, Unknown
from ..node.podresources import Holder
from ..offer.pool import Pool
from . import holder_names

if TYPE_CHECKING:
    from ..allocation.pod_sizes import PodSizes


class Resizing:
    """``pods`` finds pods at the API server; it is None if no API server is configured. ``holders`` asks the kubelet
    which container holds which slice.
    """

    def __init__(
        self,
        pool: Pool,
        resizer: Resizer,
        pods: PodSizes | None,
        holders: Callable[[], dict[str, Holder] | None],
    ) -> None:
        self._pool = pool
        self._resizer = resizer
        self._pods = pods
        self._holders = holders

    def resize(self, request: api.ResizeRequest) -> api.ResizeResponse:
        """Gives an allocation the requested size. Raises PluginError."""
        cores = request.sm_percent if request.HasField("sm_percent") else None
        if request.memory_mib < 0 or (not request.memory_mib and cores is None and not request.oom_killer):
            raise BadRequest(
                f"{request.what}: no size is requested; expected memory of 1 MiB or more, cores in percent, or both, "
                f"such as: vgpuctl resize {request.what} --memory 8Gi --cores 30"
            )
        holders = self._holders() or {}
        record = self._record(request.what, holders)
        uuids = [one["uuid"] for one in record.limits.get("devices") or []]
        if request.uuid and request.uuid not in uuids:
            raise Unknown(f"allocation {record.id} has no GPU {request.uuid}; it has {', '.join(uuids) or 'none'}")
        wanted = Wanted(request.memory_mib or None, cores)
        chosen = [request.uuid] if request.uuid else uuids
        # The scheduler adds up the sizes in the pods' annotations. So if the scheduler planned this pod, the new size
        # must be written on the pod.
        planned = self._pods is not None and record.kind == KUBELET and sizing.SIZED in record.limits
        publish = self._publisher(record, uuids) if planned and self._resizer.promises(record) else None
        done = self._resizer.resize(record.id, dict.fromkeys(chosen, wanted), request.oom_killer, publish)
        return _answer(done, _pod(record, holders) or record.holder)

    def _record(self, what: str, holders: dict[str, Holder]) -> Record:
        """Finds an allocation by its id, by one of its slices, or by the name of its holder, and returns its record.
        Raises Unknown, BadRequest.
        """
        known = {one.id: one for one in self._resizer.known()}
        shown = {one.id: _pod(one, holders) or one.holder or f"{one.kind} {one.id}" for one in known.values()}
        ids = [one.id for one in known.values() if what in (one.id, *one.slice_ids, *map(self._short, one.slice_ids))]
        if len(ids) > 1:
            named = ", ".join(f"{shown[one]} ({one})" for one in ids)
            raise BadRequest(f"{what} has several allocations: {named}; name one of them by its id")
        found = ids[0] if ids else holder_names.find(shown, what)
        if not found:
            raise Unknown(
                f"this node has no allocation, slice in use or holder named {what}; expected {holder_names.EXPECTED}; "
                "see: vgpuctl slices"
            )
        return known[found]

    def _short(self, slice_id: str) -> str:
        """Returns a slice id with the index of its GPU instead of the UUID, such as 0::2."""
        uuid, _colons, number = slice_id.partition("::")
        index = next((gpu.index for gpu in self._pool.gpus if gpu.uuid == uuid), None)
        return f"{index}::{number}" if index is not None and number else slice_id

    def _publisher(self, record: Record, uuids: list[str]) -> Publish:
        """Reads the pod of a record, and returns a function that later writes the new sizes on the pod. The returned
        function fails if the pod was changed in between. Raises PluginError.
        """
        assert self._pods is not None
        pods, owner = self._pods, self._pods.owner(record)
        plan = pods.plan(owner)
        if resizes.FORMER in (owner.pod["metadata"].get("annotations") or {}):
            raise NotNow(f"pod {owner.name}: an earlier resize is not done yet; try again when it is done")
        planned = next((part for part in plan if part.container == owner.container), None)
        if planned is None or {one.uuid for one in planned.devices} != set(uuids):
            raise Refused(
                f"pod {owner.name}, container {owner.container}: its plan names other GPUs than it has; expected "
                f"{', '.join(uuids)}; see: vgpuctl explain pod {owner.name}"
            )

        def publish(devices: list[Device], leaving: bool) -> None:
            # A device may have burst memory: memory above the guaranteed amount, which the container may use while it
            # is free. For such a device the pod's annotation keeps the planned memory, because only the node needs the
            # current limit.
            had = {one.uuid: one for one in planned.devices}
            kept = [had[one.uuid]._replace(cores=one.cores) if had[one.uuid].burst_mib else one for one in devices]
            after = sizing.with_part(plan, owner.container, kept)
            pods.write_resized(owner, after, plan if leaving else ())

        return publish


def _pod(record: Record, holders: dict[str, Holder]) -> str:
    """Returns namespace/pod/container, or an empty string if no pod holds the record's slices."""
    return next(("/".join(holders[one]) for one in record.kubelet_ids if one in holders), "")


def _answer(done: Resized, holder: str) -> api.ResizeResponse:
    return api.ResizeResponse(
        allocation=done.record.id,
        kind=done.record.kind,
        holder=holder,
        changed=done.changed,
        leaving=done.leaving,
        gpus=[
            api.ResizedGpu(
                uuid=one.now.uuid,
                memory_mib_before=one.before.memory_mib,
                memory_mib=one.now.memory_mib,
                sm_percent_before=one.before.cores,
                sm_percent=one.now.cores,
                memory_used=one.used,
            )
            for one in done.gpus
        ],
    )
