# SPDX-License-Identifier: Apache-2.0
"""Tests tools/words.py, which collects comments, docstrings and messages of random files into a sheet, so that a reader
can judge whether they are clear. Tests which texts are taken from each kind of file, and that the same seed always
selects the same files.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "words.py"


@pytest.fixture(scope="module")
def words() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vgpu_words_tool", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PYTHON = '''# SPDX-License-Identifier: Apache-2.0
"""What the file is."""
# One reason,
# on two lines.
def take(gpu):
    """Take it."""
    raise ValueError(f"GPU {gpu} is not there")  # never zero
def test_it_works():
    assert "a_key" and "two words"
'''
C = """/* SPDX-License-Identifier: Apache-2.0 */
/* One reason,
 * on two lines. */
int x; // short
f("no such GPU", '"');
"""
YAML = """---
# Why so.
- name: Take the GPU
  assert:
    fail_msg: ["no such GPU", "look again"]
  when: a and b and c
"""

# columns: name of a file, its source; expected texts as (line, kind, words)
FILES = [
    (
        "a.py",
        PYTHON,
        [
            (2, "docstring of module", "What the file is."),
            (3, "comment", "One reason, on two lines."),
            (6, "docstring of take", "Take it."),
            (7, "comment", "never zero"),
            (7, "message", "GPU {} is not there"),
            (8, "test", "test_it_works"),
        ],
    ),
    (
        "a.c",
        C,
        [(2, "comment", "One reason, on two lines."), (4, "comment", "short"), (5, "message", "no such GPU")],
    ),
    (
        "a.yml",
        YAML,
        [
            (2, "comment", "Why so."),
            (3, "name", "Take the GPU"),
            (5, "fail_msg", "look again"),
            (5, "fail_msg", "no such GPU"),
        ],
    ),
    (
        "a.sh",
        '#!/bin/sh\n# Why so.\necho "no such GPU" >&2\nx="a b c"\n',
        [(2, "comment", "Why so."), (3, "message", "no such GPU")],
    ),
    (
        "markers.py",
        "# fmt: skip\nx = 1  # noqa: E402, F401\ny = 2  # noqa: F401  # pylint: disable=unused-import\n"
        "z = 3  # type: ignore[attr-defined]\n# noqa: E711 compares three values\n",
        [(5, "comment", "noqa: E711 compares three values")],
    ),
    (
        "marker.sh",
        "#!/bin/sh\n# shellcheck disable=SC2086\n# shellcheck disable=SC2046 # a list of words\n",
        [(3, "comment", "shellcheck disable=SC2046 # a list of words")],
    ),
    ("a.md", "# Head\n\nOne\nparagraph.\n\n```\ncode here now\n```\n\n    code\n", [(3, "text", "One paragraph.")]),
    ("b.py", "", []),
]


@pytest.mark.parametrize(("name", "source", "found"), FILES, ids=[one[0] for one in FILES])
def test_texts_are_extracted_by_file_type(
    words: ModuleType, name: str, source: str, found: list[tuple[int, str, str]]
) -> None:
    assert [tuple(one) for one in words.texts(name, source)] == found


def test_long_texts_and_files_are_cut(words: ModuleType) -> None:
    source = "".join(f"# {'word ' * 200}\nx = {n}\n" for n in range(80))
    found = words.texts("a.py", source)
    assert len(found) == words.MOST_TEXTS
    assert all(len(one.words) <= words.MOST_CHARACTERS + 2 and one.words.endswith(" …") for one in found)


def repository(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# Reason of {name} here.\n")
    (folder / "empty.py").write_text("")
    (folder / "untracked.py").write_text("# Not in the sheet.\n")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "--", "empty.py", *names], cwd=folder, check=True)
    return folder


def files_of(sheet: str) -> list[str]:
    return re.findall(r"^## \d+\. (\S+)$", sheet, re.M)


def test_same_seed_gives_the_same_sheet(words: ModuleType, tmp_path: Path) -> None:
    names = [f"{n}.py" for n in range(40)]
    root = repository(tmp_path, [*names, "changelogs/a.yml"])
    sheet = words.sheet(root, "7", 25)
    assert sheet == words.sheet(root, "7", 25)
    chosen = files_of(sheet)
    assert len(set(chosen)) == 25 and set(chosen) <= set(names)
    assert chosen != files_of(words.sheet(root, "8", 25))
    assert sheet.count("\nGrade:\n") == 25
    with pytest.raises(ValueError, match="expected 41 files with words, found 40"):
        words.sheet(root, "7", 41)


def test_new_file_does_not_change_the_order_of_others(words: ModuleType) -> None:
    names = [f"{n}.py" for n in range(40)]
    assert [one for one in words.drawn([*names, "new.py"], "7") if one != "new.py"] == words.drawn(names, "7")


def test_command_prints_a_sheet_of_this_repository() -> None:
    command = [sys.executable, str(TOOL), "20261126"]
    runs = [subprocess.run(command, capture_output=True, text=True, check=False) for _time in range(2)]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert len(files_of(runs[0].stdout)) == 25
    assert all((ROOT / one).is_file() for one in files_of(runs[0].stdout))
