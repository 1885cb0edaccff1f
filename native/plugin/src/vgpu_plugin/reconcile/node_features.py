# SPDX-License-Identifier: Apache-2.0
"""Computes the patch that sets feature labels on this node's own object, with the names of gpu-feature-discovery. It
sends nothing.

An annotation lists the labels that this program set. A label on the node that is not listed belongs to another program
and stays unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .labels import PREFIX

# Annotation that lists the names of our labels, separated by commas. A name that begins with PREFIX is listed without
# PREFIX.
NAMES = "vgpu.fleet/labels"
# Name (after the prefix) of the annotation in which node-feature-discovery lists its own labels. Each of its instances
# may have such an annotation.
OF_NFD = "feature-labels"
TIMESTAMP = PREFIX + "gfd.timestamp"


def patch(metadata: Mapping[str, Any], desired: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the strategic merge patch that sets the ``desired`` labels and removes other labels that this program set
    before; None if nothing or only the timestamp would change. ``metadata``: metadata of the node.
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
        # One request sets the annotation and the labels, so that the annotation always lists every label of ours.
        out["annotations"] = {NAMES: names}
    return {"metadata": out} if out else None


def _of_nfd(annotations: Mapping[str, Any]) -> set[str]:
    """Returns the labels that node-feature-discovery maintains."""
    lists = [str(text) for name, text in annotations.items() if name.endswith(OF_NFD)]
    return {name.strip() for text in lists for name in text.split(",")}
