# SPDX-License-Identifier: Apache-2.0
"""README.zh.md says what README.md says: the same commands to the byte, the same sections, rows, links and figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENGLISH = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh.md").read_text()
BLOCK = re.compile(r"^```[^\n]*\n.*?^```\n|(?<=\n\n)(?:    [^\n]*\n)+", re.M | re.S)
# The two pages name each other; a page has no use for a link to itself.
EACH_OTHER = {"README.md", "README.zh.md"}
IN_WORDS = {"fourteen": "14", "fifteen": "15", "sixteen": "16", "seventeen": "17", "eighteen": "18", "twenty": "20"}


def blocks(text: str) -> list[str]:
    return BLOCK.findall(text)


def headings(text: str) -> list[int]:
    """The levels of all headings, in order."""
    return [len(one) for one in re.findall(r"^(#+) ", BLOCK.sub("", text), re.M)]


def links(text: str) -> list[str]:
    return sorted({one for one in re.findall(r"\]\(([^)]+)\)", text) if one not in EACH_OTHER})


def tables(text: str) -> list[int]:
    """Rows of each table."""
    return [len(one.splitlines()) for one in re.findall(r"(?:^\|[^\n]*\n)+", BLOCK.sub("", text), re.M)]


def figures(text: str) -> set[str]:
    """Numbers of two digits and more, those in words too; of one digit there are too many that mean nothing."""
    text = re.sub(r"(?<=\d) (?=\d{3}\b)", "", BLOCK.sub("", text))
    for word, number in IN_WORDS.items():
        text = re.sub(rf"\b{word}\b", number, text)
    return set(re.findall(r"\d[\d.]*\d", text))


def stale(english: str, chinese: str) -> list[str]:
    """In what the two differ."""
    found = []
    ours, theirs = blocks(chinese), blocks(english)
    found += [f"code block {n}" for n, (a, b) in enumerate(zip(ours, theirs)) if a != b]
    if len(ours) != len(theirs):
        found.append(f"{len(ours)} code blocks, {len(theirs)} in README.md")
    for what, look in (("levels of headings", headings), ("links", links), ("rows of tables", tables)):
        if look(chinese) != look(english):
            found.append(f"{what}: {look(chinese)}, in README.md {look(english)}")
    differ = figures(chinese) ^ figures(english)
    return found + ([f"figures that only one of them has: {', '.join(sorted(differ))}"] if differ else [])


def test_the_chinese_page_says_what_the_english_page_says() -> None:
    assert stale(ENGLISH, CHINESE) == [], "carry the change of README.md over to README.zh.md"


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("    make demo\n", "    make demos\n", "code block"),
        ("vgpu_split_count: 7 ", "vgpu_split_count: 8 ", "code block"),
        ("## Licence", "### Licence", "levels of headings"),
        ("(docs/variables.md)", "(docs/other.md)", "links"),
        ("docker 26.1", "docker 26.2", "figures"),
        ("| time-slicing, MIG, MPS |", "time-slicing, MIG, MPS |", "rows of tables"),
        ("28 bypasses", "29 bypasses", "figures"),
    ],
)
def test_a_page_that_was_left_behind_is_found(old: str, new: str, fault: str) -> None:
    assert old in ENGLISH, "this row of the table changes nothing any more: choose other words of README.md"
    assert any(fault in one for one in stale(ENGLISH.replace(old, new), CHINESE))
