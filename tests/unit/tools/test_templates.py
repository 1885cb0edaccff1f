# SPDX-License-Identifier: Apache-2.0
"""Tests that a template which makes JSON text ends with the filter to_json or to_nice_json. If another filter follows,
ansible-core before 2.19 turns a text that looks like a dictionary or a list into a dictionary or a list.

With ansible-core 2.16 the record of the last isolation check was once passed on as a dictionary, and ``site.yml``
failed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
JSON = re.compile(r"\|\s*to_(?:nice_)?json(?:\([^)|]*\))?(?P<after>[^}]*)\}\}")


def wrong(text: str) -> list[str]:
    """Returns the templates in which something follows the filter that makes JSON."""
    return [found[0] for found in JSON.finditer(text) if found["after"].strip()]


# columns: line with a template; expected number of faults
@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('a: "{{ b | to_json }}"', 0),
        ('a: "{{ b | to_json }}\\n"', 0),
        ('a: "{{ b | to_nice_json(indent=1) }}\\n"', 0),
        ("a: \"{{ b | to_json ~ '\\n' }}\"", 1),
        ('a: "{{ b | to_nice_json | trim }}"', 1),
    ],
)
def test_filter_after_the_json_filter_is_found(text: str, count: int) -> None:
    assert len(wrong(text)) == count


def test_all_templates_end_with_the_json_filter() -> None:
    files = [*ROOT.glob("roles/**/*.yml"), *ROOT.glob("playbooks/**/*.yml")]
    found = {str(path.relative_to(ROOT)): wrong(path.read_text()) for path in files}
    assert len(files) > 100
    assert sum("to_json" in path.read_text() for path in files) > 0
    assert {path: lines for path, lines in found.items() if lines} == {}
