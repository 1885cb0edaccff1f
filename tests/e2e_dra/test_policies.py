# SPDX-License-Identifier: Apache-2.0
"""Tests that a real API server with the project's admission policies accepts and refuses the same objects as the
project's driver for ResourceClaims."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import CLAIMS, CLASSES, remove
from kubebox.api import ApiError
from kubebox.cluster import IMAGE, PODS, Cluster
from kubebox.process import until

sys.path.append(str(Path(__file__).resolve().parents[2] / "plugins"))
from module_utils.kube import dra_manifests, mount_policy

FOLDERS = {
    "ValidatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
}
GOOD = {"apiVersion": "vgpu.fleet/v1", "kind": "Share"}
# columns: parameters of the claim; expected text of the refusal ("" means that the claim is accepted)
PARAMETERS: list[tuple[Any, str]] = [
    (GOOD, ""),
    ({**GOOD, "corePolicy": "force", "priority": 1, "oomKiller": True, "oversubscribe": False, "logLevel": 5}, ""),
    ({"anything": ["goes"]}, "have apiVersion vgpu.fleet/v1 and kind Share"),
    ({**GOOD, "kind": "Gpu"}, "have apiVersion vgpu.fleet/v1 and kind Share"),
    ({**GOOD, "memory": "100Gi"}, "and no others"),
    ({**GOOD, "corePolicy": "hard"}, "corePolicy of gpu.vgpu.fleet is one of"),
    ({**GOOD, "priority": 2}, "priority of gpu.vgpu.fleet is one of"),
    ({**GOOD, "priority": "0"}, "priority of gpu.vgpu.fleet is one of"),
    ({**GOOD, "oomKiller": "true"}, "oomKiller of gpu.vgpu.fleet is one of"),
    ({**GOOD, "logLevel": 6}, "logLevel of gpu.vgpu.fleet is one of"),
]


def refusal(cluster: Cluster, path: str, body: dict[str, Any]) -> str:
    """Returns why the API server refuses an object in a dry run, or "" if it accepts the object."""
    try:
        cluster.api.create(f"{path}?dryRun=All", body)
    except ApiError as fault:
        return str(fault)
    return ""


def claim_with(parameters: Any, driver: str = "gpu.vgpu.fleet") -> dict[str, Any]:
    request = {"deviceClassName": "vgpu"}
    asked = {"name": "gpu", "exactly": request}
    config = [{"opaque": {"driver": driver, "parameters": parameters}}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "tried"},
        "spec": {"devices": {"requests": [asked], "config": config}},
    }


@pytest.fixture(scope="module")
def judged(started: Any) -> Iterator[Cluster]:
    """Creates the policies and waits until the API server applies them."""
    cluster = started[0]
    made = [*dra_manifests.parameters_policy(), *mount_policy.of_claims()]
    for one in made:
        cluster.api.create(FOLDERS[one["kind"]], one)
    until(
        lambda: refusal(cluster, CLAIMS, claim_with({"anything": 1})),
        "refusal of a claim with wrong parameters, once the API server enforces the policy",
    )
    yield cluster
    for one in reversed(made):
        cluster.api.delete(f"{FOLDERS[one['kind']]}/{one['metadata']['name']}")
    remove(cluster, "tried")


@pytest.mark.parametrize("at", range(len(PARAMETERS)))
def test_parameters_of_a_claim_are_checked(judged: Cluster, at: int) -> None:
    parameters, reason = PARAMETERS[at]
    said = refusal(judged, CLAIMS, claim_with(parameters))
    assert reason in said and bool(reason) == bool(said)


@pytest.mark.parametrize("at", range(len(PARAMETERS)))
def test_parameters_of_a_template_and_of_a_class_are_checked(judged: Cluster, at: int) -> None:
    parameters, reason = PARAMETERS[at]
    template = claim_with(parameters)
    template.update(kind="ResourceClaimTemplate", spec={"spec": template["spec"]})
    entry = {"opaque": {"driver": "gpu.vgpu.fleet", "parameters": parameters}}
    made = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "tried"}}
    for path, body in (
        (CLAIMS.replace("resourceclaims", "resourceclaimtemplates"), template),
        (CLASSES, {**made, "spec": {"config": [entry]}}),
    ):
        said = refusal(judged, path, body)
        assert reason in said and bool(reason) == bool(said)


def test_parameters_of_another_driver_are_not_checked(judged: Cluster) -> None:
    assert refusal(judged, CLAIMS, claim_with({"anything": ["goes"]}, "gpu.example.com")) == ""


# columns: mount path of a pod's volume; whether a container with a claim may have this mount
MOUNTS = [("/data", True), ("/dev/vgpu/9", False), ("/dev/vgpu", False), ("/dev", False), ("/etc/ld.so.preload", False)]


@pytest.mark.parametrize(("path", "allowed"), MOUNTS)
@pytest.mark.parametrize("claimed", [True, False])
def test_a_claim_forbids_mounts_over_shares(judged: Cluster, path: str, allowed: bool, claimed: bool) -> None:
    """A share is a folder /dev/vgpu/<number> with limits. The library would count a forged share that a mount adds."""
    container = {"name": "main", "image": IMAGE, "volumeMounts": [{"name": "own", "mountPath": path}]}
    spec: dict[str, Any] = {"containers": [container], "volumes": [{"name": "own", "emptyDir": {}}]}
    if claimed:
        container["resources"] = {"claims": [{"name": "gpu"}]}
        spec["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "c"}]
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "tried"}, "spec": spec}
    said = refusal(judged, PODS, body)
    assert ("mount it elsewhere" in said) == (claimed and not allowed) and bool(said) == (claimed and not allowed)
