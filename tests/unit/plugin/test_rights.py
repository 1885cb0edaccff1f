# SPDX-License-Identifier: Apache-2.0
"""Tests that the service account of the device plugin has exactly the RBAC rights that the program uses: an API server
double records the right that each request needs. All other tests with a NodeApi run with the same rights (conftest).
"""

from __future__ import annotations

import pytest
from doubles.kube_rights import Access, accounts, built_in, grants, missing, unused
from vgpu_kubelet_double.manager import PodError
from vgpu_plugin._shared.kube import device_plugin_manifests
from vgpu_plugin._shared.kube.device_plugin_manifests import NAME, Desired
from vgpu_plugin.allocation.pod_sizes import PodSizes
from vgpu_plugin.node import kube_access, kube_api
from vgpu_plugin.reconcile import node_trace

from .node_api import NODE
from .samples import until
from .test_requested import api, plan, run, start  # noqa: F401  # pylint: disable=unused-import # fixtures

MANIFESTS = device_plugin_manifests.manifests(Desired("x/vgpu-device-plugin:1"))
RIGHTS = grants(MANIFESTS, NAME)


@pytest.fixture
def asked(node, kubelet, api, start, tmp_path):  # noqa: F811
    """Makes the program send all its API requests, and returns the rights that these requests needed. The cases: a pod
    that gets other GPUs than planned, a refused pod, the report about a configuration that a node label selects, and
    the removal.
    """
    one, thread = start()
    first, second = (gpu.uuid for gpu in node.gpus)
    plan(api, "one", (first, 15000, 0))
    run(kubelet, "one", ids=[f"{second}::1"])
    plan(api, "two", (first, 5000, 0))
    with pytest.raises(PodError, match="5000 MiB are asked for"):
        run(kubelet, "two", ids=[f"{second}::2"])
    api.label("nowhere")
    until(api.condition, "the result on the node")
    until(lambda: Access("create", "", "events", "default") in api.accesses, "an event")
    until(lambda: Access("patch", "", "nodes", "", "node-1") in api.accesses, "the annotation")
    until(lambda: Access("watch", "", "nodes") in api.accesses, "the watch")
    until(lambda: Access("watch", "", "pods") in api.accesses, "the watch of its pods")
    one.stop()
    thread.join(20)
    client = kube_api.Api(kube_access.Access(api.url))
    PodSizes(client, "node-1", tmp_path / "checkpoint", dict).pods()
    assert node_trace.leave(client, "node-1") and not api.condition()
    return api.accesses


def test_granted_rights_equal_used_rights_of_the_plugin(asked):
    assert missing(RIGHTS, asked) == set()
    assert unused(RIGHTS, asked) == set()
    assert all(missing(RIGHTS - {one}, asked) for one in RIGHTS), "each of these rights is used"


def test_no_other_account_has_rights():
    assert accounts(MANIFESTS) == {NAME} and built_in(MANIFESTS, NAME) == set()
    assert not any("*" in one for one in RIGHTS)


def test_request_without_a_granted_right_is_refused(api):  # noqa: F811
    """Checks the test itself: the API server double refuses a request for which the account has no right."""
    client = kube_api.Api(kube_access.Access(api.url))
    assert client.get(NODE)
    for path in ("/api/v1/secrets", "/api/v1/namespaces/kube-system/configmaps/a"):
        with pytest.raises(kube_api.ApiError, match="is forbidden"):
            client.get(path)
