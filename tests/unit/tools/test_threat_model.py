# SPDX-License-Identifier: Apache-2.0
"""Tests docs/threat-model.md, whose tables list the known ways to bypass the limits. Each row must have a verdict of
one word (prevented, detected, open) and name an existing test or an existing check of the module vgpu_isolation that
tries the bypass.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation import verdicts

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "threat-model.md"
CHECKS = {*verdicts.PROBE_CHECKS, *verdicts.PROBE_BYPASSES, *verdicts.OWN}
HEAD = ["way", "memory", "compute", "tried by"]
# Header of the table that compares the verdicts on memory with and without enforcement by the driver.
ENFORCED = ["way", "memory, by the library", "memory, by the driver too", "tried by"]
# Header of the table that compares the verdicts by the kind of container.
KINDS = ["way", "root, uid 1000 without capabilities, or a user namespace; no profile", "RuntimeDefault"]
WORDS = ("prevented", "detected", "open")
NONE = "–"
# Each test in these files tries an attack, so a row must name it.
ATTACKS = sorted((ROOT / "tests" / "e2e_scheduler").glob("test_attacker*.py"))
# If no test tries a bypass, the last cell starts with this text, and the row must not claim "prevented" or "detected".
UNTRIED = "nothing: "


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Returns each table of a page as (header, rows)."""
    found: list[tuple[list[str], list[list[str]]]] = []
    before = ""
    for line in text.splitlines():
        if line.startswith("| "):
            cells = [cell.strip() for cell in line.removeprefix("| ").removesuffix(" |").split(" | ")]
            if before.startswith("|"):
                found[-1][1].append(cells)
            else:
                found.append((cells, []))
        before = line
    return found


def rows(text: str, head: list[str]) -> list[list[str]]:
    return [row for its, all_rows in tables(text) if its == head for row in all_rows]


def verdict(cell: str) -> str:
    """Returns the verdict with which a cell starts, or the dash for "not applicable" ("": neither)."""
    word = re.split(r"[:,. ]", cell, maxsplit=1)[0]
    return word if word in (*WORDS, NONE) else ""


@lru_cache(maxsize=None)
def functions(path: str) -> frozenset[str]:
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    return frozenset(one.name for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.FunctionDef))


def attempts() -> list[str]:
    """Returns the ids of all tests in the files of attacks."""
    files = [str(path.relative_to(ROOT)) for path in ATTACKS]
    return [f"{file}::{one}" for file in files for one in sorted(functions(file)) if one.startswith("test_")]


def is_there(name: str) -> bool:
    """Returns whether a name in the last column is an existing check or an existing test."""
    path, colons, function = name.partition("::")
    return function in functions(path) if colons else name in CHECKS


def claims(memory: str, compute: str, tried: list[str]) -> list[str]:
    """Returns the contradictions between the verdicts of a row and the checks that it names."""
    bypasses = [name for name in tried if name.startswith(verdicts.BYPASS)]
    may_be_open = [name for name in bypasses if name in verdicts.MAY_BE_OPEN]
    found = [
        f"{name}: expected the verdict prevented"
        for name in bypasses
        if memory != "prevented" and name not in may_be_open
    ]
    found += [f"{name}: expected another verdict than prevented" for name in may_be_open if memory == "prevented"]
    watched = [name for name in tried if name in may_be_open or "/watch/" in name or "test_share_mounts" in name]
    graphics = verdicts.GRAPHICS in tried
    if "detected" in (memory, compute) and not watched and not graphics:
        found.append("expected a test of the watcher for the verdict detected")
    return found


def faults(text: str) -> list[str]:
    """Returns all faults in the page."""
    found, named = [], set()
    for row in rows(text, HEAD):
        way = row[0]
        if len(row) != len(HEAD):
            found.append(f"{way}: {len(row)} cells, expected {len(HEAD)}")
            continue
        memory, compute = (verdict(cell) for cell in row[1:3])
        found += [
            f"{way}: {name}: expected one of {', '.join(WORDS)}"
            for name, one in (("memory", memory), ("compute", compute))
            if not one
        ]
        if memory == compute == NONE:
            found.append(f"{way}: expected a verdict on memory or compute")
        if row[3].startswith(UNTRIED):
            found += [f"{way}: expected open, because no test tries it"] * ({memory, compute} - {"open", NONE} != set())
            continue
        tried = re.findall(r"`([^`]+)`", row[3])
        named |= set(tried)
        found += [f"{way}: {name} is neither a check nor a test" for name in tried if not is_there(name)]
        found += [f"{way}: expected a check or a test"] * (not tried)
        found += [f"{way}: {one}" for one in claims(memory, compute, tried)]
    due = [*verdicts.PROBE_BYPASSES, verdicts.IMPORT, *attempts()]
    found += [f"{name}: no row names it" for name in due if name not in named]
    return found


def test_every_row_has_verdicts_and_tests() -> None:
    assert faults(PAGE.read_text()) == []


def test_attack_files_contain_tests() -> None:
    assert len(attempts()) > 12 and len({name.partition("::")[0] for name in attempts()}) == len(ATTACKS) == 3


def test_bypass_table_by_container_kind_is_complete() -> None:
    table = rows(PAGE.read_text(), KINDS)
    assert len(table) > 4
    for way, *cells in table:
        assert is_there(way.strip("`")), way
        assert [verdict(cell) in WORDS for cell in cells] == [True] * 2, way


# columns: pattern in docs/threat-model.md, its replacement; expected words of the fault, which the check must find
# after the replacement
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r"\| prevented: what exports", "| stopped: what exports", "memory: expected one of"),
        (r"\| prevented: what exports", "| detected: what exports", "bypass-renamed: expected the verdict prevented"),
        (
            r"\| detected: `no-slot`; the watcher asks",
            "| prevented: the watcher asks",
            "bypass-leader: expected another",
        ),
        (r"`bypass-no-preload`, ", "", "bypass-no-preload: no row names it"),
        (r"`import-beside`, ", "", "import-beside: no row names it"),
        (r"::test_a_tenant_gets_no_other_identity", "::reads", "identity: no row names it"),
        (r"`dlsym-route`", "", "expected a check or a test"),
        (r"`dlsym-route`", "`dlsym-rout`", "dlsym-rout is neither a check nor a test"),
        (r"test_seats.py::test_page_change", "test_seats.py::test_page_chance", "is neither a check nor a test"),
        (r"tests/native/vcuda/test_seats.py::", "tests/native/vcuda/test_seat.py::", "is neither a check nor a test"),
        (r"\| open: only the kernel", "| prevented: only the kernel", "expected open, because no test tries it"),
        (r"\| nothing: no simulated driver", "| `freed` | x", "5 cells"),
        (
            r"`tests/unit/plugin/watch/test_watch_shares.py::test_container_that_exceeds[^`]*`, `[^`]*alone_on[^`]*`",
            "`share`",
            "expected a test of the watcher",
        ),
    ],
)
def test_wrong_claims_are_found(old: str, new: str, said: str) -> None:
    text = PAGE.read_text()
    changed = re.sub(old, new, text)
    assert changed != text
    assert any(said in one for one in set(faults(changed)) - set(faults(text))), faults(changed)


def test_driver_enforcement_table_is_complete():
    found = rows(PAGE.read_text(), ENFORCED)
    assert len(found) >= 8
    for row in found:
        assert len(row) == len(ENFORCED), row[0]
        assert verdict(row[1]) and verdict(row[2]), row[0]
        tried = re.findall(r"`([^`]+)`", row[3])
        if row[3].startswith(UNTRIED):
            assert "nobody has tried it" in row[2], row[0]
        else:
            assert tried and all(is_there(name) for name in tried), row[3]
