# SPDX-License-Identifier: Apache-2.0
"""Tests that the project's systemd units start before the container engines: an engine that starts first makes
directories in place of the plugin's files.
"""

from __future__ import annotations

import pytest
import yaml

from .conftest import ROOT

ENGINES = (
    "docker.service",
    "containerd.service",
    "crio.service",
    "kubelet.service",
    "podman-restart.service",
    "k3s.service",
    "k3s-agent.service",
    "rke2-server.service",
    "rke2-agent.service",
)


def plugin_unit() -> str:
    text = (ROOT / "roles/device_plugin/vars/main.yml").read_text()
    return str(yaml.safe_load(text)["__device_plugin_unit_text"])


def arbiter_unit() -> str:
    return (ROOT / "native/vcuda/arbiter/vgpu-arbiter.service").read_text()


def named(unit: str, key: str) -> set[str]:
    """Returns all units in the lines ``key=`` of a unit file. If there are several such lines, all of them count, as in
    systemd.
    """
    lines = [line.partition("=")[2] for line in unit.splitlines() if line.startswith(f"{key}=")]
    return {name for line in lines for name in line.split()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("unit", [plugin_unit, arbiter_unit])
def test_unit_starts_before_units_that_start_containers(unit, engine):
    assert engine in named(unit(), "Before")
    # Before= only orders the start; neither unit must start or stop the other.
    for key in ("Requires", "Wants", "BindsTo", "PartOf", "After"):
        assert engine not in named(unit(), key)
