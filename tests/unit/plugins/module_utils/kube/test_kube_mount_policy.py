# SPDX-License-Identifier: Apache-2.0
"""Tests the mount policy, an admission policy that denies pods whose own mounts would cover the files of the library.
This file tests the objects and expressions of the policy. tests/e2e/test_mount_policy.py shows which pods a real API
server denies. That test uses the same table of pods as the tests of the rule in Python.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import (
    mount_policy,
    scheduler_desired,
    scheduler_manifests,
)
from ansible_collections.vgpu.fleet.plugins.module_utils.pods import mounts

NAMES = ["nvidia.com/gpu", "example.com/own"]


def made():
    policy, binding = mount_policy.manifests("any", NAMES)
    return policy, binding


def test_binding_denies_pods_and_selects_no_labels():
    policy, binding = made()
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    assert policy["spec"]["failurePolicy"] == "Fail"
    # The policy must not select pods by labels, because the author of a pod chooses its labels and could avoid the
    # policy.
    assert set(policy["spec"]["matchConstraints"]) == {"resourceRules"}
    assert [(one["operations"], one["resources"]) for one in policy["spec"]["matchConstraints"]["resourceRules"]] == [
        (["CREATE"], ["pods"]),
        (["UPDATE"], ["pods/ephemeralcontainers"]),
    ]
    assert not any("namespace" in one["metadata"] for one in (policy, binding))


def test_rule_covers_every_container_kind_path_and_resource():
    policy, _binding = made()
    variables = {one["name"]: one["expression"] for one in policy["spec"]["variables"]}
    (condition,) = policy["spec"]["matchConditions"]
    assert json.loads(variables["guarded"]) == list(mounts.GUARDED)
    for text in (condition["expression"], variables["asking"]):
        assert all(f"object.spec.{kind}" in text for kind in mounts.KINDS)
        assert all(f'"{name}"' in text for name in NAMES)
        assert "c.resources.limits" in text and "c.resources.requests" in text
    for field in ("mountPath", "devicePath", "terminationMessagePath"):
        assert f".{field}" in variables["conflicts"]
    (validation,) = policy["spec"]["validations"]
    assert validation["expression"] == "size(variables.conflicts) == 0"
    assert "mount it elsewhere" in validation["messageExpression"]


def test_no_expression_is_longer_than_the_api_server_takes():
    """The API server accepts at most 64 matchConditions, and 16 KiB for each expression. The brackets of each
    expression must match."""
    policy, _binding = made()
    spec = policy["spec"]
    for one in [*spec["matchConditions"], *spec["variables"], *spec["validations"]]:
        text = one["expression"]
        assert len(text) < 16384
        assert [text.count(a) for a in "([{"] == [text.count(b) for b in ")]}"]


def test_schedulers_policy_covers_its_configured_resource_names():
    config = {"resourceNames": {"count": "example.com/gpu"}}
    desired = scheduler_desired.Desired("a", "b", config=config)
    found = [one for one in scheduler_manifests.manifests(desired) if one["kind"].startswith("Validating")]
    policy = next(one for one in found if one["kind"] == "ValidatingAdmissionPolicy")
    asking = next(one["expression"] for one in policy["spec"]["variables"] if one["name"] == "asking")
    assert policy["metadata"]["name"] == mount_policy.OF_SCHEDULER
    assert all(f'"{name}"' in asking for name in scheduler_desired.resource_names(config))
    assert '"nvidia.com/gpu"' not in asking
    older = scheduler_manifests.manifests(desired._replace(policies=False))
    assert not [one for one in older if "AdmissionPolicy" in one["kind"]]


NODES = [
    # columns: resources by node in the existing policy (None: no policy), resources by node in this run; expected
    # resources by node afterwards
    (None, {"a": ["x"]}, {"a": ["x"]}),
    ({"a": ["x"]}, {"b": ["y", "x", "y"]}, {"a": ["x"], "b": ["x", "y"]}),
    ({"a": ["x"], "b": ["y"]}, {"a": ["z"]}, {"a": ["z"], "b": ["y"]}),
    ({"a": ["x"], "b": ["y"]}, {"a": []}, {"b": ["y"]}),
    ({"a": ["x"]}, {"a": []}, {}),
    ("no JSON", {"a": ["x"]}, {"a": ["x"]}),
    (["a"], {"a": ["x"]}, {"a": ["x"]}),
]


@pytest.mark.parametrize(("known", "given", "expected"), NODES)
def test_policy_keeps_the_nodes_of_other_runs(known, given, expected):
    text = known if isinstance(known, str) else json.dumps(known)
    policy = known and {"metadata": {"annotations": {mount_policy.NODES: text}}}
    assert mount_policy.nodes_with(policy, given) == expected


@pytest.mark.parametrize("name", ["", "nvidia.com/gpu"])
def test_containers_with_claims_are_guarded_too(name):
    """The policy of claims also covers pods that name no claim, but request the extended resource of a DeviceClass."""
    policy, _binding = mount_policy.of_claims(name)
    (condition,) = policy["spec"]["matchConditions"]
    asking = next(one["expression"] for one in policy["spec"]["variables"] if one["name"] == "asking")
    for text in (condition["expression"], asking):
        assert "size(c.resources.claims) > 0" in text
        assert (json.dumps([name]) if name else "[]") in text
    assert "claims" not in json.dumps(mount_policy.manifests("any", NAMES))
