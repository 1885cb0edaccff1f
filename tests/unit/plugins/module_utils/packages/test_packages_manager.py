# SPDX-License-Identifier: Apache-2.0
"""Tests how programs such as apt and dnf are called, and the record in which a role keeps its changes for the
rollback."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.packages import manager as package_manager
from ansible_collections.vgpu.fleet.plugins.module_utils.packages.manager import PackageError

# A script that writes to both output streams, prints two variables and its input, and exits with status 3.
TALK = 'echo out; echo fault >&2; printf "%s|" "$LC_ALL" "$MARK" "$(cat)"; exit 3'


def test_a_program_is_called_without_a_terminal_and_in_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    apart = package_manager.run("sh", "-c", TALK, environment={"MARK": "m"})
    assert apart == (3, "out\nC.UTF-8|m||", "fault\n")
    together = package_manager.run("sh", "-c", TALK, environment={"MARK": "m"}, together=True)
    assert together == (3, "out\nfault\nC.UTF-8|m||", "")
    with pytest.raises(FileNotFoundError):
        package_manager.run("no-such-tool", environment={})


def test_files_are_written_and_removed_exactly(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"\xff text\n")
    texts = {str(path): package_manager.read_text(str(path)) for path in (one, other)}
    assert texts[str(other)] is None
    package_manager.write_texts({str(one): None, str(other): "new"})
    assert not one.exists() and other.read_text() == "new"
    package_manager.write_texts(texts)
    assert one.read_bytes() == b"\xff text\n" and not other.exists()
    package_manager.write_texts({str(other): None})


def test_record_is_readable_by_root_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "record.json"
    assert package_manager.read_record(str(path)) == package_manager.read_record(None) == {}
    package_manager.write_record(str(path), {"packages": ["a"]})
    assert package_manager.read_record(str(path)) == {"packages": ["a"]}
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "{", "[1]", "7"])
def test_invalid_record_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(PackageError, match=f"the record {path} cannot be read .*; restore it or remove it"):
        package_manager.read_record(str(path))
