# SPDX-License-Identifier: Apache-2.0
"""The driver, called through NVML. No other module of the plugin imports pynvml."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._shared.config import slices
from .._shared.gpu import memory_limits
from .._shared.gpu.memory_limits import Limits
from .._shared.gpu.nvml import NvmlError, mig_profile
from . import gauges, topology
from .gauges import Gauges
from .gpus import NO_NUMA, Driver, Gpu, GpuError, MigDevice

DOUBLE_BIT_XID = 48

log = logging.getLogger(__name__)


class Nvml:
    """The driver, called through NVML (nvidia-ml-py)."""

    def __init__(self, sys_root: Path = Path("/sys"), library: str = "") -> None:
        """``library`` is the path of the host's NVML. It is needed if the loader does not find NVML, for example in a
        container without NVIDIA's runtime. Raises GpuError.
        """
        import pynvml

        if library:
            try:
                # pynvml loads libnvidia-ml.so.1 later. It then gets the library that is loaded here, because both have
                # the same soname.
                ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
            except OSError as fault:
                raise GpuError(f"NVML of the host cannot be loaded: {fault}") from None
        self._nvml = pynvml
        self._sys_root = sys_root
        self._events: object = None
        self._unreadable: dict[int, str] = {}
        # UUID → number of uncorrected ECC errors at the last check.
        self._ecc: dict[str, int] = {}
        # PCI address → NUMA node. The nodes are cached, because only a change of hardware changes them.
        self._numa: dict[str, int] = {}
        # The GPUs for which ``_links`` (the connections between GPUs) was computed.
        self._linked: tuple[str, ...] = ()
        self._links: dict[str, tuple[tuple[str, int], ...]] = {}
        self._open()

    def _open(self) -> None:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as fault:
            raise GpuError(f"NVML does not start: {fault}") from None

    def reopen(self) -> None:
        self.close()
        self._events = None
        self._numa.clear()
        self._open()

    def gpus(self) -> list[Gpu]:
        nvml = self._nvml
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as fault:
            raise GpuError(f"NVML does not list the GPUs: {fault}") from None
        found = []
        before, self._unreadable = self._unreadable, {}
        for index in range(count):
            try:
                found.append(self._gpu(index, nvml.nvmlDeviceGetHandleByIndex(index)))
            except nvml.NVMLError as fault:
                # After an error the loop goes on, because a GPU that fell off the bus must not hide the others.
                self._unreadable[index] = f"the driver says: {fault}"
        if before.keys() - self._unreadable.keys():
            self._forget_events()  # A lost GPU is back, and no events are registered for it yet.
        uuids = tuple(gpu.uuid for gpu in found)
        if uuids != self._linked:
            # The links are cached, because only a change of hardware changes them and each pair needs a driver call.
            self._linked, self._links = uuids, self._scores(found)
        return [replace(gpu, links=self._links.get(gpu.uuid, ())) for gpu in found]

    def unreadable(self) -> dict[int, str]:
        return dict(self._unreadable)

    def _scores(self, gpus: list[Gpu]) -> dict[str, tuple[tuple[str, int], ...]]:
        nvml = self._nvml
        if len(gpus) < 2:
            return {}
        try:
            handles = {gpu.uuid: nvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in gpus}
        except nvml.NVMLError:
            return {}  # A GPU was lost after it was listed.
        levels = {}
        for one, other in itertools.combinations(handles, 2):
            with contextlib.suppress(nvml.NVMLError):
                levels[one, other] = int(nvml.nvmlDeviceGetTopologyCommonAncestor(handles[one], handles[other]))
        by_pci = {gpu.pci: gpu.uuid for gpu in gpus}
        direct: dict[tuple[str, str], int] = {}
        switched: dict[str, int] = {}
        for uuid, handle in handles.items():
            for remote in self._nvlinks(handle):
                if remote in by_pci:
                    pair = uuid, by_pci[remote]
                    direct[pair] = direct.get(pair, 0) + 1
                else:
                    switched[uuid] = switched.get(uuid, 0) + 1
        return topology.scores(levels, direct, switched)

    def _nvlinks(self, handle: object) -> list[str]:
        """Returns the PCI address at the other end of each active NVLink. At that end is a GPU or an NVSwitch."""
        nvml = self._nvml
        found = []
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED:
                    found.append(_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId).lower())
            except nvml.NVMLError:
                break  # The GPU has no link with this number.
        return found

    def _gpu(self, index: int, handle: object) -> Gpu:
        nvml = self._nvml
        pci = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()
        try:
            minor = int(nvml.nvmlDeviceGetMinorNumber(handle))
        except nvml.NVMLError:
            minor = index
        return Gpu(
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            model=_text(nvml.nvmlDeviceGetName(handle)),
            memory_mib=slices.mib(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            minor=minor,
            pci=pci,
            numa_node=self._numa_node(pci),
            mig_enabled=self._mig_mode(handle),
            mig=self._mig(handle),
        )

    def _numa_node(self, pci: str) -> int:
        if pci not in self._numa:
            self._numa[pci] = numa_node(self._sys_root, pci)
        return self._numa[pci]

    def _mig_mode(self, handle: object) -> bool:
        nvml = self._nvml
        try:
            return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
        except nvml.NVMLError:
            return False  # The driver returns an error for a GPU without MIG.

    def _mig(self, handle: object) -> tuple[MigDevice, ...]:
        """Returns the MIG devices of a GPU, in NVML's order. Raises NVMLError if an existing device cannot be read."""
        nvml = self._nvml
        if not self._mig_mode(handle):
            return ()
        found: list[MigDevice] = []
        card_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            except nvml.NVMLError:
                continue  # There is no MIG device with this index.
            attributes = nvml.nvmlDeviceGetAttributes_v2(device)
            found.append(
                MigDevice(
                    index=len(found),
                    uuid=_text(nvml.nvmlDeviceGetUUID(device)),
                    profile=mig_profile(
                        _text(nvml.nvmlDeviceGetName(device)),
                        int(attributes.gpuInstanceSliceCount),
                        int(attributes.computeInstanceSliceCount),
                        int(attributes.memorySizeMB),
                        card_bytes,
                    ),
                    memory_mib=int(attributes.memorySizeMB),
                    gpu_instance=int(nvml.nvmlDeviceGetGpuInstanceId(device)),
                    compute_instance=int(nvml.nvmlDeviceGetComputeInstanceId(device)),
                    attributes=tuple((name, int(getattr(attributes, field))) for name, field in MIG_ATTRIBUTES),
                )
            )
        return tuple(found)

    def next_xid(self, timeout_ms: int) -> tuple[str, int] | None:
        nvml = self._nvml
        try:
            if self._events is None:
                self._events = self._register_events()
            event = nvml.nvmlEventSetWait_v2(self._events, timeout_ms)
        except nvml.NVMLError as fault:
            if fault.value == nvml.NVML_ERROR_TIMEOUT:
                return None
            raise GpuError(f"NVML does not deliver events: {fault}") from None
        try:
            uuid = _text(nvml.nvmlDeviceGetUUID(event.device))
        except nvml.NVMLError:
            uuid = ""
        if event.eventType == nvml.nvmlEventTypeXidCriticalError:
            return uuid, int(event.eventData)
        return (uuid, DOUBLE_BIT_XID) if event.eventType == nvml.nvmlEventTypeDoubleBitEccError else None

    def _forget_events(self) -> None:
        if self._events is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._events)
        self._events = None

    def _register_events(self) -> object:
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                supported = nvml.nvmlDeviceGetSupportedEventTypes(handle)
                nvml.nvmlDeviceRegisterEvents(handle, wanted & supported, events)
            except nvml.NVMLError as fault:
                log.warning("GPU %d: its events are not watched: %s", index, fault)
        return events

    def fault_of(self, uuid: str) -> str:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as fault:
            return f"the driver says: {fault}"
        try:
            errors = int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            )
        except nvml.NVMLError:
            return ""  # The GPU has no ECC.
        before = self._ecc.setdefault(uuid, errors)
        self._ecc[uuid] = errors
        return f"{errors - before} more uncorrected ECC errors" if errors > before else ""

    def processes(self, uuid: str) -> dict[int, int | None]:
        nvml = self._nvml
        found: dict[int, int | None] = {}
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                used, before = one.usedGpuMemory, found.get(int(one.pid), 0)
                found[int(one.pid)] = None if used is None or before is None else before + int(used)
            for one in self._graphics(handle):
                # A process with both kinds of contexts is in both lists, each time with its total memory. So the larger
                # value is used, not the sum.
                reported = [used for used in (found.get(int(one.pid)), one.usedGpuMemory) if used is not None]
                found[int(one.pid)] = max(map(int, reported), default=None)
        except nvml.NVMLError as fault:
            raise GpuError(f"NVML does not list the processes: {fault}") from None
        return found

    def utilisation(self, uuid: str, since_us: int) -> dict[int, float] | None:
        nvml = self._nvml
        samples: dict[int, list[int]] = {}
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            for one in nvml.nvmlDeviceGetProcessUtilization(handle, since_us):
                samples.setdefault(int(one.pid), []).append(int(one.smUtil))
        except nvml.NVMLError as fault:
            if fault.value == nvml.NVML_ERROR_NOT_FOUND:  # No process used the GPU.
                return {}
            if fault.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                return None
            raise GpuError(f"NVML does not report the GPU time of processes: {fault}") from None
        return {pid: sum(found) / len(found) for pid, found in samples.items()}

    def gauges(self, uuid: str) -> Gauges:
        return gauges.read(self._nvml, uuid)

    def group_limits(self, uuid: str, group: str) -> Limits:
        try:
            return memory_limits.get_limits(self._nvml.nvmlLib, self._nvml.nvmlDeviceGetHandleByUUID(uuid), group)
        except (self._nvml.NVMLError, NvmlError) as fault:
            raise GpuError(f"memory limits of control group {group}: {fault}") from None

    def limit_group(self, uuid: str, group: str, hard: int) -> None:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            memory_limits.set_limits(self._nvml.nvmlLib, handle, group, hard)
        except (self._nvml.NVMLError, NvmlError) as fault:
            raise GpuError(f"memory limits of control group {group}: {fault}") from None

    def probe_limits(self, cgroup_root: str) -> tuple[str, str]:
        nvml = self._nvml
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            named = [(_text(nvml.nvmlDeviceGetUUID(one)), one) for one in handles]
        except nvml.NVMLError as fault:
            raise GpuError(f"NVML does not list the GPUs: {fault}") from None
        return memory_limits.probe(nvml.nvmlLib, named, cgroup_root)

    def _graphics(self, handle: object) -> list[Any]:
        """Returns processes with Vulkan or OpenGL contexts. They do not use CUDA, so a CUDA library cannot see them.
        Raises NVMLError.
        """
        nvml = self._nvml
        try:
            return list(nvml.nvmlDeviceGetGraphicsRunningProcesses(handle))
        except nvml.NVMLError as fault:
            if fault.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                return []
            raise

    def driver(self) -> Driver:
        nvml = self._nvml
        try:
            cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
            compute = {}
            for index in range(nvml.nvmlDeviceGetCount()):
                if index in self._unreadable:
                    continue
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
                compute[_text(nvml.nvmlDeviceGetUUID(handle))] = (int(major), int(minor))
            return Driver(_text(nvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10), compute)
        except nvml.NVMLError as fault:
            raise GpuError(f"NVML does not report the driver's versions: {fault}") from None

    def close(self) -> None:
        try:
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            pass  # The driver is being unloaded, so there is nothing to free.


# Name in the labels of gpu-feature-discovery → the field of nvmlDeviceAttributes_t with its value.
MIG_ATTRIBUTES = (
    ("memory", "memorySizeMB"),
    ("multiprocessors", "multiprocessorCount"),
    ("slices.gi", "gpuInstanceSliceCount"),
    ("slices.ci", "computeInstanceSliceCount"),
    ("engines.copy", "sharedCopyEngineCount"),
    ("engines.decoder", "sharedDecoderCount"),
    ("engines.encoder", "sharedEncoderCount"),
    ("engines.jpeg", "sharedJpegCount"),
    ("engines.ofa", "sharedOfaCount"),
)


def numa_node(sys_root: Path, pci: str) -> int:
    """Returns the NUMA node of a PCI device, or NO_NUMA if the platform does not report one. ``pci`` is the address
    from NVML. Its domain has eight digits, while the domain in sysfs has four, so it is shortened.
    """
    domain, _colon, rest = pci.partition(":")
    try:
        return int((sys_root / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return NO_NUMA


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
