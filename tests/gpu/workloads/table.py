# SPDX-License-Identifier: Apache-2.0
"""The workloads as a table, and the comparison of their results. Needs neither torch nor a GPU, and reads no files.

The rows are those of the ai-benchmark table that vGPU plugins are compared by: model, type, batch, size.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

FORMAT = 1
INFERENCE, TRAINING = "inference", "training"
DONE, FULL, NOT_RUN = "done", "out of memory", "not run"


class Row(NamedTuple):
    """One workload. ``size``: the side of a square image, or steps and features of the LSTM."""

    id: str
    title: str
    model: str
    kind: str
    batch: int
    size: tuple[int, int]


ROWS = (
    Row("1.1", "ResNet-V2-50", "resnet_v2_50", INFERENCE, 50, (346, 346)),
    Row("1.2", "ResNet-V2-50", "resnet_v2_50", TRAINING, 20, (346, 346)),
    Row("2.1", "ResNet-V2-152", "resnet_v2_152", INFERENCE, 10, (256, 256)),
    Row("2.2", "ResNet-V2-152", "resnet_v2_152", TRAINING, 10, (256, 256)),
    Row("3.1", "VGG-16", "vgg_16", INFERENCE, 20, (224, 224)),
    Row("3.2", "VGG-16", "vgg_16", TRAINING, 2, (224, 224)),
    Row("4.1", "DeepLab", "deeplab", INFERENCE, 2, (512, 512)),
    Row("4.2", "DeepLab", "deeplab", TRAINING, 1, (384, 384)),
    Row("5.1", "LSTM", "lstm", INFERENCE, 100, (1024, 300)),
    Row("5.2", "LSTM", "lstm", TRAINING, 10, (1024, 300)),
)


class Refused(Exception):
    """Raised if results cannot be compared or a row cannot run; the text gives the reason for the user."""


def chosen(ids: str) -> list[Row]:
    """Returns the rows with these ids, separated by commas; all rows for "". Raises Refused for an unknown id."""
    wanted = [one.strip() for one in ids.split(",") if one.strip()]
    known = {row.id: row for row in ROWS}
    unknown = [one for one in wanted if one not in known]
    if unknown:
        raise Refused(f"no row is named {', '.join(unknown)}; expected one of {', '.join(known)}")
    return [known[one] for one in wanted] if wanted else list(ROWS)


def smaller(row: Row) -> Row:
    """Returns the workload in a size for a CPU, which shows only that the workload runs."""
    size = (16, 300) if row.model == "lstm" else (64, 64)
    return row._replace(batch=2, size=size)


def ratios(results: Sequence[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Returns each row's items per second divided by the baseline's, by label.

    ``results``: results of ``run.py``, one for each label. A row that did not run has its status in place of a ratio.
    Raises Refused if the results are not comparable.
    """
    by_label: dict[str, dict[str, Any]] = {}
    for one in results:
        if one.get("format") != FORMAT:
            raise Refused(f"a result has format {one.get('format')!r}, expected {FORMAT}; measure again")
        if one["smoke"]:
            raise Refused(f'"{one["label"]}" is a smoke run (--smoke): small rows, whose figures mean nothing')
        if one["label"] in by_label:
            raise Refused(f'two results are labelled "{one["label"]}"; give each run a --label of its own')
        by_label[one["label"]] = one
    if baseline not in by_label:
        raise Refused(f'no result is labelled "{baseline}", found {", ".join(by_label) or "none"}')
    whole = by_label.pop(baseline)
    if not by_label:
        raise Refused(f'there is nothing to compare "{baseline}" with; measure in a slice too')
    for label, one in by_label.items():
        for key, what in (("device", "the GPU"), ("torch", "PyTorch"), ("precision", "the precision")):
            if one[key] != whole[key]:
                raise Refused(f'{what} differs: "{baseline}" has {whole[key]}, "{label}" has {one[key]}')
    rows = []
    for row in whole["rows"]:
        parts: dict[str, Any] = {}
        for label, one in by_label.items():
            parts[label] = _part(row, next((other for other in one["rows"] if other["id"] == row["id"]), None))
        rows.append(dict(row, ratios=parts))
    return rows


def _part(base: dict[str, Any], other: dict[str, Any] | None) -> float | str:
    if other is None:
        return NOT_RUN
    if (base["batch"], base["size"]) != (other["batch"], other["size"]):
        raise Refused(f"row {base['id']} was run with another batch or size; measure it again with the same rows")
    if other["status"] != DONE:
        return str(other["status"])
    # If the baseline has no figure for a row, there is no ratio.
    return other["items_per_s"] / base["items_per_s"] if base["status"] == DONE else f"baseline: {base['status']}"


def shown(rows: Sequence[dict[str, Any]], baseline: str) -> str:
    """Returns the ratios as a Markdown table."""
    labels = list(rows[0]["ratios"]) if rows else []
    lines = [
        "| id | model | type | batch, size | " + " | ".join([f"{baseline}, items/s", *labels]) + " |",
        "|---|---|---|---|" + "---|" * (len(labels) + 1),
    ]
    for row in rows:
        base = f"{row['items_per_s']:.4g}" if row["status"] == DONE else row["status"]
        cells = [f"{one:.2f}" if isinstance(one, float) else one for one in row["ratios"].values()]
        work = f"{row['batch']}, {row['size'][0]}×{row['size'][1]}"
        lines.append("| " + " | ".join([row["id"], row["title"], row["kind"], work, base, *cells]) + " |")
    return "\n".join(lines)
