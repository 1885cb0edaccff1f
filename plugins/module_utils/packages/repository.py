# SPDX-License-Identifier: Apache-2.0
"""One way to name a repository for every package manager: what of it apt takes, and what dnf and zypper take. Pure."""

from __future__ import annotations

from typing import Any

APT = ("uris", "files", "suites", "components", "key", "trusted")
RPM = ("baseurl", "key", "gpgcheck", "repo_gpgcheck")


def for_apt(repository: dict[str, Any]) -> dict[str, Any]:
    """The option ``source`` of apt_packages; empty where the repository is."""
    return {key: repository[key] for key in APT if key in repository}


def for_rpm(repository: dict[str, Any]) -> dict[str, Any]:
    """The option ``source`` of rpm_packages; empty where the repository is. One without ``baseurl`` lies at its first
    of ``uris``."""
    found = {key: repository[key] for key in RPM if key in repository}
    if "baseurl" not in found and repository.get("uris"):
        found["baseurl"] = repository["uris"][0]
    return found
