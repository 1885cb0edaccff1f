# SPDX-License-Identifier: Apache-2.0
"""Reads a pod's request for GPUs. The request may be in the dialect (resource names and annotations) of any supported
scheduler. ``read_pod`` reads a pod as the API server sends it. It returns an ``Ask`` (a request in one common form) for
each container that requests GPUs. If a request is invalid, it raises ``DialectError`` with one finding for each fault.
``size_on`` computes the size of an Ask on a card.

Dialects: ``hami`` (nvidia.com/gpumem and similar names), ``alibaba`` (aliyun.com/gpu-mem), ``tencent``
(tencent.com/vcuda-core), ``qgpu`` (tke.cloud.tencent.com/qgpu-memory), ``volcano`` (volcano.sh/vgpu-number), ``kai``
(annotation gpu-fraction), ``nvidia`` (nvidia.com/gpu alone, nvidia.com/gpu.shared) and ``4paradigm`` (nvidia.com/gpu
alone, where ``plain`` says that it counts slices). A pod must use one dialect; nvidia.com/gpu alone and HAMi's names
count as one dialect.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from ..config.kinds import Finding, error, errors, warning
from . import bounds, burst
from . import resources as pod_resources
from .fractions import NAMES, OF_CONTAINER, read_fractions
from .preferences import Preferences, read_preferences
from .resources import CARD, MIB, PERCENT, SLICE, UNITS, Ask, Config, Memory

__all__ = ("Ask", "Card", "Config", "DialectError", "Memory", "PodAsk", "Preferences", "Size", "read_pod", "size_on")

# Variables by which NVIDIA's toolkit sets limits of the driver, from version 1.20 on. They do not count as a request,
# because an image or a pod may set them.
VARIABLES = ("NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST")
FAMILY = {"hami": "nvidia", "nvidia": "nvidia", "4paradigm": "nvidia"}


class DialectError(ValueError):
    """A pod requests GPUs in an invalid way; ``findings`` name each field and the reason."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = list(findings)
        super().__init__(bounds.sentence(self.findings))


class Card(NamedTuple):
    """Describes the properties of one GPU that sizes depend on. ``memory_mib``: memory M of the card; ``capacity_mib``:
    memory that may be allocated to pods (M*S); ``slice_mib``, ``slice_cores`` (percent): the equal slice (share of the
    card) by the node's configuration.
    """

    memory_mib: int
    capacity_mib: int
    slice_mib: int
    slice_cores: int


class Size(NamedTuple):
    """Describes a container's part of one GPU. ``cores`` of 0 mean no limit: the container gets the compute that others
    leave. 100 means the whole GPU exclusively.
    """

    memory_mib: int
    cores: int


class PodAsk(NamedTuple):
    """Holds the GPU requests of a pod. ``asks``: init containers first, in the pod's order. ``priority``: 0 is high, 1
    is low, None means that the pod sets no priority.
    """

    dialect: str
    asks: tuple[Ask, ...]
    preferences: Preferences
    priority: int | None
    warnings: tuple[Finding, ...]

    @property
    def wants_gpus(self) -> bool:
        return bool(self.asks)


def read_pod(pod: dict[str, Any], config: Config | None = None) -> PodAsk:
    """Reads a pod. Raises DialectError. A pod that requests no GPU gives a PodAsk without asks and
    with the dialect "".
    """
    config = config or Config()
    findings = bounds.excess(pod)
    if findings:
        raise DialectError(findings)
    metadata, spec = _mapping(pod.get("metadata")), _mapping(pod.get("spec"))
    labels = _mapping(metadata.get("labels"))
    annotations = _mapping(metadata.get("annotations"))
    fractions = read_fractions(annotations, spec, findings)
    asks: list[Ask] = []
    for kind in ("initContainers", "containers"):
        for n, container in enumerate(spec.get(kind) or []):
            where = f"spec.{kind}[{n}]"
            if not isinstance(container, dict):
                findings.append(error(where, "expected a container"))
                continue
            sidecar = kind == "initContainers" and container.get("restartPolicy") == "Always"
            init = kind == "initContainers" and not sidecar
            mine = fractions.get(str(container.get("name")))
            ask = pod_resources.read_container(container, where, labels, config, findings, mine)
            if ask is not None:
                asks.append(ask._replace(init=init, sidecar=sidecar))
                findings += _variables(container, where, config)
    _one_dialect(asks, findings)
    _gpu_count_of_one_container(asks, labels, findings)
    preferences = read_preferences(annotations, findings)
    asks = [ask._replace(alone=preferences.alone, one_numa=preferences.one_numa) for ask in asks]
    asks = burst.with_request(asks, annotations, findings)
    priorities = {ask.priority for ask in asks if ask.priority is not None}
    if len(priorities) > 1:
        findings.append(error(config.priority, "containers of one pod name different priorities; name one"))
    if errors(findings) and (asks or _names_gpus(findings)):
        raise DialectError(errors(findings))
    if not asks:
        return PodAsk("", (), preferences, None, ())
    dialect = next((ask.dialect for ask in asks if ask.dialect != "nvidia"), "nvidia")
    warnings = tuple(finding for finding in findings if finding.level == "warning")
    return PodAsk(dialect, tuple(asks), preferences, priorities.pop() if priorities else None, warnings)


def size_on(ask: Ask, card: Card) -> Size | None:
    """Returns the size that a request has on each of its GPUs on such a card; None if it does not fit the card.

    If ``gpu_mem_unit`` is ``ack``, one unit of ``aliyun.com/gpu-mem`` is the card's memory divided by its size in whole
    GiB. For example, a card of 16160 MiB has 15 units, so 4 units are floor(4 * 16160 / 15) = 4309 MiB. A card under 1
    GiB fits no such request.
    """
    kind, amount = ask.memory
    cores = ask.cores
    if kind == CARD:
        memory = card.capacity_mib
    elif kind == SLICE:
        memory, cores = card.slice_mib, limit_of(card.slice_cores)
    elif kind == MIB:
        memory = amount
    elif kind == PERCENT:
        memory = card.capacity_mib * amount // 100
    elif kind == UNITS:
        gib = card.memory_mib // 1024
        memory = card.memory_mib * amount // gib if gib else 0
    else:
        raise ValueError(f"no kind of memory is named {kind}")
    return Size(memory, cores) if 0 < memory <= card.capacity_mib else None


def limit_of(slice_cores: int) -> int:
    """Converts the percentage of an equal slice to the cores of a Size. A slice of 100 % gives 0 (no limit). It does
    not give 100, because 100 means the whole GPU exclusively.
    """
    return 0 if slice_cores >= 100 else slice_cores


def needs(ask: Ask) -> str:
    """Describes in words the requested size on one GPU, in the unit that the pod uses."""
    kind, amount = ask.memory
    words = {
        MIB: f"{amount} MiB",
        PERCENT: f"{amount} % of the memory",
        UNITS: f"{amount} GiB (as {ask.field} counts)",
        CARD: "all of the memory",
        SLICE: "an equal slice",
    }[kind]
    if ask.burst_mib:
        words += f" (up to {amount + ask.burst_mib} MiB while no container was promised them)"
    return words + (f" and {ask.cores} % of the compute" if ask.cores and kind != CARD else "")


def asked(ask: PodAsk) -> list[str]:
    """Returns lines for a person: the dialect, then each container."""
    lines = [f"asks in the dialect of {ask.dialect}"]
    for one in ask.asks:
        many = f"{one.gpus} GPUs, each" if one.gpus > 1 else "1 GPU"
        lines.append(f"container {one.container}: {many} {needs(one)}")
    return lines


def admission_findings(pod: dict[str, Any], ask: PodAsk) -> list[Finding]:
    """Returns findings for other settings of a pod that requests GPUs, by which it would bypass the scheduler or the
    library. The text of a finding follows the path of its field.
    """
    findings: list[Finding] = []
    if not ask.wants_gpus:
        return findings
    spec = _mapping(pod.get("spec"))
    if spec.get("nodeName"):
        message = (
            f'names the node "{spec["nodeName"]}" itself, so the scheduler would not plan its GPUs; use a nodeSelector'
        )
        findings.append(error("spec.nodeName", message))
    asking = {one.container for one in ask.asks}
    for kind in ("initContainers", "containers"):
        for n, container in enumerate(spec.get(kind) or []):
            if container.get("name") in asking and _mapping(container.get("securityContext")).get("privileged"):
                where = f"spec.{kind}[{n}].securityContext.privileged"
                message = "a privileged container sees every GPU of the node without a limit; leave it out"
                findings.append(error(where, message))
    return findings


def _variables(container: dict[str, Any], where: str, config: Config) -> list[Finding]:
    """Returns a warning for each variable that looks like a request but is ignored."""
    message = f"is no request, and raises no limit here; request memory by {config.memory}"
    env = container.get("env")
    rows = [one if isinstance(one, dict) else {} for one in env] if isinstance(env, list) else []
    return [
        warning(f"{where}.env[{n}]", f"{one['name']} {message}")
        for n, one in enumerate(rows)
        if one.get("name") in VARIABLES
    ]


def _one_dialect(asks: list[Ask], findings: list[Finding]) -> None:
    first: dict[str, Ask] = {}
    for ask in asks:
        first.setdefault(FAMILY.get(ask.dialect, ask.dialect), ask)
    if len(first) > 1:
        one, other = list(first.values())[:2]
        message = (
            f"{other.field} ({other.dialect}) in a pod whose container {one.container} requests by {one.field} "
            f"({one.dialect}); use the names of one dialect in all containers of a pod"
        )
        findings.append(error(other.where, message))


def _gpu_count_of_one_container(asks: list[Ask], labels: dict[str, Any], findings: list[Finding]) -> None:
    """Checks the pod's label with the GPU count. Adds an error if a count above 1 could apply to several containers,
    and a warning if the label applies to no container.
    """
    mine = [ask for ask in asks if ask.dialect == "alibaba"]
    label = pod_resources.GPU_COUNT_LABEL
    where = f'metadata.labels["{label}"]'
    if label in labels and asks and not mine:
        message = f"has no effect: no container asks for {pod_resources.GPU_MEM}"
        findings.append(warning(where, message))
    elif len(mine) > 1 and any(ask.gpus > 1 for ask in mine):
        names = ", ".join(ask.container for ask in mine)
        message = (
            f"is the number of GPUs for the memory of one container, and several containers request memory: {names}"
        )
        findings.append(error(where, message))


def _names_gpus(findings: Sequence[Finding]) -> bool:
    """Returns whether a fault is about a request for GPUs. Faults in other annotations do not make a pod a GPU pod."""
    asking = [pod_resources.annotation(name) for name in (*NAMES, burst.REQUEST)]
    asking.append(pod_resources.annotation(OF_CONTAINER).rstrip('"]'))
    paths = [finding.path for finding in errors(findings)]
    return any(path.startswith(tuple(asking)) or not path.startswith("metadata.annotations") for path in paths)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
