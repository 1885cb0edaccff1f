# SPDX-License-Identifier: Apache-2.0
"""Formats results as text tables for people, in plain characters and without a table library."""

from __future__ import annotations

import collections
import re
import time
from typing import Any, Sequence

PASSED, OPEN, DETECTED, VIOLATED, NOT_RUN = "passed", "open", "detected", "violated", "not-run"
# Verdicts of checks and their words in the report, in the order of the report: violations first.
COUNTED = ((VIOLATED, "VIOLATED"), (PASSED, "passed"), (DETECTED, "detected"), (OPEN, "open"))
# Maximum number of characters of a table cell.
WIDEST = 44
# The texts of the isolation check's test program begin with the GPU's UUID. The report omits it, because the line of
# the slice (share of a GPU) names the GPU.
OF_GPU = re.compile(r"^GPU-[0-9a-f-]{36}: ")
GPU_HEADINGS = ("GPU", "model", "memory MiB", "slices", "MiB each", "SM % each", "advertised", "expected")
CHECK_HEADINGS = ("check", "verdict", "expected", "found")


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Returns the lines of a table. A column whose values are all numbers is aligned right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[n]) for row in [list(headings), *cells]) for n in range(len(headings))]
    right = [bool(rows) and all(isinstance(row[n], int) for row in rows) for n in range(len(headings))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.rjust(width) if r else cell.ljust(width) for cell, width, r in zip(row, widths, right)]
        return "  ".join(padded).rstrip()

    return [line(headings), "  ".join("=" * width for width in widths), *[line(row) for row in cells]]


def _cell(value: Any) -> str:
    """Returns a value on one line, cut to WIDEST characters. The list of faults shows the whole value."""
    text = "" if value is None else " ".join(str(value).split())
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def advertised(capacity: dict[str, Any]) -> int:
    """Returns how many slices the host advertises. This is the sum over the GPUs' rows, which includes slices that a
    check uses, plus the advertised slices that are not expected.
    """
    ours = {one["id"] for one in capacity.get("expected") or []}
    foreign = set(capacity.get("advertised") or []) - ours
    return sum(gpu["advertised"] for gpu in capacity.get("gpus") or []) + len(foreign)


def host_report(
    capacity: dict[str, Any],
    isolation: dict[str, Any] | None = None,
    title: str = "",
    gpus: bool = False,
    checks: bool = False,
) -> list[str]:
    """Returns the lines of a host's report: its result on one line, then only differences and checks that did not pass.
    ``gpus``, ``checks``: show the whole table of GPUs or checks. A host with differences always gets its GPU table.
    """
    offered, expected = advertised(capacity), len(capacity["expected"])
    teller = "kubelet" if capacity["kubelet"] else "device plugin (no kubelet here)"
    teller = "driver of claims" if capacity.get("claims") is not None else teller
    results = [with_passed(one) for one in (isolation or {}).get("results") or []]
    head = f"{capacity['resource']}: {offered} advertised by the {teller}, {expected} expected"
    installed = capacity.get("installed", True)
    head = head if installed else "vgpu.fleet is not installed on this host; run site.yml for this host"
    if results:
        every = [one for result in results for one in result["checks"]]
        head += f"; isolation of {len(results)} slice{'s'[: len(results) != 1]}{age(isolation or {})}: {counted(every)}"
    lines = [f"{title}  {head}" if title else head]
    sentences = capacity.get("sentences") or []
    if installed and (gpus or sentences):
        lines += ["  " + line for line in _gpu_table(capacity["gpus"])]
    lines += ["  DIFFERS: " + one for one in sentences]
    lines += ["  WARNING: " + one for one in capacity.get("plugin_warnings") or []]
    lines += ["  NOTE: " + sentence(one) for one in capacity.get("notes") or []]
    for result in results:
        lines += ["  " + line for line in _slice_report(result, checks)]
    return lines


def _gpu_table(gpus: Sequence[dict[str, Any]]) -> list[str]:
    names = ("index", "model", "memory_mib", "slices", "slice_mib", "sm_percent", "advertised", "slices")
    return table(GPU_HEADINGS, [[gpu[name] for name in names] for gpu in gpus])


def _slice_report(result: dict[str, Any], whole: bool) -> list[str]:
    """Describes a slice in lines. Returns nothing if the slice has only checks that the host's summary already
    counts.
    """
    where = result.get("slice") or result.get("uuid") or "any GPU"
    every = result["checks"]
    shown = every if whole else [one for one in every if one["verdict"] not in (PASSED, DETECTED, NOT_RUN)]
    said = f"isolation of slice {where}: {counted(every)}" + (f": {result['detail']}" if result.get("detail") else "")
    if not shown:
        return [said] if result.get("detail") or not every else []
    rows = [(one["name"], one["verdict"], measured(one, "expected"), measured(one, "found")) for one in shown]
    return [said, *table(CHECK_HEADINGS, rows)]


def with_passed(result: dict[str, Any]) -> dict[str, Any]:
    """Reverts isolation_brief: returns a result in which the passed checks are rows again instead of names."""
    checks = result.get("checks") or []
    names = {one["name"] for one in checks}
    passed = [name for name in str(result.get("passed") or "").split(", ") if name and name not in names]
    return dict(result, checks=[*checks, *({"name": name, "verdict": PASSED} for name in passed)])


def age(isolation: dict[str, Any], now: float | None = None) -> str:
    """Returns how long ago an earlier check ran, such as `` 3 h ago``."""
    if not isolation.get("time"):
        return ""
    seconds = max((time.time() if now is None else now) - isolation["time"], 0)
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f" {seconds // size:.0f} {unit} ago"
    return f" {seconds:.0f} s ago"


def counted(checks: Sequence[dict[str, Any]]) -> str:
    """Describes how many checks had each verdict, with the commonest reason for checks that did not run:
    ``18 passed, 4 detected, 19 not run: the card has no room``.
    """
    numbers = collections.Counter(one["verdict"] for one in checks)
    parts = [f"{numbers[verdict]} {word}" for verdict, word in COUNTED if numbers[verdict]]
    if not numbers[NOT_RUN]:
        return ", ".join(parts) or "not run"
    why = collections.Counter(
        OF_GPU.sub("", one.get("detail") or "no reason given") for one in checks if one["verdict"] == NOT_RUN
    )
    ((reason, number),) = why.most_common(1)
    most = f" ({number} of them)" if number < numbers[NOT_RUN] else ""
    return ", ".join([*parts, f"{numbers[NOT_RUN]} not run: {reason}{most}"])


def with_kubernetes(capacity: dict[str, Any], kube: dict[str, Any] | None, node: str) -> dict[str, Any]:
    """Joins a host's findings of vgpu_capacity_info with those of kube_capacity_info for its node."""
    kube = kube or {}
    missing = dict(capacity.get("missing") or {})
    seen = (kube.get("nodes") or {}).get(node)
    if seen and not seen["found"] and capacity.get("kubelet") is False:
        missing["kubernetes"] = "this host has no kubelet yet"
        return dict(capacity, missing=missing, kubernetes=None)
    if seen is None:
        missing["kubernetes"] = kube.get("missing") or "not asked"
        return dict(capacity, missing=missing, kubernetes=None)
    drift = [*(capacity.get("drift") or []), *seen["drift"]]
    texts = [sentence(one) for one in seen["drift"]]
    return dict(
        capacity,
        missing=missing,
        kubernetes={key: seen[key] for key in ("ready", "resources", "pods")},
        drift=drift,
        sentences=[*(capacity.get("sentences") or []), *texts],
        ok=not drift,
    )


def sentence(difference: dict[str, str]) -> str:
    """Describes a difference in one line for a person."""
    return "{what} {where}: expected {expected}, found {found}; {remedy}".format(**difference)


def measured(check: dict[str, Any], key: str) -> str:
    """Returns a figure of a check with its unit."""
    value = check.get(key)
    unit = check.get("unit") or ""
    return "" if value is None else f"{value} {unit}".strip()


def isolation_brief(isolation: dict[str, Any]) -> dict[str, Any]:
    """Shortens a host's isolation result for the fleet's report; at a thousand nodes no other part is as large.

    The names of the passed checks become one string, ``passed``. All other checks and the measured share stay in
    ``checks``. If the isolation check did not run (no ``results``), the result is an empty mapping.
    """
    results = []
    for result in isolation.get("results") or []:
        checks = result.get("checks") or []
        brief = {key: result.get(key) for key in ("slice", "uuid", "verdict", "detail")}
        brief["passed"] = ", ".join(one["name"] for one in checks if one["verdict"] == PASSED)
        brief["checks"] = [one for one in checks if one["verdict"] != PASSED or one["name"] == "share"]
        results.append(brief)
    return {"verdict": isolation.get("verdict"), "results": results} if results else {}


def isolation_faults(isolation: dict[str, Any]) -> list[str]:
    """Returns why isolation is not proven, empty if every slice passed. A host without any slice is a fault. The
    module's verdict says whether a slice passed, and its checks say why it did not.
    """
    faults = []
    for result in isolation.get("results") or []:
        if result["verdict"] == PASSED:
            continue
        where = result.get("slice") or result.get("uuid") or "any GPU"
        # If a check of the slice found a violation, only count the checks that did not run. If no check found one, list
        # each check that did not run, because these are the reason.
        silent = [one for one in result.get("checks") or [] if one["verdict"] == "not-run"]
        silent = silent if result["verdict"] == "violated" else []
        for one in result.get("checks") or []:
            if one["verdict"] not in (PASSED, OPEN, DETECTED) and one not in silent:
                expected, found = measured(one, "expected"), measured(one, "found")
                text = f"slice {where}: {one['name']} is {one['verdict']}: expected {expected}, found {found}"
                faults.append(text + (f"; {one['detail']}" if one.get("detail") else ""))
        if silent:
            faults.append(f"slice {where}: {len(silent)} checks not run")
        if not result.get("checks"):
            faults.append(f"slice {where}: {result['verdict']}: {result.get('detail') or 'no check ran'}")
    if not faults and isolation.get("verdict") != PASSED:
        faults.append(
            "isolation is {}: {}".format(isolation.get("verdict", "not-run"), isolation.get("msg", "no check ran"))
        )
    return faults
