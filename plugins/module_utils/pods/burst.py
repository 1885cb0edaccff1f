# SPDX-License-Identifier: Apache-2.0
"""Reads the memory that a pod is promised below its limit, from the pod's annotation ``vgpu.fleet/memory-request``.

The value is MiB of each GPU: one whole number for each container that asks for GPU memory, or JSON by container,
``{"main": 2048}``. A container without an entry is promised its limit. The limit is the container's request in MiB (for
example ``nvidia.com/gpumem``). The scheduler and quotas count only the promised memory. Up to its limit, a container
may also use free memory of its card that is promised to no container. No I/O.
"""

from __future__ import annotations

import json
from typing import Any, Sequence

from ..config.kinds import Finding, error
from .bounds import read_json
from .resources import MAX_MIB, MIB, Ask, Memory, annotation

REQUEST = "vgpu.fleet/memory-request"
EXAMPLE = '2048, or by container {"main": 2048}'


def with_request(asks: Sequence[Ask], annotations: dict[str, Any], findings: list[Finding]) -> list[Ask]:
    """Returns the asks (each an ``Ask``, the GPU request of one container) with the promised ``memory``, and with
    ``burst_mib``: how far the limit is above that memory. Faults are added to ``findings`` with the annotation's name;
    after a fault the asks are returned unchanged.
    """
    if REQUEST not in annotations:
        return list(asks)
    before = len(findings)
    named = _read(annotations[REQUEST], findings)
    if not asks:
        _fault(
            findings,
            "no container asks for GPU memory in MiB, so no memory can be promised; expected a resource such as "
            "nvidia.com/gpumem on a node with sliceSizing: requested. Equal slices, whole GPUs, MIG, time-slicing and "
            "claims have one size; leave the annotation out",
        )
    known = [one.container for one in asks]
    if isinstance(named, dict):
        for name in named:
            if name not in known:
                _fault(findings, f"{name[:64]}: no container that asks for a GPU; expected {', '.join(known[:10])}")
    out = [_promised(one, named if isinstance(named, int) else named.get(one.container), findings) for one in asks]
    return out if len(findings) == before else list(asks)


def _read(text: Any, findings: list[Finding]) -> int | dict[str, int]:
    """Returns the MiB for all containers or by container; empty if ``findings`` has an error."""
    try:
        found = read_json(text)
    except ValueError as fault:
        shown = json.dumps(str(text)[:64])
        _fault(findings, f"expected whole MiB without a unit, such as {EXAMPLE}; found {shown} ({fault})")
        return {}
    for value in found.values() if isinstance(found, dict) else [found]:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_MIB:
            shown = json.dumps(value)[:64]
            _fault(findings, f"expected whole MiB from 1 to {MAX_MIB}, such as {EXAMPLE}; found {shown}")
            return {}
    if found == {}:
        _fault(findings, f"names no container; expected text such as {EXAMPLE}")
    return found


def _promised(ask: Ask, mib: int | None, findings: list[Finding]) -> Ask:
    if mib is None:
        return ask
    kind, limit = ask.memory
    if kind != MIB:
        _fault(
            findings,
            f"container {ask.container} requests by {ask.field}, which is no limit in MiB; expected a limit such as "
            "nvidia.com/gpumem, or no annotation",
        )
    elif ask.burst_mib:
        _fault(
            findings, (f"container {ask.container} already has a request in addition to {ask.field}; name one of them")
        )
    elif mib > limit:
        _fault(
            findings,
            f"container {ask.container}: {mib} MiB are more than its limit of {limit} MiB; expected at most that",
        )
    else:
        return ask._replace(memory=Memory(MIB, mib), burst_mib=limit - mib)
    return ask


def _fault(findings: list[Finding], text: str) -> None:
    findings.append(error(annotation(REQUEST), text))
