# SPDX-License-Identifier: Apache-2.0
"""Counts how many victims of a preemption the PodDisruptionBudgets of a namespace allow to evict together.

The API server checks each eviction, but it does not count a dry run as a disruption. So if a budget allows one
disruption, the dry runs of two of its pods both succeed, and only the second real eviction is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import wire


def beyond(pods: Mapping[str, dict[str, Any]], budgets: Sequence[wire.Budget]) -> list[str]:
    """Returns the uids of the pods (uid → pod) that a budget protects once the pods before them have been evicted."""
    left = [one.status.disruptionsAllowed for one in budgets]
    found = []
    for uid, pod in pods.items():
        labels = pod["metadata"].get("labels") or {}
        mine = [n for n, one in enumerate(budgets) if _counts(pod) and selects(one.spec.selector, labels)]
        if any(left[n] < 1 for n in mine):
            found.append(uid)
            continue
        for n in mine:
            left[n] -= 1
    return found


def selects(selector: wire.Selector | None, labels: Mapping[str, str]) -> bool:
    """Returns whether a label selector matches. In policy/v1, no selector matches no pod and an empty one all pods."""
    if selector is None:
        return False
    if not (selector.matchLabels or {}).items() <= labels.items():
        return False
    return all(_meets(one, labels) for one in selector.matchExpressions or [])


def _meets(one: wire.Requirement, labels: Mapping[str, str]) -> bool:
    value = labels.get(one.key)
    if one.operator == "Exists":
        return value is not None
    if one.operator == "DoesNotExist":
        return value is None
    return (value in (one.values or [])) == (one.operator == "In")


def _counts(pod: Mapping[str, Any]) -> bool:
    """Returns whether the eviction of a pod is a disruption. The eviction of a pod that is not ready is none."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any((one.get("type"), one.get("status")) == ("Ready", "True") for one in conditions)
