# SPDX-License-Identifier: Apache-2.0
"""A real API server, etcd and kube-scheduler in the box of tests/e2e, with nodes that are objects alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENT = ROOT / ".build" / "scheduler"
sys.path[:0] = [str(HERE.parent / "e2e"), str(ROOT / "native/plugin/src"), str(ROOT / "plugins" / "module_utils")]

from fleet import Fleet  # noqa: E402
from kubebox.box import CGROUP_VARIABLE  # noqa: E402
from kubebox.cluster import Cluster  # noqa: E402
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


@pytest.fixture(autouse=True)
def clean(request):
    """Each test begins without pods, on nodes of its own."""
    fleet = request.getfixturevalue("fleet")
    fleet.clean()
