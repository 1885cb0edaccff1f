# SPDX-License-Identifier: Apache-2.0
"""Why a pod waits, in words: which nodes, which limit, and what would help."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vgpu_plugin._shared.dialects import Config, DialectError, read_pod

from . import reasons
from .ledger import Ledger

SHOWN = 5
# Pods that are thought away one by one to see whose end would help.
MAX_TRIED = 500


def explain(pod: dict[str, Any], ledger: Ledger, config: Config) -> list[str]:
    """Lines for a person."""
    metadata = pod.get("metadata") or {}
    key = f"{metadata.get('namespace', 'default')}/{metadata.get('name', '?')}"
    held = ledger.held(str(metadata.get("uid") or ""))
    try:
        ask = read_pod(pod, config)
    except DialectError as fault:
        return [f"{key}: asks for what cannot be", *(f"  {one}" for one in fault.findings)]
    if not ask.wants_gpus:
        return [f"{key}: asks for no GPU"]
    lines = [f"{key}: asks in the dialect of {ask.dialect}"]
    for one in ask.asks:
        many = f"{one.gpus} GPUs, each" if one.gpus > 1 else "1 GPU"
        lines.append(f"  container {one.container}: {many} {reasons.needs(one)}")
    if held is not None:
        lines.append(f"  holds on node {held.node}:")
        lines += [f"    {uuid}: {memory} MiB, {cores} %" for uuid, memory, cores, _slots in held.uses]
        return lines
    names = sorted(ledger.nodes)
    answer = ledger.filter(ask, names)
    if not names:
        return [
            *lines,
            "  no node tells GPUs that pods may ask parts of; is the device plugin with sliceSizing: requested up?",
        ]
    lines.append(f"  {len(answer.fits)} of {len(names)} nodes have room")
    if answer.fits:
        lines.append(f"  it fits on {_some(answer.fits)}: what it waits for is not GPUs; see its events")
    for text, count in Counter([*answer.failed.values(), *answer.never.values()]).most_common():
        nodes = [name for name in names if answer.failed.get(name, answer.never.get(name)) == text]
        lines.append(f"  {count} nodes: {text} ({_some(nodes)})")
    if not answer.fits:
        lines += [f"  {line}" for line in _help(ledger, ask, answer.failed, answer.never)]
    return lines


def _help(ledger: Ledger, ask: Any, failed: dict[str, str], never: dict[str, str]) -> list[str]:
    """The node that comes nearest, and who would have to leave; else what no end of a pod changes."""
    if not failed:
        return [
            "no other pod's end helps: ask for less, for other GPUs, or add a node",
            *sorted(set(never.values()))[:SHOWN],
        ]
    best: tuple[int, str, str] | None = None
    for tried, (uid, held) in enumerate((uid, held) for uid, held in ledger.held_by() if held.node in failed):
        if tried >= MAX_TRIED:
            break
        name = held.node
        if ledger.filter(ask, [name], {name: [uid]}).fits:
            size = sum(memory for _uuid, memory, _cores, _slots in held.uses)
            best = min(best, (size, held.pod, name)) if best else (size, held.pod, name)
    if best:
        return [f"it would fit on {best[2]} once {best[1]} ({best[0]} MiB) ends"]
    return ["on no node would the end of one pod alone do; it needs several to end, or a node more"]


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
