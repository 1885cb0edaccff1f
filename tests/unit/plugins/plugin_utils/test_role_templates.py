# SPDX-License-Identifier: Apache-2.0
"""Tests templates of roles on values that a user may write in another type, or leave out. The plan works on checked
values, but the tasks of a role get the values as the user wrote them.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from ansible.template import Templar
from ansible_collections.vgpu.fleet.plugins.plugin_utils import role_tables
from test_every_variable import LOADER, ROOT, trusted

BASE = role_tables.base(LOADER)


def evaluated(template: Any, variables: dict[str, Any]) -> Any:
    return Templar(loader=LOADER, variables={**BASE, "omit": "<omitted>", **variables}).template(template)


@pytest.mark.parametrize(("given", "written"), [("2G", "2G"), (2147483648, "2147483648"), ("", None)])
def test_size_of_shared_memory_is_a_text(given: Any, written: str | None) -> None:
    settings = evaluated(BASE["__container_runtime_docker_settings"], {"container_runtime_shm_size": given})
    assert settings.get("default-shm-size") == written


# columns: container_runtime_runtimes; expected program of NVIDIA's runtime (<omitted>: the module's default)
RUNTIMES = [
    ({"nvidia": {"path": "/opt/nvidia"}}, "/opt/nvidia"),
    ({"kata": {"path": "/usr/bin/kata"}}, "<omitted>"),
    ({"nvidia": {}}, "<omitted>"),
    ({"nvidia": None}, "<omitted>"),
    ({}, "<omitted>"),
]


@pytest.mark.parametrize(("given", "program"), RUNTIMES)
def test_program_of_containerd_has_a_default(given: dict[str, Any], program: str) -> None:
    task = trusted(yaml.safe_load((ROOT / "roles/container_runtime/tasks/containerd.yml").read_text())[0])
    runtime = task["vgpu.fleet.containerd_config"]["runtime"]
    assert evaluated(runtime, {"container_runtime_runtimes": given}) == program
