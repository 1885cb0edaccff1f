# SPDX-License-Identifier: Apache-2.0
"""Tests that the work of a placement is proportional to the number of a pod's containers. With quadratic work, one pod
with hundreds of init containers would block the scheduler for all other pods.
"""

from __future__ import annotations

import pytest
from vgpu_scheduler import placement
from vgpu_scheduler.ledger import Ledger

from .samples import ask, node, pod_ask

# columns: the containers of a pod; copies of the node's GPUs that the placement may use, one for the permanent
# containers and one for each container that gets the GPUs of init containers
LARGE = [
    ([*[ask(10, init=True)] * 498, ask(20)], 2),
    ([*(ask(10 + n, init=True) for n in range(498)), ask(20)], 2),
    ([ask(10, init=True)] * 499, 2),
    ([*[ask(10, init=True), ask(20, sidecar=True)] * 249, ask(20)], 250),
]


@pytest.mark.parametrize(("containers", "copies"), LARGE)
def test_work_grows_linearly_with_the_containers(monkeypatch, containers, copies):
    tests, made = [], []
    fit, moments = placement.fit, placement.moments
    monkeypatch.setattr(placement, "fit", lambda *given: tests.append(given) or fit(*given))
    monkeypatch.setattr(placement, "moments", lambda view, count: made.append(count) or moments(view, count))
    ledger = Ledger(gpu_policy="binpack")
    ledger.set_node("a", node("a", slots=500))
    assert ledger.filter(pod_ask(*containers), ["a"]).fits == ["a"]
    # Each container is tested once alone, and at most twice together with the others.
    assert len(tests) <= 3 * len(containers) and made == [copies]
