# SPDX-License-Identifier: Apache-2.0
"""Tests which victims of a preemption exceed what PodDisruptionBudgets allow, by the API server's rules."""

from __future__ import annotations

import msgspec
import pytest
from vgpu_scheduler import wire
from vgpu_scheduler.budgets import beyond, selects


def expression(operator, *values):
    return {"matchExpressions": [{"key": "app", "operator": operator, "values": list(values)}]}


# columns: label selector as the API server sends it, labels of a pod, whether the selector matches
SELECTORS = [
    (None, {"app": "web"}, False),
    ({}, {}, True),
    ({"matchLabels": {"app": "web"}}, {"app": "web", "tier": "front"}, True),
    ({"matchLabels": {"app": "web", "tier": "front"}}, {"app": "web"}, False),
    (expression("In", "web", "db"), {"app": "db"}, True),
    (expression("In", "web", "db"), {}, False),
    (expression("NotIn", "web"), {"app": "web"}, False),
    (expression("NotIn", "web"), {}, True),
    (expression("Exists"), {"app": ""}, True),
    (expression("Exists"), {}, False),
    (expression("DoesNotExist"), {}, True),
    (expression("DoesNotExist"), {"app": ""}, False),
    ({"matchLabels": {"tier": "front"}, **expression("Exists")}, {"app": "web"}, False),
]


@pytest.mark.parametrize(("selector", "labels", "expected"), SELECTORS)
def test_selector_matches_as_in_kubernetes(selector, labels, expected):
    assert selects(msgspec.convert(selector, wire.Selector | None), labels) is expected


def pod(app, ready=True):
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {"metadata": {"labels": {"app": app}}, "status": {"conditions": conditions}}


# columns: allowed disruptions by label, pods in the order of eviction, pods that are protected then
COUNTS = [
    ({"web": 1}, [pod("web"), pod("web"), pod("db")], ["1"]),
    ({"web": 2}, [pod("web"), pod("web"), pod("web")], ["2"]),
    ({"web": 0, "db": 1}, [pod("web"), pod("db")], ["0"]),
    # The eviction of a pod that is not ready is no disruption.
    ({"web": 1}, [pod("web", ready=False), pod("web")], []),
    ({"web": 1}, [pod("web"), {"metadata": {"labels": {"app": "web"}}}, {"metadata": {}}], []),
    ({}, [pod("web"), pod("web")], []),
]


@pytest.mark.parametrize(("allowed", "pods", "expected"), COUNTS)
def test_victims_beyond_a_budget(allowed, pods, expected):
    budgets = [
        wire.Budget(wire.BudgetSpec(wire.Selector({"app": app})), wire.BudgetStatus(n)) for app, n in allowed.items()
    ]
    found, exceeded = beyond({str(n): one for n, one in enumerate(pods)}, budgets)
    assert found == expected
    assert {one.spec.selector.matchLabels["app"] for one in exceeded} == {
        pods[int(n)]["metadata"]["labels"]["app"] for n in expected
    }
