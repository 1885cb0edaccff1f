# SPDX-License-Identifier: Apache-2.0
"""Builds the report of a fleet as data: the state of each node, sums over all nodes, changes since the last report.

The functions do no I/O: the filter fleet_report passes the results of the modules and the last written report. Used on
the controller only.
"""

from __future__ import annotations

import time
from typing import Any, Mapping, Sequence

from ansible_collections.vgpu.fleet.plugins.module_utils.capacity.tables import NOT_RUN, advertised, with_passed

SCHEMA = 1
PASSED, PARTLY, VIOLATED = "passed", "partly", "violated"
# States of a node, the worst first.
STATES = ("unreachable", "failed", "violated", "differs", "warned", "unproven", PARTLY, PASSED, "whole")
# States that an operator must act on: all states before "unproven".
TROUBLE = STATES[:5]
# If a larger fraction of the checks of a slice (share of a GPU) did not run, for example because the GPU is full, its
# isolation counts as only partly proven.
MAY_BE_LEFT_OUT = 1 / 3
# Number of earlier reports whose sums are kept for the charts: a year of weekly or two months of daily reports.
HISTORY = 60
# Keys of a node that are compared with the last report, in this order, with the words for them in sentences.
WATCHED = ("state", "driver", "library", "plugin", "gpus", "expected", "advertised")


def node(name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one node of the report from the facts that the role ``verify`` collected of a host.

    ``facts``: ``groups`` (names), ``capacity`` (the result of vgpu_capacity_info), ``isolation`` (the result of
    vgpu_isolation, reduced by the filter isolation_brief) and ``fault`` (why the host has no results:
    ``{state, message}``). Each key may be missing.
    """
    capacity = facts.get("capacity") or {}
    isolation = facts.get("isolation") or {}
    fault = facts.get("fault") or (
        {} if capacity else {"state": "failed", "message": ("nothing was read from this host")}
    )
    versions = capacity.get("versions") or {}
    gpus = [_gpu(one, capacity) for one in capacity.get("gpus") or []]
    results = [_in_words(one) for one in isolation.get("results") or []]
    return {
        "name": name,
        "groups": sorted(str(one) for one in facts.get("groups") or []),
        "state": _state(capacity, isolation, results, fault),
        "message": str(fault.get("message") or ""),
        "driver": versions.get("driver"),
        "library": capacity.get("library"),
        "plugin": versions.get("plugin"),
        "kubelet": bool(capacity.get("kubelet")),
        "resources": list(capacity.get("resources") or []),
        "expected": len(capacity.get("expected") or []),
        "advertised": advertised(capacity),
        "in_use": sum(len(one["taken"]) for one in gpus),
        "proven": bool(capacity.get("proven")) or isolation.get("verdict") == PASSED,
        "gpus": gpus,
        "lost": [dict(one) for one in capacity.get("lost") or []],
        "drift": [dict(one) for one in capacity.get("drift") or []],
        "notes": [dict(one) for one in capacity.get("notes") or []],
        "warnings": [str(one) for one in capacity.get("plugin_warnings") or []],
        "enforcement": str(capacity.get("memory_enforcement") or ""),
        "unheard": {str(source): str(why) for source, why in sorted((capacity.get("missing") or {}).items())},
        "kubernetes": _kubernetes(capacity.get("kubernetes")),
        "isolation": {"verdict": isolation.get("verdict"), "results": results} if results else None,
        # An isolation result has a time only if it comes from an earlier check and not from this run.
        "checked": _utc(isolation["time"]) if isolation.get("time") else None,
        "shares": _shares(results),
    }


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _state(
    capacity: Mapping[str, Any],
    isolation: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    fault: Mapping[str, Any],
) -> str:
    if fault:
        return str(fault["state"])
    if isolation.get("verdict") == VIOLATED:
        return "violated"
    if not capacity.get("ok"):
        return "differs"
    if capacity.get("plugin_warnings"):
        return "warned"
    if not capacity.get("shared"):
        return "whole"
    if isolation.get("verdict") != PASSED and not capacity.get("proven"):
        return "unproven"
    return PARTLY if any(one["verdict"] == PARTLY for one in results) else PASSED


def _in_words(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an isolation result for the report. If a slice passed but more than MAY_BE_LEFT_OUT of its checks did not
    run, its verdict becomes "partly".
    """
    checks = with_passed(dict(result))["checks"]
    left_out = sum(one["verdict"] == NOT_RUN for one in checks) > MAY_BE_LEFT_OUT * len(checks)
    return dict(result, verdict=PARTLY) if left_out and result.get("verdict") == PASSED else dict(result)


def _gpu(gpu: Mapping[str, Any], capacity: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the report's data of one GPU: how many slices it has, and the numbers of the slices that are missing or
    in use.
    """
    ids = [one["id"] for one in capacity.get("expected") or [] if one["uuid"] == gpu["uuid"]]
    advertised = set(capacity.get("advertised") or [])
    keys = ("index", "uuid", "model", "memory_mib", "used_mib", "slices", "slice_mib", "sm_percent", "advertised")
    made: dict[str, Any] = {key: gpu.get(key) for key in keys}
    made.update({key: gpu.get(key) for key in ("mode", "utilisation", "temperature")})
    made["xids"] = [dict(one) for one in gpu.get("xids") or []]
    made["sold_mib"] = int(gpu["slices"]) * int(gpu["slice_mib"])
    # A slice that is leased to an isolation check or a program is not advertised to the kubelet. List it under "taken"
    # with its user, and not under "missing".
    used = {one for use in capacity.get("usage") or [] for one in use.get("slices") or []}
    made["missing"] = [_number(one) for one in ids if one not in advertised | used]
    made["taken"] = [
        {"slice": _number(one), "by": str(use.get("by") or ""), "used_mib": use.get("used_mib")}
        for use in capacity.get("usage") or []
        for one in use.get("slices") or []
        if one in ids
    ]
    return made


def _kubernetes(seen: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns what Kubernetes shows of a node, with the names of pods that do not run; None without Kubernetes data."""
    if not seen:
        return None
    pods = seen.get("pods") or []
    waiting = [{key: one.get(key) for key in ("pod", "resource", "count", "phase")} for one in pods if _waits(one)]
    return {
        "ready": bool(seen.get("ready")),
        "resources": {str(name): dict(one) for name, one in sorted((seen.get("resources") or {}).items())},
        # Count each pod once, because a pod that requests two resources has two entries.
        "pods": len({one.get("pod") for one in pods}),
        "waiting": waiting,
    }


def _waits(pod: Mapping[str, Any]) -> bool:
    return pod.get("phase") != "Running"


def _number(slice_id: str) -> str:
    """Returns the number in a slice's id: 3 for ``GPU-…::3``."""
    return slice_id.rpartition("::")[2] or slice_id


def _shares(results: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Returns the expected and the measured share of GPU time, in percent, of each slice with a measured share."""
    found = []
    for result in results:
        for check in result.get("checks") or []:
            if check.get("name") == "share" and check.get("unit") == "percent":
                try:
                    found.append({"wanted": float(check["expected"]), "got": float(check["found"])})
                except ValueError:
                    continue
    return found


def totals(nodes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns sums over all nodes; memory in MiB."""
    gpus = [gpu for one in nodes for gpu in one["gpus"]]
    sums = {
        "nodes": len(nodes),
        "gpus": len(gpus),
        "lost": sum(len(one["lost"]) for one in nodes),
        "memory_mib": sum(int(gpu["memory_mib"] or 0) for gpu in gpus),
        "sold_mib": sum(gpu["sold_mib"] for gpu in gpus),
        "used_mib": sum(int(gpu["used_mib"] or 0) for gpu in gpus),
        "differences": sum(len(one["drift"]) for one in nodes),
        "trouble": sum(one["state"] in TROUBLE for one in nodes),
    }
    sums.update({key: sum(one[key] for one in nodes) for key in ("expected", "advertised", "in_use")})
    sums.update({state: sum(one["state"] == state for one in nodes) for state in STATES})
    return sums


def changes(nodes: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Returns what differs from the last report: new nodes, removed nodes, and changed values of the other nodes."""
    then = {str(one.get("name")): one for one in before}
    found = []
    for one in nodes:
        old = then.pop(one["name"], None)
        if old is None:
            found.append({"node": one["name"], "what": "node", "before": "", "now": one["state"]})
            continue
        for key in WATCHED:
            was, now = _shown(old.get(key)), _shown(one[key])
            # Report only the changed state of an unreachable node, because its versions are not known.
            if was != now and (key == "state" or (one["gpus"] and old.get("gpus"))):
                found.append({"node": one["name"], "what": key, "before": was, "now": now})
    found += [
        {"node": name, "what": "node", "before": str(then[name].get("state")), "now": ""} for name in sorted(then)
    ]
    return found


def _shown(value: Any) -> str:
    """Returns a compared value as text. For a list this is its length."""
    return "" if value is None else str(len(value) if isinstance(value, (list, tuple)) else value)


def report(nodes: Sequence[Mapping[str, Any]], made: str, title: str, last: Any = None) -> dict[str, Any]:
    """Returns the whole report.

    ``made``: the time of this report, ISO 8601 in UTC. ``last``: the report before this one. A value that is no report
    of this schema counts as no report.
    """
    known = last if isinstance(last, Mapping) and last.get("schema") == SCHEMA else {}
    ranked = sorted(nodes, key=lambda one: (STATES.index(one["state"]), one["name"]))
    sums = totals(ranked)
    places: dict[str, int] = {}
    compact = [_passed_once(one, places) for one in ranked]
    return {
        "schema": SCHEMA,
        "title": title,
        "made": made,
        "last": known.get("made"),
        "states": list(STATES),
        "trouble": list(TROUBLE),
        "totals": sums,
        "changes": changes(ranked, known.get("nodes") or []) if known else [],
        "history": [*(known.get("history") or []), {"made": made, **sums}][-HISTORY:],
        "passed": list(places),
        "nodes": compact,
    }


def _passed_once(node: Mapping[str, Any], places: dict[str, int]) -> dict[str, Any]:
    """Returns the node with each text of passed checks replaced by its index in the report's list ``passed``.

    Nearly all slices have the same text, which would otherwise fill most of a large page.
    """
    if not node["isolation"]:
        return dict(node)
    results = [
        {**one, "passed": places.setdefault(one.get("passed") or "", len(places))}
        for one in node["isolation"]["results"]
    ]
    return {**node, "isolation": {**node["isolation"], "results": results}}
