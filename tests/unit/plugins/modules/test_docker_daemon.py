# SPDX-License-Identifier: Apache-2.0
"""Tests the module docker_daemon as Ansible calls it, on a daemon.json of the test and without a docker daemon.
test_engines_daemon_apply.py tests which reloads and restarts of the daemon follow from a change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COLLECTIONS = Path(__file__).resolve().parents[4] / ".build" / "collections"
MODULE = "ansible_collections.vgpu.fleet.plugins.modules.docker_daemon"
SETTINGS = {"default-runtime": "other", "runtimes": {"other": {"path": "/bin/sh"}}}


def call(tmp_path: Path, arguments: dict[str, Any], check: bool = False) -> dict[str, Any]:
    """Runs the module in a separate process and returns its output."""
    given = {"path": str(tmp_path / "daemon.json"), "apply": "none", "validate": False, **arguments}
    given.update(_ansible_check_mode=check, _ansible_diff=True, _ansible_remote_tmp=str(tmp_path))
    file = tmp_path.parent / f"{tmp_path.name}.args"
    file.write_text(json.dumps({"ANSIBLE_MODULE_ARGS": given}))
    search = os.pathsep.join([str(COLLECTIONS), *sys.path])
    environment = {**os.environ, "PYTHONPATH": search, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", MODULE, str(file)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


# columns: text of daemon.json before (None: no file), arguments of the module; expected "changed", content of the file
# afterwards
CASES: list[tuple[str | None, dict[str, Any], bool, Any]] = [
    (None, {"settings": SETTINGS}, True, SETTINGS),
    (json.dumps(SETTINGS), {"settings": SETTINGS}, False, SETTINGS),
    ('{"a": 1}', {"settings": {"b": [1, 2]}}, True, {"a": 1, "b": [1, 2]}),
    ('{"a": 1, "b": {"c": 1, "d": 2}}', {"remove": ["a", ["b", "c"]]}, True, {"b": {"d": 2}}),
    ('{"a": 1}', {"remove": ["x"]}, False, {"a": 1}),
    (json.dumps({**SETTINGS, "a": 1}), {"settings": SETTINGS, "state": "absent"}, True, {"a": 1}),
    ('{"default-runtime": "theirs"}', {"settings": SETTINGS, "state": "absent"}, False, {"default-runtime": "theirs"}),
    (None, {"settings": SETTINGS, "state": "absent"}, False, None),
]


@pytest.mark.parametrize(("before", "arguments", "changed", "after"), CASES)
def test_check_mode_predicts_and_a_second_run_changes_nothing(
    tmp_path: Path, before: str | None, arguments: dict, changed: bool, after: Any
) -> None:
    path = tmp_path / "daemon.json"
    if before is not None:
        path.write_text(before)
    predicted = call(tmp_path, arguments, check=True)
    assert (path.read_text() if path.exists() else None) == before
    real = call(tmp_path, arguments)
    assert real["changed"] is changed
    for key in ("changed", "plan", "changes", "applied", "diff"):
        assert predicted[key] == real[key], key
    assert (json.loads(path.read_text()) if path.exists() else None) == after
    assert real["diff"]["before"] == (before or "")
    assert real["diff"]["after"] == (path.read_text() if path.exists() else "")
    assert call(tmp_path, arguments)["changed"] is False


def test_absent_restores_the_file_from_its_record(tmp_path: Path) -> None:
    path, record = tmp_path / "daemon.json", str(tmp_path / "record.json")
    path.write_text('{ "bridge":"none" }')
    assert call(tmp_path, {"settings": SETTINGS, "record": record})["changed"]
    assert call(tmp_path, {"state": "absent", "record": record})["changed"]
    assert path.read_text() == '{ "bridge":"none" }'
    assert not Path(record).exists()


def test_backup_has_the_former_text(tmp_path: Path) -> None:
    (tmp_path / "daemon.json").write_text("{}")
    result = call(tmp_path, {"settings": SETTINGS, "backup": True})
    assert Path(result["backup_file"]).read_text() == "{}"
    assert "backup_file" not in call(tmp_path, {"settings": SETTINGS, "backup": True})


def test_invalid_json_names_line_and_column(tmp_path: Path) -> None:
    text = '{\n    "runtimes": {}\n    "default-shm-size": "2G"\n}\n'
    path = tmp_path / "daemon.json"
    path.write_text(text)
    result = call(tmp_path, {"settings": SETTINGS})
    assert result["failed"]
    assert (result["line"], result["column"]) == (3, 5)
    assert result["msg"].startswith(f"{path}: not valid JSON: line 3, column 5: ")
    assert path.read_text() == text


# columns: arguments of the module; expected words of the message
BAD_ARGUMENTS = [
    ({"remove": [3]}, "expected a key or a list of keys"),
    ({"remove": [[]]}, "expected a key or a list of keys"),
    ({"settings": {"a": None}}, 'the setting "a" has no value'),
    ({"settings": {"default-runtime": "nosuch"}}, "does not define"),
    ({"settings": {"runtimes": {"x": {"path": "/nowhere"}}}}, "no program"),
    ({"restart": "sometimes"}, "value of restart must be one of"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_ARGUMENTS)
def test_invalid_arguments_write_no_file(tmp_path: Path, arguments: dict, words: str) -> None:
    result = call(tmp_path, arguments)
    assert result["failed"]
    assert words in result["msg"]
    assert not (tmp_path / "daemon.json").exists()
