# SPDX-License-Identifier: Apache-2.0
"""Converts a claim, as read from the API server, into shares of this node's devices. This module does no I/O.

Only ``status.allocation`` of the claim is used, not its spec. The two differ, because the scheduler rounds requests up,
and uses the device's defaults for capacities that are not requested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._shared.config.slices import MIB
from .._shared.pods import quantity
from ..errors import Refused
from . import parameters
from .names import CORES, DRIVER, MEMORY


@dataclass(frozen=True)
class Part:
    """The part of one device that a request got. ``memory_mib`` and ``cores`` are the consumed capacities; None means
    that the device does not share that capacity. ``share_id`` is the API's id of this part. It is empty for a device
    that only one claim can have.
    """

    device: str
    share_id: str = ""
    memory_mib: int | None = None
    cores: int | None = None


@dataclass(frozen=True)
class Share:
    """All parts of devices that one request of a claim got on this node. ``given`` are the parameters for the request.
    Those of the device class come first.
    """

    request: str
    parts: tuple[Part, ...]
    given: tuple[tuple[str, Mapping[str, Any]], ...] = ()


@dataclass(frozen=True)
class Claim:
    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name}"


def shares_of(claim: Claim, found: Mapping[str, Any], pool: str) -> list[Share]:
    """Returns the claim's shares of the devices in ``pool``, the pool of this node. If the claim has no share on this
    node, the list is empty. Raises Refused.
    """
    uid = (found.get("metadata") or {}).get("uid")
    if uid != claim.uid:
        raise Refused(f"{claim} was replaced: its uid is {uid}, expected {claim.uid}")
    allocation = (found.get("status") or {}).get("allocation")
    if not isinstance(allocation, Mapping):
        raise Refused(f"{claim} is not allocated; expected status.allocation, which the scheduler writes")
    devices = allocation.get("devices") or {}
    parts: dict[str, list[Part]] = {}
    names: dict[str, set[str]] = {}
    for result in devices.get("results") or ():
        if result.get("driver") != DRIVER:
            continue
        if result.get("pool") != pool:
            device = f"device {result.get('device')} belongs to pool {result.get('pool')}"
            raise Refused(f"{claim}: {device}, expected this node's pool {pool}")
        # A request may list alternatives. Then the result names the chosen alternative: <request>/<subrequest>.
        full = str(result["request"])
        request = full.partition("/")[0]
        parts.setdefault(request, []).append(_part(claim, result))
        names.setdefault(request, set()).update((request, full))
    config = devices.get("config") or ()
    return [Share(one, tuple(mine), _given(claim, config, names[one])) for one, mine in parts.items()]


def _part(claim: Claim, result: Mapping[str, Any]) -> Part:
    consumed = {str(key).rpartition("/")[2]: value for key, value in (result.get("consumedCapacity") or {}).items()}
    memory = _whole(claim, consumed, MEMORY, MIB)
    cores = _whole(claim, consumed, CORES, 1)
    return Part(str(result["device"]), str(result.get("shareID") or ""), memory, cores)


def _whole(claim: Claim, consumed: Mapping[str, Any], key: str, unit: int) -> int | None:
    if key not in consumed:
        return None
    number = quantity.exact(consumed[key])
    if number is None or number <= 0 or number % unit:
        expected = "a whole number of MiB" if unit > 1 else "a whole number"
        raise Refused(f"{claim}: it has {consumed[key]!r:.80} of {key}, expected {expected}")
    return int(number // unit)


def _given(claim: Claim, config: Any, names: set[str]) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """Returns the parameters for a request. Those of the device class come first. Apart from that, the order of the
    claim is kept.
    """
    out = []
    for entry in config:
        opaque = entry.get("opaque") or {}
        requests = entry.get("requests") or ()
        if opaque.get("driver") != DRIVER or (requests and names.isdisjoint(requests)):
            continue
        source = str(entry.get("source"))
        where = f"{claim}: parameters of {'its class' if source == parameters.FROM_CLASS else 'the claim'}"
        out.append((source, parameters.check(opaque.get("parameters"), where)))
    return tuple(sorted(out, key=lambda one: one[0] != parameters.FROM_CLASS))
