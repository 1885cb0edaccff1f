# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the annotations by which device plugin and scheduler exchange the state of GPUs.

``vgpu.fleet/gpus`` on a node: the device plugin lists the GPUs that pods may share, and, if known, the policy of the
kubelet's topology manager. ``vgpu.fleet/plan`` on a pod: the scheduler writes the planned GPUs in the same request that
binds the pod, so a pod has a plan exactly when it has a node. ``vgpu.fleet/given`` on a pod: the allocated GPUs, which
override the plan. The device plugin writes them if the kubelet chose other GPUs than planned, and the scheduler writes
them when it grants another size (resizes.py). The three annotations above are JSON with a version; memory is in MiB,
cores in percent. ``vgpu.fleet/drained-gpus`` on a node: an administrator lists the UUIDs of GPUs that get no more pods,
separated by commas. ``vgpu.fleet/resources`` on a node: the device plugin lists the resource names of its slices that
are outside nvidia.com/, separated by commas.
"""

from __future__ import annotations

import json
from typing import Any, Mapping, NamedTuple, Sequence

GPUS, PLAN, GIVEN = "vgpu.fleet/gpus", "vgpu.fleet/plan", "vgpu.fleet/given"
DRAINED, RESOURCES = "vgpu.fleet/drained-gpus", "vgpu.fleet/resources"
VERSION = 1
INIT, SIDECAR, APP = "init", "sidecar", "app"
# Values of the kubelet's topologyManagerPolicy and topologyManagerScope on which a plan depends.
SINGLE_NUMA_NODE = "single-numa-node"
POLICIES = ("none", "best-effort", "restricted", SINGLE_NUMA_NODE)
CONTAINER, POD = "container", "pod"
MAX_GPUS = 128
MAX_MIB = 1 << 24


class PlanError(ValueError):
    """An annotation cannot be read; the text describes the fault."""


class NodeGpu(NamedTuple):
    """Describes a GPU of a node. ``memory_mib``: memory of the card; ``capacity_mib``: memory that all its pods
    together may get; ``slots``: how many containers may share the GPU; ``slice_mib``, ``slice_cores``: the equal slice
    (share of the GPU), in MiB and percent. ``links``: (UUID, score) of each GPU with a fast link to this one, where a
    higher score means nearer. ``numa``: NUMA node, -1 if unknown.
    """

    uuid: str
    model: str
    memory_mib: int
    capacity_mib: int
    slots: int
    slice_mib: int
    slice_cores: int
    healthy: bool = True
    numa: int = -1
    links: tuple[tuple[str, int], ...] = ()


class Topology(NamedTuple):
    """Describes the topology manager of a node's kubelet; an empty policy means unknown."""

    policy: str = ""
    scope: str = CONTAINER


NO_POLICY = Topology()


class Device(NamedTuple):
    """Describes a container's part of one GPU. ``cores``: percent of compute, where 0 means no limit and 100 the GPU
    exclusively. ``memory_mib``: promised memory; ``burst_mib``: memory that the container may use in addition while it
    is promised to no container (burst.py).
    """

    uuid: str
    memory_mib: int
    cores: int
    burst_mib: int = 0


class Part(NamedTuple):
    """Describes one container's part of a plan; ``kind`` is the kind of the container: init, sidecar or app."""

    container: str
    kind: str
    devices: tuple[Device, ...]


class Use(NamedTuple):
    """Holds the most that a pod uses of one GPU at any time."""

    memory_mib: int
    cores: int
    slots: int


Plan = Sequence[Part]


def use_of(plan: Plan) -> dict[str, Use]:
    """Maps the UUID of each GPU to the most that a pod uses of it at any time. The parts have the order of the pod's
    containers. Init containers run one after the other, together with the sidecars that started before them. Afterwards
    the other containers run together with all sidecars.
    """
    sidecars: dict[str, Use] = {}
    moments = []
    for part in plan:
        if part.kind == INIT:
            moments.append(_with(sidecars, part))
        elif part.kind == SIDECAR:
            sidecars = _with(sidecars, part)
    running = sidecars
    for part in plan:
        if part.kind == APP:
            running = _with(running, part)
    highest = dict(running)
    for moment in moments:
        for uuid, use in moment.items():
            highest[uuid] = Use(*map(max, use, highest.get(uuid, use)))
    return highest


def limit_of(plan: Plan) -> dict[str, int]:
    """Returns the MiB that a pod may use at most on each GPU, including memory that is not promised to it."""
    most = [
        part._replace(devices=tuple(one._replace(memory_mib=one.memory_mib + one.burst_mib) for one in part.devices))
        for part in plan
    ]
    return {uuid: use.memory_mib for uuid, use in use_of(most).items()}


def _with(uses: Mapping[str, Use], part: Part) -> dict[str, Use]:
    out = dict(uses)
    for device in part.devices:
        use = out.get(device.uuid, Use(0, 0, 0))
        out[device.uuid] = Use(use.memory_mib + device.memory_mib, use.cores + device.cores, use.slots + 1)
    return out


def write_plan(plan: Plan) -> str:
    containers: list[dict[str, Any]] = [
        {"name": part.container, "kind": part.kind, "gpus": [list(one[:3]) for one in part.devices]} for part in plan
    ]
    for one, part in zip(containers, plan):
        # The burst memory has a separate key. An older program does not know this key, so it uses only the promised
        # memory.
        if any(device.burst_mib for device in part.devices):
            one["burst"] = [device.burst_mib for device in part.devices]
    return json.dumps({"version": VERSION, "containers": containers}, separators=(",", ":"))


def read_plan(text: str) -> tuple[Part, ...]:
    """Parses the text of a plan. Raises PlanError."""
    parts = []
    for n, one in enumerate(_entries(text, "containers")):
        where = f"containers[{n}]"
        kind = one.get("kind")
        if kind not in (INIT, SIDECAR, APP) or not isinstance(one.get("name"), str):
            raise PlanError(f"{where}: expected name and kind ({INIT}, {SIDECAR} or {APP})")
        devices = one.get("gpus")
        if not isinstance(devices, list) or not all(isinstance(each, list) and len(each) == 3 for each in devices):
            raise PlanError(f"{where}.gpus: expected a list of [UUID, MiB, percent]")
        for uuid, memory, cores in devices:
            if not isinstance(uuid, str) or not _whole(memory, 1, MAX_MIB) or not _whole(cores, 0, 100):
                raise PlanError(
                    f"{where}.gpus: expected a list of [UUID, MiB, percent], found [{uuid}, {memory}, {cores}]"
                )
        found = tuple(Device(*each) for each in devices)
        if "burst" in one:
            burst = one["burst"]
            if not isinstance(burst, list) or not all(_whole(n, 0, MAX_MIB) for n in burst) or len(burst) != len(found):
                raise PlanError(f"{where}.burst: expected {len(found)} whole numbers of MiB")
            found = tuple(device._replace(burst_mib=n) for device, n in zip(found, burst))
        parts.append(Part(one["name"], kind, found))
    for uuid, use in use_of(parts).items():
        if use.memory_mib > MAX_MIB:
            raise PlanError(f"containers: {use.memory_mib} MiB of {uuid}; expected at most {MAX_MIB} together")
    return tuple(parts)


def read_annotations(annotations: Mapping[str, str]) -> tuple[Part, ...] | None:
    """Returns the plan in a pod's annotations, None if there is no plan. Raises PlanError."""
    for name in (GIVEN, PLAN):
        if name in annotations:
            try:
                return read_plan(annotations[name])
            except PlanError as fault:
                raise PlanError(f'metadata.annotations["{name}"]: {fault}') from None
    return None


def read_drained(text: str) -> frozenset[str]:
    """Returns the UUIDs of the drained GPUs. A UUID that is not a GPU of the node has no effect."""
    return frozenset(one.strip() for one in text[: MAX_GPUS * 64].split(",") if one.strip())


def write_gpus(gpus: Sequence[NodeGpu], topology: Topology = NO_POLICY) -> str:
    rows = []
    for gpu in gpus:
        row: dict[str, Any] = dict(gpu._asdict(), links=dict(gpu.links))
        rows.append(row)
    document: dict[str, Any] = {"version": VERSION, "gpus": rows}
    if topology.policy:
        document["topology"] = dict(topology._asdict())
    return json.dumps(document, separators=(",", ":"))


def read_gpus(text: str) -> tuple[NodeGpu, ...]:
    """Returns the GPUs in a node's annotation. Ignores the keys of later versions. Raises PlanError."""
    gpus: list[NodeGpu] = []
    for n, one in enumerate(_entries(text, "gpus")):
        where = f"gpus[{n}]"
        for key, low, high in (
            ("memory_mib", 1, MAX_MIB),
            ("capacity_mib", 1, MAX_MIB),
            ("slots", 1, 1024),
            ("slice_mib", 1, MAX_MIB),
            ("slice_cores", 1, 100),
        ):
            if not _whole(one.get(key), low, high):
                raise PlanError(f"{where}.{key}: expected a whole number from {low} to {high}, found {one.get(key)}")
        if not isinstance(one.get("uuid"), str) or not one["uuid"]:
            raise PlanError(f"{where}.uuid: expected a UUID, found {one.get('uuid')}")
        links = one.get("links")
        links = links if isinstance(links, dict) else {}
        numa = one.get("numa", -1)
        gpus.append(
            NodeGpu(
                one["uuid"],
                str(one.get("model") or ""),
                one["memory_mib"],
                one["capacity_mib"],
                one["slots"],
                one["slice_mib"],
                one["slice_cores"],
                one.get("healthy", True) is True,
                numa if _whole(numa, -1, 127) else -1,
                tuple(sorted((uuid, score) for uuid, score in links.items() if _whole(score, 0, 1 << 20))),
            )
        )
    if len({gpu.uuid for gpu in gpus}) != len(gpus):
        raise PlanError("a UUID occurs twice")
    if len(gpus) > MAX_GPUS:
        raise PlanError(f"{len(gpus)} GPUs; expected at most {MAX_GPUS}")
    return tuple(gpus)


def read_topology(text: str) -> Topology:
    """Returns the kubelet's topology settings from a text that ``read_gpus`` accepts. Older device plugins write no
    settings. An unknown policy, written by a later plugin, counts as no setting.
    """
    found = json.loads(text).get("topology")
    found = found if isinstance(found, dict) else {}
    policy, scope = found.get("policy"), found.get("scope")
    return Topology(policy, POD if scope == POD else CONTAINER) if policy in POLICIES else NO_POLICY


def _entries(text: str, key: str) -> list[dict[str, Any]]:
    try:
        document = json.loads(text)
    except (TypeError, ValueError, RecursionError) as fault:
        raise PlanError(f"is no JSON ({fault})") from None
    if not isinstance(document, dict) or not _whole(document.get("version"), VERSION, 1 << 16):
        raise PlanError(f'expected a mapping with "version": {VERSION}')
    entries = document.get(key)
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise PlanError(f"{key}: expected a list of mappings")
    return entries


def _whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
