# SPDX-License-Identifier: Apache-2.0
"""Converts the description of a repository, a variable of a role, to the option of the module for apt or of the module
for dnf and zypper. No I/O.
"""

from __future__ import annotations

from typing import Any

APT = ("uris", "files", "suites", "components", "key", "trusted")
RPM = ("baseurl", "key", "gpgcheck", "repo_gpgcheck")


def for_apt(repository: dict[str, Any]) -> dict[str, Any]:
    """Returns the option ``source`` of apt_packages; empty if the repository is empty."""
    return {key: repository[key] for key in APT if key in repository}


def for_rpm(repository: dict[str, Any]) -> dict[str, Any]:
    """Returns the option ``source`` of rpm_packages; empty if the repository is empty. Without ``baseurl`` the first of
    ``uris`` is used.
    """
    found = {key: repository[key] for key in RPM if key in repository}
    if "baseurl" not in found and repository.get("uris"):
        found["baseurl"] = repository["uris"][0]
    return found
