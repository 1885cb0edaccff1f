# SPDX-License-Identifier: Apache-2.0
"""Reads the parts of GPUs that a pod requests by annotations in the format of the KAI Scheduler: ``gpu-memory`` (MiB)
or ``gpu-fraction`` (of the memory of a card), on ``gpu-fraction-num-devices`` GPUs, for one container; or for each
container ``nvidia.com/container.NAME.gpu-memory.limit`` and ``.request`` (bytes in Kubernetes' notation), on one
GPU.

Unlike the names of resources, names such as ``gpu-memory`` have no domain, so other programs may use them too. A pod
whose ``schedulerName`` is KAI's scheduler belongs to KAI, with all its annotations. In any other pod these annotations
are requests, and an invalid value is an error, because otherwise the container would get no GPU and nobody would see a
reason.
"""

from __future__ import annotations

from typing import Any

from ..config.kinds import Finding, error, show
from .quantity import QuantityError, exact, whole
from .resources import MAX_GPUS, MAX_MIB, MIB, PERCENT, Fraction, Memory, annotation

GPU_MEMORY, GPU_FRACTION = "gpu-memory", "gpu-fraction"
NUM_DEVICES, CONTAINER_NAME = "gpu-fraction-num-devices", "gpu-fraction-container-name"
# Annotations that request GPUs. KAI's other annotations only give details of the request.
ASKING = (GPU_MEMORY, GPU_FRACTION)
NAMES = (*ASKING, NUM_DEVICES, CONTAINER_NAME)
# This prefix is followed by the container's name, which has no dot, and by one of these suffixes.
OF_CONTAINER = "nvidia.com/container."
LIMIT, REQUEST = "gpu-memory.limit", "gpu-memory.request"
# Annotations that KAI's scheduler writes itself. They say which GPUs the container has, and how they are shared.
NOT_READ = ("gpus.devices", "gpu-compute.mode")
KAI_SCHEDULER = "kai-scheduler"
BYTES_OF_MIB = 1 << 20


def read_fractions(annotations: dict[str, Any], spec: dict[str, Any], findings: list[Finding]) -> dict[str, Fraction]:
    """Returns the requests by container; empty if the annotations request nothing or ``findings`` has an error. The
    text of a finding follows the name of its annotation.
    """
    if spec.get("schedulerName") == KAI_SCHEDULER:
        return {}
    of_pod, of_container = _of_pod(annotations, spec, findings), _of_containers(annotations, spec, findings)
    if of_pod and of_container:
        text = f"is set together with {of_pod.field}, which also requests GPUs for a container; name one of them"
        findings.append(error(annotation(next(iter(of_container.values())).field), text))
        return {}
    return of_container or ({of_pod.container: of_pod} if of_pod else {})


def _of_containers(annotations: dict[str, Any], spec: dict[str, Any], findings: list[Finding]) -> dict[str, Fraction]:
    before = len(findings)
    named: dict[str, dict[str, str]] = {}
    known = set(_names(spec))
    for name in [name for name in annotations if str(name).startswith(OF_CONTAINER)]:
        container, _dot, field = name[len(OF_CONTAINER) :].partition(".")
        if field in NOT_READ:
            findings.append(error(annotation(name), "is read by KAI's own scheduler alone; leave it out"))
        elif field not in (LIMIT, REQUEST):
            text = f"expected {OF_CONTAINER}NAME.{LIMIT} or .{REQUEST}; correct the name"
            findings.append(error(annotation(name), text))
        elif container not in known:
            findings.append(error(annotation(name), f"the pod has no container {show(container)}"))
        else:
            named.setdefault(container, {})[field] = name
    found = {}
    for container, fields in named.items():
        if LIMIT not in fields:
            text = f"is set without {OF_CONTAINER}{container}.{LIMIT}; name the limit too"
            findings.append(error(annotation(fields[REQUEST]), text))
            continue
        limit = _mib(annotations, fields[LIMIT], findings)
        request = _mib(annotations, fields[REQUEST], findings) if REQUEST in fields else limit
        if request > limit > 0:
            text = f"{request} MiB are more than the limit of {limit} MiB; expected at most that"
            findings.append(error(annotation(fields[REQUEST]), text))
        found[container] = Fraction(container, 1, Memory(MIB, request), fields[LIMIT], limit - request)
    return found if len(findings) == before else {}


def _mib(annotations: dict[str, Any], name: str, findings: list[Finding]) -> int:
    """Returns the MiB of a quantity in bytes. If the value is no whole number of MiB, returns 0 and adds a finding."""
    value = annotations[name]
    number = exact(value)
    mib = number / BYTES_OF_MIB if number is not None else None
    if mib is None or mib.denominator != 1 or not 1 <= mib <= MAX_MIB:
        text = f"expected a quantity of bytes in whole MiB, such as 2000Mi or 8Gi, found {show(value)}"
        findings.append(error(annotation(name), text))
        return 0
    return int(mib)


def _of_pod(annotations: dict[str, Any], spec: dict[str, Any], findings: list[Finding]) -> Fraction | None:
    named = [name for name in ASKING if name in annotations]
    if not named:
        return None
    before = len(findings)
    memory = _memory(annotations, named, findings)
    gpus = 1
    if NUM_DEVICES in annotations:
        gpus = _number(annotations, NUM_DEVICES, MAX_GPUS, "GPUs", findings) or 1
    container = _container(annotations, spec, findings)
    return Fraction(container, gpus, memory, named[0]) if len(findings) == before else None


def _memory(annotations: dict[str, Any], named: list[str], findings: list[Finding]) -> Memory:
    if len(named) > 1:
        findings.append(error(annotation(GPU_FRACTION), f"is set together with {GPU_MEMORY}; name one of them"))
    if named[0] == GPU_MEMORY:
        return Memory(MIB, _number(annotations, GPU_MEMORY, MAX_MIB, "MiB", findings))
    value = annotations[GPU_FRACTION]
    number = exact(value)
    percent = 100 * number if number is not None else None
    if percent is None or percent.denominator != 1 or not 0 < percent < 100:
        text = f"expected a decimal from 0.01 to 0.99 with at most two digits after the point, found {show(value)}"
        findings.append(error(annotation(GPU_FRACTION), text))
        percent = None
    return Memory(PERCENT, int(percent or 0))


def _number(annotations: dict[str, Any], name: str, high: int, unit: str, findings: list[Finding]) -> int:
    try:
        return whole(annotations[name], 1, high, unit)
    except QuantityError as fault:
        findings.append(error(annotation(name), str(fault)))
        return 0


def _container(annotations: dict[str, Any], spec: dict[str, Any], findings: list[Finding]) -> str:
    """Returns the name of the container that the annotations are for: the container that an annotation names, else the
    pod's first container.
    """
    names = _names(spec)
    if CONTAINER_NAME not in annotations:
        return names[0] if names else ""
    name = str(annotations[CONTAINER_NAME])
    if name not in names:
        findings.append(error(annotation(CONTAINER_NAME), f"the pod has no container {show(name)}"))
    return name


def _names(spec: dict[str, Any]) -> list[str]:
    kinds = [spec.get(kind) for kind in ("containers", "initContainers")]
    return [str(one.get("name")) for kind in kinds for one in kind or [] if isinstance(one, dict)]
