# SPDX-License-Identifier: Apache-2.0
"""Tests which packages install a container engine on a host. It depends on the system, the installed packages and the
variables of the role container_runtime.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import engine_packages

# operating systems, as /etc/os-release describes them
DEBIAN = {"id": "debian", "id_like": "", "version_id": "12", "name": "Debian GNU/Linux 12 (bookworm)"}
NOBLE = {"id": "ubuntu", "id_like": "debian", "version_id": "24.04", "name": "Ubuntu 24.04.1 LTS"}
MINT = {"id": "linuxmint", "id_like": "ubuntu debian", "version_id": "22", "name": "Linux Mint 22"}
RHEL = {"id": "rhel", "id_like": "fedora", "version_id": "8.10", "name": "Red Hat Enterprise Linux 8.10 (Ootpa)"}
ROCKY = {"id": "rocky", "id_like": "rhel centos fedora", "version_id": "9.4", "name": "Rocky Linux 9.4 (Blue Onyx)"}
SLES = {"id": "sles", "id_like": "suse", "version_id": "15.6", "name": "SUSE Linux Enterprise Server 15 SP6"}
ARCH = {"id": "arch", "id_like": "", "version_id": "", "name": "Arch Linux"}
RECORD = "/var/lib/vgpu/baseline/container_runtime.json"
MIRROR = {"baseurl": "https://mirror.example.com/docker-ce/linux/rhel/9/x86_64/stable"}
CE = ["docker-ce", "docker-ce-cli", "containerd.io"]


def chosen(system, engine="docker", packages=(), repository=None, there=False, has=(), begun=False):
    state = {
        "os": system,
        "units": {engine_packages.UNITS.get(engine, "x.service"): {"present": there}},
        "packages": dict.fromkeys(has, "1.0"),
        "files": {RECORD: {"mtime": 1.0} if begun else None},
    }
    wanted = {
        "engine": engine,
        "packages": list(packages),
        "repository": repository or {},
        "packages_record": RECORD,
    }
    return engine_packages.choose(state, wanted)


BARE = [
    (DEBIAN, "docker", "apt", ["docker.io"]),
    (DEBIAN, "containerd", "apt", ["containerd"]),
    (NOBLE, "docker", "apt", ["docker.io"]),
    (MINT, "docker", "apt", ["docker.io"]),
    (SLES, "docker", "zypper", ["docker"]),
    (SLES, "containerd", "zypper", ["containerd"]),
    (ROCKY, "crio", "dnf", []),
    (ROCKY, "k3s", "dnf", []),
    (DEBIAN, "rke2", "apt", []),
]


@pytest.mark.parametrize(("system", "engine", "manager", "packages"), BARE)
def test_bare_host_gets_the_package_of_its_distribution(system, engine, manager, packages):
    assert chosen(system, engine)[:3] == (manager, packages, "")


@pytest.mark.parametrize(
    ("system", "more", "components"),
    [
        (NOBLE, {}, ["universe"]),
        (NOBLE, {"packages": ["docker.io", "docker-buildx"]}, ["universe"]),
        (NOBLE, {"there": True}, []),
        (DEBIAN, {}, []),
        (SLES, {}, []),
    ],
)
def test_ubuntu_has_docker_in_universe(system, more, components):
    """Small Ubuntu images do not have the component universe enabled. It is named here, so that apt_packages can enable
    it if apt does not find the package."""
    assert list(chosen(system, **more).components) == components


@pytest.mark.parametrize(("system", "manager"), [(DEBIAN, "apt"), (ROCKY, "dnf"), (RHEL, "dnf"), (SLES, "zypper")])
def test_docker_repository_uses_dockers_package_names(system, manager):
    assert chosen(system, repository=MIRROR)[:3] == (manager, CE, "")
    assert chosen(system, "containerd", repository=MIRROR)[:3] == (manager, ["containerd.io"], "")


@pytest.mark.parametrize("engine", ["docker", "containerd"])
@pytest.mark.parametrize("system", [ROCKY, RHEL])
def test_refusal_without_an_engine_package_names_the_variable(system, engine):
    refusal = chosen(system, engine).refusal
    assert refusal.startswith(system["name"])
    assert f"has no package of {engine}" in refusal
    assert "container_runtime_repository" in refusal
    assert chosen(system, engine, there=True)[:3] == ("dnf", [], "")


# columns: label, what is installed and configured (``begun``: the record of our role exists, so it began an
# installation); expected packages to install ([]: the engine stays as it is)
THERE = [
    ("Docker's own packages, installed by others", {"there": True, "has": CE}, []),
    ("unit without a package", {"there": True}, []),
    ("distribution's package installed", {"there": True, "has": ["docker.io"]}, ["docker.io"]),
    ("run killed during apt", {"there": True, "begun": True}, ["docker.io"]),
    ("run killed before apt", {"begun": True}, ["docker.io"]),
    (
        "distribution's package, repository configured later",
        {"there": True, "begun": True, "has": ["docker.io"], "repository": MIRROR},
        [],
    ),
    (
        "Docker's own packages, installed by the role",
        {"there": True, "begun": True, "has": CE, "repository": MIRROR},
        CE,
    ),
    ("Docker's own packages, incomplete", {"there": True, "begun": True, "has": CE[:1], "repository": MIRROR}, CE),
    ("Docker's own packages, repository removed later", {"there": True, "begun": True, "has": CE}, []),
    (
        "configured packages override the installed ones",
        {"there": True, "has": CE, "packages": ["docker.io=26*"]},
        ["docker.io=26*"],
    ),
]


@pytest.mark.parametrize(("name", "host", "packages"), THERE, ids=[row[0] for row in THERE])
def test_installed_engine_is_not_replaced(name, host, packages):
    assert chosen(DEBIAN, **host).packages == packages


def test_unknown_system_has_no_package_manager():
    assert engine_packages.manager_of(ARCH) == ""
    assert engine_packages.family_of({**ROCKY, "version_id": "7.9"}) == ""


def test_names_include_every_package_that_may_be_chosen():
    desired = {"engine": "docker", "packages": []}
    assert set(engine_packages.names(desired)) == {"docker.io", "docker", *CE}
    assert engine_packages.names({"engine": "docker", "packages": ["moby"]}) == ["moby"]
