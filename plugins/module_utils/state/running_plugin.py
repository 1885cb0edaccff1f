# SPDX-License-Identifier: Apache-2.0
"""Reads what a host's running device plugin reports. Also reads for which state of the host isolation was last proven,
by an isolation check that passed.
"""

from __future__ import annotations

import json
from typing import Any

from ..host.host import Host

VGPUCTL = "/usr/local/bin/vgpuctl"
PROOF = "/var/lib/vgpu/proof.json"


def status(host: Host) -> dict[str, Any] | None:
    """Returns the status of the running device plugin, None if no plugin answers."""
    return _ask(host, "status", "--json")


def usage(host: Host) -> list[dict[str, Any]]:
    """Returns the limits and the use of each limited container on each GPU; empty if no device plugin answers."""
    usages = (_ask(host, "top", "--once", "--json") or {}).get("usages")
    return usages if isinstance(usages, list) else []


def slices(host: Host) -> list[dict[str, Any]]:
    """Returns every slice with its state and its holder's name; empty if no device plugin answers."""
    found = (_ask(host, "slices", "--json") or {}).get("slices")
    return found if isinstance(found, list) else []


def watch(host: Host) -> dict[str, Any] | None:
    """Returns the report of the device plugin's watcher, which finds processes that use a GPU past their limits. None
    if no plugin answers or the plugin has no watcher.
    """
    return _ask(host, "watch", "--json")


def _ask(host: Host, *arguments: str) -> dict[str, Any] | None:
    if host.file(VGPUCTL) is None:
        return None
    answer = host.run([host.path(VGPUCTL), *arguments])
    if answer.rc != 0:
        return None
    try:
        status = json.loads(answer.out)
    except ValueError:
        return None
    return status if isinstance(status, dict) else None


def proof(host: Host) -> str | None:
    """Returns the fingerprint (a digest) of the state for which isolation was last proven, None if it never was."""
    return str(_kept(host).get("fingerprint") or "") or None


def last_isolation(host: Host) -> dict[str, Any] | None:
    """Returns the result of the last isolation check, passed or not: verdict, results and ``time``,
    seconds since 1970.
    """
    found = _kept(host).get("isolation")
    return found if isinstance(found, dict) and isinstance(found.get("time"), int) else None


def _kept(host: Host) -> dict[str, Any]:
    try:
        kept = json.loads(host.text(PROOF) or "")
    except ValueError:
        return {}
    return kept if isinstance(kept, dict) else {}
