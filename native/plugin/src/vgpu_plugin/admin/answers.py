# SPDX-License-Identifier: Apache-2.0
"""Answers the calls of vgpuctl. The calls are the methods of the service vgpu.v1.Admin in admin.proto. admin_socket.py
serves them to root on this host.
"""

from __future__ import annotations

import os
import time
from typing import Protocol

from .. import version
from .._proto import admin_pb2 as api
from ..allocation.allocator import Allocator
from ..allocation.driver_limits import DriverLimits
from ..allocation.leases import Leases, Terms
from ..allocation.limit_devices import AtMost
from ..allocation.records import LEASE, LEASES
from ..errors import PluginError
from ..kubelet.service import to_message
from ..node.gauges import UNKNOWN, Gauges
from ..node.gpus import NO_NUMA, Gpu
from ..offer.pool import LOST, Offer, Pool
from ..reconcile.reconfigure import Reconfiguration
from ..watch import setup as watch_setup
from .containers import Containers
from .resizing import Resizing

# States in which vgpuctl shows a slice (the part of a GPU that one container gets). The health that the kubelet sees is
# a different value: for example, an allocated slice of a healthy GPU may be reported to the kubelet as Unhealthy.
FREE, IN_USE, UNHEALTHY = "free", "in use", "unhealthy"
# Fields of the message Gauges (current measurements of a GPU). A field is omitted from the response if the driver does
# not report it.
MAY_LACK = ("power_milliwatts", "sm_clock_mhz", "memory_clock_mhz", "ecc_corrected", "ecc_uncorrected")


class Served(Protocol):
    """What this program has registered with the kubelet: either its resources, or its driver for claims
    (Dynamic Resource Allocation)."""

    def state(self) -> tuple[bool, str]:
        """Returns whether the plugin is registered with the kubelet, and the last error if it is not."""

    def no_kubelet(self) -> bool:
        """Returns whether this host never had a kubelet, but only docker or podman."""


class Admin:
    # assembly.py sets these two attributes after it has created this object.
    resizing: Resizing
    driver_limits: DriverLimits

    def __init__(
        self,
        pool: Pool,
        allocator: Allocator,
        leases: Leases,
        registrations: Served,
        changes: Reconfiguration,
        containers: Containers,
    ) -> None:
        self._pool = pool
        self._allocator = allocator
        self._leases = leases
        self._registrations = registrations
        self._changes = changes
        self._containers = containers

    def Status(self, request: api.StatusRequest) -> api.StatusResponse:
        return self.status()

    def status(self) -> api.StatusResponse:
        registered, fault = self._registrations.state()
        used = self._leases.in_use()
        settings = self._changes.settings
        return api.StatusResponse(
            version=version(),
            pid=os.getpid(),
            resource=settings.resource,
            config_path=str(settings.path),
            config_sha256=settings.sha256,
            library=self._library(),
            registered=registered,
            kubelet_error=fault,
            no_kubelet=self._registrations.no_kubelet(),
            gpus=self._gpus(),
            slices=[self._slice(offer, offer.slice.id in used) for offer in self._pool.offers()[1]],
            allocations=[
                api.Allocation(
                    id=record.id,
                    kind=record.kind,
                    slice_ids=record.slice_ids,
                    library=os.path.basename(record.library),
                    expires_in_s=self._leases.seconds_left(record) if record.kind in LEASES else 0,
                    holder=record.holder,
                )
                for record in self._allocator.records.all()
            ],
            warnings=[*self._allocator.records.warnings, *self._changes.notes()],
            resources=self._pool.resources,
            memory_enforcement=self._allocator.enforcement.verdict.active,
            memory_enforcement_reason=self._allocator.enforcement.verdict.line(),
            memory_enforcement_probed=self._allocator.enforcement.probed,
            driver_limits=[api.DriverLimit(**vars(one)) for one in self.driver_limits.state],
            driver_limits_repaired=self.driver_limits.repaired,
            hand_over=", ".join(self._allocator.hand_over.strategies),
            hand_over_reason=self._allocator.hand_over.reason,
            config_name=self._changes.name,
            config_fault=self._changes.fault,
            waiting=self._changes.waiting,
            mounts_unchecked=self._allocator.sizer.mounts.unchecked,
        )

    def _gpus(self) -> list[api.Gpu]:
        """Returns every GPU of the pool, and the GPUs that the driver counts but that could never be read."""
        gpus = self._pool.gpus
        shown = self._containers.gauges([gpu.uuid for gpu in gpus])
        found = [self._gpu(gpu, shown[gpu.uuid]) for gpu in gpus]
        unknown = [
            api.Gpu(
                index=index,
                model="unknown",
                numa_node=NO_NUMA,
                reason=f"{LOST}{reason}",
                memory_used_mib=UNKNOWN,
                utilisation=UNKNOWN,
                temperature=UNKNOWN,
            )
            for index, reason in self._changes.unknown.items()
        ]
        return sorted([*found, *unknown], key=lambda gpu: gpu.index)

    def _gpu(self, gpu: Gpu, shown: Gauges) -> api.Gpu:
        xids = self._containers.xids(gpu.uuid)
        known = {name: value for name in MAY_LACK if (value := getattr(shown, name)) != UNKNOWN}
        return api.Gpu(
            index=gpu.index,
            uuid=gpu.uuid,
            model=gpu.model,
            memory_mib=gpu.memory_mib,
            minor=gpu.minor,
            pci=gpu.pci,
            numa_node=gpu.numa_node,
            healthy=not self._pool.unhealthy_reason(gpu.uuid),
            reason=self._pool.unhealthy_reason(gpu.uuid),
            memory_used_mib=shown.memory_used_mib,
            utilisation=shown.utilisation,
            temperature=shown.temperature,
            xids=[
                api.XidCount(xid=xid, count=count, age_s=time.monotonic() - xids.times[xid])
                for xid, count in sorted(xids.counts.items())
            ],
            last_xid=xids.last,
            **known,
        )

    def _slice(self, offer: Offer, held: bool) -> api.Slice:
        one = offer.slice
        in_use = held or bool(self._pool.outside(one.id))
        state = IN_USE if in_use or self._pool.withheld(one.id) else FREE
        return api.Slice(
            id=one.id,
            uuid=one.uuid,
            memory_mib=one.memory_mib,
            sm_percent=one.sm_percent,
            health="Healthy" if offer.healthy else "Unhealthy",
            in_use=in_use,
            resource=one.resource,
            mode=one.mode,
            device=one.device,
            state=UNHEALTHY if self._pool.unhealthy_reason(one.uuid) else state,
        )

    def _library(self) -> str:
        try:
            return self._allocator.library().name
        except PluginError:
            return ""

    def Usage(self, request: api.UsageRequest) -> api.UsageResponse:
        return self.usage()

    def usage(self) -> api.UsageResponse:
        return api.UsageResponse(
            usages=[
                api.ContainerUsage(
                    allocation=one.allocation,
                    kind=one.kind,
                    namespace=one.holder.namespace,
                    pod=one.holder.pod,
                    container=one.holder.container,
                    slice_ids=one.slice_ids,
                    uuid=one.uuid,
                    memory_limit=one.memory_limit,
                    memory_used=one.memory_used,
                    memory_context=one.memory_context,
                    processes=one.processes,
                    share_limit=one.share_limit,
                    share_granted=one.share_granted,
                    device_seconds=one.device_seconds,
                    throttled_seconds=one.throttled_seconds,
                    active=one.active,
                    throttled=one.throttled,
                    violations=one.violations,
                    memory_driver=one.memory_driver,
                    holder=one.whose,
                    programs=watch_setup.programs(one.programs),
                    memory_promised=one.memory_promised,
                    memory_most=one.memory_most,
                )
                for one in self._containers.usages()
            ]
        )

    def Watch(self, request: api.WatchRequest) -> api.WatchResponse:
        return self.watched()

    def watched(self) -> api.WatchResponse:
        return self._containers.watched()

    def Lease(self, request: api.LeaseRequest) -> api.LeaseResponse:
        at_most = AtMost(request.memory_bytes, request.sm_percent)
        kind, gpus = request.kind or LEASE, request.gpus or 1
        terms = Terms(kind, request.holder, request.engine, gpus, at_most, request.by_cdi)
        answer = self._leases.lease(request.uuid, request.ttl_s, terms)
        return api.LeaseResponse(allocation=answer.allocation, ids=answer.slice_ids, answer=to_message(answer))

    def Forget(self, request: api.ForgetRequest) -> api.ForgetResponse:
        self._changes.forget(request.uuid)
        return api.ForgetResponse()

    def Release(self, request: api.ReleaseRequest) -> api.ReleaseResponse:
        self._leases.release(request.allocation)
        return api.ReleaseResponse()

    def Resize(self, request: api.ResizeRequest) -> api.ResizeResponse:
        return self.resizing.resize(request)
