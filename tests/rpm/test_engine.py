# SPDX-License-Identifier: Apache-2.0
"""container_runtime on real dnf and zypper: an engine from Docker's repository or from SLES, and one that is there."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import RpmHost, Run, told

CE = ["docker-ce", "docker-ce-cli", "containerd.io"]
OF_SLES = ["docker", "containerd"]


def engine(host: RpmHost, *options: str, **variables: Any) -> Run:
    """The role itself. No systemd is in the root, so daemon.json is written and no daemon asked."""
    tasks = [{"ansible.builtin.import_role": {"name": "vgpu.fleet.container_runtime"}}]
    # NVIDIA's runtime is brought by another role; a program that is there stands for it.
    given = {"container_runtime_runtimes": {"nvidia": {"path": "/usr/bin/true"}}, **variables}
    return host.play(tasks, *options, **given)


def dockers(mirror: str) -> dict[str, Any]:
    return {"container_runtime_repository": {"baseurl": f"{mirror}/docker-ce", "key": f"{mirror}/keys/vendor.asc"}}


def of(host: RpmHost) -> set[str]:
    return set(host.versions()) & {*CE, *OF_SLES}


def test_dockers_repository_brings_the_engine_and_it_goes_without_a_trace(host: RpmHost, mirror: str) -> None:
    before = host.trace()
    tried = engine(host, "--check", **dockers(mirror))
    with told(tried):
        assert tried.code == 0
        assert host.trace() == before, "check mode changed the host"
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


def test_a_key_of_somebody_else_is_refused(host: RpmHost, mirror: str) -> None:
    before = host.trace()
    repository = {"baseurl": f"{mirror}/docker-ce", "key": f"{mirror}/keys/stranger.asc"}
    run = engine(host, container_runtime_repository=repository)
    with told(run):
        assert run.code != 0
        assert "as they were" in run.said
        assert host.trace() == before


def test_what_the_distribution_has(host: RpmHost) -> None:
    """SLES has docker; RHEL and Rocky have none, and the way out is named before anything is changed."""
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
def test_packages_that_are_named_are_taken_as_they_are(host: RpmHost, name: str) -> None:
    run = engine(host, container_runtime_packages=[name])
    with told(run):
        assert run.code == 0
        assert name in of(host)
