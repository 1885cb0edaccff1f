# SPDX-License-Identifier: Apache-2.0
"""Targets in a clean clone: what one runs finds what it needs, whatever was made there before."""

from __future__ import annotations

import re
from pathlib import Path

MAKEFILE = (Path(__file__).resolve().parents[3] / "Makefile").read_text()
RULE = re.compile(r"^(?P<targets>[a-z0-9 -]+):(?P<needs>[^=\n]*)\n(?P<recipe>(?:\t.*\n?)+)", re.MULTILINE)


def rules() -> dict[str, tuple[set[str], str]]:
    return {one["targets"]: (set(one["needs"].split()), one["recipe"]) for one in RULE.finditer(MAKEFILE)}


def test_whatever_runs_tests_has_made_the_collection_they_import() -> None:
    runs = {
        name: needs for name, (needs, recipe) in rules().items() if re.search(r"pytest|gates\.py|molecule\.sh", recipe)
    }
    assert {"test", "e2e", "e2e-scheduler", "fuzz", "molecule-all"} <= set(runs), "the rules were read"
    assert {name for name, needs in runs.items() if "collection" not in needs} == set()
    assert {name for name, needs in runs.items() if "venv" not in needs} == set()
