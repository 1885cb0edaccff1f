# SPDX-License-Identifier: Apache-2.0
"""Tests under which kind the client of the API server counts its requests. Each kind is a label of a metric, so no name
of an object may be one.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from doubles.kube_api import KubeApi
from vgpu_plugin.node.kube_access import Access
from vgpu_scheduler.api import Api, ApiError

PODS = "/api/v1/namespaces/default/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"

# columns: method and path of a request; its kind in the metric
REQUESTS = [
    ("GET", f"{PODS}/train-1", "pods"),
    ("PATCH", f"{PODS}/train-1/status", "pods"),
    ("GET", f"{PODS}/status", "pods"),
    ("PATCH", f"{PODS}/status/status", "pods"),
    ("POST", f"{PODS}/train-1/binding", "binding"),
    ("POST", f"{PODS}/train-1/eviction", "eviction"),
    ("POST", "/api/v1/namespaces/default/events", "events"),
    ("LIST", "/api/v1/nodes", "nodes"),
    ("PUT", f"{LEASES}/vgpu-scheduler", "leases"),
    ("POST", LEASES, "leases"),
]


@pytest.mark.parametrize(("method", "path", "kind"), REQUESTS)
def test_requests_are_counted_by_kind_and_not_by_name(method, path, kind):
    async def go():
        async with KubeApi() as double, Api(Access(double.url), timeout=60.0) as api:
            double.fault = lambda _method, _path: 404
            with contextlib.suppress(ApiError):
                await api.call(method, path, {})
            return api.calls

    assert asyncio.run(go()) == {(method, kind): 1}
