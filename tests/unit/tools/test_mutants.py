# SPDX-License-Identifier: Apache-2.0
"""Tests the lists of `make mutants`. That target changes single source lines and expects that a test fails for each
changed line (a mutant). An equivalent mutant changes no behaviour, so no test can fail for it. The listed files, tests
and lines must exist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
LISTS = ROOT / "tests" / "mutants"
TARGETS: list[dict[str, Any]] = yaml.safe_load((LISTS / "targets.yml").read_text())
EQUIVALENT: list[dict[str, str]] = yaml.safe_load((LISTS / "equivalent.yml").read_text()) or []


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["sources"][0])
def test_sources_and_tests_exist(target: dict[str, Any]) -> None:
    for pattern in target["sources"]:
        assert list(ROOT.glob(pattern)), f"{pattern}: expected files, found none"
    for tests in target["tests"]:
        assert (ROOT / tests).exists(), f"{tests}: expected tests, found none"


def test_no_source_file_is_in_two_rows() -> None:
    found = [path for target in TARGETS for pattern in target["sources"] for path in ROOT.glob(pattern)]
    assert len(found) == len(set(found))


def test_an_equivalent_mutant_names_a_line_and_a_reason() -> None:
    for row in EQUIVALENT:
        lines = [line.strip() for line in (ROOT / row["path"]).read_text().splitlines()]
        assert row["line"] in lines, (
            f"{row['path']}: expected the line {row['line']}, found none; judge the mutant again"
        )
        assert len(row["why"].split()) > 3, row
