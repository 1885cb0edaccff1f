# SPDX-License-Identifier: Apache-2.0
"""Chooses the packages of the container engine for a host without an engine. No I/O.

An engine that is already installed, such as Docker's own docker-ce, stays unchanged: another package of the engine
would replace it under the running containers.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from ..host import distribution

# Packages of the distribution itself. RHEL and its derivatives have podman alone.
DISTRIBUTION = {
    "debian": {"docker": ["docker.io"], "containerd": ["containerd"]},
    "ubuntu": {"docker": ["docker.io"], "containerd": ["containerd"]},
    "sles": {"docker": ["docker"], "containerd": ["containerd"]},
    "el": {},
}
# Packages of Docker's repositories and their mirrors, on every system.
REPOSITORY = {"docker": ["docker-ce", "docker-ce-cli", "containerd.io"], "containerd": ["containerd.io"]}
UNITS = {"docker": "docker.service", "containerd": "containerd.service"}
DOCKER_UNIT = "docker.service"
# The services of each engine other than docker. A node of k3s or RKE2 runs one of the two services.
ENGINE_UNITS = {
    "containerd": ["containerd.service"],
    "crio": ["crio.service"],
    "k3s": ["k3s.service", "k3s-agent.service"],
    "rke2": ["rke2-server.service", "rke2-agent.service"],
}
# The variables of the role container_runtime that ``choose`` reads, with their defaults.
DEFAULTS: dict[str, Any] = {
    "packages": [],
    "repository": {},
    "docker_config": "/etc/docker/daemon.json",
    "docker_settings": {},
    "engine": "auto",
    "default_runtime": "nvidia",
    "runtimes": {},
    "containerd_config": "/etc/containerd/config.toml",
    "containerd_record": "",
    "systemd_cgroup": "auto",
    "restart": "if_idle",
    "packages_record": "",
    "docker_record": "",
}
# Families of distributions. Their engine packages fit every release, even one that the driver's tables do not list.
APT_LIKE = {"debian", "ubuntu"}


class Choice(NamedTuple):
    """Describes the packages to install. ``manager``: ``apt``, ``dnf`` or ``zypper``; ``packages``: empty if the engine
    is installed; ``refusal``: why no package is known; ``components``: components of the distribution that apt may have
    to enable.
    """

    manager: str
    packages: list[str]
    refusal: str = ""
    components: Sequence[str] = ()


def names(wanted: dict[str, Any]) -> list[str]:
    """Returns all packages whose versions ``choose`` must know. These are the packages that the user named. If the user
    named none, they are all packages that may be chosen.
    """
    if wanted["packages"]:
        return [str(package) for package in wanted["packages"]]
    asked = UNITS if wanted["engine"] == "auto" else (wanted["engine"],)
    found = {name for family in (*DISTRIBUTION.values(), REPOSITORY) for one in asked for name in family.get(one, [])}
    return sorted(found)


def family_of(system: dict[str, str]) -> str:
    """Returns the family of ``host_state``'s ``os``: ``debian``, ``ubuntu``, ``el`` or ``sles``; empty if the system is
    not supported.
    """
    known = distribution.system(system)
    if known:
        return known.family
    alike = [one for one in (system["id"], *system["id_like"].split()) if one in APT_LIKE]
    return alike[0] if alike else ""


def manager_of(system: dict[str, str]) -> str:
    """Returns the package manager of a host, empty if it is not known."""
    known = distribution.system(system)
    if known:
        return known.manager
    return "apt" if family_of(system) else ""


def choose(state: dict[str, Any], wanted: dict[str, Any]) -> Choice:
    """Returns the packages to install. ``wanted``: engine, packages, repository and packages_record
    of container_runtime.
    """
    manager = manager_of(state["os"])
    if wanted["packages"]:
        named = [str(package) for package in wanted["packages"]]
        return Choice(manager, named, "", distribution.community(state["os"]))
    engine = wanted["engine"]
    if engine not in UNITS:
        return Choice(manager, [])
    by_system = REPOSITORY if wanted["repository"] else DISTRIBUTION.get(family_of(state["os"]), {})
    brings = by_system.get(engine, [])
    there = bool((state["units"].get(UNITS[engine]) or {}).get("present"))
    # The record (the list of installed packages) is written before the installation. So if it exists, an installation
    # may have been interrupted and must be completed.
    ours = state["files"].get(wanted["packages_record"] or "") is not None
    has = {name for name in names(wanted) if state["packages"].get(name)}
    if there and not has & set(brings) and (has or not ours):
        return Choice(manager, [])
    if not brings and not there:
        system = state["os"]["name"] or state["os"]["id"]
        way_out = (
            "name Docker's repository, or a mirror of it, in container_runtime_repository, or install the engine first"
        )
        return Choice(manager, [], f"{system} has no package of {engine}, and {engine} is not installed; {way_out}")
    return Choice(manager, list(brings), "", distribution.community(state["os"]) if brings else ())
