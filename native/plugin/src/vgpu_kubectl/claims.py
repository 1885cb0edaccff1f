# SPDX-License-Identifier: Apache-2.0
"""Finds the GPUs of nodes whose pods use claims (Dynamic Resource Allocation), and the shares (parts of GPUs) that each
claim holds. The caller has read the ResourceSlices and ResourceClaims that contain both.

Pods with the same claim use the same share, so a share is counted once for each claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vgpu_plugin._shared.pods import quantity
from vgpu_plugin._shared.pods.annotations import NodeGpu, Use
from vgpu_plugin._shared.pods.claim_requests import LABEL, WANTED

DRIVER = "gpu.vgpu.fleet"
# Names of the DeviceClasses that the vgpu.fleet collection creates.
CLASSES = ("vgpu", "vgpu-mig")
MIB = 1 << 20
UNHEALTHY = f"{DRIVER}/unhealthy"

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Share:
    """A claim's share of one GPU; ``pods``: ``namespace/name`` of the pods that use the claim."""

    claim: str
    node: str
    uuid: str
    use: Use
    pods: tuple[str, ...]


@dataclass(frozen=True)
class Claims:
    """What was found. ``gpus``: node → its GPUs; ``shares``: the parts of GPUs that claims hold; ``there``:
    ``namespace/name`` of all claims; ``waiting``: those of our claims that have no device yet.
    """

    gpus: Mapping[str, tuple[NodeGpu, ...]] = field(default_factory=dict)
    shares: tuple[Share, ...] = ()
    waiting: frozenset[str] = frozenset()
    there: frozenset[str] = frozenset()

    def of_node(self, name: str) -> list[Share]:
        return [one for one in self.shares if one.node == name]

    def of_pod(self, key: str) -> list[Share]:
        return [one for one in self.shares if key in one.pods]

    def waits(self, pod: Object) -> bool:
        """Returns whether a claim of the pod has no device yet. The claim may be one that the pod names, directly or by
        a template, or one that our scheduler will create.
        """
        meta = pod.get("metadata") or {}
        place, ours = meta.get("namespace") or "default", (meta.get("labels") or {}).get(LABEL) == WANTED
        named = [*((pod.get("spec") or {}).get("resourceClaims") or ())]
        named += (pod.get("status") or {}).get("resourceClaimStatuses") or ()
        keys = {f"{place}/{one['resourceClaimName']}" for one in named if one.get("resourceClaimName")}
        return bool(keys & self.waiting or (ours and keys - self.there))


NONE = Claims()


def read(slices: Iterable[Object], claims: Iterable[Object]) -> Claims:
    """Reads GPUs and shares from the objects. ``slices``: ResourceSlices of all drivers. Only the slices of our
    driver count, and of these only each node's newest generation.
    """
    devices: dict[str, dict[str, NodeGpu]] = {}
    newest: dict[str, int] = {}
    for one in sorted(slices, key=_generation):
        spec = one.get("spec") or {}
        if spec.get("driver") != DRIVER:
            continue
        node = str(spec.get("nodeName") or "")
        if newest.get(node) != _generation(one):
            newest[node], devices[node] = _generation(one), {}
        devices[node].update({str(device.get("name")): _gpu(device) for device in spec.get("devices") or ()})
    every = list(claims)
    shares = [share for one in every for share in _shares(one, devices)]
    waiting = frozenset(_key(one) for one in every if not (one.get("status") or {}).get("allocation") and _ours(one))
    gpus = {node: tuple(found.values()) for node, found in devices.items()}
    return Claims(gpus, tuple(shares), waiting, frozenset(map(_key, every)))


def _key(claim: Object) -> str:
    meta = claim.get("metadata") or {}
    return f"{meta.get('namespace') or 'default'}/{meta.get('name')}"


def _ours(claim: Object) -> bool:
    """Returns whether a request of the claim, or an alternative in a request, uses one of our DeviceClasses."""
    requests = ((claim.get("spec") or {}).get("devices") or {}).get("requests") or ()
    kinds = [kind for one in requests for kind in (one.get("exactly") or {}, *(one.get("firstAvailable") or ()))]
    return any(kind.get("deviceClassName") in CLASSES for kind in kinds)


def _generation(one: Object) -> int:
    return int(((one.get("spec") or {}).get("pool") or {}).get("generation") or 0)


def _gpu(device: Object) -> NodeGpu:
    attributes = {key.rpartition("/")[2]: value for key, value in (device.get("attributes") or {}).items()}
    capacity = device.get("capacity") or {}
    memory = _mib((capacity.get("memory") or {}).get("value"))
    slots = quantity.exact((capacity.get("slots") or {}).get("value") or 1)
    return NodeGpu(
        uuid=str((attributes.get("uuid") or {}).get("string") or device.get("name")),
        model=str((attributes.get("model") or {}).get("string") or ""),
        memory_mib=memory,
        capacity_mib=memory,
        slots=int(slots or 1),
        slice_mib=0,
        slice_cores=0,
        healthy=not any(one.get("key") == UNHEALTHY for one in device.get("taints") or ()),
    )


def _shares(claim: Object, devices: Mapping[str, Mapping[str, NodeGpu]]) -> list[Share]:
    status = claim.get("status") or {}
    place = _key(claim).partition("/")[0]
    pods = sorted(f"{place}/{one['name']}" for one in status.get("reservedFor") or () if one.get("resource") == "pods")
    found = []
    for one in ((status.get("allocation") or {}).get("devices") or {}).get("results") or ():
        node, name = str(one.get("pool")), str(one.get("device"))
        if one.get("driver") != DRIVER:
            continue
        gpu = devices.get(node, {}).get(name)
        has = one.get("consumedCapacity") or {}
        memory = _mib(has["memory"]) if "memory" in has else gpu.memory_mib if gpu else 0
        cores = quantity.exact(has.get("cores") or 0) or 0
        found.append(Share(_key(claim), node, gpu.uuid if gpu else name, Use(memory, int(cores), 1), tuple(pods)))
    return found


def _mib(value: Any) -> int:
    return int((quantity.exact(value) or 0) / MIB)
