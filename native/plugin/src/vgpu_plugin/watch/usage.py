# SPDX-License-Identifier: Apache-2.0
"""Reads the usage and the limits of each limited container on each GPU. The sources are the container's ledger (memory
counted by our library), its tenant page (GPU time measured by our library), the driver, and the arbiter, the node's
program that divides GPU time.

Tenants write ledger and tenant page, so the values from these may be forged.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .._shared.abi import files as abi_files
from ..allocation.allocation_files import AllocationFiles
from ..allocation.records import Record
from ..allocation.sizing import LIMIT, MIB, PROMISED
from ..node.podresources import Holder
from . import rule
from .finding import STATIC_KIND, Programs, State

# Parts per million, the unit of the rate in the arbiter's page (the data that the arbiter publishes).
PPM = 1_000_000
# The largest value that fits into a message field. A tenant may write any value, which must not make the whole response
# fail.
MOST = 2**63 - 1
RECENT_NS = 1_000_000_000
NOBODY = Holder("", "", "")
# Reasons of the watcher's findings that count as a violation of the memory limit.
VIOLATIONS = frozenset((rule.NO_SLOT, rule.MEMORY))


@dataclass(frozen=True)
class Usage:
    """The usage of one GPU by one allocation (the slices of one container). Memory is in bytes, times are in seconds,
    shares are from 0 to 1. ``memory_limit`` is the current limit, between ``memory_promised`` and ``memory_most``.
    ``share_granted`` is -1 if no arbiter grants a share. ``whose`` says for whom a lease (slices that ``vgpuctl``
    allocated) was created; it is empty for other allocations.
    """

    allocation: str
    kind: str
    holder: Holder
    slice_ids: tuple[str, ...]
    uuid: str
    memory_limit: int
    memory_used: int
    memory_context: int
    processes: int
    share_limit: float
    share_granted: float
    device_seconds: float
    throttled_seconds: float = 0.0
    active: bool = False
    throttled: bool = False
    violations: int = 0
    # Bytes that the driver reported at the watcher's last poll; -1 if no process of the allocation was on the GPU.
    memory_driver: int = -1
    whose: str = ""
    programs: Programs = ()
    memory_promised: int = 0
    memory_most: int = 0


class Violations:
    """Counts how often each allocation exceeded its memory limit on each GPU, according to its ledger or to the
    watcher. An excess that lasts over several calls counts once. The class is thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over: set[tuple[str, str]] = set()
        self._counts: dict[tuple[str, str], int] = {}

    def seen(self, usages: list[Usage], state: State) -> list[Usage]:
        """Returns the usages, with the counts of violations and the driver's values filled in. Drops the counts of
        ended allocations.
        """
        with self._lock:
            over = {(one.allocation, one.uuid) for one in usages if 0 < one.memory_limit < one.memory_used}
            over |= {(one.allocation, one.uuid) for one in state.findings if one.suspicion.reason in VIOLATIONS}
            for key in over - self._over:
                self._counts[key] = self._counts.get(key, 0) + 1
            self._over = over
            known = {(one.allocation, one.uuid) for one in usages}
            self._counts = {key: count for key, count in self._counts.items() if key in known}
            return [
                replace(
                    one,
                    violations=self._counts.get((one.allocation, one.uuid), 0),
                    memory_driver=min(MOST, state.shown.get((one.allocation, one.uuid), -1)),
                    programs=state.programs.get((one.allocation, one.uuid), ()),
                )
                for one in usages
            ]


def of_record(record: Record, folder: Path, holder: Holder) -> list[Usage]:
    """Returns a usage for each GPU of a record (the saved data of an allocation); its values are zero if the ledger
    cannot be read."""
    devices = record.limits.get("devices") or []
    try:
        ledger = abi_files.read_ledger(str(folder / "rw" / "ledger"))
    except (OSError, abi_files.LayoutError):
        ledger = {"totals": [], "slots": []}
    totals = {one["uuid"]: one for one in ledger["totals"]}
    pages = _tenant(folder / "rw" / "tenant")
    now = time.monotonic_ns()
    out = []
    for n, device in enumerate(devices):
        uuid = device["uuid"]
        held = totals.get(uuid, {"used": 0, "context": 0})
        page = pages.get(uuid, {})
        active = _recent(page, "active_ns", now)
        out.append(
            Usage(
                record.id,
                record.kind,
                holder,
                record.slice_ids,
                uuid,
                device["memory_bytes"],
                min(held["used"] + held["context"], MOST),
                min(held["context"], MOST),
                sum(any(slot["used"][n : n + 1] + slot["context"][n : n + 1]) for slot in ledger["slots"]),
                device["sm_percent"] / 100,
                _granted(folder / f"gpu-{uuid}"),
                page.get("used_ns", 0) / 1e9,
                page.get("throttled_ns", 0) / 1e9,
                active,
                active and (page.get("balance_ns", 0) < 0 or _recent(page, "waiting_ns", now)),
                whose=record.holder,
                memory_promised=device[PROMISED] * MIB if PROMISED in device else device["memory_bytes"],
                memory_most=device[LIMIT] * MIB if LIMIT in device else device["memory_bytes"],
            )
        )
    return out


def _recent(page: dict[str, Any], name: str, now: int) -> bool:
    """Returns whether a time in the tenant page lies within the last second. The tenant may have written any value."""
    return bool(page) and 0 <= now - page[name] < RECENT_NS


def _tenant(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the tenant page's data by GPU."""
    try:
        with os.fdopen(abi_files.open_shared(str(path)), "rb") as stream:
            page = abi_files.parse_tenant_page(stream.read(abi_files.TENANT_FILE_SIZE))
    except (OSError, abi_files.LayoutError):
        return {}
    return {one["uuid"]: one for one in page["devices"]}


def _granted(path: Path) -> float:
    try:
        page = abi_files.parse_gpu_page(path.read_bytes())
    except (OSError, abi_files.LayoutError):
        return -1.0
    return page["rate_ppm"] / PPM if page["heartbeat_ns"] else -1.0


def of_all(
    records: list[Record], files: AllocationFiles, holders: Callable[[], dict[str, Holder] | None]
) -> list[Usage]:
    """Returns the usage of every limited allocation. ``holders``, which asks the kubelet for the pods of allocations,
    is called once.
    """
    known = holders() or {}
    out = []
    for record in records:
        holder = next((known[one] for one in record.kubelet_ids if one in known), NOBODY)
        out += of_record(record, files.folder(record.id), holder)
    return out


def of_static(files: AllocationFiles, state: State) -> list[Usage]:
    """Returns the usage of the slices that containers outside Kubernetes use now, according to their ledgers or to the
    driver.
    """
    out = []
    shown = {name for name, _uuid in state.programs}
    for name in files.static():
        # Most of the hundreds of slices are free, so the other files are read only for a slice in use.
        if name not in shown and not abi_files.ledger_in_use(f"{files.root}/{name}/rw/ledger"):
            continue
        try:
            limits = abi_files.parse_limits((files.folder(name) / "limits").read_bytes())
        except (OSError, abi_files.LayoutError):
            continue
        ids = tuple(files.static_id(name, device["uuid"]) for device in limits["devices"])
        found = of_record(Record(name, STATIC_KIND, ids, limits), files.folder(name), NOBODY)
        out += [one for one in found if one.processes or (name, one.uuid) in state.programs]
    return out
