# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a real API server, etcd and kube-scheduler in the box of tests/e2e (separate namespaces on this machine).
The nodes are only API objects."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENT = ROOT / ".build" / "scheduler"
sys.path[:0] = [str(HERE.parent / "e2e"), str(ROOT / "native/plugin/src"), str(ROOT / "plugins" / "module_utils")]

from attacks import NEIGHBOUR, Neighbour  # noqa: E402
from fleet import Fleet  # noqa: E402
from kubebox.api import Api, ApiError  # noqa: E402
from kubebox.box import CGROUP_VARIABLE  # noqa: E402
from kubebox.cluster import PODS, SERVER, Cluster  # noqa: E402
from kubebox.process import until  # noqa: E402
from kubebox.programs import Programs  # noqa: E402


@pytest.fixture(scope="session")
def fleet():
    if CGROUP_VARIABLE not in os.environ:
        pytest.fail("these tests need the box: run `make e2e-scheduler`")
    with Cluster(Programs.from_environment(), os.environ[CGROUP_VARIABLE]) as cluster:
        cluster.start_control_plane()
        made = Fleet(cluster, ENVIRONMENT / "bin" / "python", ROOT)
        try:
            made.start()
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="session")
def tenant(fleet):
    """Returns a client of a user with only the rights of `edit`, in the namespace of the pods."""
    authority, group = fleet.cluster.authority, "rbac.authorization.k8s.io"
    subject = {"apiGroup": group, "kind": "User", "name": "tenant"}
    # The controller that builds `edit` from these two roles does not run here.
    for role in ("system:aggregate-to-edit", "system:aggregate-to-view"):
        reference = {"apiGroup": group, "kind": "ClusterRole", "name": role}
        binding = {"metadata": {"name": role}, "roleRef": reference, "subjects": [subject]}
        fleet.api.create(f"/apis/{group}/v1/namespaces/default/rolebindings", binding)
    found = Api(SERVER, authority.certificate, *authority.pair("tenant", "/O=tenants/CN=tenant"))
    until(lambda: reads(found), "right of the tenant to list pods")
    return found


def reads(api: Api) -> bool:
    try:
        return bool(api.get(PODS))
    except ApiError:
        return False


@pytest.fixture
def neighbour(fleet):
    """Creates pods in another namespace; ``bound(name, limits)`` waits until the pod is bound."""
    spaces = "/api/v1/namespaces"
    if fleet.api.get_or_none(NEIGHBOUR) is None:
        fleet.api.create(spaces, {"metadata": {"name": "neighbour"}})
        fleet.api.create(f"{NEIGHBOUR}/serviceaccounts", {"metadata": {"name": "default"}})
    made = Neighbour(fleet)
    yield made
    for kind in ("pods", "resourcequotas"):
        for one in fleet.api.get(f"{NEIGHBOUR}/{kind}")["items"]:
            fleet.api.delete(f"{NEIGHBOUR}/{kind}/{one['metadata']['name']}", 0)
    until(lambda: not fleet.api.get(f"{NEIGHBOUR}/pods")["items"], "deletion of all pods of the neighbour")


@pytest.fixture(autouse=True)
def clean(request):
    """Deletes pods and nodes, so that each test starts with its own nodes."""
    fleet = request.getfixturevalue("fleet")
    fleet.clean()
