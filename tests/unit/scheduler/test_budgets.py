# SPDX-License-Identifier: Apache-2.0
"""Tests which victims of a preemption exceed what PodDisruptionBudgets allow, by the API server's rules."""

from __future__ import annotations

import copy

import msgspec
import pytest
from doubles.kube_api import Cluster
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


def pod(app, ready=True, phase="Running", **more):
    status = {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}]}
    return {"metadata": {"labels": {"app": app}, **more}, "status": status}


# columns: allowed disruptions by label, pods in the order of eviction, pods that are protected then
COUNTS = [
    ({"web": 1}, [pod("web"), pod("web"), pod("db")], ["1"]),
    ({"web": 2}, [pod("web"), pod("web"), pod("web")], ["2"]),
    ({"web": 0, "db": 1}, [pod("web"), pod("db")], ["0"]),
    ({"web": 1}, [pod("web"), {"metadata": {}}], []),
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


ENDS = {"deletionTimestamp": "2026-11-22T00:00:00Z"}
# columns: a pod; its budget's policy for pods that are not ready, its number of healthy pods and the number it needs;
# whether the eviction counts (eviction.go of Kubernetes, canIgnorePDB and Create)
STATES = [
    (pod("web"), "AlwaysAllow", 3, 2, True),
    (pod("web", ready=False), None, 2, 2, False),
    (pod("web", ready=False), None, 1, 2, True),
    (pod("web", ready=False), "IfHealthyBudget", 1, 2, True),
    (pod("web", ready=False), "AlwaysAllow", 1, 2, False),
    # No pod is needed, as if the disruption controller has not counted yet.
    (pod("web", ready=False), None, 0, 0, True),
    ({"metadata": {"labels": {"app": "web"}}}, None, 1, 2, True),
    *((pod("web", phase=phase), None, 1, 2, False) for phase in ("Pending", "Succeeded", "Failed")),
    (pod("web", **ENDS), None, 1, 2, False),
]


@pytest.mark.parametrize(("pod", "policy", "healthy", "desired", "expected"), STATES)
def test_eviction_counts_as_in_kubernetes(pod, policy, healthy, desired, expected):
    spec = {"selector": {"matchLabels": {"app": "web"}}, "unhealthyPodEvictionPolicy": policy}
    status = {"disruptionsAllowed": 0, "currentHealthy": healthy, "desiredHealthy": desired}
    budget = {"metadata": {"name": "web", "namespace": "default"}, "spec": spec, "status": status}
    found, _exceeded = beyond({"a": pod}, [msgspec.convert(budget, wire.Budget)])
    assert found == (["a"] if expected else [])
    double = Cluster()
    double.put("/apis/policy/v1/namespaces/default/poddisruptionbudgets/web", budget)
    path = "/api/v1/namespaces/default/pods/a"
    double.put(path, copy.deepcopy(pod))
    assert double.request("POST", f"{path}/eviction", {"deleteOptions": {}})[0] == (429 if expected else 201)
