# SPDX-License-Identifier: Apache-2.0
"""Tests which versions of the kube-scheduler the module kube_scheduler starts with the option that retries a waiting
pod after one minute instead of five. A kube-scheduler without the option would not start.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ansible_collections.vgpu.fleet.plugins.modules import kube_scheduler as module_under_test
from doubles.kube_api import KubeClient

PARAMS = {
    "state": "present",
    "image": "i",
    "kube_scheduler_repository": "r",
    "namespace": "kube-system",
    "replicas": 1,
    "config": {},
    "fail_closed": True,
    "node_selector": {},
    "tolerations": [],
    "nodes": [],
    "may_give": [],
    "metrics_namespaces": [],
    "log_format": "text",
    "rollout": 0,
}


@pytest.mark.parametrize(
    ("version", "has"),
    [("v1.23.17", False), ("v1.24.0", True), ("v1.34.2", True), ("v1.36.3", True), ("v1.37.0", False)],
)
def test_only_known_versions_get_the_option_for_earlier_retries(version, has):
    def fail_json(msg):
        pytest.fail(msg)

    module = SimpleNamespace(params=PARAMS, check_mode=True, warn=[].append, fail_json=fail_json)
    found = module_under_test.run(module, KubeClient(version))["manifests"]
    (deployment,) = [one for one in found if one["kind"] == "Deployment"]
    (_ours, kube) = deployment["spec"]["template"]["spec"]["containers"]
    assert ("--pod-max-in-unschedulable-pods-duration=60s" in kube["command"]) is has
