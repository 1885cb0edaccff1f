# SPDX-License-Identifier: Apache-2.0
"""The text of vgpuctl explain, which says why a GPU, a slice (part of a GPU) or the node is in its state. It is made
from the plugin's responses, without I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..admin import holder_names
from ..allocation.allocation_files import AllocationFiles
from ..errors import counted
from .text import LOST, OUTSIDE, ends, has_kubelet, short_id, slice_rows


def explain(
    status: dict[str, Any],
    wanted: str,
    usages: list[dict[str, Any]] | None = None,
    tenants: Mapping[str, str] | None = None,
) -> list[dict[str, str]]:
    """Returns facts that explain the state of ``wanted``, each with its subject. ``wanted`` is a GPU (index or UUID), a
    slice, or a holder of slices. If it is empty, the whole node is explained. If it does not exist here, the list is
    empty. Raises BadRequest if several holders match.
    """
    status = {**status, "slices": slice_rows(status, usages or [], tenants)}
    gpus = [gpu for gpu in status["gpus"] if wanted in ("", gpu["uuid"], str(gpu["index"]))]
    pieces = [one for one in status["slices"] if wanted in (one["id"], short_id(status, one["id"]))]
    if not gpus and not pieces:
        pieces = _held(status["slices"], wanted)
    facts = []
    for gpu in gpus:
        facts += [_fact("gpu", gpu["uuid"], line) for line in _gpu(status, gpu)]
    for piece in pieces:
        facts += [_fact("slice", piece["id"], line) for line in _slice(status, piece)]
    if not wanted:
        facts += [_fact("node", "", line) for line in _node(status)]
    named = [gpu["uuid"] for gpu in gpus if gpu["uuid"]]
    mine = [one for one in status["warnings"] if not wanted or any(uuid in one for uuid in named)]
    return facts + [_fact("warning", "", f"warning: {one}") for one in mine]


def _fact(about: str, name: str, text: str) -> dict[str, str]:
    return {"about": about, "id": name, "text": text}


def _held(rows: list[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    """Returns the slices of a holder. The holder is given by its name or by the id of its allocation."""
    keys = [one["allocation"] or AllocationFiles.static_name(one["id"]) for one in rows]
    shown = {key: one["held_by"] for key, one in zip(keys, rows, strict=True) if one["held_by"]}
    found = what if what in shown else holder_names.find(shown, what)
    return [one for key, one in zip(keys, rows, strict=True) if found == key]


def _node(status: dict[str, Any]) -> list[str]:
    lines = []
    if not has_kubelet(status):
        lines.append("this host has no Kubernetes: docker and podman get slices by vgpuctl run")
    elif not status["registered"]:
        lines.append(f"the kubelet can assign no slices: {status['kubelet_error']}")
    if not status["library"] and any(one["mode"] == "vcuda" for one in status["slices"]):
        lines.append("no container can start with a slice: the library is not installed; run site.yml")
    if has_kubelet(status):
        lines.append(f"containers get their GPU by {status['hand_over']}: {status['hand_over_reason']}")
    return lines


def _gpu(status: dict[str, Any], gpu: dict[str, Any]) -> list[str]:
    name = f"GPU {gpu['index']} ({gpu['model']}, {gpu['uuid']})"
    pieces = [one for one in status["slices"] if one["uuid"] == gpu["uuid"]]
    lines = []
    if gpu["reason"].startswith(LOST):
        lines.append(f"{name} is {gpu['reason']}; reset or replace it")
    elif not gpu["healthy"]:
        remedy = (
            "it is healthy again after a period without errors, if the driver responds for it; see the Xid errors in "
            "the kernel log"
        )
        lines.append(f"{name} is unhealthy: {gpu['reason']}; {remedy}")
    kinds = [(one["resource"], one["mode"], one["memory_mib"], one["sm_percent"]) for one in pieces]
    for kind in dict.fromkeys(kinds):
        used = sum(one["in_use"] for one, other in zip(pieces, kinds, strict=True) if other == kind)
        resource, mode, memory_mib, sm_percent = kind
        lines.append(
            f"{name}: {kinds.count(kind)} of {resource} by {mode}, {memory_mib} MiB and {sm_percent} % of the SMs "
            f"each; {used} in use"
        )
    return lines or [f"{name} has no slices: the configuration {status['config_path']} does not offer this GPU"]


def _slice(status: dict[str, Any], piece: dict[str, Any]) -> list[str]:
    gpu = next(one for one in status["gpus"] if one["uuid"] == piece["uuid"])
    sizes = [
        one["memory_mib"] for one in status["slices"] if one["uuid"] == piece["uuid"] and one["mode"] == piece["mode"]
    ]
    lines = [
        f"slice {piece['id']}: {piece['memory_mib']} MiB and {piece['sm_percent']} % of the SMs; one of "
        f"{counted(len(sizes), 'slice')} ({sum(sizes)} MiB in total) of a GPU with {gpu['memory_mib']} MiB; mode "
        f"{piece['mode']} in {status['config_path']}"
    ]
    kubelet = has_kubelet(status)
    holder = next((one for one in status["allocations"] if one["id"] == piece["allocation"]), None)
    if holder is not None:
        name = piece["held_by"] if piece["held_by"] != f"{holder['kind']} {holder['id']}" else ""
        whose = f"{holder['kind']}, {name}" if name else holder["kind"]
        lines.append(f"held by allocation {holder['id']} ({whose}){ends(holder)}")
    elif piece["in_use"] and piece["held_by"] == OUTSIDE:
        lines.append("held by a container outside Kubernetes, or by a container that only the kubelet knows")
    elif piece["in_use"]:
        lines.append(f"held by {piece['held_by']}")
    if piece["health"] != "Healthy":
        leased = holder is not None and holder["kind"] == "lease"
        outside = kubelet and (holder is None or holder["kind"] in ("slice", "container", "exec"))
        why = gpu["reason"] or ("it is leased to a check" if leased else "")
        why = why or ("it is used outside Kubernetes" if outside else "it is in use")
        lines.append(f"{'the kubelet cannot assign it' if kubelet else 'no other container can get it'}: {why}")
    return lines
