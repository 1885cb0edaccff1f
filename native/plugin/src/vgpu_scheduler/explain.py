# SPDX-License-Identifier: Apache-2.0
"""Explains why a pod waits: on which nodes which limit is exceeded, and what would help."""

from __future__ import annotations

from typing import Any

from vgpu_plugin._shared.pods.requests import Config, DialectError, PodAsk, asked, read_pod

from .ledger import Answer, Ledger
from .quota import Quotas

SHOWN = 5
# To find a pod whose end would make room, each pod in turn is treated as gone. This is the maximum number of pods
# tried.
MAX_TRIED = 500


def explain(
    pod: dict[str, Any], ledger: Ledger, config: Config, quotas: Quotas | None = None, untried: str = ""
) -> list[str]:
    """Returns lines for a person. ``untried``: why pods with this pod's container runtime get no slices; empty if
    they get slices.
    """
    metadata = pod.get("metadata") or {}
    key = f"{metadata.get('namespace', 'default')}/{metadata.get('name', '?')}"
    held = ledger.held(str(metadata.get("uid") or ""))
    try:
        ask = read_pod(pod, config)
    except DialectError as fault:
        return [f"{key}: its GPU request is invalid:", *(f"  {one}" for one in fault.findings)]
    if not ask.wants_gpus:
        return [f"{key}: requests no GPU"]
    lines = [f"{key}: {asked(ask)[0]}", *(f"  {line}" for line in asked(ask)[1:])]
    if held is not None:
        lines.append(f"  holds on node {held.node}:")
        lines += [f"    {uuid}: {memory} MiB, {cores} %" for uuid, memory, cores, _slots in held.uses]
        return lines
    if untried:
        return [*lines, f"  {untried}"]
    names = sorted(ledger.nodes)
    space = str(metadata.get("namespace") or "default")
    over = quotas.fits(space, ask) if quotas is not None else ""
    if over:
        lines.append(f"  {over}")
    answer = ledger.filter(ask, names)
    if not names:
        return [
            *lines,
            "  no node publishes GPUs of which pods may request parts; does the device plugin run with sliceSizing: "
            "requested?",
        ]
    lines.append(f"  {len(answer.fits)} of {len(names)} nodes have room")
    if answer.fits and not over:
        lines.append(f"  it fits on {_some(answer.fits)}, so it does not wait for GPUs; see its events")
    lines += [f"  {count} nodes: {text} ({nodes})" for count, text, nodes in _reasons(answer, names)]
    if not answer.fits:
        lines += [f"  {line}" for line in _help(ledger, ask, answer)]
    return lines


def sentence(ledger: Ledger, ask: PodAsk, names: list[str], space: str, tried: int) -> tuple[str, str]:
    """Returns two texts for an event on a pod of the namespace ``space``: the reasons, and the reasons together with
    what would help. The texts name no pod of another namespace.
    """
    answer = ledger.filter(ask, names)
    found = _reasons(answer, names)
    reasons = "; ".join(f"{count} {text}" for count, text, _nodes in found)
    shown = "; ".join(f"{count} {text} ({nodes})" for count, text, nodes in found)
    if answer.fits:
        return reasons, f"{len(answer.fits)} of {len(names)} nodes have room for it now; {shown}"
    help_ = "; ".join(_help(ledger, ask, answer, tried, space)[:2])
    return reasons, f"0 of {len(names)} nodes have room: {shown}. {help_[:1].upper()}{help_[1:]}"


def _reasons(answer: Answer, names: list[str]) -> list[tuple[int, str, str]]:
    """Returns (number of nodes, reason, some of the nodes), the most frequent reason first."""
    by_text: dict[str, list[str]] = {}
    for name in names:
        text = answer.failed.get(name) or answer.never.get(name)
        if text:
            by_text.setdefault(text, []).append(name)
    ranked = sorted(by_text.items(), key=lambda one: -len(one[1]))
    return [(len(nodes), text, _some(nodes)) for text, nodes in ranked]


def _help(ledger: Ledger, ask: PodAsk, answer: Answer, most: int = MAX_TRIED, space: str = "") -> list[str]:
    """Returns which pod would have to end so that the waiting pod fits, and on which node. If no pod's end helps,
    returns the reasons.
    """
    failed, never = answer.failed, answer.never
    if not failed:
        return [
            "the end of other pods does not help: request less or other GPUs, or add a node",
            *sorted(set(never.values()))[:SHOWN],
        ]
    best: tuple[int, str, str] | None = None
    for tried, (uid, held) in enumerate((uid, held) for uid, held in ledger.held_by() if held.node in failed):
        if tried >= most:
            break
        name = held.node
        if ledger.filter(ask, [name], {name: [uid]}).fits:
            size = sum(memory for _uuid, memory, _cores, _slots in held.uses)
            best = min(best, (size, held.pod, name)) if best else (size, held.pod, name)
    if best:
        size, pod, node = best
        who = pod if space in ("", pod.partition("/")[0]) else "a pod of another namespace"
        return [f"it would fit on {node} once {who} ({size} MiB) ends"]
    return ["on no node the end of a single pod makes enough room; several pods must end, or add a node"]


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
