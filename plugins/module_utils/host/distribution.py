# SPDX-License-Identifier: Apache-2.0
"""Names the distributions that the collection supports and finds which of them a host runs. No I/O."""

from __future__ import annotations

from typing import Any, NamedTuple

DEBIAN = ("12", "13")
UBUNTU = ("20.04", "22.04", "24.04", "26.04")
EL_LIKE = {"rhel", "rocky", "almalinux", "centos", "ol"}


class System(NamedTuple):
    """Describes a host's system. ``family``: ``debian``, ``ubuntu``, ``el`` or ``sles``. ``release``: of ubuntu the
    version, such as 24.04, of the others the major version. ``headers``: whether the running kernel's headers are
    installed.
    """

    family: str
    release: str
    name: str
    arch: str
    kernel: str
    headers: bool = False

    @property
    def manager(self) -> str:
        return {"debian": "apt", "ubuntu": "apt", "el": "dnf", "sles": "zypper"}[self.family]

    @property
    def cuda_name(self) -> str:
        """Returns the name of this release in the CUDA repository: debian12, ubuntu2204, rhel9, sles15."""
        family = {"el": "rhel"}.get(self.family, self.family)
        return family + self.release.replace(".", "")


SUPPORTED = "Debian 12 and 13, Ubuntu 20.04, 22.04, 24.04 and 26.04, RHEL and Rocky 8 to 10, SLES 15"


def system(host: dict[str, Any]) -> System | None:
    """Returns the System of a host, or None if its distribution is not supported. ``host``: the fact ``os`` of the
    module host_state.
    """
    name, version = host.get("id", ""), host.get("version_id", "")
    major = version.partition(".")[0]
    facts = (host.get("name") or f"{name} {version}", host.get("arch") or "x86_64", host.get("kernel") or "")
    if name == "debian" and major in DEBIAN:
        return System("debian", major, *facts)
    if name == "ubuntu" and version in UBUNTU:
        return System("ubuntu", version, *facts)
    if name in EL_LIKE and major in ("8", "9", "10"):
        return System("el", major, *facts)
    if name in ("sles", "sles_sap") and major == "15":
        return System("sles", major, *facts)
    return None


def community(host: dict[str, Any]) -> list[str]:
    """Names the repository component with software that the distribution itself does not support, such as docker and
    newer Pythons.
    """
    known = system(host)
    return ["universe"] if known is not None and known.family == "ubuntu" else []
