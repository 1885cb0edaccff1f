# SPDX-License-Identifier: Apache-2.0
"""Tests server-side apply of Kubernetes objects (check, apply, repeat, change, removal) with an API server in
memory."""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import apply as kube_apply
from doubles.kube_api import KubeClient

MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "n"}, "data": {"k": "v"}}
ROLE = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "r"}, "rules": []}


PATHS = [
    (MAP, "/api/v1/namespaces/n/configmaps/a"),
    (ROLE, "/apis/rbac.authorization.k8s.io/v1/clusterroles/r"),
    ({"apiVersion": "policy/v1", "kind": "Ingress", "metadata": {"name": "i"}}, "/apis/policy/v1/ingresses/i"),
    ({"apiVersion": "v1", "kind": "NetworkPolicy", "metadata": {"name": "i"}}, "/api/v1/networkpolicies/i"),
]


@pytest.mark.parametrize(("one", "path"), PATHS)
def test_object_has_this_path(one, path):
    assert kube_apply.path_of(one) == path


def test_check_apply_repeat_change_undo():
    api, objects = KubeClient(), [ROLE, MAP]
    planned = kube_apply.apply(api, objects, check=True)
    assert [one.title for one in planned] == ["ClusterRole r", "ConfigMap n/a"] and api.writes == []
    assert [one.title for one in kube_apply.apply(api, objects)] == [one.title for one in planned]
    assert kube_apply.apply(api, objects) == []
    other = [ROLE, dict(MAP, data={"k": "w"})]
    for check in (True, False):
        (change,) = kube_apply.apply(api, other, check)
        assert (change.before["data"], change.after["data"]) == ({"k": "v"}, {"k": "w"})
        assert "resourceVersion" not in change.before["metadata"]
    writes = len(api.writes)
    assert [one.title for one in kube_apply.remove(api, other, check=True)] == ["ConfigMap n/a", "ClusterRole r"]
    assert len(api.writes) == writes and len(kube_apply.remove(api, other)) == 2
    assert api.objects == {} and kube_apply.remove(api, other) == []


def test_secrets_are_not_shown():
    api, one = KubeClient(), {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "n"}}
    kube_apply.apply(api, [dict(one, data={"tls.key": "c2VjcmV0"})])
    for check in (True, False):
        (change,) = kube_apply.remove(api, [one], check)
        assert change.before["data"] == {"tls.key": "(not shown)"} and "c2VjcmV0" not in str(change)
    assert api.objects == {}


def test_keys_of_other_writers_stay():
    api = KubeClient()
    kube_apply.apply(api, [MAP])
    api.objects[kube_apply.path_of(MAP)]["data"]["theirs"] = "x"
    assert kube_apply.apply(api, [MAP]) == []
    assert api.objects[kube_apply.path_of(MAP)]["data"] == {"k": "v", "theirs": "x"}


VERSIONS = [("v1.34.2", (1, 34, 2)), ("v1.31.4+k3s1", (1, 31, 4)), ("v1.29.8-eks-a18cd3a", (1, 29, 8))]


@pytest.mark.parametrize(("text", "numbers"), VERSIONS)
def test_version_of_the_api_server(text, numbers):
    assert kube_apply.numbers({"gitVersion": text}) == numbers


@pytest.mark.parametrize("version", [{}, {"gitVersion": "1.2"}, {"gitVersion": None}, {"gitVersion": "vx.y.z"}])
def test_text_that_is_no_version_is_an_error(version):
    with pytest.raises(ValueError, match="expected a version"):
        kube_apply.numbers(version)
