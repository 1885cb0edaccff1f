# SPDX-License-Identifier: Apache-2.0
"""Tests the module kube_claims with an API server in memory: it creates and removes the cluster's objects for GPUs by
ResourceClaims. It refuses a cluster whose Kubernetes is too old, and a user who lacks rights.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from ansible_collections.vgpu.fleet.plugins.modules import kube_claims as module_under_test
from doubles.kube_api import KubeClient

GROUP = "/apis/resource.k8s.io/v1"
CLASS = f"{GROUP}/deviceclasses/vgpu"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
NAME = "nvidia.com/gpu"


class Failed(Exception):
    pass


def call(api, state="present", name="", check=False, warnings=None):
    def fail_json(msg):
        raise Failed(msg)

    params = {"state": state, "extended_resource": name}
    warn = ([] if warnings is None else warnings).append
    return module_under_test.run(SimpleNamespace(params=params, check_mode=check, warn=warn, fail_json=fail_json), api)


def claim(api, name, *drivers, pods=()):
    results = [{"request": "gpu", "driver": one, "pool": "n1", "device": "gpu-0"} for one in drivers]
    status = {
        "allocation": {"devices": {"results": results}} if drivers else None,
        "reservedFor": [{"resource": "pods", "name": one, "uid": one} for one in pods],
    }
    metadata = {"namespace": "default", "name": name}
    api.put(f"{GROUP}/namespaces/default/resourceclaims/{name}", {"metadata": metadata, "status": status})


def test_check_apply_repeat_undo():
    api = KubeClient("v1.36.3")
    planned = call(api, check=True)
    assert planned["changed"] and api.writes == []
    done = call(api)
    assert done["objects"] == planned["objects"]
    assert CLASS in api.objects and f"{POLICIES}/vgpu-claim-parameters" in api.objects
    assert f"{POLICIES}/vgpu-claim-mounts" in api.objects
    assert not call(api)["changed"]
    before = len(api.writes)
    assert call(api, "absent", check=True)["changed"] and len(api.writes) == before
    assert call(api, "absent")["changed"] and api.objects == {}
    assert not call(api, "absent")["changed"]


def test_extended_resource_name_is_added_and_removed():
    api = KubeClient("v1.36.3")
    call(api, name=NAME)
    assert api.objects[CLASS]["spec"]["extendedResourceName"] == NAME
    assert not call(api, name=NAME)["changed"]
    assert call(api)["objects"] != []
    assert "extendedResourceName" not in api.objects[CLASS]["spec"]


@pytest.mark.parametrize(("version", "warned"), [("v1.34.2", 1), ("v1.35.4", 1), ("v1.36.0", 0), ("v1.37.2", 0)])
def test_a_version_with_the_gate_off_is_a_warning(version, warned):
    warnings = []
    call(KubeClient(version), warnings=warnings)
    assert ["DRAConsumableCapacity" in one for one in warnings] == [True] * warned


def test_an_older_version_is_refused_and_has_nothing_to_remove():
    api = KubeClient("v1.33.9")
    with pytest.raises(ValueError, match=r"expected Kubernetes 1\.34 or newer"):
        call(api)
    assert not call(api, "absent")["changed"] and api.writes == []


def test_class_of_another_owner_is_refused():
    api = KubeClient("v1.36.3")
    api.put(f"{GROUP}/deviceclasses/gpu.nvidia.com", {"metadata": {"name": "gpu.nvidia.com"}, "spec": {}})
    call(api, name=NAME)
    api.objects[f"{GROUP}/deviceclasses/gpu.nvidia.com"]["spec"]["extendedResourceName"] = NAME
    before = len(api.writes)
    with pytest.raises(ValueError, match=r"gpu\.nvidia\.com already has the extendedResourceName nvidia\.com/gpu"):
        call(api, name=NAME)
    assert len(api.writes) == before
    call(api)


def test_server_without_extended_resource_names_is_refused_before_a_write():
    class Dropping(KubeClient):
        def apply(self, path, body, dry_run):
            body = copy.deepcopy(body)
            body["spec"].pop("extendedResourceName", None)
            return super().apply(path, body, dry_run)

    api = Dropping("v1.35.4")
    with pytest.raises(ValueError, match="DRAExtendedResource"):
        call(api, name=NAME)
    assert api.writes == []


def test_claims_in_use_are_named_with_their_pods():
    api = KubeClient("v1.36.3")
    call(api)
    claim(api, "ours", "gpu.vgpu.fleet", pods=("b", "a"))
    claim(api, "theirs", "gpu.nvidia.com", pods=("c",))
    claim(api, "none")
    before = len(api.writes)
    with pytest.raises(ValueError, match=r"^claim default/ours \(pods: default/a, default/b\) have shares"):
        call(api, "absent")
    assert len(api.writes) == before
    api.remove(f"{GROUP}/namespaces/default/resourceclaims/ours")
    assert call(api, "absent")["changed"] and CLASS not in api.objects


def test_a_user_without_rights_changes_nothing():
    api = KubeClient("v1.36.3")
    api.fault = lambda method, path: (403, "deviceclasses is forbidden") if "deviceclasses" in path else None
    with pytest.raises(Failed, match="deviceclasses is forbidden"):
        call(api)
    assert api.writes == []
