# SPDX-License-Identifier: Apache-2.0
"""Tests changes of single keys in a TOML file on disk (for example the NVIDIA container toolkit's configuration): check
mode, a first and a repeated run, and the rollback. Changes that other programs made in between must stay.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines.toolkit_file import TomlFile
from ansible_collections.vgpu.fleet.plugins.module_utils.text.toml_text import TomlError

# a file with keys and comments of another owner
TEXT = '# theirs\nx = 1\n\n[t]\ny = "a" # why\n'
# columns: text before, settings; expected text
ROWS = [
    (TEXT, {"x": 2, "t.z": True}, '# theirs\nx = 2\n\n[t]\ny = "a" # why\nz = true\n'),
    (TEXT, {"x": 1}, TEXT),
    ("", {"x": 1}, "x = 1\n"),
]


@pytest.mark.parametrize(("text", "settings", "after"), ROWS)
def test_change_and_removal_restore_the_file(tmp_path, text, settings, after):
    path, record = tmp_path / "config.toml", tmp_path / "record.json"
    path.write_text(text)
    path.chmod(0o640)
    predicted = TomlFile(str(path), str(record), check_mode=True)
    predicted.present(settings)
    assert (path.read_text(), record.exists()) == (text, False)
    run = TomlFile(str(path), str(record))
    run.present(settings)
    assert (path.read_text(), run.plan) == (after, predicted.plan)
    assert path.stat().st_mode & 0o777 == 0o640
    again = TomlFile(str(path), str(record))
    again.present(settings)
    assert (again.plan, again.before) == ([], again.after)
    TomlFile(str(path), str(record)).absent()
    assert path.read_text() == text
    assert not record.exists()


def test_absent_removes_a_file_that_we_created(tmp_path):
    path, record = tmp_path / "new" / "config.toml", tmp_path / "record.json"
    TomlFile(str(path), str(record)).present({"x": 1})
    assert path.read_text() == "x = 1\n"
    TomlFile(str(path), str(record)).absent()
    assert not path.exists()


def test_later_value_of_another_program_stays(tmp_path):
    path, record = tmp_path / "config.toml", tmp_path / "record.json"
    path.write_text(TEXT)
    TomlFile(str(path), str(record)).present({"x": 2, "t.z": True})
    path.write_text(path.read_text().replace("x = 2", "x = 3") + "theirs = 1\n")
    TomlFile(str(path), str(record)).absent()
    assert path.read_text() == TEXT.replace("x = 1", "x = 3") + "theirs = 1\n"


def test_second_change_keeps_the_first_former_value(tmp_path):
    path, record = tmp_path / "config.toml", tmp_path / "record.json"
    path.write_text(TEXT)
    for value in (2, 3):
        TomlFile(str(path), str(record)).present({"x": value})
    TomlFile(str(path), str(record)).absent()
    assert path.read_text() == TEXT


def test_invalid_file_is_not_changed(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("what is this\n")
    with pytest.raises(TomlError, match="line 1"):
        TomlFile(str(path), str(tmp_path / "record.json")).present({"x": 1})
    assert path.read_text() == "what is this\n"
    assert not (tmp_path / "record.json").exists()
