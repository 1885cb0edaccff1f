# SPDX-License-Identifier: Apache-2.0
"""Tests the version that the controller calculates for a build: it is a digest of the source files, so equal sources
have equal versions and every change of a source changes the version.
"""

from __future__ import annotations

import json

import pytest
from ansible.errors import AnsibleLookupError
from ansible_collections.vgpu.fleet.plugins.lookup import source_version


@pytest.fixture
def root(tmp_path):
    for path, text in {"galaxy.yml": "version: 1.2.3\n", "src/a.c": "a", "src/deep/b.c": "b"}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def digest(root):
    return source_version.digest(str(root), source_version.sources(str(root), ["src"]))


def test_equal_sources_have_equal_versions(root):
    assert source_version.sources(str(root), ["src"]) == ["src/a.c", "src/deep/b.c"]
    assert digest(root) == digest(root)


CHANGES = [
    (lambda root: (root / "src/a.c").write_text("A"), True),
    (lambda root: (root / "src/c.c").write_text(""), True),
    (lambda root: (root / "src/a.c").rename(root / "src/z.c"), True),
    # The two files together have the same bytes as before; only the boundary between the files moved.
    (lambda root: ((root / "src/a.c").write_text("ab"), (root / "src/deep/b.c").write_text("")), True),
    (lambda root: (root / "src/a.o").write_text("built"), False),
    (lambda root: (root / "src/README.md").write_text("words"), False),
    (lambda root: ((root / "src/__pycache__").mkdir(), (root / "src/__pycache__/a.py").write_text("x")), False),
    (lambda root: ((root / "src/build").mkdir(), (root / "src/build/x.c").write_text("x")), False),
    (lambda root: (root / "src/.a.c.swp").write_text("x"), False),
]


@pytest.mark.parametrize(("change", "differs"), CHANGES)
def test_only_a_source_changes_the_version(root, change, differs):
    before = digest(root)
    change(root)
    assert (digest(root) != before) is differs


def test_version_reads_the_collection_version(root):
    assert source_version.collection_version(str(root)) == "1.2.3"
    # An installed collection has MANIFEST.json instead of galaxy.yml.
    (root / "galaxy.yml").unlink()
    (root / "MANIFEST.json").write_text(json.dumps({"collection_info": {"version": "4.5.6"}}))
    assert source_version.collection_version(str(root)) == "4.5.6"


def test_missing_source_is_an_error(root):
    with pytest.raises(AnsibleLookupError, match='no "native/nothing"'):
        source_version.sources(str(root), ["native/nothing"])


def test_run_keeps_one_version_while_sources_change(tmp_path):
    answers = iter(["first", "second", "third"])
    asked = [source_version.settled(str(tmp_path), key, lambda: next(answers)) for key in ("a", "a", "b", "a")]
    assert asked == ["first", "first", "second", "first"]
    assert not [path for path in tmp_path.iterdir() if "." in path.name]  # no partly written file stays in the folder
