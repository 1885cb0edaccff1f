# SPDX-License-Identifier: Apache-2.0
"""Tests that the newest release in the changelog has the version of galaxy.yml, and that CHANGELOG.md is exactly what
antsibull-changelog generates from the releases.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]


def test_newest_release_is_the_version_of_the_collection() -> None:
    releases = yaml.safe_load((ROOT / "changelogs" / "changelog.yaml").read_text())["releases"]
    newest = max(releases, key=lambda version: tuple(int(part) for part in version.split(".")))
    assert newest == yaml.safe_load((ROOT / "galaxy.yml").read_text())["version"]
    assert releases[newest]["changes"]["release_summary"]


def test_changelog_page_is_made_from_the_releases(tmp_path: Path) -> None:
    copy = tmp_path / "ansible_collections" / "vgpu" / "fleet"
    copy.mkdir(parents=True)
    shutil.copy(ROOT / "galaxy.yml", copy)
    shutil.copytree(ROOT / "changelogs", copy / "changelogs")
    subprocess.run(["antsibull-changelog", "generate"], cwd=copy, check=True, capture_output=True, text=True)
    assert (copy / "CHANGELOG.md").read_text() == (ROOT / "CHANGELOG.md").read_text()
