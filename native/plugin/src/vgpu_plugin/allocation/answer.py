# SPDX-License-Identifier: Apache-2.0
"""Builds the response to an Allocate request: the mounts, environment variables and devices that a container gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .._shared.config.sharing import MPS, Piece
from ..inject import cdi, handover
from ..inject.handover import HandOver
from ..node.checkpoint import DEVICES_ANNOTATION
from ..node.gpus import Gpu, MigDevice
from ..node.paths import Paths
from ..offer.pool import Pool
from ..offer.settings import Settings
from . import admission
from .allocation_files import AllocationFiles
from .records import Record


@dataclass(frozen=True)
class Answer:
    """What one container gets. ``mounts`` are (container path, host path, read-only), ``devices`` are (container path,
    host path, permissions).
    """

    allocation: str
    slice_ids: tuple[str, ...]
    envs: dict[str, str]
    mounts: list[tuple[str, str, bool]]
    devices: list[tuple[str, str, str]] = field(default_factory=list)
    cdi_devices: list[str] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)


class Answers:
    def __init__(self, paths: Paths, pool: Pool, files: AllocationFiles) -> None:
        self._paths = paths
        self._pool = pool
        self._files = files

    def of(self, record: Record, pieces: list[Piece], settings: Settings, hand_over: HandOver) -> Answer:
        """Returns the response for a record (the saved data of an allocation). Raises Refused if a device has no name
        by which the container's runtime could provide it.
        """
        envs: dict[str, str] = {}
        annotations: dict[str, str] = {}
        mounts: list[tuple[str, str, bool]] = []
        if record.limits:
            # Containers do not get the driver capability ``video``, because the memory that video engines use is not
            # counted against the limit.
            envs["NVIDIA_DRIVER_CAPABILITIES"] = "compute,utility"
            # The UUIDs of the GPUs are part of the response, because no mount contains them. If a record is lost, the
            # plugin reads them from the kubelet's checkpoint, which has a copy of the response.
            annotations[DEVICES_ANNOTATION] = ",".join(device["uuid"] for device in record.limits["devices"])
            mounts += self._files.expected_mounts(record)
        mounts += self._files.lone_mount(record)
        if mps := next((one for one in pieces if one.mode == MPS), None):
            envs.update(handover.mps_environment(mps.resource))
            mounts += handover.mps_mounts(Path(settings.flags["mpsRoot"]), mps.resource, self._paths.seen_root)
        envs.update(handover.features(settings.config))
        gpus = list({piece.uuid: self._pool.gpu(piece.uuid) for piece in pieces}.values())
        devices = {piece.device: piece for piece in pieces}
        by_index = hand_over.id_strategy == "index"
        names = [Pool.runtime_name(one, self._pool.gpu(one.uuid), by_index) for one in devices.values()]
        if hand_over.by_cdi:

            def nodes(gpu: Gpu, mig: MigDevice) -> object:
                return cdi.mig_nodes(gpu, mig, self._paths.host_root / "proc", settings.dev_root)

            admission.refuse_unnamed(gpus, devices, nodes)
        parts = hand_over.parts(gpus, record.id, names, list(devices))
        return Answer(
            record.id,
            record.slice_ids,
            {**envs, **parts.envs},
            mounts + parts.mounts,
            parts.devices,
            parts.cdi_devices,
            {**annotations, **parts.annotations},
        )
