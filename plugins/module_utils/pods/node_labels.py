# SPDX-License-Identifier: Apache-2.0
"""Reads two settings from a node's labels: which pods may use the node's GPUs, and in which order GPUs are filled if a
pod does not choose. Labels of Alibaba's ACK are read as aliases; labels of vgpu.fleet override them. ACK's sharing
modes (``cgpu``, ``core_mem``, ``share``, ``mps``) all mean ``shared``: vgpu.fleet enforces limits with each of them.
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple

from ..config.kinds import Finding, nearest, show, warning
from .preferences import BINPACK, SPREAD, TOPOLOGY

POLICY, SHARING = "vgpu.fleet/gpu-policy", "vgpu.fleet/gpu-sharing"
ACK_POLICY, ACK_SHARING = "ack.node.gpu.placement", "ack.node.gpu.schedule"
EXCLUSIVE, SHARED, ANY = "exclusive", "shared", "any"

POLICIES = {word: word for word in (BINPACK, SPREAD, TOPOLOGY)}
SHARINGS = {EXCLUSIVE: EXCLUSIVE, SHARED: SHARED, ANY: ""}
ACK_SHARINGS = {
    "default": EXCLUSIVE,
    **dict.fromkeys(("cgpu", "core_mem", "share", "mps"), SHARED),
    TOPOLOGY: EXCLUSIVE,
}


class NodeLabels(NamedTuple):
    """Holds the settings of a node's labels. ``policy``: the order of GPUs for pods without a GPU policy. ``sharing``:
    ``exclusive`` admits pods that use whole GPUs, ``shared`` admits pods that use parts. Both may be empty.
    """

    policy: str = ""
    sharing: str = ""


NO_LABELS = NodeLabels()


def read_labels(labels: Mapping[str, Any] | None, findings: list[Finding]) -> NodeLabels:
    """Reads the labels of a node. An unknown value gives a warning and counts as unset."""
    labels = labels or {}
    policy = _value(labels, POLICY, POLICIES, findings)
    if policy is None:
        policy = _value(labels, ACK_POLICY, {word: word for word in (BINPACK, SPREAD)}, findings)
    sharing = _value(labels, SHARING, SHARINGS, findings)
    if sharing is None:
        sharing = _value(labels, ACK_SHARING, ACK_SHARINGS, findings)
        if policy is None and labels.get(ACK_SHARING) == TOPOLOGY:
            policy = TOPOLOGY
    return NodeLabels(policy or "", sharing or "")


def _value(labels: Mapping[str, Any], name: str, words: Mapping[str, str], findings: list[Finding]) -> str | None:
    """Returns the value of a label, None if the label is missing."""
    if name not in labels:
        return None
    value = str(labels[name])
    if value not in words:
        meant = nearest(value, list(words))
        hint = f'; did you mean "{meant}"?' if meant else ""
        text = f"expected one of {', '.join(words)}, found {show(value)}{hint}; the label is ignored"
        findings.append(warning(f'metadata.labels["{name}"]', text))
    return words.get(value, "")
