# SPDX-License-Identifier: Apache-2.0
"""Tests the common format in which the variables of all roles describe a package repository: its translation for apt
and for RPM systems, and that every role and module accepts the same keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.vgpu.fleet.plugins.module_utils.packages import repository

ROOT = Path(__file__).resolve().parents[5]
BOTH = {"uris": ["http://m/deb"], "suites": ["/"], "baseurl": "http://m/rpm", "key": "K", "repo_gpgcheck": True}


@pytest.mark.parametrize(
    ("given", "apt", "rpm"),
    [
        ({}, {}, {}),
        (
            BOTH,
            {"uris": ["http://m/deb"], "suites": ["/"], "key": "K"},
            {"baseurl": "http://m/rpm", "key": "K", "repo_gpgcheck": True},
        ),
        ({"uris": ["http://m", "http://n"]}, {"uris": ["http://m", "http://n"]}, {"baseurl": "http://m"}),
        ({"uris": []}, {"uris": []}, {}),
        ({"baseurl": "http://m", "gpgcheck": False}, {}, {"baseurl": "http://m", "gpgcheck": False}),
        ({"files": ["/a.deb"], "trusted": True}, {"files": ["/a.deb"], "trusted": True}, {}),
        # key_url and key_fingerprint are not passed on, because the role itself copies the key.
        ({"baseurl": "http://m", "key_url": "http://m/k", "key_fingerprint": "F"}, {}, {"baseurl": "http://m"}),
    ],
)
def test_repository_is_translated_for_each_package_manager(
    given: dict[str, Any], apt: dict[str, Any], rpm: dict[str, Any]
) -> None:
    assert (repository.for_apt(given), repository.for_rpm(given)) == (apt, rpm)


def suboptions(path: str, *names: str) -> dict[str, Any]:
    """Returns the documented keys of an option, from the argument specification of a role or the DOCUMENTATION of a
    module."""
    text = (ROOT / path).read_text()
    if path.endswith(".py"):
        text = text.partition('DOCUMENTATION = r"""')[2].partition('"""')[0]
    found = yaml.safe_load(text)
    for name in names:
        found = found[name]
    return dict(found)


@pytest.mark.parametrize(
    ("module", "keys", "own"),
    [("apt_packages", repository.APT, set()), ("rpm_packages", repository.RPM, {"priority"})],
)
def test_the_modules_take_these_keys(module: str, keys: tuple[str, ...], own: set[str]) -> None:
    assert set(suboptions(f"plugins/modules/{module}.py", "options", "source", "suboptions")) == {*keys, *own}


@pytest.mark.parametrize("role", ["nvidia_driver", "nvidia_docker", "container_runtime"])
def test_the_roles_have_the_same_keys(role: str) -> None:
    spec = suboptions(
        f"roles/{role}/meta/argument_specs.yml",
        *("argument_specs", "main", "options", f"{role}_repository", "options"),
    )
    # Only container_runtime has package files in the repository; the other roles have a variable of their own for them.
    if role == "container_runtime":
        spec.pop("files")
    first = suboptions(
        "roles/nvidia_driver/meta/argument_specs.yml",
        *("argument_specs", "main", "options", "nvidia_driver_repository", "options"),
    )
    assert spec == first
    assert set(spec) == {*repository.APT, *repository.RPM} - {"files"}
