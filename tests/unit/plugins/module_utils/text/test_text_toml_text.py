# SPDX-License-Identifier: Apache-2.0
"""Tests changes of single keys in TOML texts, which must keep all other lines and comments. Python's tomllib checks
every result; the tested code does not use it, because it also runs on nodes whose Python is too old for it.
"""

from __future__ import annotations

import string

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.text import toml_text
from ansible_collections.vgpu.fleet.plugins.module_utils.text.toml_text import TomlError
from hypothesis import given
from hypothesis import strategies as st

# tomllib exists from Python 3.11 on
tomllib = pytest.importorskip("tomllib")

# the configuration file of the NVIDIA container toolkit, as nvidia-ctk 1.17 writes it
TOOLKIT = """\
#accept-nvidia-visible-devices-as-volume-mounts = false
#accept-nvidia-visible-devices-envvar-when-unprivileged = true
disable-require = false
supported-driver-capabilities = "compat32,compute,display,graphics,ngx,utility,video"
#swarm-resource = "DOCKER_RESOURCE_GPU"

[nvidia-container-cli]
#debug = "/var/log/nvidia-container-toolkit.log"
environment = []
#no-cgroups = false
load-kmods = true # theirs

[nvidia-container-runtime]
log-level = "info"
mode = "auto"
runtimes = [
  "runc",  # ["not", "nested"]
  "crun",
]

[nvidia-container-runtime.modes.cdi]
annotation-prefixes = ["cdi.k8s.io/"]
"""
UNPRIVILEGED = "accept-nvidia-visible-devices-envvar-when-unprivileged"
VOLUMES = "accept-nvidia-visible-devices-as-volume-mounts"

# columns: text, keys to set; expected added lines, removed lines, number of changes
MERGES = [
    (TOOLKIT, {UNPRIVILEGED: False, VOLUMES: True}, {f"{UNPRIVILEGED} = false", f"{VOLUMES} = true"}, set(), 2),
    (TOOLKIT, {"disable-require": False}, set(), set(), 0),
    (TOOLKIT, {"disable-require": True}, {"disable-require = true"}, {"disable-require = false"}, 1),
    (TOOLKIT, {"nvidia-container-cli.no-cgroups": True}, {"no-cgroups = true"}, set(), 1),
    (
        TOOLKIT,
        {"nvidia-container-cli.load-kmods": False},
        {"load-kmods = false  # theirs"},
        {"load-kmods = true # theirs"},
        1,
    ),
    (
        TOOLKIT,
        {"nvidia-container-runtime.runtimes": ["runc"]},
        {'runtimes = ["runc"]'},
        {"runtimes = [", '  "runc",  # ["not", "nested"]', '  "crun",', "]"},
        1,
    ),
    (TOOLKIT, {"nvidia-container-runtime.mode": "cdi"}, {'mode = "cdi"'}, {'mode = "auto"'}, 1),
    (TOOLKIT, {"features.x": 1}, {"", "[features]", "x = 1"}, set(), 1),
    ("", {VOLUMES: True}, {f"{VOLUMES} = true"}, set(), 1),
    (None, {"a.b": "x"}, {"[a]", 'b = "x"'}, set(), 1),
    ("# head\n[t]\nx = 1\n", {"y": 2}, {"y = 2"}, set(), 1),
    ('s = """\n[not a table]\nx = 9\n"""\n[t]\n', {"t.x": 1}, {"x = 1"}, set(), 1),
    ('t.x = "#" # c\n', {"t.x": "y"}, {'t.x = "y"  # c'}, {'t.x = "#" # c'}, 1),
    ("[[many]]\nx = 1\n[[many]]\nx = 2\n", {"y": 3}, {"y = 3"}, set(), 1),
    ("a = 1", {"b": 2}, {"b = 2"}, set(), 1),
]


def at(document: dict, key: str):
    for part in toml_text.split_key(key):
        document = document[part]
    return document


def strip(document, keys):
    """Returns the document without these keys, and without tables that become empty."""
    result = {}
    for name, value in document.items():
        inner = [key.partition(".")[2] for key in keys if key.partition(".")[0] == name]
        if "" in inner:
            continue
        if isinstance(value, dict):
            value = strip(value, inner)
            if not value:
                continue
        result[name] = value
    return result


@pytest.mark.parametrize(("text", "wanted", "come", "gone", "changes"), MERGES)
def test_setting_keys_changes_no_other_line(text, wanted, come, gone, changes):
    after, told = toml_text.merge(text, wanted)
    assert len(told) == changes
    before_document, document = tomllib.loads(text or ""), tomllib.loads(after)
    assert {key: at(document, key) for key in wanted} == wanted
    assert strip(document, wanted) == strip(before_document, wanted)
    before_lines, lines = (text or "").split("\n"), after.split("\n")
    assert {line for line in lines if line not in before_lines} - {""} == come - {""}
    assert {line for line in before_lines if line not in lines} == gone
    assert toml_text.merge(after, wanted) == (after, [])


def test_new_key_follows_the_comment_with_its_default():
    lines = toml_text.merge(TOOLKIT, {VOLUMES: True})[0].split("\n")
    assert lines[:2] == [f"#{VOLUMES} = false", f"{VOLUMES} = true"]


# columns: text that is invalid or cannot be changed by lines; expected words of the refusal
REFUSED = [
    ("x = 1\nx = 2\n", "line 2: x is set twice"),
    ("[t]\n[t]\n", "line 2: the table .t. occurs twice"),
    ('x = "open\n', "line 1: the text has no closing"),
    ("x = [1,\n", "line 1: the value does not end"),
    ("what is this\n", "line 1: expected a key, a table or a comment"),
    ("t = {x = 1}\n", "write it as a table"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_invalid_text_is_refused(text, words):
    with pytest.raises(TomlError, match=words):
        toml_text.merge(text, {"t.y": 1})


@pytest.mark.parametrize("key", [UNPRIVILEGED, "nvidia-container-cli.no-cgroups", "features.x"])
def test_setting_and_removing_keys_restores_the_text(key):
    after, _changes = toml_text.merge(TOOLKIT, {key: True})
    assert tomllib.loads(toml_text.remove(after, key)).get("disable-require") is False
    if not key.startswith("features"):
        assert toml_text.remove(after, key) == TOOLKIT
    assert toml_text.remove(TOOLKIT, key) == TOOLKIT


NAMES = st.text(string.ascii_lowercase + "-_", min_size=1, max_size=6)
PLAIN = st.one_of(
    st.booleans(), st.integers(-99, 99), st.text(string.printable.replace("\x0b", "").replace("\x0c", ""))
)
TABLES = st.dictionaries(NAMES, st.one_of(PLAIN, st.lists(st.integers(0, 9), max_size=3)), max_size=4)


@given(top=TABLES, tables=st.dictionaries(NAMES, TABLES, max_size=3), name=NAMES, value=PLAIN)
def test_setting_a_key_keeps_the_rest_of_any_file(top, tables, name, value):
    lines = [f"{key} = {toml_text.literal(one)} # c" for key, one in top.items()]
    for table, entries in tables.items():
        if table not in top:
            lines += ["", f"[{table}]", *(f"{key} = {toml_text.literal(one)}" for key, one in entries.items())]
    text = "\n".join(lines) + "\n"
    key = f"{next(iter(tables), 'new')}.{name}"
    if key.partition(".")[0] in top:
        return
    after, _changes = toml_text.merge(text, {key: value})
    assert at(tomllib.loads(after), key) == value
    assert strip(tomllib.loads(after), [key]) == strip(tomllib.loads(text), [key])
    assert toml_text.merge(after, {key: value}) == (after, [])
