# SPDX-License-Identifier: Apache-2.0
"""Counts how many victims of a preemption the PodDisruptionBudgets of a namespace allow to evict together.

The API server checks each eviction, but it does not count a dry run as a disruption. So if a budget allows one
disruption, the dry runs of two of its pods both succeed, and only the second real eviction is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from . import wire


class Limit(NamedTuple):
    """Of the pods ``uids`` at most ``allowed`` may be evicted together."""

    uids: frozenset[str]
    allowed: int


def limit(budget: wire.Budget, pods: Mapping[str, dict[str, Any]]) -> Limit:
    """Returns the limit that a budget sets to these pods (uid → pod)."""
    mine = [uid for uid, pod in pods.items() if selects(budget.spec.selector, _labels(pod)) and _counts(pod, budget)]
    return Limit(frozenset(mine), budget.status.disruptionsAllowed)


def allows(gone: Sequence[str], uid: str, limits: Iterable[Limit]) -> bool:
    """Returns whether a pod may be evicted together with the pods ``gone``."""
    return all(uid not in one.uids or sum(other in one.uids for other in gone) < one.allowed for one in limits)


def within(uids: Iterable[str], limits: Sequence[Limit]) -> list[str]:
    """Returns the pods without those that a limit protects once the pods before them have been evicted."""
    kept: list[str] = []
    for uid in uids:
        if allows(kept, uid, limits):
            kept.append(uid)
    return kept


def beyond(pods: Mapping[str, dict[str, Any]], budgets: Sequence[wire.Budget]) -> tuple[list[str], list[wire.Budget]]:
    """Returns the uids of the pods (uid → pod) that a budget protects once the pods before them have been evicted, and
    the budgets that protect them.
    """
    limits = [limit(one, pods) for one in budgets]
    kept = within(pods, limits)
    found = [uid for uid in pods if uid not in kept]
    return found, [one for one, its in zip(budgets, limits, strict=True) if not its.uids.isdisjoint(found)]


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


def _labels(pod: Mapping[str, Any]) -> dict[str, str]:
    return pod["metadata"].get("labels") or {}


def _counts(pod: Mapping[str, Any], budget: wire.Budget) -> bool:
    """Returns whether the eviction of a pod counts against its budget, by the API server's rules. A pod that is not
    ready is free only if the budget always allows that, or has as many healthy pods as it needs.
    """
    status = pod.get("status") or {}
    if status.get("phase") in ("Pending", *wire.ENDED) or pod["metadata"].get("deletionTimestamp"):
        return False
    if any((one.get("type"), one.get("status")) == ("Ready", "True") for one in status.get("conditions") or []):
        return True
    return budget.spec.unhealthyPodEvictionPolicy != "AlwaysAllow" and not (
        budget.status.currentHealthy >= budget.status.desiredHealthy > 0
    )
