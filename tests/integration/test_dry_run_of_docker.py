# SPDX-License-Identifier: Apache-2.0
"""Tests a dry run of docker's configuration on a host without nvidia-container-runtime. The role must warn only if the
run's plan (the list of its steps) does not install this runtime. Docker's configuration file is in a temporary folder.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from conftest import Workplace

RUNTIME = "/usr/bin/nvidia-container-runtime"


# columns: the plan of the run; whether the run is expected to warn
@pytest.mark.skipif(os.access(RUNTIME, os.X_OK), reason=f"this machine has {RUNTIME}")
@pytest.mark.parametrize(
    ("plan", "warns"),
    [
        ({"roles": ["nvidia_docker", "container_runtime"]}, False),
        ({"roles": ["container_runtime"]}, True),
        (None, True),
    ],
)
def test_warning_of_a_missing_runtime(place: Workplace, plan: dict[str, Any] | None, warns: bool) -> None:
    place.hosts({"t4": ["a"]})
    given: dict[str, Any] = {"container_runtime_docker_config": str(place.folder / "daemon.json")}
    if plan is not None:
        given["preflight_plan"] = plan
    role = {"name": "vgpu.fleet.container_runtime", "tasks_from": "docker"}
    task = {"name": "Configure docker", "ansible.builtin.import_role": role}
    run = place.play([{"hosts": "gpu_nodes", "gather_facts": False, "vars": given, "tasks": [task]}], "--check")
    assert run.code == 0, run.output
    assert (f'no program "{RUNTIME}"' in " ".join(run.output.split())) is warns, run.output
    assert "changed=1" in run.output
