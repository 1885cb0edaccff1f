# SPDX-License-Identifier: Apache-2.0
"""Tests frameworks.py, which runs other frameworks in a slice (part of a GPU) and writes a page of the results. The
page must have no figure without a record of a run, and the records must be right. Frameworks are test doubles."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import frameworks
import pytest
import table

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
def test_outcome_of_a_record_is_computed(found: dict[str, Any], result: str) -> None:
    assert frameworks.outcome(found, 2194) == result


def test_page_is_generated_from_the_records() -> None:
    records, results = frameworks.records_in(frameworks.RUNS), frameworks.results_in(frameworks.RESULTS)
    assert frameworks.PAGE.read_text() == frameworks.page(records, results), (
        "docs/frameworks.md differs from the records: run tests/gpu/workloads/frameworks.py --page"
    )


# columns: results of the slice alone and oversold (items per second by workload); expected row of workload 2.1
# on the page
@pytest.mark.parametrize(
    ("alone", "oversold", "line"),
    [
        ({"2.1": 400.0}, {"2.1": 8.0}, "| 2.1 ResNet-V2-152 inference | 800 | 0.5 | 0.01 |"),
        ({"2.1": 400.0}, {"1.1": 8.0}, "| 2.1 ResNet-V2-152 inference | 800 | 0.5 | not run |"),
        ({"2.1": 400.0}, None, "| 2.1 ResNet-V2-152 inference | 800 | 0.5 | not run |"),
        ({"2.1": None}, {}, "| 2.1 ResNet-V2-152 inference | 800 | out of memory | not run |"),
    ],
)
def test_workload_without_a_result_says_why(
    alone: dict[str, float | None], oversold: dict[str, float | None] | None, line: str
) -> None:
    def result(label: str, rates: dict[str, float | None]) -> dict[str, Any]:
        rows = [
            {"id": row.id, "title": row.title, "kind": row.kind, "batch": row.batch, "size": list(row.size)}
            | {"status": "done" if rates[row.id] else "out of memory", "items_per_s": rates[row.id]}
            for row in table.ROWS
            if row.id in rates
        ]
        about = {"device": "T4", "torch": "2.4", "precision": "single", "date": "2026-11-27T19:08:30+00:00"}
        return {"format": table.FORMAT, "label": label, "smoke": False, "rows": rows, **about}

    whole = result("whole", {row.id: 800.0 for row in table.ROWS})
    shown = [result("alone", alone)] + ([] if oversold is None else [result("oversold", oversold)])
    assert line in frameworks.page([], [[whole, *shown]]).splitlines()


def test_frameworks_of_the_4paradigm_plugin_have_a_program() -> None:
    """The documentation of 4paradigm's plugin names these frameworks as tested."""
    assert {"TensorFlow", "PyTorch", "MXNet", "MindSpore", "XGBoost", "NCCL"} <= set(frameworks.PROGRAMS)


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
    text = frameworks.page(records, [])
    assert "\nT4, driver 535.261.03, a slice of 2194 MiB, " in text
    assert "\nGPU unknown, driver 535.261.03, a slice of 2194 MiB, " in text
    assert "| Good | 1 | not queried | held |" in text
    assert "no machine with a GPU had them: Missing." in text
    assert "no machine with a GPU had them: Good, Greedy, Missing." in frameworks.page([], [])
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
