# SPDX-License-Identifier: Apache-2.0
"""Tests the rollback of daemon.json by the record, which lists the changes of our runs. If no other program changed the
file, the rollback restores the original bytes; otherwise it removes only our keys.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import daemon_json, daemon_record
from hypothesis import given
from hypothesis import strategies as st

NVIDIA = {
    "default-runtime": "nvidia",
    "runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime"}},
    "default-shm-size": "2G",
}


def applied(text: str | None, *desired: dict) -> tuple[str | None, dict]:
    """Returns the text after these settings were applied in order, and the record of the changes. The record is
    converted to JSON and back, because a host stores it as a JSON file."""
    record = None
    for settings in desired:
        new, changes = daemon_json.merge(text, settings)
        record = json.loads(json.dumps(daemon_record.update(record, text, new, changes)))
        text = new
    assert record is not None
    return text, record


# texts of daemon.json before the first run (None: no file)
ORIGINALS = [
    None,
    "",
    "{}",
    "\ufeff{}",
    '{"bridge":"none"}',
    '{\n\t"default-runtime" : "kata",\n\t"runtimes": {"kata": {"path": "/kata"}}\n}',
    '{"default-shm-size": "64M", "runtimes": {"nvidia": {"path": "/old", "runtimeArgs": ["-d"]}}}',
    json.dumps(NVIDIA),
]


@pytest.mark.parametrize("original", ORIGINALS)
def test_unchanged_file_is_restored_exactly(original: str | None) -> None:
    text, record = applied(original, NVIDIA)
    assert daemon_record.undo(text, record)[0] == original


@pytest.mark.parametrize("original", ORIGINALS)
def test_rollback_after_several_runs(original: str | None) -> None:
    text, record = applied(original, {"default-runtime": "runc"}, NVIDIA, {"default-shm-size": "4G", "debug": True})
    assert daemon_record.undo(text, record)[0] == original


@pytest.mark.parametrize("original", ORIGINALS)
def test_run_killed_before_the_write_is_completed(original: str | None) -> None:
    _text, record = applied(original, NVIDIA)
    undone, changes = daemon_record.undo(original, record)
    assert undone == original
    assert changes == []
    # The interrupted run wrote the record but not the file. The next run writes the file, and a rollback still restores
    # the original text.
    new, changes = daemon_json.merge(original, NVIDIA)
    again = daemon_record.update(record, original, new, changes)
    assert daemon_record.undo(new, again)[0] == original


# columns: original text, later change by another program; expected content after the rollback
TOUCHED = [
    (None, {"debug": True}, {"debug": True}),
    ("{}", {"debug": True}, {"debug": True}),
    ('{"bridge": "none"}', {"bridge": "br0"}, {"bridge": "br0"}),
    # The other program gave one of our keys a new value, which must stay.
    ("{}", {"default-shm-size": "8G"}, {"default-shm-size": "8G"}),
    # The other program added a second runtime. The rollback removes only our runtime.
    ("{}", {"runtimes": {"kata": {"path": "/k"}}}, {"runtimes": {"kata": {"path": "/k"}}}),
    ('{"default-runtime": "kata"}', {"debug": True}, {"default-runtime": "kata", "debug": True}),
]


@pytest.mark.parametrize(("original", "theirs", "left"), TOUCHED)
def test_rollback_keeps_later_changes_of_other_programs(original: str | None, theirs: dict, left: dict) -> None:
    text, record = applied(original, NVIDIA)
    text = daemon_json.merge(text, theirs)[0]
    undone, changes = daemon_record.undo(text, record)
    assert undone is not None
    assert json.loads(undone) == left
    assert changes


def test_rollback_after_changes_by_both_programs() -> None:
    text, record = applied('{"a": 1}', NVIDIA)
    text = daemon_json.merge(text, {"theirs": 1})[0]
    new, changes = daemon_json.merge(text, {"default-shm-size": "4G"})
    record = daemon_record.update(record, text, new, changes)
    assert json.loads(daemon_record.undo(new, record)[0]) == {"a": 1, "theirs": 1}


SMALLER = {key: value for key, value in NVIDIA.items() if key != "default-shm-size"}
# columns: original text, change by another program after the first run, settings of the second run, keys that it
# removes; expected content after it
NO_LONGER = [
    (None, {}, SMALLER, [], SMALLER),
    ('{"bridge": "none"}', {}, SMALLER, [], {"bridge": "none", **SMALLER}),
    ('{"default-shm-size": "64M"}', {}, SMALLER, [], {"default-shm-size": "64M", **SMALLER}),
    # The other program gave our key a new value, or the file already had our value.
    (None, {"default-shm-size": "8G"}, SMALLER, [], {"default-shm-size": "8G", **SMALLER}),
    (json.dumps(NVIDIA), {}, SMALLER, [], NVIDIA),
    (None, {"debug": True}, {}, [], {"debug": True}),
    (None, {}, {"runtimes": {}}, [], {"runtimes": {}}),
    ('{"a": {"b": 1}}', {}, NVIDIA, [("a",)], NVIDIA),
]


@pytest.mark.parametrize(("original", "theirs", "second", "remove", "left"), NO_LONGER)
def test_recorded_key_that_is_no_longer_desired_is_reverted(
    original: str | None, theirs: dict, second: dict, remove: list, left: dict
) -> None:
    text, record = applied(original, NVIDIA)
    text = daemon_json.merge(text, theirs)[0]
    new, changes = daemon_record.merge(text, record, second, remove)
    assert daemon_json.parse(new) == left
    record = daemon_record.update(record, text, new, changes)
    assert daemon_record.merge(new, record, second, remove) == (new, [])
    if not theirs:
        assert daemon_record.undo(new, record)[0] == original


# columns: original text; whether a run writes the record between the change by another program and our next setting
AGAIN = [(None, True), (None, False), ('{"default-shm-size": "64M"}', True), ('{"default-shm-size": "64M"}', False)]


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize(("original", "at_once"), AGAIN)
def test_value_of_another_program_between_two_settings_of_a_key_stays(
    original: str | None, at_once: bool, absent: bool
) -> None:
    text, record = applied(original, NVIDIA)
    theirs = {"default-shm-size": "8G"}
    steps = [theirs, SMALLER] if at_once else [SMALLER, theirs, SMALLER]
    for settings in [*steps, NVIDIA, *([] if absent else [SMALLER])]:
        if settings is theirs:
            text = daemon_json.merge(text, theirs)[0]
            continue
        new, changes = daemon_record.merge(text, record, settings)
        record = json.loads(json.dumps(daemon_record.update(record, text, new, changes)))
        text = new
    left = daemon_record.undo(text, record)[0] if absent else text
    assert daemon_json.parse(left) == {**theirs, **({} if absent else SMALLER)}


def test_removed_key_returns_if_its_removal_is_no_longer_desired() -> None:
    new, changes = daemon_record.merge('{"a": {"b": 1}}', None, NVIDIA, [("a",)])
    record = daemon_record.update(None, '{"a": {"b": 1}}', new, changes)
    assert daemon_json.parse(daemon_record.merge(new, record, NVIDIA)[0]) == {"a": {"b": 1}, **NVIDIA}


# columns: text of daemon.json, settings that may be ours; expected text after a rollback without a record
TAKEN_OUT = [
    (None, NVIDIA, None),
    (json.dumps(NVIDIA), NVIDIA, "{}"),
    ('{"default-runtime": "kata"}', NVIDIA, '{"default-runtime": "kata"}'),
    ('{"runtimes": {"nvidia": {"path": "/x"}}}', NVIDIA, '{"runtimes": {"nvidia": {"path": "/x"}}}'),
    ('{"a": 1}', {}, '{"a": 1}'),
]


@pytest.mark.parametrize(("text", "settings", "left"), TAKEN_OUT)
def test_rollback_without_a_record_removes_our_keys(text: str | None, settings: dict, left: str | None) -> None:
    assert daemon_record.take_out(text, settings)[0] == left


KEYS = st.sampled_from(["a", "b", "runtimes", "nvidia"])
VALUES = st.recursive(
    st.one_of(st.integers(0, 3), st.text(max_size=2)),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
DOCUMENTS = st.dictionaries(KEYS, VALUES, max_size=4)


@given(st.one_of(st.none(), DOCUMENTS), st.lists(DOCUMENTS, min_size=1, max_size=3), st.sampled_from([None, 2]))
def test_rollback_of_any_history_restores_the_same_bytes(
    original: dict | None, desired: list, layout: int | None
) -> None:
    before = None if original is None else json.dumps(original, indent=layout)
    text, record = applied(before, *desired)
    assert daemon_record.undo(text, record)[0] == before
