# SPDX-License-Identifier: Apache-2.0
"""GPUs, and the interface to the driver: it lists GPUs, reads their state and critical Xid errors, and sets memory
limits. Node programs use nvml.Nvml; tests replace only GpuSource.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from .._shared.gpu.memory_limits import Limits
from .gauges import Gauges

NO_NUMA = -1


class GpuError(Exception):
    """The driver did not respond, or it returned an error. The text names the call and the error."""


@dataclass(frozen=True)
class MigDevice:
    """One MIG device. ``index`` counts the MIG devices of its GPU, and ``profile`` is the name that nvidia-smi prints,
    such as 1g.10gb.
    """

    index: int
    uuid: str
    profile: str
    memory_mib: int
    gpu_instance: int = 0
    compute_instance: int = 0
    attributes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    model: str
    memory_mib: int
    minor: int
    pci: str
    numa_node: int = NO_NUMA
    mig_enabled: bool = False
    mig: tuple[MigDevice, ...] = ()
    # (UUID, score) of each GPU that can be reached by a better connection than through the host. A higher score means
    # closer.
    links: tuple[tuple[str, int], ...] = ()

    def facts(self) -> dict[str, Any]:
        """Returns the GPU in the form that the shared modules use."""
        return {
            "index": self.index,
            "uuid": self.uuid,
            "model": self.model,
            "memory_mib": self.memory_mib,
            "mig_enabled": self.mig_enabled,
            "mig": [
                {"index": one.index, "uuid": one.uuid, "profile": one.profile, "memory_mib": one.memory_mib}
                for one in self.mig
            ],
        }


@dataclass(frozen=True)
class Driver:
    """Versions of the driver and of CUDA. ``compute`` maps GPU UUIDs to compute capabilities."""

    version: str
    cuda: tuple[int, int]
    compute: dict[str, tuple[int, int]]


class GpuSource(Protocol):
    """The calls of the driver that the plugin needs."""

    def gpus(self) -> list[Gpu]:
        """Returns all readable GPUs in NVML's order. Raises GpuError."""

    def unreadable(self) -> dict[int, str]:
        """Returns index → error of each GPU that the last call of ``gpus`` could not read."""

    def next_xid(self, timeout_ms: int) -> tuple[str, int] | None:
        """Waits for the next critical Xid error. Returns (UUID, Xid number), or None after the timeout. The UUID is
        empty if the driver does not name the GPU. An uncorrectable ECC error is reported as Xid 48, as in NVIDIA's
        list. Raises GpuError.
        """

    def fault_of(self, uuid: str) -> str:
        """Returns why a GPU cannot be used now, or an empty string if it can be used."""

    def processes(self, uuid: str) -> dict[int, int | None]:
        """Returns pid → bytes in use, for each process that has a compute or graphics context on the GPU. None means
        that the driver does not report the bytes. Raises GpuError.
        """

    def utilisation(self, uuid: str, since_us: int) -> dict[int, float] | None:
        """Returns pid → mean percent of the GPU's time that the process used since ``since_us``, a time in microseconds
        since 1970. Returns None if the driver has no such samples. Raises GpuError.
        """

    def gauges(self, uuid: str) -> Gauges:
        """Returns the current measurements of a GPU."""

    def driver(self) -> Driver:
        """Returns the versions and the compute capabilities. Raises GpuError."""

    def group_limits(self, uuid: str, group: str) -> Limits:
        """Returns the limits that the driver enforces for a control group. ``group`` is the group's folder. Raises
        GpuError.
        """

    def limit_group(self, uuid: str, group: str, hard: int) -> None:
        """Sets the driver's hard limit of a control group, with a soft limit of 0. Success does not prove that the
        limit is active; ``group_limits`` shows that. Raises GpuError.
        """

    def probe_limits(self, cgroup_root: str) -> tuple[str, str]:
        """Tests whether the driver enforces limits on this host. Returns (backend, "") if it does, and ("", reason) if
        not. Raises GpuError.
        """

    def reopen(self) -> None:
        """Shuts NVML down and starts it again, because NVML lists the GPUs only when it starts. Must not be called
        while another thread waits in NVML. Raises GpuError.
        """

    def close(self) -> None: ...
