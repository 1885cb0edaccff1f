# SPDX-License-Identifier: Apache-2.0
"""Tests how apt is asked about sources that are not on the host yet: real apt runs on a scratch folder with its own
sources and package lists. Also tests which of apt's messages about unreadable sources stop a role.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.packages import apt_index, apt_scratch, apt_text

OURS, KEY = "/etc/apt/sources.list.d/ours.sources", "/etc/apt/keyrings/ours.asc"
CONTROL = "Package: vgpu-test-{name}\nVersion: {version}\nArchitecture: all\nMaintainer: nobody\nDescription: none\n"


def folder_of(root: Path, name: str, version: str) -> Path:
    """Creates a flat apt repository (a folder with an index) that contains one package."""
    root.mkdir(exist_ok=True)
    (root / f"{name}.deb").write_bytes(b"no package, but a file")
    control = CONTROL.format(name=name, version=version)
    (root / "Packages").write_text(apt_index.stanza(control, str(root / f"{name}.deb")))
    return root


def apt(options: list[str], *words: str) -> str:
    program = {"update": "apt-get", "policy": "apt-cache"}[words[0]]
    return subprocess.run([program, *options, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not shutil.which("apt-get"):
        pytest.skip("needs apt, which is not installed")
    (tmp_path / "hosts" / "lists").mkdir(parents=True)
    monkeypatch.setattr(apt_scratch, "LISTS", str(tmp_path / "hosts" / "lists"))
    folder = tmp_path / "scratch"
    folder.mkdir()
    for one in (folder, *folder.parents):
        if one.owner() == "root" and str(one).startswith("/tmp/"):
            one.chmod(0o755)
    return folder


def test_repository_can_be_queried_before_its_source_is_written(scratch: Path, tmp_path: Path) -> None:
    there = folder_of(tmp_path / "there", "one", "1.0")
    new = folder_of(tmp_path / "new", "two", "2.0")
    gone = folder_of(tmp_path / "gone", "three", "3.0")
    sources = {
        "/etc/apt/sources.list": f"deb [trusted=yes] file:{there} ./\n",
        "/etc/apt/sources.list.d/gone.list": f"deb [trusted=yes] file:{gone} ./\n",
    }
    text = f"Types: deb\nURIs: file:{new}\nSuites: ./\nTrusted: yes\nSigned-By: {KEY}\n"
    changed = {OURS: text, KEY: "a key\n", "/etc/apt/sources.list.d/gone.list": None}
    options = apt_scratch.lay_out(str(scratch), sources, changed, "/etc/apt/sources.list")
    assert (scratch / KEY[1:]).read_text() == "a key\n"
    assert f"Signed-By: {scratch}{KEY}" in (scratch / "sources.list.d" / "ours.sources").read_text()
    apt(options, "update")
    found = apt_text.parse_policy(apt(options, "policy", "vgpu-test-one", "vgpu-test-two", "vgpu-test-three"))
    assert {name: known["candidate"] for name, known in found.items()} == {
        "vgpu-test-one": "1.0",
        "vgpu-test-two": "2.0",
    }
    assert not list((tmp_path / "hosts" / "lists").iterdir()), "expected the host's package lists to stay unchanged"


def test_package_folder_can_be_queried_before_its_source_is_written(scratch: Path, tmp_path: Path) -> None:
    (tmp_path / "file.deb").write_bytes(b"no package")
    control = CONTROL.format(name="file", version="4.0")
    uri, suite, index = apt_index.build("ours", [str(tmp_path / "file.deb")], lambda _path: control)
    text = f"Types: deb\nURIs: {uri}\nSuites: {suite}\nTrusted: yes\n"
    changed = {OURS: text, f"{apt_index.FOLDER}/ours/Packages": index}
    options = apt_scratch.lay_out(str(scratch), {}, changed, "/etc/apt/sources.list")
    apt(options, "update")
    assert apt_text.parse_policy(apt(options, "policy", "vgpu-test-file"))["vgpu-test-file"]["candidate"] == "4.0"


# columns: messages of apt, addresses of the sources that the role needs; expected: whether the role stops
UNREAD = [
    ("Err:1 http://x.test/a ./ InRelease\nE: Failed to fetch http://x.test/a/./InRelease  404  Not Found", [], False),
    ("E: Failed to fetch http://x.test/a/./InRelease  404  Not Found", ["http://x.test/a"], True),
    ("E: Failed to fetch http://x.test/a/./InRelease  404  Not Found", ["http://x.test/b"], False),
    ("E: Failed to fetch https://n.test/deb/amd64/InRelease", ["https://n.test/deb/$(ARCH)"], True),
    ("E: The repository 'http://x.test/a ./ InRelease' is not signed.", [], False),
    ("W: GPG error: http://x.test/a ./ InRelease: NO_PUBKEY 1", ["http://x.test/a/"], True),
    ("E: Repository 'http://x.test/a x InRelease' changed its 'Suite' value from 'a' to 'b'", [], False),
    ("E: Release file for http://x.test/a/InRelease is expired", [], False),
    ("E: Conflicting values set for option Signed-By regarding source http://x.test/a/ ./: /k != ", [], True),
    ("E: The list of sources could not be read.", [], True),
    ("E: Could not get lock /var/lib/apt/lists/lock", [], True),
    ("E: Some index files failed to download. They have been ignored, or old ones used instead.", ["http://x"], False),
]


@pytest.mark.parametrize(("text", "needed", "fatal"), UNREAD)
def test_only_an_unreadable_needed_source_stops_the_role(text: str, needed: list[str], fatal: bool) -> None:
    assert apt_text.is_fatal(text, needed) is fatal


# columns: output of apt; expected: whether the package lists are outdated, because the archive no longer has a file in
# them
OUTDATED = [
    ("E: Failed to fetch http://m.test/p.deb  404  Not Found [IP: 127.0.0.1 80]\nE: Unable to fetch some", True),
    ("Err:1 http://m.test bookworm/main amd64 p amd64 1.0\n  404  Not Found [IP: 127.0.0.1 80]", True),
    ("E: Unable to fetch some archives, maybe run apt-get update or try with --fix-missing?", True),
    ("E: Sub-process /usr/bin/dpkg returned an error code (1)", False),
    ("E: You don't have enough free space in /var/cache/apt/archives/.", False),
]


@pytest.mark.parametrize(("text", "outdated"), OUTDATED)
def test_missing_file_of_the_archive_is_recognised_in_the_output_of_apt(text: str, outdated: bool) -> None:
    assert apt_text.is_outdated(text) is outdated
