# SPDX-License-Identifier: Apache-2.0
"""Tests the Kubernetes objects of a cluster whose pods get GPUs by ResourceClaims (dynamic resource allocation): device
classes, rights and admission policies. tests/e2e_dra shows which requests a real API server denies by the policies.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import dra_manifests
from ansible_collections.vgpu.fleet.plugins.module_utils.kube.dra_manifests import Desired

ROOT = Path(__file__).resolve().parents[5]
DRIVER = ROOT / "native/plugin/src/vgpu_plugin/dra"


def by_kind(desired: Desired) -> list[tuple[str, str]]:
    return [(one["kind"], one["metadata"]["name"]) for one in dra_manifests.manifests(desired)]


POLICY = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
SERVICE = [
    ("DeviceClass", "vgpu"),
    ("DeviceClass", "vgpu-mig"),
    *((kind, "vgpu-claim-parameters") for kind in POLICY),
    *((kind, "vgpu-claim-mounts") for kind in POLICY),
]
DAEMONSET = [
    *SERVICE,
    ("ClusterRole", "vgpu-claims"),
    ("ClusterRoleBinding", "vgpu-claims"),
    *((kind, "vgpu-slices-of-their-node") for kind in POLICY),
]


@pytest.mark.parametrize(
    ("desired", "objects"),
    [(Desired(), SERVICE), (Desired("nvidia.com/gpu"), SERVICE), (Desired("", "kube-system", "vgpu"), DAEMONSET)],
)
def test_objects_follow_the_settings(desired: Desired, objects: list) -> None:
    assert by_kind(desired) == objects


@pytest.mark.parametrize("name", ["", "nvidia.com/gpu"])
def test_class_has_an_extended_resource_only_on_request(name: str) -> None:
    shares, mig = dra_manifests.classes(name)
    assert shares["spec"].get("extendedResourceName", "") == name
    assert "extendedResourceName" not in mig["spec"]
    for one, kind in ((shares, "gpu"), (mig, "mig")):
        (selector,) = one["spec"]["selectors"]
        assert selector["cel"]["expression"] == (
            f'device.driver == "gpu.vgpu.fleet" && device.attributes["gpu.vgpu.fleet"].type == "{kind}"'
        )


def assigned(path: Path, name: str) -> object:
    """Returns the value of a constant in the source file of a program, without importing the program."""
    tree = ast.parse(path.read_text())
    constants = {"POLICIES": ("disable", "default", "force")}
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            return eval(compile(ast.Expression(node.value), str(path), "eval"), constants)
    raise AssertionError(f"{path} has no {name}")


def test_policy_and_driver_know_the_same_parameters() -> None:
    assert assigned(DRIVER / "parameters.py", "KEYS") == dra_manifests.PARAMETERS
    assert assigned(DRIVER / "names.py", "DRIVER") == dra_manifests.DRIVER
    names = dra_manifests.PARAMETERS_VERSION, dra_manifests.PARAMETERS_KIND
    assert f'API_VERSION, KIND = "{names[0]}", "{names[1]}"' in (DRIVER / "names.py").read_text()


def test_every_parameter_is_bounded() -> None:
    policy, binding = dra_manifests.parameters_policy()
    expressions = [one["expression"] for one in policy["spec"]["validations"]]
    assert all(
        any(f'"{key}" in c.opaque.parameters' in text for text in expressions) for key in dra_manifests.PARAMETERS
    )
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert rule["resources"] == ["resourceclaims", "resourceclaimtemplates", "deviceclasses"]
    # The policy names only version v1. With "Equivalent" the API server also applies it to other versions, after
    # conversion.
    assert policy["spec"]["matchConstraints"]["matchPolicy"] == "Equivalent" and rule["apiVersions"] == ["v1"]
    assert policy["spec"]["failurePolicy"] == "Fail" and binding["spec"]["validationActions"] == ["Deny"]


def test_driver_has_exactly_the_rights_that_it_uses() -> None:
    role, binding = dra_manifests.rights("kube-system", "vgpu")
    assert {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]} == {
        ("resourceclaims", "get"),
        ("nodes", "get"),
        *(("resourceslices", verb) for verb in ("list", "watch", "create", "update", "delete")),
    }
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "vgpu", "namespace": "kube-system"}]


def test_policy_limits_resource_slices_to_the_node_of_the_token() -> None:
    policy, _binding = dra_manifests.slices_policy("kube-system", "vgpu")
    (condition,) = policy["spec"]["matchConditions"]
    assert condition["expression"] == 'request.userInfo.username == "system:serviceaccount:kube-system:vgpu"'
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert rule["operations"] == ["CREATE", "UPDATE", "DELETE"]
