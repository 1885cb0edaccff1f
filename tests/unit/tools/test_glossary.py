# SPDX-License-Identifier: Apache-2.0
"""Tests that words with a private meaning, which a new reader cannot know, do not occur in the product's code: in
names, options, metrics, help texts, messages and comments.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("plugins", "roles", "playbooks", "native", "tools")

# Forbidden word → plain words for it. These words are forbidden in all texts and names of the folders above.
EVERYWHERE = {
    r"wish(es|ed|ing)?": "desired state",
    r"rivals?": "conflicting device plugin",
    r"told": "reported, finding",
    r"anew": "again",
    r"foretells?|foretold|foretelling": "predict",
    r"whoever": "a process that, a user who",
    r"residues?": "unaccounted driver memory",
    r"tall(y|ies|ied)": "per-device counters",
    r"witness(es|ed)?": "process state",
    r"lent|loans?|loaned|borrow(s|ed|er|ers|ing)?": "exported, import reference",
    r"sick(ness)?": "unhealthy, reason",
    r"swept": "collected for release",
    r"wanting": "active",
    r"held[ _]+back": "throttled",
    r"way[ _]+back": "rollback",
    r"(go|goes|going|went|gone)[ _]+round": "bypass",
}
# Words that are forbidden only in comments and docstrings.
IN_COMMENTS = {r"by +itself": "automatically, alone", r"beside": "next to"}
# Exceptions: (file, word) → the reason.
ALLOWED: dict[tuple[str, str], str] = {
    ("plugins/module_utils/config/options.py", "rivals"): "part of the old name of a variable",
}
MOST_ALLOWED = 20

NAMES = re.compile(r"(?<![a-z])(?:" + "|".join(f"(?:{one})" for one in EVERYWHERE) + r")(?![a-z])", re.I)
COMMENTS = re.compile(
    r"(?<![a-z])(?:" + "|".join(f"(?:{one})" for one in [*EVERYWHERE, *IN_COMMENTS]) + r")(?![a-z])", re.I
)
C_PARTS = re.compile(r"(/\*.*?\*/|//[^\n]*)|(\"(?:\\.|[^\"\\\n])*\")|('(?:\\.|[^'\\\n])*')", re.S)


def spaced(text: str) -> str:
    """Returns a text of the same length in which spaces replace line breaks, so that a phrase that is split between two
    lines is found too."""
    return re.sub(r"\s", " ", text)


def words(identifier: str) -> str:
    """Returns an identifier with its words separated by underscores: ``heldBack`` becomes ``held_Back``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", identifier)


def in_python(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, forbidden word) for a Python file."""
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    for one in tokenize.generate_tokens(io.StringIO(text).readline):
        if one.type == tokenize.NAME:
            found = NAMES.finditer(words(one.string))
        elif one.type == tokenize.STRING and one.start not in docstrings:
            found = NAMES.finditer(spaced(one.string))
        elif one.type in (tokenize.STRING, tokenize.COMMENT):
            found = COMMENTS.finditer(spaced(one.string))
        else:
            continue
        for match in found:
            yield one.start[0] + one.string.count("\n", 0, match.start()), match[0]


def in_c(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, forbidden word) for a C file."""
    plain = list(text)
    for part in C_PARTS.finditer(text):
        rule = COMMENTS if part[1] else NAMES
        for match in rule.finditer(spaced(re.sub(r"\n[ \t]*\*", lambda gap: " " * len(gap[0]), part[0]))):
            yield text.count("\n", 0, part.start() + match.start()) + 1, match[0]
        plain[part.start() : part.end()] = [one if one == "\n" else " " for one in part[0]]
    for number, line in enumerate("".join(plain).splitlines(), 1):
        for match in NAMES.finditer(words(line)):
            yield number, match[0]


def in_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, forbidden word) for files with ``#`` comments, such as YAML, Makefiles and shell."""
    for number, line in enumerate(text.splitlines(), 1):
        code, _hash, comment = line.partition("#")
        for match in (*NAMES.finditer(code), *COMMENTS.finditer(comment)):
            yield number, match[0]


READERS = {
    **dict.fromkeys((".py",), in_python),
    **dict.fromkeys((".c", ".h", ".S", ".def", ".proto"), in_c),
    **dict.fromkeys((".yml", ".yaml", ".sh", ".j2", ".txt", ".service", ""), in_lines),
}


def sources() -> list[str]:
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True)
    return [one for one in listed.stdout.split() if Path(one).suffix in READERS and not (ROOT / one).is_symlink()]


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_has_no_forbidden_word(folder: str) -> None:
    found = []
    for name in sources():
        if not name.startswith(folder + "/"):
            continue
        for line, word in READERS[Path(name).suffix]((ROOT / name).read_text()):
            if (name, word.lower()) not in ALLOWED:
                found.append(f"{name}:{line}: {word}")
    assert not found, f"{len(found)} words to replace (see the table in this file):\n" + "\n".join(found)


def test_exceptions_are_few_and_used() -> None:
    assert len(ALLOWED) <= MOST_ALLOWED
    for (name, word), reason in ALLOWED.items():
        assert reason
        assert word in {one.lower() for _line, one in READERS[Path(name).suffix]((ROOT / name).read_text())}, name


# columns: reader of a file type, text with forbidden words; expected (line, word) pairs
@pytest.mark.parametrize(
    ("reader", "text", "found"),
    [
        (in_python, "wish_list = 1\n", [(1, "wish")]),
        (in_python, "def f():\n    '''A\n    rival.'''\n", [(3, "rival")]),
        (in_python, "x = 'it stands beside'  # told\n", [(1, "told")]),
        (in_python, "'''Ends by\nitself.'''\n", [(1, "by itself")]),
        (in_python, "untold = refresh_tallyho = 1\n", []),
        (in_c, "int heldBack; /* goes\n * round */\n", [(1, "goes    round"), (1, "held_Back")]),
        (in_c, 'int lent_mib;\nchar *t = "sick"; // anew\n', [(2, "sick"), (2, "anew"), (1, "lent")]),
        (in_lines, "a: wishes # beside\n", [(1, "wishes"), (1, "beside")]),
    ],
)
def test_forbidden_words_are_found_by_file_type(reader, text: str, found: list[tuple[int, str]]) -> None:
    assert list(reader(text)) == found
