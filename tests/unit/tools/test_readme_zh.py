# SPDX-License-Identifier: Apache-2.0
"""Tests that README.zh.md, the Chinese page, was changed together with README.md: both must have the same commands, the
same levels of headings, and equal rows of tables, links and numbers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENGLISH = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh.md").read_text()
BLOCK = re.compile(r"^```[^\n]*\n.*?^```\n|(?<=\n\n)(?:    [^\n]*\n)+", re.M | re.S)
# The two pages link to each other, so these links differ and are ignored.
EACH_OTHER = {"README.md", "README.zh.md"}
IN_WORDS = {"fourteen": "14", "fifteen": "15", "sixteen": "16", "seventeen": "17", "eighteen": "18", "twenty": "20"}


def blocks(text: str) -> list[str]:
    return BLOCK.findall(text)


def headings(text: str) -> list[int]:
    """Returns the levels of all headings, in the order of the page."""
    return [len(one) for one in re.findall(r"^(#+) ", BLOCK.sub("", text), re.M)]


def links(text: str) -> list[str]:
    return sorted({one for one in re.findall(r"\]\(([^)]+)\)", text) if one not in EACH_OTHER})


def tables(text: str) -> list[int]:
    """Returns the number of rows of each table, in the order of the page."""
    return [len(one.splitlines()) for one in re.findall(r"(?:^\|[^\n]*\n)+", BLOCK.sub("", text), re.M)]


def figures(text: str) -> set[str]:
    """Returns all numbers of two or more digits, also those written as words. Shorter numbers mostly carry no
    information."""
    text = re.sub(r"(?<=\d) (?=\d{3}\b)", "", BLOCK.sub("", text))
    for word, number in IN_WORDS.items():
        text = re.sub(rf"\b{word}\b", number, text)
    return set(re.findall(r"\d[\d.]*\d", text))


def stale(english: str, chinese: str) -> list[str]:
    """Returns the differences between the Chinese and the English page."""
    found = []
    ours, theirs = blocks(chinese), blocks(english)
    found += [f"code block {n}" for n, (a, b) in enumerate(zip(ours, theirs)) if a != b]
    if len(ours) != len(theirs):
        found.append(f"{len(ours)} code blocks, {len(theirs)} in README.md")
    for what, look in (("levels of headings", headings), ("links", links), ("rows of tables", tables)):
        if look(chinese) != look(english):
            found.append(f"{what}: {look(chinese)}, in README.md {look(english)}")
    differ = figures(chinese) ^ figures(english)
    return found + ([f"figures in only one of the pages: {', '.join(sorted(differ))}"] if differ else [])


def test_chinese_readme_matches_the_english_readme() -> None:
    assert stale(ENGLISH, CHINESE) == [], "make the change of README.md in README.zh.md too"


# columns: words of README.md, their replacement; expected words of the difference, which the check must find after the
# replacement
@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("    make demo\n", "    make demos\n", "code block"),
        ("vgpu_split_count: 7 ", "vgpu_split_count: 8 ", "code block"),
        ("## Licence", "### Licence", "levels of headings"),
        ("(docs/variables.md)", "(docs/other.md)", "links"),
        ("docker 20.10", "docker 20.11", "figures"),
        ("| time-slicing, MIG, MPS |", "time-slicing, MIG, MPS |", "rows of tables"),
        ("28 bypasses", "29 bypasses", "figures"),
    ],
)
def test_outdated_chinese_readme_is_found(old: str, new: str, fault: str) -> None:
    assert old in ENGLISH, "README.md no longer has these words: choose others for this row"
    assert any(fault in one for one in stale(ENGLISH.replace(old, new), CHINESE))
