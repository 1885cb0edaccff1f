# SPDX-License-Identifier: Apache-2.0
"""Tests that the role vcuda, which installs the library, installs an archive that was built elsewhere: only the
configured archive reaches a host."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Run, Workplace

VERSION = "7.0.0-elsewhere"


def archive(folder: Path) -> tuple[str, str]:
    """Creates an archive as if built elsewhere; returns its path and its digest."""
    files = {name: name.encode() for name in ("libvgpu.so", "vgpu-probe", "vgpu-arbiter")}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    manifest = {"version": VERSION, "arch": platform.machine(), "files": digests}
    path = folder / "prebuilt.tar.gz"
    with tarfile.open(path, "w:gz") as bundle:
        for name, content in {**files, "manifest.json": json.dumps(manifest).encode()}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            bundle.addfile(member, io.BytesIO(content))
    return str(path), hashlib.sha256(path.read_bytes()).hexdigest()


def build(place: Workplace, **variables: Any) -> Run:
    place.hosts({"some": ["one"]})
    # Nothing may be built: an unwritable cache folder makes a build fail.
    options = {"vcuda_version": VERSION, "vcuda_cache": "/proc/no-cache", **variables}
    role = {"ansible.builtin.import_role": {"name": "vgpu.fleet.vcuda", "tasks_from": "build"}, "vars": options}
    return place.play([{"hosts": "all", "gather_facts": False, "tasks": [role]}])


def test_configured_archive_is_used(place: Workplace) -> None:
    path, digest = archive(place.folder)
    run = build(place, vcuda_archive=path, vcuda_archive_checksum=digest)
    assert run.code == 0, run.output
    assert "changed=0" in run.output


# columns: changed variables of the role; expected text of the message
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"vcuda_archive_checksum": "0" * 64}, "expected SHA-256 " + "0" * 64),
        ({"vcuda_archive_checksum": ""}, "expected SHA-256 in vcuda_archive_checksum"),
        ({"vcuda_archive": "/nonexistent.tar.gz"}, "no such file on the controller"),
    ],
)
def test_archive_with_another_digest_is_refused(place: Workplace, changes: dict[str, str], words: str) -> None:
    path, digest = archive(place.folder)
    run = build(place, **{"vcuda_archive": path, "vcuda_archive_checksum": digest, **changes})
    assert run.code != 0
    assert words in " ".join(run.output.split())


def test_upgrade_builds_for_all_hosts_before_the_first_batch() -> None:
    """The build must run before the first batch: in a batch, a run_once task is skipped if its condition is false for
    the batch's first host."""
    text = (Path(__file__).parents[2] / "playbooks" / "upgrade.yml").read_text()
    plays = yaml.safe_load(text)
    batch = next(number for number, play in enumerate(plays) if "serial" in play)
    builds = [
        (number, play.get("any_errors_fatal"))
        for number, play in enumerate(plays)
        for task in play["tasks"]
        if task.get("ansible.builtin.include_role", {}).get("tasks_from") == "build"
    ]
    assert builds == [(batch - 1, True)]
