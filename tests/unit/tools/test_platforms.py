# SPDX-License-Identifier: Apache-2.0
"""Tests that the metadata of each role, which Galaxy shows, names the systems that site.yml supports and the oldest
supported ansible-core.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.vgpu.fleet.plugins.module_utils.host import distribution
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import plugin_python

ROOT = Path(__file__).resolve().parents[3]
# name of a system family in our tables → its name on Galaxy
NAMES = {"debian": "Debian", "ubuntu": "Ubuntu", "el": "EL", "sles": "SLES"}
RELEASES = {
    ("debian", "12"): "bookworm",
    ("debian", "13"): "trixie",
    ("ubuntu", "20.04"): "focal",
    ("ubuntu", "22.04"): "jammy",
    ("ubuntu", "24.04"): "noble",
    ("ubuntu", "26.04"): "resolute",
    # Galaxy does not list every service pack. Older service packs than 4 have no Python for the device plugin, so they
    # are left out.
    ("sles", "15"): "15SP4 15SP5 15SP6 15SP7",
}
ROLES = sorted(path.parent.parent.name for path in ROOT.glob("roles/*/meta/main.yml"))


def galaxy_info(role: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "roles" / role / "meta/main.yml").read_text())["galaxy_info"])


def supported() -> list[dict[str, Any]]:
    """Returns the systems that have a Python for the device plugin, in the form of the metadata. site.yml refuses all
    other systems."""
    found: dict[str, list[str]] = {}
    for (family, release), row in plugin_python.TABLE.items():
        if row.python:
            found.setdefault(NAMES[family], []).extend(RELEASES.get((family, release), release).split())
    return [{"name": name, "versions": releases} for name, releases in found.items()]


@pytest.mark.parametrize("role", ROLES)
def test_role_platforms_match_the_tables(role: str) -> None:
    assert galaxy_info(role)["platforms"] == supported()


@pytest.mark.parametrize(("family", "release"), sorted(plugin_python.TABLE))
def test_all_tables_have_the_same_systems(family: str, release: str) -> None:
    name = {"el": "rhel"}.get(family, family)
    system = distribution.system({"id": name, "version_id": release})
    assert system is not None and (system.family, system.release) == (family, release)


@pytest.mark.parametrize("role", ROLES)
def test_role_requires_the_collections_ansible_version(role: str) -> None:
    needed = yaml.safe_load((ROOT / "meta/runtime.yml").read_text())["requires_ansible"]
    assert needed == f">={galaxy_info(role)['min_ansible_version']}.0"
