# SPDX-License-Identifier: Apache-2.0
"""Tests a host that was reinstalled with another system while Ansible still has cached facts of the former system."""

from __future__ import annotations

from pathlib import Path

from conftest import Workplace


def test_package_manager_follows_the_current_system(place: Workplace, tmp_path: Path) -> None:
    """This machine has apt; the cached fact says zypper. The package is installed already, and check mode changes
    nothing."""
    place.hosts({"some": ["one"]})
    settings = {"nvidia_docker_packages": ["bash"], "nvidia_docker_repository": {}, "nvidia_docker_config": {}}
    settings["__nvidia_docker_record"] = str(tmp_path / "record.json")
    kept = {"ansible.builtin.set_fact": {"pkg_mgr": "zypper", "cacheable": True}}
    told = {"ansible.builtin.debug": {"msg": "kept: {{ ansible_facts.pkg_mgr }}"}}
    role = {"ansible.builtin.import_role": {"name": "vgpu.fleet.nvidia_docker"}, "vars": settings}
    run = place.play([{"hosts": "all", "gather_facts": False, "tasks": [kept, told, role]}], "--check")
    assert "kept: zypper" in run.output, "expected the cached fact pkg_mgr=zypper in this run"
    assert run.code == 0 and "by apt" in run.output and "changed=0" in run.output, run.output
