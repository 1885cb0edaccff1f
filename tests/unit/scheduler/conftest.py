# SPDX-License-Identifier: Apache-2.0
"""Makes the scheduler importable. Its pinned packages come from a virtual environment of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = ROOT / ".build" / "scheduler"
SITE = ENVIRONMENT / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

command = [ROOT / "tools/venv.sh", ENVIRONMENT, ROOT / "requirements/scheduler.txt", sys.executable]
subprocess.run(command, check=True)
for folder in (str(ROOT / "native" / "plugin" / "src"), str(SITE)):
    if folder not in sys.path:
        sys.path.append(folder)

import pytest  # noqa: E402
from doubles.kube_api import KubeApi  # noqa: E402
from doubles.kube_rights import grants  # noqa: E402
from vgpu_plugin._shared.kube import scheduler_desired, scheduler_manifests  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def rights():
    """Makes all API servers of these tests refuse requests that the account in the shipped manifests may not make.
    Names of single objects are not compared.
    """
    desired = scheduler_desired.Desired("x/vgpu-scheduler:1", "x/kube-scheduler:v1.34.2", config={"claims": True})
    granted = {one[:3] for one in grants(scheduler_manifests.manifests(desired), scheduler_desired.NAME)}
    before, KubeApi.may = KubeApi.may, staticmethod(lambda access: access[:3] in granted)
    yield
    KubeApi.may = before
