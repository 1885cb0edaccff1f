# SPDX-License-Identifier: Apache-2.0
"""Feature labels on this node's own object, by the names of gpu-feature-discovery. Pure.

An annotation names those that this program set: a label that is on the node and not in it belongs to somebody else, and
is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .labels import PREFIX

# Names without PREFIX, where that is theirs, separated by commas.
NAMES = "vgpu.fleet/labels"
# node-feature-discovery's own list of the labels that it writes; there may be one for each of its instances.
OF_NFD = "feature-labels"
TIMESTAMP = PREFIX + "gfd.timestamp"


def patch(metadata: Mapping[str, Any], desired: Mapping[str, str]) -> dict[str, Any] | None:
    """The strategic merge patch that gives the node these labels and takes away those that were set before; None where
    nothing is to be done. ``metadata``: of the node. A time that alone differs is no change.
    """
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    text = annotations.get(NAMES)
    named = {name if "/" in name else PREFIX + name for name in (text or "").split(",") if name}
    before = named - _of_nfd(annotations)
    mine = {name: value for name, value in desired.items() if name in before or name not in labels}
    mine = {name: value for name, value in mine.items() if name not in _of_nfd(annotations)}
    changed: dict[str, str | None] = {name: value for name, value in mine.items() if labels.get(name) != value}
    changed.update(dict.fromkeys(name for name in before - mine.keys() if name in labels))
    if set(changed) == {TIMESTAMP} and labels.get(TIMESTAMP) and mine.get(TIMESTAMP):
        changed = {}
    names = ",".join(sorted(name.removeprefix(PREFIX) for name in mine)) or None
    out: dict[str, Any] = {}
    if changed:
        out["labels"] = changed
    if names != text:
        # In the same request, so that no label is ever on the node without being known as ours.
        out["annotations"] = {NAMES: names}
    return {"metadata": out} if out else None


def _of_nfd(annotations: Mapping[str, Any]) -> set[str]:
    """Labels that node-feature-discovery keeps."""
    lists = [str(text) for name, text in annotations.items() if name.endswith(OF_NFD)]
    return {name.strip() for text in lists for name in text.split(",")}
