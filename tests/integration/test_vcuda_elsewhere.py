# SPDX-License-Identifier: Apache-2.0
"""Tests that the role vcuda, which installs the library, can build on another host than the controller. It compiles
once for all hosts, and leaves no file on the build host. The test compiles the real sources, so it takes long."""

from __future__ import annotations

import hashlib
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, Workplace

pytestmark = pytest.mark.slow

VERSION = "7.0.0-there"


@pytest.fixture
def build(place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the entry point ``build`` for two hosts with the second as build host; its temporary files go to ``tmp``."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    place.hosts({"some": ["one", "two"]})
    places = {"vcuda_cache": str(tmp_path / "cache"), "__vcuda_build_cache": str(tmp_path / "there")}
    options = {"vcuda_version": VERSION, "vcuda_build_host": "two", **places}
    role = {"ansible.builtin.import_role": {"name": "vgpu.fleet.vcuda", "tasks_from": "build"}, "vars": options}
    play = [{"hosts": "all", "gather_facts": False, "tasks": [role]}]
    return lambda *words: place.play(play, *words)


def left(tmp_path: Path) -> list[str]:
    return [one.name for one in (tmp_path / "tmp").iterdir() if one.name.startswith("vcuda-sources-")]


def test_another_host_builds_for_all(build: Any, tmp_path: Path) -> None:
    path = tmp_path / "cache" / f"vcuda-{VERSION}-{platform.machine()}.tar.gz"
    predicted: Run = build("--check")
    assert (predicted.code, path.exists()) == (0, False), predicted.output
    done: Run = build()
    assert done.code == 0, done.output
    with tarfile.open(path) as bundle:
        files = {one.name: bundle.extractfile(one).read() for one in bundle if one.isfile()}  # type: ignore[union-attr]
    manifest = json.loads(files.pop("manifest.json"))
    assert manifest["version"] == VERSION
    assert manifest["files"] == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert files["libvgpu.so"].startswith(b"\x7fELF") and {"vgpu-probe", "vgpu-arbiter"} <= set(files)
    # The calls on the controller count too. The sources, about ninety files, are sent as one file.
    assert 1 <= sum(done.calls.values()) <= 14, done.calls
    assert left(tmp_path) == []
    bytes_of_it = path.read_bytes()
    again: Run = build()
    assert again.code == 0 and "changed=1" not in again.output, again.output
    assert path.read_bytes() == bytes_of_it


def test_failed_build_leaves_no_file_on_the_build_host(build: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    run: Run = build()
    assert run.code != 0
    assert "the vGPU library was not built" in run.output
    assert left(tmp_path) == [] and not list(tmp_path.glob("*/*.tar.gz"))


HOMES = [
    # columns: the controller's XDG_CACHE_HOME (below the test's folder; None means not set); the expected folder of the
    # controller's archive (below the test's folder)
    (None, "here/.cache/vgpu.fleet"),
    ("xdg", "xdg/vgpu.fleet"),
]


@pytest.mark.parametrize("cache, came", HOMES)
def test_each_host_uses_its_own_home_folder(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str | None, came: str
) -> None:
    """The build host's archive is in the home of the build host's user, and the role creates none of the controller's
    paths on the build host."""
    name = f"vcuda-{VERSION}-{platform.machine()}.tar.gz"
    kept = tmp_path / "there" / ".cache" / "vgpu.fleet" / name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"built before")
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if cache:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    # A compilation would fail here: the build host must find the archive in its cache.
    monkeypatch.setenv("CC", "/bin/false")
    place.hosts({"some": ["one", "two"]})
    options = {"vcuda_version": VERSION, "vcuda_build_host": "two"}
    role = {"ansible.builtin.import_role": {"name": "vgpu.fleet.vcuda", "tasks_from": "build"}, "vars": options}
    there = {"HOME": str(tmp_path / "there")}
    run = place.play([{"hosts": "all", "gather_facts": False, "environment": there, "tasks": [role]}])
    assert run.code == 0, run.output
    assert (tmp_path / came / name).read_bytes() == b"built before"
