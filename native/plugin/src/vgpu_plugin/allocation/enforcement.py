# SPDX-License-Identifier: Apache-2.0
"""Decides whether the library or the driver enforces memory limits. The inputs are the setting
``vgpu_memory_enforcement`` and facts about the host.

The rule itself (gpu/enforcement.py) is shared with the Ansible modules that predict the result. This module collects
the facts. It also runs the probe, which sets a limit of the driver and checks it; the result of the probe is final.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .._shared.config.sharing import MPS, TIME_SLICING, VCUDA, Piece
from .._shared.config.slices import MIB
from .._shared.gpu import enforcement as rule
from .._shared.gpu import memory_limits
from .._shared.gpu.enforcement import DRIVER, Facts, Verdict
from ..errors import Refused
from ..inject import limit_hook
from ..inject.driver_files import DriverFiles
from ..inject.handover import HandOver
from ..node.gpus import Gpu, GpuError, GpuSource
from ..node.paths import Paths
from ..offer.settings import Settings

NVML = "libnvidia-ml.so.1"
NOT_TRIED = Verdict(rule.LIBRARY, rule.NOT_TRIED)

log = logging.getLogger(__name__)


class Enforcement:
    """Holds two results: the verdict (who enforces memory limits), and the CDI hook for containers. The caller of
    ``configure`` holds the allocator's lock. Any thread may read ``verdict``.
    """

    def __init__(self, paths: Paths, source: GpuSource) -> None:
        self._paths = paths
        self._source = source
        self._hook: dict[str, Any] | None = None
        self.requested = rule.AUTO
        self.verdict = NOT_TRIED
        # True if the verdict comes from a probe on this host, and False if it comes from the facts alone.
        self.probed = False
        self.gpus: tuple[Gpu, ...] = ()

    @property
    def by_driver(self) -> bool:
        return self.verdict.by_driver

    def configure(self, settings: Settings, driver: DriverFiles, gpus: Iterable[Gpu], hand_over: HandOver) -> None:
        self.requested, self.gpus = settings.memory_enforcement, tuple(gpus)
        before, self.verdict = self.verdict, self._decide(settings, hand_over)
        program = settings.library_root / "current" / limit_hook.PROGRAM
        nvml = dict(driver.libraries).get(NVML, "")
        if self.by_driver and not (program.is_file() and nvml):
            missing = f"{program} does not exist" if nvml else f"no {NVML} of the driver is found on this host"
            self.verdict = Verdict(rule.LIBRARY if settings.sharing == VCUDA else rule.NONE, missing)
        self._hook = None
        if self.by_driver:
            where = (str(self._paths.allocations), str(self._paths.cgroup_root))
            self._hook = limit_hook.hook(str(program), *where, nvml, self.verdict.backend, self.requested)
        if self.verdict != before:
            log.log(
                logging.INFO if self.by_driver or self.requested != DRIVER else logging.ERROR, "%s", self.verdict.line()
            )

    def _decide(self, settings: Settings, hand_over: HandOver) -> Verdict:
        sharing, count = settings.sharing, bool(settings.vcuda.get("countContext", True))
        facts = self._facts(hand_over)
        verdict = rule.decide(self.requested, facts, sharing, count)
        # If the facts permit enforcement by the driver, the probe decides. Otherwise the library enforces the limits,
        # and no probe is needed.
        self.probed = False
        undecided = rule.decide(self.requested, facts._replace(probed=("misc", "")), sharing, count).by_driver
        if not undecided:
            return verdict
        try:
            probed = self._source.probe_limits(str(self._paths.cgroup_root))
        except GpuError as fault:
            probed = "", str(fault)
        self.probed = True
        return rule.decide(self.requested, facts._replace(probed=probed), sharing, count)

    def _facts(self, hand_over: HandOver) -> Facts:
        branch = 0
        try:
            branch = int(self._source.driver().version.partition(".")[0])
        except (GpuError, ValueError) as fault:
            log.warning("the driver's version is unknown: %s", fault)
        kubelet = self._paths.kubelet_socket.exists()
        return Facts(
            branch=branch,
            mig=[gpu.uuid for gpu in self.gpus if gpu.mig_enabled],
            cgroup2=memory_limits.is_cgroup2(str(self._paths.cgroup_root)),
            handover="" if hand_over.by_cdi or not kubelet else rule.handover_of(hand_over.strategies),
        )

    def refuse_unproved(self) -> None:
        """Raises Refused if the setting demands enforcement by the driver, but no probe has proved that the driver
        enforces limits.
        """
        if self.requested == DRIVER and not self.by_driver:
            why = self.verdict.why
            raise Refused(
                f"vgpu_memory_enforcement is driver, but no probe proved that the driver enforces limits: {why}"
            )

    def refuse_without_hook(self, what: str) -> None:
        """Raises Refused if the setting demands enforcement by the driver. It is called if no hook runs for a container
        or program, because the driver's limit cannot be set then. ``what`` names it in the message.
        """
        if self.requested == DRIVER:
            raise Refused(
                f"vgpu_memory_enforcement is driver, and {what} starts without CDI, so no hook sets the driver's limit "
                "for it; use containers by CDI (kubelet 1.29 with containerd 1.7 or CRI-O, docker 25, podman 4.3)"
            )

    def hooks(self) -> list[dict[str, Any]]:
        """Returns the CDI hooks for a device. They set the driver's limit of its container. The list is empty if the
        driver does not limit the container."""
        return [self._hook] if self._hook is not None else []

    def with_cards(self, devices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the devices of a limits file, which has the limits of one container. If the driver enforces limits,
        each device also gets the memory size of its GPU. The library needs this size, because the driver then reports
        the limit as the size of the GPU.
        """
        cards = {gpu.uuid: gpu.memory_mib * MIB for gpu in self.gpus} if self.by_driver else {}
        return [
            {**one, "card_bytes": cards[one["uuid"]]} if one["uuid"] in cards else {**_without_card(one)}
            for one in devices
        ]

    def limits_of(self, allocation: str, pieces: Sequence[Piece], replicas: dict[str, int]) -> dict[str, Any]:
        """Returns the content of the limits file of an allocation (the slices of one container) that the library does
        not limit. The content is empty if the driver does not limit the allocation either.

        ``replicas`` maps GPU UUIDs to the number of replicas of the GPU. Each replica of a time-sliced GPU gets an
        equal part of its memory. A whole GPU is written as unlimited, because a new control group may have inherited a
        limit that must be removed.
        """
        if not self.by_driver or any(piece.device != piece.uuid for piece in pieces):
            return {}
        devices: dict[str, dict[str, Any]] = {}
        for piece in pieces:
            one = devices.setdefault(piece.uuid, {"uuid": piece.uuid, "memory_bytes": 0, "sm_percent": 100})
            if piece.mode == MPS:
                one["memory_bytes"] += piece.memory_mib * MIB
            elif piece.mode == TIME_SLICING:
                one["memory_bytes"] += piece.memory_mib // max(1, replicas.get(piece.uuid, 1)) * MIB
            else:
                one["unlimited"] = True
        return {"allocation": allocation, "devices": self.with_cards(list(devices.values()))}


def _without_card(device: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in device.items() if key != "card_bytes"}


def none(paths: Paths) -> Enforcement:
    """Returns the initial enforcement, before the node's settings are read: the library enforces the limits."""
    return Enforcement(paths, _NoDriver())


class _NoDriver:
    """Takes the place of the driver where none is available. Every method raises GpuError."""

    def __getattr__(self, name: str) -> Any:
        raise GpuError(f"no driver is available for {name}")


def host_group(root: Path, name: str) -> str:
    """Returns the folder of a control group on the host. ``name`` is the kernel's name of the group, such as in
    /proc/<pid>/cgroup.
    """
    return os.path.join(str(root), name.lstrip("/"))
