# SPDX-License-Identifier: Apache-2.0
"""Reads and applies requests to change the GPU size of a running pod, by annotations of the pod.

The pod's owner writes the request ``vgpu.fleet/resize``: JSON, ``{container: {memory_mib, cores}}``, for each of the
container's GPUs; an omitted value stays unchanged. If the leading scheduler grants the request, it writes three
annotations at once: ``vgpu.fleet/given`` (the new plan, the GPUs with their sizes), ``vgpu.fleet/resized`` (the granted
request) and ``vgpu.fleet/former`` (the plan before the resize). The device plugin removes ``former`` when the limits on
the node match ``given``. Until then the greater of the two sizes counts. No I/O.
"""

from __future__ import annotations

import json
from typing import Any, Mapping, NamedTuple

from .annotations import MAX_MIB, Device, Part, Plan, PlanError, read_annotations, read_plan
from .bounds import read_json
from .burst import REQUEST

RESIZE, RESIZED, FORMER = "vgpu.fleet/resize", "vgpu.fleet/resized", "vgpu.fleet/former"
KEYS = ("memory_mib", "cores")
EXAMPLE = '{"main": {"memory_mib": 8192, "cores": 30}}'


class Size(NamedTuple):
    """Describes the requested size on each GPU of a container. None means unchanged. For cores, 0 means no limit and
    100 means the GPU exclusively.
    """

    memory_mib: int | None = None
    cores: int | None = None


Request = Mapping[str, Size]


def read_request(text: str) -> dict[str, Size]:
    """Parses a request. Raises PlanError with the place in the text. The message follows the annotation's name."""
    try:
        found = read_json(text)
    except ValueError as fault:
        raise PlanError(f"is no JSON ({fault}); expected such as {EXAMPLE}") from None
    if not isinstance(found, dict) or not found:
        raise PlanError(f"names no container; expected text such as {EXAMPLE}")
    return {name: _size(name, size) for name, size in found.items()}


def _size(name: str, size: Any) -> Size:
    shown = name[:64]
    if not isinstance(size, dict) or not size or not set(size) <= set(KEYS):
        raise PlanError(f"{shown}: expected memory_mib, cores or both, and nothing else; such as {EXAMPLE}")
    for key, low, high in (("memory_mib", 1, MAX_MIB), ("cores", 0, 100)):
        value = size.get(key, low)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise PlanError(
                f"{shown}.{key}: expected a whole number from {low} to {high}, found {json.dumps(value)[:64]}"
            )
    return Size(size.get("memory_mib"), size.get("cores"))


def write_request(request: Request) -> str:
    """Writes a request. Equal requests give equal texts."""
    sizes = {
        name: {key: value for key, value in size._asdict().items() if value is not None}
        for name, size in request.items()
    }
    return json.dumps(sizes, sort_keys=True, separators=(",", ":"))


def pending(annotations: Mapping[str, str]) -> dict[str, Size] | None:
    """Returns the owner's request if it is not granted yet, else None. Raises PlanError."""
    if RESIZE not in annotations:
        return None
    try:
        request = read_request(annotations[RESIZE])
    except PlanError as fault:
        raise PlanError(f'metadata.annotations["{RESIZE}"]: {fault}') from None
    return None if annotations.get(RESIZED) == write_request(request) else request


def applied(plan: Plan, request: Request) -> tuple[Part, ...]:
    """Returns the plan with the sizes of a request. Raises PlanError for a container that has no GPU."""
    having = [part.container for part in plan if part.devices]
    for name in request:
        if name not in having:
            raise PlanError(f"{name[:64]}: no container of the pod with a GPU; expected {', '.join(having) or 'none'}")
    parts = []
    for part in plan:
        size = request.get(part.container, Size())
        parts.append(part._replace(devices=tuple(_sized(part.container, one, size) for one in part.devices)))
    return tuple(parts)


def _sized(name: str, device: Device, size: Size) -> Device:
    if device.burst_mib and size.memory_mib is not None:
        raise PlanError(
            f"{name[:64]}: its memory is from {device.memory_mib} to {device.memory_mib + device.burst_mib} MiB by "
            f"{REQUEST}, which cannot change after admission; request only cores, or create the pod again"
        )
    memory = device.memory_mib if size.memory_mib is None else size.memory_mib
    return device._replace(memory_mib=memory, cores=device.cores if size.cores is None else size.cores)


def greater(plan: Plan, other: Plan) -> tuple[Part, ...]:
    """Returns, for each container and GPU, the greater size of both plans."""
    others = {(part.container, one.uuid): one for part in other for one in part.devices}
    parts = []
    for part in plan:
        both = []
        for one in part.devices:
            had = others.pop((part.container, one.uuid), one)
            both.append(Device(one.uuid, *map(max, one[1:], had[1:])))
        more = [device for (name, _uuid), device in others.items() if name == part.container]
        parts.append(part._replace(devices=(*both, *more)))
    known = {part.container for part in plan}
    return (*parts, *(part for part in other if part.container not in known))


def counted(annotations: Mapping[str, str]) -> tuple[Part, ...] | None:
    """Returns the plan with the sizes that count for a pod, from its annotations; None if it has no plan. Raises
    PlanError.
    """
    plan = read_annotations(annotations)
    if plan is None or FORMER not in annotations:
        return plan
    try:
        return greater(plan, read_plan(annotations[FORMER]))
    except PlanError as fault:
        raise PlanError(f'metadata.annotations["{FORMER}"]: {fault}') from None


def under_way(annotations: Mapping[str, str]) -> list[str]:
    """Describes in words which parts of a resize are not done yet."""
    out = []
    try:
        wanted = pending(annotations)
    except PlanError as fault:
        return [str(fault)]
    if wanted is not None:
        out.append(f"asks for another size, which is not granted yet: {write_request(wanted)}")
    if FORMER in annotations:
        out.append("its node has not applied the new size yet; the greater of both sizes counts")
    return out
