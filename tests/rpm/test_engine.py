# SPDX-License-Identifier: Apache-2.0
"""Tests container_runtime with real dnf and zypper: an engine from Docker's repository, from SLES, or by name."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import RpmHost, Run, told

CE = ["docker-ce", "docker-ce-cli", "containerd.io"]
OF_SLES = ["docker", "containerd"]


def engine(host: RpmHost, *options: str, **variables: Any) -> Run:
    """Runs the role. The root has no systemd, so the role writes daemon.json and reloads no daemon."""
    tasks = [{"ansible.builtin.import_role": {"name": "vgpu.fleet.container_runtime"}}]
    # Another role installs NVIDIA's runtime. Here an existing program takes its place.
    given = {"container_runtime_runtimes": {"nvidia": {"path": "/usr/bin/true"}}, **variables}
    return host.play(tasks, *options, **given)


def dockers(mirror: str) -> dict[str, Any]:
    return {"container_runtime_repository": {"baseurl": f"{mirror}/docker-ce", "key": f"{mirror}/keys/vendor.asc"}}


def of(host: RpmHost) -> set[str]:
    return set(host.versions()) & {*CE, *OF_SLES}


def test_engine_from_dockers_repository_is_installed_and_removed_completely(host: RpmHost, mirror: str) -> None:
    before = host.trace()
    tried = engine(host, "--check", **dockers(mirror))
    with told(tried):
        assert tried.code == 0
        assert host.trace() == before, "expected an unchanged host after check mode"
    first = engine(host, **dockers(mirror))
    with told(first):
        assert first.code == 0
        assert of(host) == set(CE)
        assert '"default-runtime": "nvidia"' in host.text("/etc/docker/daemon.json")
    again = engine(host, **dockers(mirror))
    with told(again):
        assert (again.code, again.changed) == (0, 0)
    gone = engine(host, container_runtime_state="absent")
    with told(gone):
        assert gone.code == 0
        assert host.trace() == before


def test_wrong_signing_key_is_refused(host: RpmHost, mirror: str) -> None:
    before = host.trace()
    repository = {"baseurl": f"{mirror}/docker-ce", "key": f"{mirror}/keys/stranger.asc"}
    run = engine(host, container_runtime_repository=repository)
    with told(run):
        assert run.code != 0
        assert "Repositories, keys and packages are as they were." in run.said
        assert host.trace() == before


def test_engine_from_the_distribution(host: RpmHost) -> None:
    """SLES has a docker package. Rocky has none, so the role fails before any change and names the variable to set."""
    before = host.trace()
    run = engine(host)
    with told(run):
        if host.kind == "sles":
            assert run.code == 0
            assert of(host) == set(OF_SLES)
            gone = engine(host, container_runtime_state="absent")
            assert gone.code == 0, gone.output
        else:
            assert run.code != 0
            assert "Rocky Linux 9.4 (Blue Onyx) has no package of docker" in run.said
            assert "container_runtime_repository" in run.said
        assert host.trace() == before


@pytest.mark.parametrize("name", ["docker", "containerd"])
def test_named_packages_are_installed_unchanged(host: RpmHost, name: str) -> None:
    run = engine(host, container_runtime_packages=[name])
    with told(run):
        assert run.code == 0
        assert name in of(host)
