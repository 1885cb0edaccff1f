# SPDX-License-Identifier: Apache-2.0
"""Builds rows about slices (parts of GPUs) and their containers from the metrics that the nodes' exporters report. The
caller has read these metrics, which are texts.

An exporter knows two things that no API object contains: which GPU a container has if all slices are equal, and how
much memory the container uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

LINE = re.compile(r"^(\w+)\{(.*)\} (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
MIB = 1 << 20


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """Yields those lines of a text in Prometheus' format that have labels."""
    for line in text.splitlines():
        found = LINE.match(line)
        if found is None:
            continue
        labels = {
            name: re.sub(r"\\[n\"\\]", lambda one: ESCAPES[one.group()], value)
            for name, value in LABEL.findall(found[2])
        }
        try:
            yield Sample(found[1], labels, float(found[3]))
        except ValueError:
            continue


def gpus(text: str) -> dict[str, int]:
    """Returns UUID → index of each GPU that a node's exporter reports."""
    return {
        one.labels["uuid"]: int(one.labels["gpu"])
        for one in samples(text)
        if one.name == "vgpu_gpu_healthy" and one.labels.get("gpu", "").isdigit() and "uuid" in one.labels
    }


def slices(texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns a row for each slice of each node. ``texts``: node → its exporter's output."""
    rows = []
    for node, text in sorted(texts.items()):
        index = gpus(text)
        found: dict[str, dict[str, Any]] = {}
        for name, labels, value in samples(text):
            if not name.startswith("vgpu_slice_"):
                continue
            one = found.setdefault(labels.get("slice", ""), {"uuid": labels.get("uuid", ""), **labels})
            one[name] = value
        rows += [_slice(node, index, name, one) for name, one in found.items()]
    return sorted(rows, key=lambda one: (one["node"], one["gpu"], _number(one["slice"])))


def _slice(node: str, index: Mapping[str, int], name: str, one: Mapping[str, Any]) -> dict[str, Any]:
    in_use, healthy = one.get("vgpu_slice_in_use"), one.get("vgpu_slice_healthy")
    return {
        "node": node,
        "gpu": index.get(one["uuid"], -1),
        "uuid": one["uuid"],
        "slice": name,
        "resource": one.get("resource", ""),
        "memory_mib": int(one.get("vgpu_slice_memory_limit_bytes", 0)) // MIB,
        "cores": round(one.get("vgpu_slice_share_limit_ratio", 0) * 100),
        "state": "in use" if in_use else "free" if healthy else "unhealthy",
    }


def _number(name: str) -> tuple[str, int]:
    head, _colons, number = name.rpartition("::")
    return head, int(number) if number.isdigit() else 0


def containers(texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns a row for each container and GPU in the exporters' output: memory limit and memory in use."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for node, text in sorted(texts.items()):
        index = gpus(text)
        for name, labels, value in samples(text):
            key = {"vgpu_container_memory_limit_bytes": "limit_mib", "vgpu_container_memory_used_bytes": "used_mib"}
            if name not in key:
                continue
            uuid = labels.get("uuid", "")
            row = rows.setdefault(
                (node, labels.get("allocation", ""), uuid),
                {
                    "node": node,
                    "gpu": index.get(uuid, -1),
                    "uuid": uuid,
                    **{part: labels.get(part, "") for part in ("namespace", "pod", "container")},
                },
            )
            row[key[name]] = int(value) // MIB
    return [row for _key, row in sorted(rows.items())]
