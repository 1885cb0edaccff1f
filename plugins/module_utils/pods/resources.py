# SPDX-License-Identifier: Apache-2.0
"""Reads the GPU resources of one container. Pods may use the resource names of several GPU-sharing projects; the names
and rules of one project are a dialect.

A resource's value is taken from the container's limits, else from its requests. Units by dialect: HAMi and Volcano: MiB
and percent of a card, per GPU. Alibaba: total GiB, divided over as many GPUs as a label of the pod says. Tencent's
gpu-manager: hundredths of a GPU, and units of 256 MiB. Tencent's qGPU: total percent and total GiB, divided over the
GPUs.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from ..config.kinds import Finding, error, nearest, show, warning
from .quantity import QuantityError, whole

GPU_MEM = "aliyun.com/gpu-mem"
GPU_CORE = "aliyun.com/gpu-core.percentage"
GPU_COUNT_LABEL = "aliyun.com/gpu-count"
VCUDA_CORE = "tencent.com/vcuda-core"
VCUDA_MEMORY = "tencent.com/vcuda-memory"
VCUDA_UNIT_MIB = 256
QGPU_CORE = "tke.cloud.tencent.com/qgpu-core"
QGPU_MEMORY = "tke.cloud.tencent.com/qgpu-memory"
VOLCANO = "volcano.sh/vgpu-number"
VOLCANO_MEMORY = "volcano.sh/vgpu-memory"
VOLCANO_PERCENTAGE = "volcano.sh/vgpu-memory-percentage"
VOLCANO_CORES = "volcano.sh/vgpu-cores"
# Fixed names of other dialects, which no configuration renames.
OF_OTHERS = (
    *(GPU_MEM, GPU_CORE, VCUDA_CORE, VCUDA_MEMORY, QGPU_CORE, QGPU_MEMORY),
    *(VOLCANO, VOLCANO_MEMORY, VOLCANO_PERCENTAGE, VOLCANO_CORES),
)

# Resources of NVIDIA's own device plugin. If the configuration renames our resource ``gpu``, NVIDIA's plugin may serve
# these names, so they are not reported as typos.
OF_NVIDIA = ("nvidia.com/gpu", "nvidia.com/gpu.shared")

# Kinds of Memory, with the unit of ``amount``: MIB in MiB, PERCENT in percent of a card, UNITS in units of Alibaba's
# ACK, where one unit is 1/N of the card's memory and N is the card's size in whole GiB. CARD (the whole card) and SLICE
# (an equal slice of the card) have no amount.
MIB, PERCENT, UNITS, CARD, SLICE = "mib", "percent", "units", "card", "slice"
MAX_GPUS = 128
MAX_MIB = 1 << 24  # 16 TiB. No card has as much, and sums of such values cannot overflow.


class Memory(NamedTuple):
    """Describes memory on each GPU. ``amount`` is 0 for CARD (all memory) and SLICE (an equal slice)."""

    kind: str
    amount: int


class Config(NamedTuple):
    """Holds the names of resources and their defaults. ``plain``: what a pod that requests only the resource
    ``gpu`` gets: ``whole`` (whole GPUs, as with NVIDIA and HAMi), ``slice`` (equal slices, as with 4paradigm) or
    ``default`` (``default_memory_mib`` of each GPU). A ``default_memory_mib`` of 0 means the whole card. A
    ``default_count`` of 0 means that a request without a count is refused.
    """

    gpu: str = "nvidia.com/gpu"
    memory: str = "nvidia.com/gpumem"
    memory_percentage: str = "nvidia.com/gpumem-percentage"
    cores: str = "nvidia.com/gpucores"
    cores_also: str = "nvidia.com/cores"
    priority: str = "nvidia.com/priority"
    default_memory_mib: int = 5000
    default_cores: int = 0
    default_count: int = 1
    memory_factor: int = 1
    plain: str = "whole"
    gpu_mem_unit: str = "ack"

    @property
    def shared(self) -> str:
        return self.gpu + ".shared"


class Ask(NamedTuple):
    """Describes the request of one container: ``memory`` and ``cores`` (percent) on each of ``gpus`` different GPUs.

    ``init``: the container ends before the app containers start; ``sidecar``: it starts with the init containers and
    stays. ``field``, ``where``: the resource and its path, for messages. ``compute``: ``limited`` to ``cores``, or
    ``shared`` with the other containers. ``alone``: no other pod may use the GPUs at placement. ``one_numa``: all GPUs
    are of one NUMA node. ``burst_mib``: how far the limit is above ``memory``, the promised memory.
    """

    container: str
    gpus: int
    memory: Memory
    cores: int
    dialect: str
    field: str
    where: str
    priority: int | None = None
    init: bool = False
    sidecar: bool = False
    alone: bool = False
    one_numa: bool = False
    burst_mib: int = 0

    @property
    def compute(self) -> str:
        return "limited" if self.cores else "shared"


class Fraction(NamedTuple):
    """Describes the request that annotations make for one container: ``memory`` on each of ``gpus`` GPUs. It has no
    compute limit: the container gets the compute that other containers leave.
    """

    container: str
    gpus: int
    memory: Memory
    field: str
    burst_mib: int = 0

    def ask(self, name: str) -> Ask:
        made = Ask(name, self.gpus, self.memory, 0, "kai", self.field, annotation(self.field))
        return made._replace(burst_mib=self.burst_mib)


def annotation(name: str) -> str:
    return f'metadata.annotations["{name}"]'


class _Values:
    """Reads the resources of a container by name. Collects faults; a faulty value reads as None. The text of a fault
    follows the name of its resource: ``nvidia.com/gpumem``, "is set without nvidia.com/gpu".
    """

    def __init__(self, container: dict[str, Any], where: str, findings: list[Finding]) -> None:
        resources = _mapping(container.get("resources"))
        self.limits, self.requests = _mapping(resources.get("limits")), _mapping(resources.get("requests"))
        self.where, self.findings = where, findings
        self.faulty = False

    def named(self, *names: str) -> list[str]:
        return [name for name in names if name in self.limits or name in self.requests]

    def path(self, name: str) -> str:
        kind = "requests" if name in self.requests and name not in self.limits else "limits"
        return f'{self.where}.resources.{kind}["{name}"]'

    def fault(self, name: str, message: str) -> None:
        self.faulty = True
        self.findings.append(error(self.path(name), message))

    def number(self, name: str, low: int, high: int, unit: str = "") -> int | None:
        """Returns the number of a resource, None if the resource is missing or its value is wrong."""
        if not self.named(name):
            return None
        value = self.limits[name] if name in self.limits else self.requests[name]
        try:
            number = whole(value, low, high, unit)
            if name in self.limits and name in self.requests and whole(self.requests[name], low, high, unit) != number:
                raise QuantityError(f"limit {show(value)} and request {show(self.requests[name])} differ; name one")
        except QuantityError as fault:
            self.fault(name, str(fault))
            return None
        return number


def read_container(
    container: dict[str, Any],
    where: str,
    labels: dict[str, Any],
    config: Config,
    findings: list[Finding],
    fraction: Fraction | None = None,
) -> Ask | None:
    """Returns a container's request, None if it requests no GPU or if ``findings`` has an error.

    ``fraction``: what an annotation of the pod requests for this container.
    """
    values = _Values(container, where, findings)
    name = str(container.get("name") or where)
    _refuse_typos(values, config)
    hami = values.named(config.memory, config.memory_percentage, config.cores, config.cores_also, config.priority)
    alibaba = values.named(GPU_MEM, GPU_CORE)
    tencent = values.named(VCUDA_CORE, VCUDA_MEMORY)
    qgpu = values.named(QGPU_CORE, QGPU_MEMORY)
    volcano = values.named(VOLCANO, VOLCANO_MEMORY, VOLCANO_PERCENTAGE, VOLCANO_CORES)
    shared = values.named(config.shared)
    spoken = [names for names in (hami, alibaba, tencent, qgpu, volcano, shared) if names]
    if fraction is not None and spoken:
        values.fault(
            spoken[0][0], (f"is set together with the annotation {fraction.field}; use the names of one dialect")
        )
        return None
    if len(spoken) > 1:
        first, other = spoken[0][0], spoken[1][0]
        values.fault(other, f"is set together with {first} of another dialect; use the names of one dialect")
        return None
    if fraction is not None:
        _agree(values, config, fraction.gpus, fraction.field)
        return None if values.faulty else fraction.ask(name)
    if hami:
        return _hami(values, name, config, hami)
    if alibaba:
        return _alibaba(values, name, labels, config)
    if tencent:
        return _tencent(values, name, config)
    if qgpu:
        return _qgpu(values, name, config)
    if volcano:
        return _volcano(values, name, config, volcano)
    if shared:
        return _shared(values, name, config)
    return _plain(values, name, config)


def _refuse_typos(values: _Values, config: Config) -> None:
    """Refuses mistyped resource names. A pod with such a name would wait for ever, or run without its limit."""
    known, stems = _names(config)
    for name in sorted({*values.limits, *values.requests} - {*known, *OF_NVIDIA}):
        if str(name).startswith(stems):
            message = f'is no resource of GPU sharing; did you mean "{nearest(name, known)}"?'
            values.fault(name, message)


def resource_names(config: Config) -> list[str]:
    """Returns every resource name by which a pod may request GPUs."""
    return _names(config)[0]


@lru_cache(maxsize=8)
def _names(config: Config) -> tuple[list[str], tuple[str, ...]]:
    """Returns all resource names by which a pod may request GPUs, and the prefixes that reveal a mistyped name."""
    known = [config.gpu, config.shared, config.memory, config.memory_percentage, config.cores, config.cores_also]
    known += [config.priority, *OF_OTHERS]
    return known, tuple(name.split("/")[0] + "/" + re.split("[-.]", name.split("/")[1])[0][:3] for name in known)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _ask(values: _Values, name: str, count: int, memory: Memory, cores: int, dialect: str, field: str) -> Ask | None:
    return None if values.faulty else Ask(name, count, memory, cores, dialect, field, values.path(field))


def _plain(values: _Values, name: str, config: Config) -> Ask | None:
    """Reads a request that names only a number of GPUs. A number of 0 requests no GPU, as with every resource of
    Kubernetes.
    """
    count = values.number(config.gpu, 0, MAX_GPUS, "GPUs")
    if not count:
        return None
    if config.plain == "slice":
        return _ask(values, name, count, Memory(SLICE, 0), 0, "4paradigm", config.gpu)
    if config.plain == "default":
        memory = _default_memory(config)
        return _ask(values, name, count, memory, config.default_cores, "hami", config.gpu)
    return _ask(values, name, count, Memory(CARD, 0), 100, "nvidia", config.gpu)


def _shared(values: _Values, name: str, config: Config) -> Ask | None:
    count = values.number(config.shared, 0, MAX_GPUS, "slices")
    if not count:
        return None
    _agree(values, config, count, config.shared)
    return _ask(values, name, count, Memory(SLICE, 0), 0, "nvidia", config.shared)


def _hami(values: _Values, name: str, config: Config, named: list[str]) -> Ask | None:
    count = values.number(config.gpu, 0, MAX_GPUS, "GPUs")
    mib = values.number(config.memory, 1, MAX_MIB // config.memory_factor, "MiB" if config.memory_factor == 1 else "")
    # In HAMi 0 percent and 0 cores mean "not set".
    percent = values.number(config.memory_percentage, 0, 100, "%")
    cores = values.number(config.cores, 0, 100, "%")
    also = values.number(config.cores_also, 0, 100, "%")
    priority = values.number(config.priority, 0, 1, "(0 high, 1 low)")
    if cores is not None and also is not None and cores != also:
        values.fault(config.cores_also, f"is {also}, and {config.cores} is {cores}; name one of them")
    if mib is not None and percent:
        values.fault(config.memory_percentage, f"is set together with {config.memory}; name one of them")
    if not values.named(config.gpu):
        count = config.default_count
        if not count:
            values.fault(named[0], f"is set without {config.gpu}; name the number of GPUs")
        elif named == [config.priority]:
            values.fault(config.priority, f"is set without a GPU; name {config.gpu} too")
    elif count == 0:
        values.fault(config.gpu, f"is 0 together with {named[0]}; name the number of GPUs, or leave both out")
    if mib is not None:
        memory = Memory(MIB, mib * config.memory_factor)
    elif percent:
        memory = Memory(PERCENT, percent)
    else:
        memory = _default_memory(config)
    chosen = cores if cores is not None else also
    chosen = config.default_cores if chosen is None else chosen
    ask = _ask(values, name, count or 0, memory, chosen, "hami", named[0])
    return ask and ask._replace(priority=priority)


def _default_memory(config: Config) -> Memory:
    return Memory(MIB, config.default_memory_mib) if config.default_memory_mib else Memory(CARD, 0)


def _alibaba(values: _Values, name: str, labels: dict[str, Any], config: Config) -> Ask | None:
    total = values.number(GPU_MEM, 1, MAX_MIB // 1024, "GiB")
    cores = values.number(GPU_CORE, 1, 100, "%")
    if not values.named(GPU_MEM):
        values.fault(GPU_CORE, f"is set without {GPU_MEM}; name the memory")
    label = f'metadata.labels["{GPU_COUNT_LABEL}"]'
    gpus = 1
    if GPU_COUNT_LABEL in labels:
        try:
            gpus = whole(labels[GPU_COUNT_LABEL], 1, MAX_GPUS, "GPUs")
        except QuantityError as fault:
            values.faulty = True
            values.findings.append(error(label, str(fault)))
    if gpus > 1 and cores is not None:
        message = f"cannot be set with {GPU_COUNT_LABEL} {gpus}: only memory is divided over several GPUs; leave it out"
        values.fault(GPU_CORE, message)
    if total is not None and not values.faulty and total % gpus:
        message = f"{total} GiB over {gpus} GPUs gives no whole GiB each; expected a multiple of {gpus}"
        values.fault(GPU_MEM, message)
    _agree(values, config, gpus, GPU_MEM)
    each = (total or 0) // gpus
    memory = Memory(UNITS, each) if config.gpu_mem_unit == "ack" else Memory(MIB, each * 1024)
    return _ask(values, name, gpus, memory, cores or 0, "alibaba", GPU_MEM)


def _tencent(values: _Values, name: str, config: Config) -> Ask | None:
    hundredths = values.number(VCUDA_CORE, 1, 100 * MAX_GPUS)
    units = values.number(VCUDA_MEMORY, 1, MAX_MIB // VCUDA_UNIT_MIB, "units of 256 MiB")
    if not values.named(VCUDA_CORE):
        values.fault(VCUDA_MEMORY, f"is set without {VCUDA_CORE}; name the hundredths of a GPU (100: a whole GPU)")
    if hundredths is None or values.faulty:
        return None
    if hundredths < 100:
        if units is None:
            values.fault(VCUDA_CORE, f"is under 100, which means a part of a GPU, and needs {VCUDA_MEMORY} too")
        _agree(values, config, 1, VCUDA_CORE)
        memory = Memory(MIB, (units or 0) * VCUDA_UNIT_MIB)
        return _ask(values, name, 1, memory, hundredths, "tencent", VCUDA_CORE)
    if hundredths % 100:
        values.fault(VCUDA_CORE, f"is {hundredths}; expected a multiple of 100 (whole GPUs) above 100")
    elif units is not None:
        message = f"has no effect: {VCUDA_CORE} {hundredths} takes whole GPUs with all of their memory"
        values.findings.append(warning(values.path(VCUDA_MEMORY), message))
    _agree(values, config, hundredths // 100, VCUDA_CORE)
    return _ask(values, name, hundredths // 100, Memory(CARD, 0), 100, "tencent", VCUDA_CORE)


def _qgpu(values: _Values, name: str, config: Config) -> Ask | None:
    """Reads a request of qGPU. Less than 100 percent means a part of one GPU. Multiples of 100 mean whole GPUs. Other
    values above 100 are divided over as few GPUs as suffice. Each GPU gives an equal part of cores and memory, rounded
    down, as in TKE.
    """
    percent = values.number(QGPU_CORE, 1, 100 * MAX_GPUS, "%")
    gib = values.number(QGPU_MEMORY, 1, MAX_MIB // 1024, "GiB")
    if values.faulty:
        return None
    if percent is not None and percent % 100 == 0:
        if gib is not None:
            message = f"has no effect: {QGPU_CORE} {percent} takes whole GPUs with all of their memory"
            values.findings.append(warning(values.path(QGPU_MEMORY), message))
        _agree(values, config, percent // 100, QGPU_CORE)
        return _ask(values, name, percent // 100, Memory(CARD, 0), 100, "qgpu", QGPU_CORE)
    if gib is None:
        values.fault(QGPU_CORE, f"is a part of a GPU and needs {QGPU_MEMORY}; or request a multiple of 100")
        return None
    gpus = max(1, -(-(percent or 0) // 100))
    if gib < gpus:
        values.fault(QGPU_MEMORY, f"{gib} GiB over {gpus} GPUs gives less than 1 GiB each; request more")
    field = QGPU_CORE if percent else QGPU_MEMORY
    _agree(values, config, gpus, field)
    return _ask(values, name, gpus, Memory(MIB, gib // gpus * 1024), (percent or 0) // gpus, "qgpu", field)


def _volcano(values: _Values, name: str, config: Config, named: list[str]) -> Ask | None:
    """Reads a request of Volcano. Each value applies to each GPU. Without a memory size the request means the whole
    card's memory; without cores it means no compute limit.
    """
    count = values.number(VOLCANO, 1, MAX_GPUS, "GPUs")
    mib = values.number(VOLCANO_MEMORY, 1, MAX_MIB, "MiB")
    percent = values.number(VOLCANO_PERCENTAGE, 0, 100, "%")
    cores = values.number(VOLCANO_CORES, 0, 100, "%")
    if mib is not None and percent:
        values.fault(VOLCANO_PERCENTAGE, f"is set together with {VOLCANO_MEMORY}; name one of them")
    if not values.named(VOLCANO):
        count = config.default_count
        if not count:
            values.fault(named[0], f"is set without {VOLCANO}; name the number of GPUs")
    memory = Memory(MIB, mib) if mib is not None else Memory(PERCENT, percent) if percent else Memory(CARD, 0)
    _agree(values, config, count or 0, named[0])
    return _ask(values, name, count or 0, memory, cores or 0, "volcano", named[0])


def _agree(values: _Values, config: Config, count: int, field: str) -> None:
    """Adds a fault if a request in another dialect also has the resource ``gpu`` with a different number of GPUs. An
    equal number is valid, because our webhook adds that resource.
    """
    if not values.named(config.gpu):
        return
    named = values.number(config.gpu, 0, MAX_GPUS, "GPUs")
    if named is not None and named != count and not values.faulty:
        message = f"is {named}, and {field} asks for {count} GPU{'s' if count > 1 else ''}; leave this resource out"
        values.fault(config.gpu, message)
