# SPDX-License-Identifier: Apache-2.0
"""Tests the module for the mount policy (an admission policy that denies pods whose mounts would cover the library's
files) with an API server in memory. Several controllers may add and remove nodes in the same policy.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.kube import client as kube_client
from ansible_collections.vgpu.fleet.plugins.modules import kube_mount_policy as module_under_test
from doubles.kube_api import KubeClient, Refusal

NAME = "vgpu-device-plugin-mounts"
GROUP = "/apis/admissionregistration.k8s.io/v1"
POLICY = f"{GROUP}/validatingadmissionpolicies/{NAME}"
BINDING = f"{GROUP}/validatingadmissionpolicybindings/{NAME}"
GPU = ["nvidia.com/gpu"]


def call(api, nodes, check=False, warnings=None):
    warn = ([] if warnings is None else warnings).append
    return module_under_test.run(SimpleNamespace(params={"nodes": nodes}, check_mode=check, warn=warn), api)


def asking(api):
    return next(one["expression"] for one in api.objects[POLICY]["spec"]["variables"] if one["name"] == "asking")


def test_check_mode_creation_repetition_and_removal():
    api = KubeClient("v1.34.2")
    planned = call(api, {"n1": GPU}, check=True)
    assert planned["changed"] and api.writes == []
    done = call(api, {"n1": GPU})
    assert done["objects"] == planned["objects"] and set(api.objects) == {POLICY, BINDING}
    assert not call(api, {"n1": GPU})["changed"]
    before = len(api.writes)
    assert call(api, {"n1": []}, check=True)["changed"] and len(api.writes) == before
    assert call(api, {"n1": []})["changed"] and api.objects == {}
    assert not call(api, {"n1": []})["changed"]


def test_run_for_some_nodes_keeps_the_resources_of_the_others():
    api = KubeClient("v1.30.0")
    call(api, {"n1": GPU, "n2": ["example.com/own"]})
    call(api, {"n1": []})
    assert "example.com/own" in asking(api) and GPU[0] not in asking(api)
    call(api, {"n3": GPU})
    known = json.loads(api.objects[POLICY]["metadata"]["annotations"]["vgpu.fleet/nodes"])
    assert known == {"n2": ["example.com/own"], "n3": GPU}
    assert "example.com/own" in asking(api) and GPU[0] in asking(api)


def test_rule_of_an_older_version_is_replaced():
    api = KubeClient("v1.34.2")
    call(api, {"n1": GPU})
    api.objects[POLICY]["spec"]["variables"][0]["expression"] = '["/former"]'
    assert call(api, {"n2": GPU})["objects"] == [f"ValidatingAdmissionPolicy {NAME}"]
    assert "/dev/vgpu" in api.objects[POLICY]["spec"]["variables"][0]["expression"]


@pytest.mark.parametrize(("nodes", "warned"), [({"n1": GPU}, 1), ({"n1": []}, 0)])
def test_old_kubernetes_gets_no_policy(nodes, warned):
    api, warnings = KubeClient("v1.29.9"), []
    done = call(api, nodes, warnings=warnings)
    assert not done["changed"] and not done["supported"] and api.writes == []
    assert len(warnings) == warned and all("expected 1.30 or newer" in text for text in warnings)


def nodes_of(api):
    found = api.objects.get(POLICY)
    return json.loads(found["metadata"]["annotations"]["vgpu.fleet/nodes"]) if found else {}


TWO = ["example.com/own"]
# columns: label; resources by node in the policy before, in our run, in the run of another controller, and expected in
# the policy afterwards
RACES = [
    ("both runs add the first node", {}, {"n1": GPU}, {"n2": TWO}, {"n1": GPU, "n2": TWO}),
    ("each run adds a node", {"n0": GPU}, {"n1": GPU}, {"n2": TWO}, {"n0": GPU, "n1": GPU, "n2": TWO}),
    ("our run removes the last node, theirs adds a node", {"n1": GPU}, {"n1": []}, {"n2": TWO}, {"n2": TWO}),
    ("our run adds a node, theirs removes the last node", {"n1": GPU}, {"n2": TWO}, {"n1": []}, {"n2": TWO}),
    ("both runs remove a node", {"n1": GPU, "n2": TWO}, {"n1": []}, {"n2": []}, {}),
]


@pytest.mark.parametrize("at", range(8), ids=lambda at: f"at request {at}")
@pytest.mark.parametrize(
    ("before", "mine", "theirs", "after"), [row[1:] for row in RACES], ids=[row[0] for row in RACES]
)
def test_two_controllers_at_once_lose_no_node(monkeypatch, before, mine, theirs, after, at):
    """The run of the other controller happens completely between two requests of our run, at each possible position. No
    change of either run may be lost."""
    monkeypatch.setattr(kube_client, "ApiException", Refusal, raising=False)
    api = KubeClient("v1.34.2")
    if before:
        call(api, before)
    first, done = len(api.calls), []

    def between(_method, _path):
        if len(api.calls) - first > at and not done:
            done.append(True)
            call(api, theirs)

    api.meanwhile = between
    call(api, mine)
    api.meanwhile = None
    if not done:  # our run ended before this position
        call(api, theirs)
    assert nodes_of(api) == after
    assert set(api.objects) == ({POLICY, BINDING} if after else set())
    assert all(name in asking(api) for names in after.values() for name in names)


def test_permanent_conflict_ends_the_run(monkeypatch):
    """If another writer changes the policy again and again, the run ends after a limited number of attempts and reports
    this."""
    monkeypatch.setattr(kube_client, "ApiException", Refusal, raising=False)
    api = KubeClient("v1.34.2")
    call(api, {"n0": GPU})

    def touch(method, path):
        if (method, path) == ("PATCH", POLICY):
            with api.edit(POLICY) as found:
                found["metadata"]["annotations"]["theirs"] = str(api.version)

    api.meanwhile = touch
    with pytest.raises(ValueError, match=NAME + ".*run it again"):
        call(api, {"n1": GPU})
    assert api.count("PATCH", POLICY) < 30


class Forbidden(Exception):
    """The error of the Kubernetes client if the user lacks a right."""

    status = 403


@pytest.mark.parametrize(("nodes", "goes_on"), [({"n1": []}, True), ({"n1": GPU}, False)])
def test_user_without_the_right_hears_which_one_is_missing(monkeypatch, nodes, goes_on):
    """If no node has a limited container, the policy is not needed, so a kubeconfig without the right only gets a
    warning."""
    api, warnings = KubeClient("v1.34.2"), []
    monkeypatch.setattr(kube_client, "ApiException", Forbidden, raising=False)

    def refuse(path):
        if "validatingadmissionpolicies" in path:
            raise Forbidden
        return KubeClient.get(api, path)

    monkeypatch.setattr(api, "get", refuse)
    if goes_on:
        assert not call(api, nodes, warnings=warnings)["changed"] and api.writes == []
        (said,) = warnings
    else:
        with pytest.raises(ValueError, match="403") as fault:
            call(api, nodes)
        said = str(fault.value)
    assert "get, create, patch, delete" in said and "validatingadmissionpolicybindings" in said
