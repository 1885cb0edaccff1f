# SPDX-License-Identifier: Apache-2.0
"""Tests that tools/function_size.py refuses functions of more than 60 lines or more than 6 parameters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(*folders: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "function_size.py"), *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def body(lines: int) -> str:
    """Returns the source of a function that has this number of lines in total."""
    return "def long():\n" + "    pass\n" * (lines - 1)


# columns: label, source of a function; expected fault ("": allowed). self is not counted as a parameter.
CASES = [
    ("60 lines", body(60), ""),
    ("61 lines", body(61), ":1 long 61/60 lines"),
    ("61 lines, async, below a decorator", "@one\nasync " + body(61), ":2 long 61/60 lines"),
    ("6 parameters", "def f(a, b, c, d, e, f): ...\n", ""),
    ("7 parameters", "def f(a, b, c, d, e, f, g): ...\n", ":1 f 7/6 parameters"),
    ("6 and self", "class C:\n    def f(self, a, b, c, d, e, f): ...\n", ""),
    ("7 and self", "class C:\n    def f(self, a, b, c, d, e, f, g): ...\n", ":2 f 7/6 parameters"),
    ("by position and by name", "def f(a, /, b, *, c, d, e, f, g=1): ...\n", ":1 f 7/6 parameters"),
    ("any number counts", "def f(a, b, c, d, e, *f, **g): ...\n", ":1 f 7/6 parameters"),
    ("in another function", "def f():\n    def g(a, b, c, d, e, f, g): ...\n", ":2 g 7/6 parameters"),
]


@pytest.mark.parametrize(("source", "fault"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_long_functions_are_refused(tmp_path: Path, source: str, fault: str) -> None:
    file = tmp_path / "deep" / "planted.py"
    file.parent.mkdir()
    file.write_text(source)
    status, text = run(tmp_path)
    if fault:
        assert (status, text) == (1, f"{file}{fault}\n")
    else:
        assert status == 0, text


def test_folder_without_a_file_is_a_fault(tmp_path: Path) -> None:
    assert run(tmp_path) == (2, f"{tmp_path}: expected Python files, found none\n")
    assert run()[0] == 2


def test_node_programs_pass() -> None:
    source = ROOT / "native" / "plugin" / "src"
    status, text = run(source / "vgpu_plugin", source / "vgpu_scheduler")
    assert status == 0, text
