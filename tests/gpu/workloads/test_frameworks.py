# SPDX-License-Identifier: Apache-2.0
"""Tests frameworks.py, which runs other frameworks in a slice (part of a GPU) and writes a page of the results. The
page must have no row without a record of a run, and the records must be right. Frameworks are test doubles."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import frameworks
import pytest

GOOD = {"right": True, "total_mib": 2194, "refused": True}


# columns: output of a framework's program in a slice of 2194 MiB; expected outcome
@pytest.mark.parametrize(
    ("found", "result"),
    [
        (GOOD, "held"),
        ({"right": True}, "held"),
        ({**GOOD, "right": False}, "wrong result"),
        ({}, "wrong result"),
        ({**GOOD, "total_mib": 15360}, "sees 15360 MiB"),
        ({**GOOD, "refused": False}, "got twice the slice"),
    ],
)
def test_outcome_of_a_record(found: dict[str, Any], result: str) -> None:
    assert frameworks.outcome(found, 2194) == result


def test_page_is_generated_from_the_records() -> None:
    assert frameworks.PAGE.read_text() == frameworks.page(frameworks.records_in(frameworks.RUNS)), (
        "docs/frameworks.md differs from the records: run tests/gpu/workloads/frameworks.py --page"
    )


@pytest.mark.parametrize("name", sorted(frameworks.PROGRAMS))
def test_programs_are_python(name: str) -> None:
    ast.parse(frameworks.FRAME.format(frameworks.PROGRAMS[name]))


def test_programs_that_ran_get_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of three programs passes, one gets more than the slice, one is not installed. The first two get a record."""
    programs = {
        "Good": 'found.update(version="1", gpu="T4", right=True, refused=slice_mib == 2194)',
        "Greedy": 'found.update(version="2", right=True, refused=False)',
        "Missing": "import no_such_framework",
    }
    monkeypatch.setattr(frameworks, "PROGRAMS", programs)
    runs = tmp_path / "runs"
    words = ["--run", "--slice-mib=2194", "--driver=535.261.03", f"--python={sys.executable}", f"--runs={runs}"]
    assert frameworks.main(words) == 1
    assert capsys.readouterr().out == "Good: held\nGreedy: got twice the slice\nMissing: not installed\n"
    records = frameworks.records_in(runs)
    assert [(one["framework"], one["result"]) for one in records] == [
        ("Good", "held"),
        ("Greedy", "got twice the slice"),
    ]
    text = frameworks.page(records)
    assert "| Good | 1 | T4 | 535.261.03 | 2194 | not queried | held |" in text
    assert "Missing" not in text and "No framework" not in text
    assert "No framework has been run" in frameworks.page([])
    assert json.loads(next(runs.glob("*.json")).read_text()) == records


def test_one_framework_is_run_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reads the source of its kernels, so each program must run from a file."""
    reads = "import inspect\ndef kernel(): pass\n"
    programs = {
        "Reader": reads + 'found.update(version="1", gpu="T4", right="kernel" in inspect.getsource(kernel))',
        "Other": 'found.update(version="2", right=True)',
    }
    monkeypatch.setattr(frameworks, "PROGRAMS", programs)
    words = ["--run", "--only=Reader", "--slice-mib=64", "--driver=580", f"--python={sys.executable}"]
    assert frameworks.main([*words, f"--runs={tmp_path}"]) == 0
    assert [one["framework"] for one in frameworks.records_in(tmp_path)] == ["Reader"]


@pytest.mark.parametrize("words", [["--run"], ["--run", "--slice-mib=2194"], [], ["--run", "--page"]])
def test_incomplete_or_conflicting_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        frameworks.main(words)
    assert end.value.code == 2
