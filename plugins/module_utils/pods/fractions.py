# SPDX-License-Identifier: Apache-2.0
"""Parts of GPUs that a pod asks for by annotations, as the KAI Scheduler has it: ``gpu-memory`` (MiB) or
``gpu-fraction`` (of the memory of a card), on ``gpu-fraction-num-devices`` GPUs, for one container.

Annotations have no fixed kind as resources have, and other programs may use such short names. A pod whose
``schedulerName`` is KAI's own is KAI's, with all its annotations. In any other pod they ask, and a value that cannot
be is an error: the container would have no GPU, and nobody would know why.
"""

from __future__ import annotations

from typing import Any

from ..config.kinds import Finding, error, show
from .quantity import QuantityError, exact, whole
from .resources import MAX_GPUS, MAX_MIB, MIB, PERCENT, Fraction, Memory, annotation

GPU_MEMORY, GPU_FRACTION = "gpu-memory", "gpu-fraction"
NUM_DEVICES, CONTAINER_NAME = "gpu-fraction-num-devices", "gpu-fraction-container-name"
# Those by which a pod asks; the others say more of it.
ASKING = (GPU_MEMORY, GPU_FRACTION)
NAMES = (*ASKING, NUM_DEVICES, CONTAINER_NAME)
KAI_SCHEDULER = "kai-scheduler"


def read_fraction(annotations: dict[str, Any], spec: dict[str, Any], findings: list[Finding]) -> Fraction | None:
    """None where the annotations ask for nothing, and where ``findings`` has an error."""
    named = [name for name in ASKING if name in annotations]
    if not named or spec.get("schedulerName") == KAI_SCHEDULER:
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
        findings.append(error(annotation(GPU_FRACTION), f"beside {GPU_MEMORY}; name one of them"))
    if named[0] == GPU_MEMORY:
        return Memory(MIB, _number(annotations, GPU_MEMORY, MAX_MIB, "MiB", findings))
    value = annotations[GPU_FRACTION]
    number = exact(value)
    percent = 100 * number if number is not None else None
    if percent is None or percent.denominator != 1 or not 0 < percent < 100:
        text = f"expected a decimal from 0.01 to 0.99 with two digits at most, found {show(value)}"
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
    """The one that is named, else the first of the pod."""
    kinds = [spec.get(kind) for kind in ("containers", "initContainers")]
    names = [str(one.get("name")) for kind in kinds for one in kind or [] if isinstance(one, dict)]
    if CONTAINER_NAME not in annotations:
        return names[0] if names else ""
    name = str(annotations[CONTAINER_NAME])
    if name not in names:
        findings.append(error(annotation(CONTAINER_NAME), f"the pod has no container {show(name)}"))
    return name
