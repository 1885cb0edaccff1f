# SPDX-License-Identifier: Apache-2.0
"""Tests edits of the text of daemon.json: which texts are accepted or refused, what a merge of settings changes, and
which changed keys dockerd applies only after a restart.
"""

from __future__ import annotations

import copy
import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import daemon_json
from ansible_collections.vgpu.fleet.plugins.module_utils.text import json_text
from hypothesis import given
from hypothesis import strategies as st

NVIDIA = {
    "default-runtime": "nvidia",
    "runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime"}},
    "default-shm-size": "2G",
}

# The example of a published guide, which is invalid because a comma is missing.
PUBLISHED = """{
    "default-runtime": "nvidia",
    "runtimes": {
        "nvidia": {
            "path": "/usr/bin/nvidia-container-runtime",
            "runtimeArgs": []
        }
    }
    "default-shm-size": "2G"
}
"""

# columns: text; expected line, column and words of the error
INVALID = [
    (PUBLISHED, 9, 5, 'expected "," or "}" after the value of "runtimes"'),
    ('{"debug": true,}', 1, 16, "a comma stands before the closing bracket"),
    ('{\n  // ours\n  "debug": true\n}', 2, 3, "JSON has no comments"),
    ('{\n  "debug": true # ours\n}', 2, 17, "JSON has no comments"),
    ('{"debug": true, /* x */ "a": 1}', 1, 17, "JSON has no comments"),
    ('{"a": 1,\n "b": 2,\n "a": 3}', 3, 2, 'the key "a" already occurs in line 1'),
    ('{"runtimes": {"x": {"path": "/a", "path": "/b"}}}', 1, 35, 'the key "path"'),
    ("{'a': 1}", 1, 2, "a key in double quotes"),
    ("{a: 1}", 1, 2, "a key in double quotes"),
    ('{"a" 1}', 1, 6, 'expected ":" after the key "a"'),
    ('{"a": tru}', 1, 7, 'a value for the key "a"'),
    ('{"a": True}', 1, 7, 'a value for the key "a"'),
    ('{"a": NaN}', 1, 7, 'a value for the key "a"'),
    ('{"a": 01}', 1, 8, 'expected "," or "}"'),
    ('{"a": .5}', 1, 7, "a value"),
    ('{"a": [1 2]}', 1, 10, 'expected "," or "]" after item 1'),
    ('{"a": [1, 2', 1, 12, "the text ends here"),
    ('{"a": "x', 1, 7, "unterminated string"),
    ('{"a": "x\ny"}', 1, 9, "control character"),
    ('{"a": "\\q"}', 1, 8, "escape"),
    ('{"a": 1', 1, 8, "the text ends here"),
    ('{"a": 1}}', 1, 9, "end of the text"),
    ('{"a": 1} {"b": 2}', 1, 10, "end of the text"),
    ("[1]", 1, 1, "expected an object"),
    ("null", 1, 1, "expected an object"),
    ('"text"', 1, 1, "expected an object"),
    ('{"a": ' + "[" * 200 + "]" * 200 + "}", 1, 107, "nested deeper"),
]


@pytest.mark.parametrize(("text", "line", "column", "words"), INVALID)
def test_invalid_text_is_refused_with_its_position(text: str, line: int, column: int, words: str) -> None:
    with pytest.raises(daemon_json.DaemonJsonError) as caught:
        daemon_json.merge(text, NVIDIA)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert words in str(caught.value)


def test_error_shows_the_line_and_marks_the_column() -> None:
    with pytest.raises(daemon_json.DaemonJsonError) as caught:
        daemon_json.parse(PUBLISHED.replace('    "default-shm', '\t"default-shm'))
    assert str(caught.value).splitlines()[1:] == ['\t"default-shm-size": "2G"', "\t^"]


# dockerd reads each of these texts as a configuration without keys.
@pytest.mark.parametrize("text", [None, "", " \n", "\ufeff", "{}", "\ufeff{}", "{ }\n"])
def test_text_without_keys_is_accepted(text: str | None) -> None:
    assert daemon_json.parse(text) == {}
    merged, changes = daemon_json.merge(text, NVIDIA)
    assert merged is not None
    # The result has no byte order mark, because dockerd 20.10 does not start with one.
    assert json.loads(merged) == NVIDIA
    assert [(change.path[0], change.action) for change in changes] == [(key, "add") for key in NVIDIA]
    assert daemon_json.merge(text, {}) == (text, [])


def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(daemon_json.DaemonJsonError, match="line 2: byte 0xff is not UTF-8"):
        daemon_json.decode(b'{\n"a": "\xff"}')
    assert daemon_json.decode(None) is None


# columns: text before, settings, keys to remove; expected text. Every other byte must stay.
TEXTS = [
    ('{"a": 1}', {"b": 2}, (), '{"a": 1, "b": 2}'),
    ('{"a":1e400,"b":"\\u00e9"}', {"b": "x"}, (), '{"a":1e400,"b":"x"}'),
    ('{\n  "a": 1\n}\n', {"b": {"c": [1]}}, (), '{\n  "a": 1,\n  "b": {\n    "c": [\n      1\n    ]\n  }\n}\n'),
    ('{\n\t"a": {}\n}', {"a": {"b": True}}, (), '{\n\t"a": {\n\t\t"b": true\n\t}\n}'),
    ('{\r\n  "a": 1\r\n}', {"b": 2}, (), '{\r\n  "a": 1,\r\n  "b": 2\r\n}'),
    ('{"a": 1, "b": 2, "c": 3}', {}, [("a",)], '{"b": 2, "c": 3}'),
    ('{"a": 1, "b": 2, "c": 3}', {}, [("b",)], '{"a": 1, "c": 3}'),
    ('{"a": 1, "b": 2, "c": 3}', {}, [("c",)], '{"a": 1, "b": 2}'),
    ('{"a": {"b": 1}}', {}, [("a", "b")], '{"a": {}}'),
    ('{"a": {"b": 1}}', {}, [("a", "x"), ("y",), ("a", "b", "c")], '{"a": {"b": 1}}'),
    ('{"a": 1}', {"a": {"b": 2}}, (), '{"a": {"b": 2}}'),
    ('{"a": {"b": 2}}', {"a": 1}, (), '{"a": 1}'),
    ('{"a": [1, 2]}', {"a": [2, 1]}, (), '{"a": [2, 1]}'),
    ('{"a": {"x": {"path": "/p", "runtimeArgs": ["-v"]}}}', {"a": {"x": {"path": "/q"}}}, (), None),
    ('{"a": 1}', {"ключ": "значение"}, (), '{"a": 1, "ключ": "значение"}'),
    ('{"a": 1}', {"a": True}, (), '{"a": true}'),
    ('{"a": 1}', {"a": 1.0}, (), '{"a": 1.0}'),
    ('{"a": 1}', {"io.containerd.x/y": 1}, (), '{"a": 1, "io.containerd.x/y": 1}'),
]


@pytest.mark.parametrize(("before", "settings", "remove", "after"), TEXTS)
def test_merge_changes_only_the_given_keys(before: str, settings: dict, remove: list, after: str | None) -> None:
    if after is None:
        after = before.replace("/p", "/q")
    merged, _changes = daemon_json.merge(before, settings, remove)
    assert merged == after
    assert daemon_json.merge(merged, settings, remove) == (merged, [])


def test_settings_without_a_value_are_refused() -> None:
    with pytest.raises(daemon_json.DaemonJsonError, match=r'"runtimes\.nvidia" has no value'):
        daemon_json.merge("{}", {"runtimes": {"nvidia": None}})


# columns: text before, settings, keys to remove; expected keys that only a restart applies
RESTARTS = [
    ("{}", NVIDIA, (), []),
    ("{}", {"live-restore": True, "debug": True, "features": {"buildkit": True}}, (), []),
    ("{}", {"log-driver": "local"}, (), ["log-driver"]),
    ("{}", {"data-root": "/d", "debug": True}, (), ["data-root"]),
    ("{}", {"exec-opts": ["native.cgroupdriver=systemd"]}, (), ["exec-opts"]),
    ('{"features": {"buildkit": true}}', {"features": {"cdi": True}}, (), ["features.cdi"]),
    ("{}", {"features": {"cdi": True}}, (), ["features"]),
    # A reload keeps the value of a key that was removed from the file.
    ('{"default-runtime": "nvidia"}', {}, [("default-runtime",)], ["default-runtime"]),
    ('{"runtimes": {"a": {"path": "/a"}}}', {}, [("runtimes",)], ["runtimes"]),
    # A reload applies the whole object if the object stays in the file.
    ('{"runtimes": {"a": {"path": "/a"}}}', {}, [("runtimes", "a")], []),
    ('{"storage-opts": ["a"]}', {"storage-opts": ["b"]}, (), ["storage-opts"]),
    ('{"storage-opts": ["a"]}', {"storage-opts": ["a"]}, (), []),
]


@pytest.mark.parametrize(("before", "settings", "remove", "keys"), RESTARTS)
def test_keys_that_need_a_restart(before: str, settings: dict, remove: list, keys: list) -> None:
    assert daemon_json.needs_restart(daemon_json.merge(before, settings, remove)[1]) == keys


INFO = {
    "DefaultRuntime": "nvidia",
    "Runtimes": {
        "runc": {"path": "runc"},
        "io.containerd.runc.v2": {"path": "runc"},
        "nvidia": {"path": "/usr/bin/nvidia-container-runtime"},
    },
    "LiveRestoreEnabled": False,
}
FRESH = {"DefaultRuntime": "runc", "Runtimes": {"runc": {"path": "runc"}}, "LiveRestoreEnabled": False}
ADDED = ["dockerd", "--add-runtime", "nvidia=/usr/bin/nvidia-container-runtime", "--default-runtime=nvidia"]

# columns: the daemon's info, content of daemon.json, command line; expected (unapplied key, the action that applies it)
LACKS = [
    (INFO, NVIDIA, (), []),
    (FRESH, {}, (), []),
    (FRESH, NVIDIA, (), [("runtimes.nvidia", "reload"), ("default-runtime", "reload")]),
    (INFO, {"runtimes": {}}, (), [("runtimes.nvidia", "reload"), ("default-runtime", "restart")]),
    (INFO, {}, (), [("runtimes.nvidia", "restart"), ("default-runtime", "restart")]),
    (INFO, {}, ADDED, []),
    (INFO, {**NVIDIA, "live-restore": True}, (), [("live-restore", "reload")]),
    (INFO, {**NVIDIA, "default-runtime": "runc"}, (), [("default-runtime", "reload")]),
    (INFO, {**NVIDIA, "runtimes": {"nvidia": {"path": "/opt/other"}}}, (), [("runtimes.nvidia", "reload")]),
    (
        INFO,
        {**NVIDIA, "runtimes": {**NVIDIA["runtimes"], "x": {"runtimeType": "io.x"}}},
        (),
        [("runtimes.x", "reload")],
    ),
]


@pytest.mark.parametrize(("info", "document", "argv", "expected"), LACKS)
def test_keys_that_the_daemon_has_not_applied(info: dict, document: dict, argv: list, expected: list) -> None:
    assert [(one.key, one.apply) for one in daemon_json.unapplied(info, document, argv)] == expected


# --- property tests: random documents and settings
# -------------------------------------------------------------------------------------

KEYS = st.one_of(st.sampled_from(["runtimes", "a", "b", "nvidia", "path"]), st.text(min_size=1, max_size=4))
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=6)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(KEYS, VALUES, max_size=5)
SETTINGS = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.text(max_size=6), st.lists(SCALARS, max_size=2)),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
LAYOUTS = st.sampled_from([None, 0, 1, 4, "\t"])
PATHS = st.lists(st.lists(KEYS, min_size=1, max_size=3).map(tuple), max_size=3)


def merged_by_definition(document: dict, settings: dict) -> dict:
    result = copy.deepcopy(document)
    for key, value in settings.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged_by_definition(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def without(document: dict, path: tuple) -> dict:
    result = copy.deepcopy(document)
    node = result
    for key in path[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(path[-1], None)
    return result


def written(document: dict, layout: object, escaped: bool, newline: str) -> str:
    # Strings contain no raw line breaks, so every line break belongs to the layout.
    return json.dumps(document, indent=layout, ensure_ascii=escaped).replace("\n", newline)


@given(
    DOCUMENTS,
    st.dictionaries(KEYS, SETTINGS, max_size=4),
    PATHS,
    LAYOUTS,
    st.booleans(),
    st.sampled_from(["\n", "\r\n"]),
)
def test_merge_of_any_document(
    document: dict, settings: dict, remove: list, layout: object, escaped: bool, newline: str
) -> None:
    text = written(document, layout, escaped, newline)
    expected = document
    for path in remove:
        expected = without(expected, path)
    expected = merged_by_definition(expected, settings)
    merged, changes = daemon_json.merge(text, settings, remove)
    assert merged is not None
    # The standard library's json reads the resulting text.
    result = json.loads(merged)
    assert json_text.same(result, expected)
    assert bool(changes) == (not json_text.same(document, expected))
    if not changes:
        assert merged == text
    kept = [key for key in document if key in result]
    assert [key for key in result if key in document] == kept or any(path[0] in settings for path in remove)
    assert daemon_json.merge(merged, settings) == (merged, [])


@given(DOCUMENTS, st.text(min_size=1, max_size=5), SETTINGS, LAYOUTS)
def test_removed_new_key_restores_the_same_bytes(document: dict, key: str, value: object, layout: object) -> None:
    document.pop(key, None)
    if not document:
        return
    text = json.dumps(document, indent=layout)
    merged, _changes = daemon_json.merge(text, {key: value})
    assert daemon_json.merge(merged, {}, [(key,)])[0] == text


@given(st.text(max_size=40))
def test_reads_what_the_standard_library_reads(text: str) -> None:
    def strict(pairs: list) -> dict:
        if len({key for key, _value in pairs}) != len(pairs):
            raise ValueError("twice")
        return dict(pairs)

    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        expected = json.loads(text, object_pairs_hook=strict, parse_constant=refuse)
    except ValueError:
        with pytest.raises(json_text.JsonTextError):
            json_text.read(text)
    else:
        assert json_text.same(json_text.read(text).value, expected)
