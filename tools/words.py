# SPDX-License-Identifier: Apache-2.0
"""Draw files by a seed and print their docstrings, comments and messages, for a reader to grade.

    python tools/words.py SEED [--files 25] > sheet.md

The reader sees the texts without the code and writes a grade below each file: A if they are clear at the first reading,
B at the second, C only with the code. The same tree and seed give the same sheet. Every tracked file with such texts
may be drawn, except changelogs and the graded sheets in docs/grades.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = ("CHANGELOG.md", "changelogs/", "docs/grades/", "LICENSES/")
# Limits for one text and for one file: more texts would tire the reader and show nothing new about the style.
MOST_CHARACTERS = 420
MOST_TEXTS = 60
# A string of at least three words is a message; a shorter string is a key or a name.
MESSAGE = re.compile(r"[A-Za-z]\S* +\S+ +\S")
# A comment that consists only of such markers is for a tool, not for a reader.
MARKERS = re.compile(
    r"(?:#?\s*(?:noqa(?::\s*[\w\[\]-]+(?:,\s*[\w\[\]-]+)*)?|type:\s*ignore(?:\[[^\]]*\])?|fmt:\s*\w+"
    r"|pylint:\s*\S+|shellcheck(?:\s+[\w-]+=\S+)+)\s*)+"
)
# Keys of YAML files whose values are sentences for a reader.
KEYS = {"name", "msg", "fail_msg", "success_msg", "description", "short_description", "summary", "title", "notes"}


class Text(NamedTuple):
    """One text of a file: the line where it begins (from 1), its kind, and its words on one line."""

    line: int
    kind: str
    words: str


def python(source: str) -> Iterator[Text]:
    """Yields the docstrings, names of tests, comments and messages of a Python file."""
    tree = ast.parse(source)
    docstrings, parts = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = getattr(node, "name", "module")
            found = ast.get_docstring(node)
            if found:
                docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
                yield Text(node.body[0].lineno, f"docstring of {name}", found)
            elif name.startswith("test_"):
                yield Text(getattr(node, "lineno", 1), "test", name)
        elif isinstance(node, ast.JoinedStr):
            parts |= {id(one) for one in node.values}
            whole = "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values)
            if MESSAGE.search(whole):
                yield Text(node.lineno, "message", whole)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings | parts:
            continue
        if MESSAGE.search(node.value):
            yield Text(node.lineno, "message", node.value)
    for one in tokenize.generate_tokens(io.StringIO(source).readline):
        if one.type == tokenize.COMMENT:
            yield Text(one.start[0], "comment", one.string)


C_PARTS = re.compile(r"(/\*.*?\*/|//[^\n]*)|\"((?:\\.|[^\"\\\n])*)\"|'(?:\\.|[^'\\\n])*'", re.S)


def c(source: str) -> Iterator[Text]:
    """Yields comments and messages of a C file."""
    for found in C_PARTS.finditer(source):
        line = source.count("\n", 0, found.start()) + 1
        if found[1]:
            yield Text(line, "comment", re.sub(r"\n\s*\*", "\n", found[1].strip("/* \n")))
        elif found[2] and MESSAGE.search(found[2]):
            yield Text(line, "message", found[2])


def hashes(source: str) -> Iterator[Text]:
    """Yields comments that begin with a hash."""
    for number, line in enumerate(source.splitlines(), 1):
        found = re.search(r"(?:^|\s)(#.*)", line)
        if found:
            yield Text(number, "comment", found[1])


def yaml_file(source: str) -> Iterator[Text]:
    """Yields comments, names of tasks, messages and descriptions of a YAML file."""
    yield from hashes(source)
    nodes = [one for one in yaml.compose_all(source, Loader=yaml.SafeLoader) if one is not None]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                texts = value.value if isinstance(value, yaml.SequenceNode) else [value]
                if key.value in KEYS:
                    for one in texts:
                        if isinstance(one, yaml.ScalarNode) and " " in one.value:
                            yield Text(one.start_mark.line + 1, key.value, one.value)
                nodes.append(value)
        elif isinstance(node, yaml.SequenceNode):
            nodes.extend(node.value)


def shell(source: str) -> Iterator[Text]:
    """Yields comments and printed sentences of a shell script."""
    yield from hashes(source)
    for number, line in enumerate(source.splitlines(), 1):
        for found in re.findall(r"\"([^\"]+)\"|'([^']+)'", line if re.search(r"\b(?:echo|printf)\b", line) else ""):
            if MESSAGE.search(found[0] or found[1]):
                yield Text(number, "message", found[0] or found[1])


def page(source: str) -> Iterator[Text]:
    """Yields the paragraphs of a Markdown page, without its code blocks."""
    text = re.sub(r"^```.*?^```\n", lambda block: "\n" * block[0].count("\n"), source, flags=re.M | re.S)
    for found in re.finditer(r"(?:^(?!    |#|\s*$).*\n?)+", text, re.M):
        yield Text(text.count("\n", 0, found.start()) + 1, "text", found[0])


READERS: dict[str, Callable[[str], Iterator[Text]]] = {
    ".py": python,
    ".c": c,
    ".h": c,
    ".yml": yaml_file,
    ".sh": shell,
    ".md": page,
}


def texts(name: str, source: str) -> list[Text]:
    """Returns the texts of a file in the order of its lines; joins comments on consecutive lines to one text."""
    found: list[Text] = []
    last = 0
    for one in sorted(set(READERS[Path(name).suffix](source)), key=lambda text: (text.line, text.kind, text.words)):
        words = " ".join(one.words.split())
        if one.kind == "comment":
            words = words.lstrip("# ")
        if not words or "SPDX-License-Identifier" in words or words.startswith("!/"):
            continue
        if one.kind == "comment" and MARKERS.fullmatch(words):
            continue
        if found and one.kind == found[-1].kind == "comment" and one.line == last + 1:
            found[-1] = found[-1]._replace(words=f"{found[-1].words} {words}")
        else:
            found.append(one._replace(words=words))
        last = one.line
    return [one._replace(words=shortened(one.words)) for one in found[:MOST_TEXTS]]


def shortened(words: str) -> str:
    return words if len(words) <= MOST_CHARACTERS else words[:MOST_CHARACTERS].rsplit(" ", 1)[0] + " …"


def tracked(root: Path) -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    names = [one for one in listed.splitlines() if Path(one).suffix in READERS and not one.startswith(OUTSIDE)]
    return [one for one in names if (root / one).is_file() and not (root / one).is_symlink()]


def drawn(names: list[str], seed: str) -> list[str]:
    """Returns the names sorted by a hash of seed and name, so an additional file does not reorder the others."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed}\0{name}".encode()).hexdigest())


def sheet(root: Path, seed: str, files: int) -> str:
    """Returns the sheet as Markdown. Raises ValueError if fewer files have texts than were requested."""
    lines = [
        f"# Words, seed {seed}",
        "",
        "A: clear at the first reading. B: at the second. C: not without the code.",
        "",
    ]
    count = 0
    for name in drawn(tracked(root), seed):
        found = texts(name, (root / name).read_text(encoding="utf-8"))
        if not found:
            continue
        count += 1
        lines += [f"## {count}. {name}", "", "Grade:", ""]
        lines += [*(f"- {one.line}, {one.kind}: {one.words}" for one in found), ""]
        if count == files:
            return "\n".join(lines)
    raise ValueError(f"expected {files} files with words, found {count}; ask for fewer with --files")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seed", help="any text that selects the files; publish it with the sheet")
    parser.add_argument("--files", type=int, default=25, help="number of drawn files (default: 25)")
    given = parser.parse_args()
    try:
        print(sheet(ROOT, given.seed, given.files))
    except ValueError as problem:
        parser.error(str(problem))


if __name__ == "__main__":
    main()
