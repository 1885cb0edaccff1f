# SPDX-License-Identifier: Apache-2.0
"""Formats rows as tables for people. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vgpu_plugin.ctl.tables import Row, table

Values = Mapping[str, Any]
# Number of characters of a UUID that are shown. They suffice to tell a cluster's GPUs apart.
SHORT_UUID = len("GPU-12345678")


def nodes(rows: Sequence[Values], _wide: bool = False) -> list[str]:
    if not rows:
        return ["no node reports GPUs to Kubernetes"]
    found: list[Row] = [("NODE", "STATUS", "GPUS", "SHARING", "GIVEN OUT", "PLANNED MiB", "OF MiB", "PODS")]
    for row in rows:
        status = ("Ready" if row["ready"] else "NotReady") + ("" if row["schedulable"] else ",cordoned")
        count = "?" if row["gpus"] is None else str(row["gpus"])
        gpus = f"{count} × {row['model'] or 'unknown'}"
        given = ", ".join(_given(name, one) for name, one in row["resources"].items()) or "-"
        memory = [_or_dash(row["planned_mib"]), _or_dash(row["capacity_mib"])]
        found.append((row["node"], status, gpus, row["sharing"] or "-", given, *memory, row["pods"]))
    lines = table(found, (5, 6, 7))
    return lines + [f"{row['node']}: {one}" for row in rows for one in row["trouble"]]


def cards(rows: Sequence[Values], wide: bool = False) -> list[str]:
    if not rows:
        return [
            "no node publishes GPUs of which pods may request parts; kubectl vgpu nodes shows nodes with other GPUs"
        ]
    more = ("UUID", "WHO") if wide else ()
    found: list[Row] = [("NODE", "GPU", "MODEL", "PLANNED MiB", "OF MiB", "CORES %", "SLOTS", "PODS", "HEALTH", *more)]
    for row in rows:
        who = "; ".join(f"{one['pod']} {one['memory_mib']} MiB" for one in row["pods"]) or "-"
        found.append(
            (
                row["node"],
                row["gpu"],
                row["model"],
                row["planned_mib"],
                row["capacity_mib"],
                row["planned_cores"],
                f"{row['planned_slots']} of {row['slots']}",
                len(row["pods"]),
                "drained" if row["drained"] else "healthy" if row["healthy"] else "unhealthy",
                *((row["uuid"], who) if wide else ()),
            )
        )
    return table(found, (1, 3, 4, 5, 6, 7))


def pods(rows: Sequence[Values], wide: bool = False) -> list[str]:
    if not rows:
        return ["no pod has a GPU or waits for one"]
    found: list[Row] = [("NAMESPACE", "POD", "NODE", "PHASE", "HAS", "CHOSEN BY")]
    for row in rows:
        has = "; ".join(_part(one, wide) for one in row["gpus"])
        counted = ", ".join(f"{count} × {name}" for name, count in row["resources"].items())
        asks = has or (counted if row["node"] else f"requests {counted}" if counted else "-")
        found.append(
            (row["namespace"], row["pod"], row["node"] or "-", row["phase"], asks, row["chosen_by"] or "waits")
        )
    lines = table(found)
    waiting = [f"{row['namespace']}/{row['pod']}: {row['waits_for']}" for row in rows if row["waits_for"]]
    return lines + waiting


def slices(rows: Sequence[Values], wide: bool = False) -> list[str]:
    if not rows:
        return ["no exporter reports a slice"]
    found: list[Row] = [("NODE", "GPU", "SLICE", "MiB", "CORES %", "STATE", *(("RESOURCE",) if wide else ()))]
    for row in rows:
        name = row["slice"] if wide else row["slice"].rpartition("::")[2] or row["slice"]
        gpu = row["gpu"] if row["gpu"] >= 0 else "?"
        more = (row["resource"],) if wide else ()
        found.append((row["node"], gpu, name, row["memory_mib"], row["cores"], row["state"], *more))
    return table(found, (1, 3, 4))


def containers(rows: Sequence[Values]) -> list[str]:
    if not rows:
        return []
    found: list[Row] = [("NODE", "GPU", "NAMESPACE", "POD", "CONTAINER", "USED MiB", "OF MiB")]
    for row in rows:
        who = [row[part] or "-" for part in ("namespace", "pod", "container")]
        gpu = row["gpu"] if row["gpu"] >= 0 else "?"
        found.append((row["node"], gpu, *who, row.get("used_mib", "-"), row.get("limit_mib", "-")))
    return ["", *table(found, (1, 5, 6))]


def _given(name: str, one: Values) -> str:
    return f"{one['allocated']} of {_or_dash(one['allocatable'])} {name.removeprefix('nvidia.com/')}"


def _part(one: Values, wide: bool) -> str:
    uuid = one["uuid"] if wide else one["uuid"][:SHORT_UUID]
    cores = f"{one['cores']} %" if one["cores"] else "any share"
    more = f" to {one['limit_mib']}" if one["limit_mib"] > one["memory_mib"] else ""
    return f"{uuid} {one['memory_mib']}{more} MiB, {cores}"


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)
