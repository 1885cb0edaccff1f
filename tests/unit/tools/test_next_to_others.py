# SPDX-License-Identifier: Apache-2.0
"""Tests docs/next-to-others.md, a table that says how the collection works next to other schedulers, device plugins and
host systems. The last cell of each row must name an existing test of the combination. Otherwise it must say "not
tried", or "on tables": only our own rules were tested, by tables of inputs and without the other program.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_threat_model import rows

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "next-to-others.md"
# the header of the table
HEAD = ["next to", "works", "does not work", "how far it was tried"]
# If the last cell of a row has one of these words, the row needs no test.
UNTRIED = ("not tried", "on tables", "tables")
# Systems that users ask about. Each must be in the first cell of a row.
ASKED = (
    *("default scheduler", "Cluster Autoscaler", "Karpenter", "Kueue", "Volcano", "KAI", "HAMi", "ACK", "gangs"),
    *("queues", "Descheduler", "DRA driver", "PriorityClasses", "docker", "MIG", "MPS", "Slurm", "Enroot", "Apptainer"),
    *("Kata", "AMD"),
)


def wrong(text: str) -> list[str]:
    """Returns the faults in the rows of the page."""
    found = []
    for row in rows(text, HEAD):
        if len(row) != len(HEAD) or not all(row):
            found.append(f"{row[0]}: expected {len(HEAD)} cells with text")
            continue
        names = re.findall(r"`(tests/[^`:]+)", row[-1])
        found += [f"{row[0]}: {name} does not exist" for name in names if not (ROOT / name).exists()]
        if not names and not any(word in row[-1] for word in UNTRIED) and "scenario" not in row[-1]:
            found.append(f"{row[0]}: expected a test, or one of: {', '.join(UNTRIED)}")
    return found


def test_every_row_has_the_extent_of_its_test() -> None:
    text = PAGE.read_text()
    assert wrong(text) == []
    assert len(rows(text, HEAD)) >= 25


@pytest.mark.parametrize("word", ASKED)
def test_page_has_a_row_for_each_word(word: str) -> None:
    assert any(word in row[0] for row in rows(PAGE.read_text(), HEAD))


# columns: pattern in docs/next-to-others.md, its replacement; expected words of the fault, which the check must find
# after the replacement
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r"(\| Kueue .*)not tried \|", r"\1|", "expected 4 cells"),
        (r"(\| Kueue .*)not tried \|", r"\1it works \|", "expected a test, or one of: not tried"),
        (r"test_preemption\.py", "test_preemptions.py", "does not exist"),
    ],
)
def test_incomplete_rows_are_found(old: str, new: str, said: str) -> None:
    text = PAGE.read_text()
    changed = re.sub(old, new, text)
    assert changed != text and any(said in one for one in wrong(changed)), wrong(changed)
