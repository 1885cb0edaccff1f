# SPDX-License-Identifier: Apache-2.0
"""Tests that the role device_plugin finds the engine that loads its image, with the facts of the role preflight and
without them (as in a teardown)."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Workplace

ROLE = {"ansible.builtin.import_role": {"name": "vgpu.fleet.device_plugin"}, "when": False}
SHOW = {
    "ansible.builtin.debug": {
        "msg": "engine {{ __device_plugin_engine }}, {{ __device_plugin_image_list | join(' ') }}"
    }
}


# columns: variables of the host; the expected engine
@pytest.mark.parametrize(
    ("variables", "engine"),
    [
        ({"container_runtime_engine": "auto"}, "containerd"),
        ({"container_runtime_engine": "auto", "preflight_plan": {"state": {"kubelet_engine": None}}}, "containerd"),
        (
            {"container_runtime_engine": "auto", "preflight_plan": {"state": {"kubelet_engine": {"engine": "k3s"}}}},
            "k3s",
        ),
        # Preflight was skipped by `when`, so the role has to read the host itself.
        (
            {
                "container_runtime_engine": "auto",
                "preflight_plan": {"skipped": True},
                "__device_plugin_asked": {"state": {"kubelet_engine": {"engine": "rke2"}}},
            },
            "rke2",
        ),
        ({"container_runtime_engine": "docker"}, "docker"),
    ],
)
def test_engine_is_known_without_preflight(place: Workplace, variables: dict[str, Any], engine: str) -> None:
    place.hosts({"t4": ["gpu-1"]})
    run = place.play([{"hosts": "all", "gather_facts": False, "vars": variables, "tasks": [ROLE, SHOW]}])
    assert run.code == 0, run.output
    assert f"engine {engine}, " in run.output, run.output
