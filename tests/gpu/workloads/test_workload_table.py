# SPDX-License-Identifier: Apache-2.0
"""Tests the table of workloads: its rows must be those of the published table, and only comparable results may be
compared."""

from __future__ import annotations

import copy
from typing import Any

import measure
import pytest
import table

# The published ai-benchmark table, copied again to check the code's table. columns: id, name, type, batch, size
PUBLISHED = """\
1.1 Resnet-V2-50 inference 50 346*346
1.2 Resnet-V2-50 training 20 346*346
2.1 Resnet-V2-152 inference 10 256*256
2.2 Resnet-V2-152 training 10 256*256
3.1 VGG-16 inference 20 224*224
3.2 VGG-16 training 2 224*224
4.1 DeepLab inference 2 512*512
4.2 DeepLab training 1 384*384
5.1 LSTM inference 100 1024*300
5.2 LSTM training 10 1024*300
"""


def test_rows_equal_the_published_table() -> None:
    ours = [f"{row.id} {row.title} {row.kind} {row.batch} {row.size[0]}*{row.size[1]}" for row in table.ROWS]
    assert [one.lower() for one in ours] == PUBLISHED.lower().splitlines()


def result(label: str, *rates: float | str, **more: Any) -> dict[str, Any]:
    """Returns a result with one row for each rate; a text in place of a rate is the row's status."""
    rows = []
    for row, rate in zip(table.ROWS, rates):
        done = {"status": table.DONE, "items_per_s": rate} if isinstance(rate, float) else {"status": rate}
        rows.append({**row._asdict(), "size": list(row.size), **done})
    about = {"torch": "2.9.0", "device": "T4", "precision": "single", "smoke": False}
    return {"format": table.FORMAT, "label": label, **about, "rows": rows, **more}


def test_ratios_are_parts_of_the_baseline() -> None:
    whole = result("whole", 200.0, 50.0, table.FULL)
    slice_ = result("slice", 50.0, table.FULL, 10.0)
    rows = table.ratios([slice_, whole, result("oversold", 20.0)], "whole")
    assert [row["ratios"] for row in rows] == [
        {"slice": 0.25, "oversold": 0.1},
        {"slice": table.FULL, "oversold": "not run"},
        {"slice": "baseline: out of memory", "oversold": "not run"},
    ]
    lines = table.shown(rows, "whole").splitlines()
    assert lines[0] == "| id | model | type | batch, size | whole, items/s | slice | oversold |"
    assert lines[2] == "| 1.1 | ResNet-V2-50 | inference | 50, 346×346 | 200 | 0.25 | 0.10 |"
    assert lines[4] == (
        "| 2.1 | ResNet-V2-152 | inference | 10, 256×256 | out of memory | baseline: out of memory | not run |"
    )


def other_batch() -> dict[str, Any]:
    found = copy.deepcopy(result("slice", 1.0))
    found["rows"][0]["batch"] = 49
    return found


# columns: results that are compared with the baseline; expected words of the refusal
@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([], "nothing to compare"),
        ([result("slice", 1.0, device="V100")], "the GPU differs"),
        ([result("slice", 1.0, torch="2.8.0")], "PyTorch differs"),
        ([result("slice", 1.0, precision="half")], "the precision differs"),
        ([result("slice", 1.0, smoke=True)], "smoke run"),
        ([result("slice", 1.0, format=0)], "format 0"),
        ([result("whole", 1.0)], "two results are labelled"),
        ([other_batch()], "row 1.1 was run with another batch or size"),
    ],
)
def test_results_that_are_not_comparable_are_refused(others: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(table.Refused, match=words):
        table.ratios([result("whole", 1.0), *others], "whole")


def test_missing_baseline_is_refused() -> None:
    with pytest.raises(table.Refused, match='no result is labelled "whole", found slice'):
        table.ratios([result("slice", 1.0)], "whole")


@pytest.mark.parametrize(
    ("ids", "found"),
    [("", [row.id for row in table.ROWS]), ("5.2", ["5.2"]), ("5.1, 1.1", ["5.1", "1.1"])],
)
def test_rows_are_chosen_by_id(ids: str, found: list[str]) -> None:
    assert [row.id for row in table.chosen(ids)] == found


def test_unknown_row_id_is_refused() -> None:
    with pytest.raises(table.Refused, match=r"no row is named 6\.1; expected one of 1\.1, "):
        table.chosen("1.1,6.1")


def test_figures_are_computed_from_the_steps() -> None:
    row = table.ROWS[1]  # The batch has 20 items.
    found = measure.summary(row, [0.1] * 18 + [0.2, 1.0])
    assert found["items_per_s"] == pytest.approx(20 * 20 / 3.0)
    assert (found["steps"], found["median_step_ms"], found["p95_step_ms"]) == (20, 100.0, 200.0)
