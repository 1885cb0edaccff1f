# SPDX-License-Identifier: Apache-2.0
"""Formats tables, wrapped text, numbers and ages for a terminal. This module does no I/O."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

Row = Sequence[object]
# Minimum width of a name when the table is shortened.
SHORT_NAME = 12


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def table(rows: Sequence[Row], right: Sequence[int] = (), width: int = 0, gives_way: int = -1) -> list[str]:
    """Returns the table's lines with aligned columns. The first row is the head. ``right`` has the columns that are
    aligned to the right. ``width`` is the width of the terminal; 0 means unlimited. If the table is too wide, the
    column ``gives_way`` is shortened. If it is still too wide, its lines are cut.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    if width and gives_way >= 0 and (over := max(map(len, _aligned(texts, right))) - width) > 0:
        longest = max(len(row[gives_way]) for row in texts)
        room = max(SHORT_NAME, longest - over)
        for row in texts:
            row[gives_way] = shortened(row[gives_way], room)
    return [shortened(line, width) if width else line for line in _aligned(texts, right)]


def _aligned(texts: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    widths = [max(len(row[n]) for row in texts) for n in range(len(texts[0]))]
    return [
        "  ".join(
            cell.rjust(width) if n in right else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    ]


def wide(lines: Sequence[str], width: int) -> bool:
    """Returns whether a line is longer than ``width`` columns. A width of 0 means unlimited."""
    return 0 < width < max(map(len, lines), default=0)


def wrapped(text: str, width: int) -> str:
    """Wraps each line between words to ``width`` columns, and indents the continuation lines. With width 0 the text is
    unchanged.
    """
    lines = []
    for line in text.splitlines():
        if wide([line], width):
            lines += textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        else:
            lines.append(line)
    return "\n".join(lines)


def mib(size: int) -> str:
    return f"{size / (1 << 20):.0f}"


def percent(share: float) -> str:
    return "-" if share < 0 else f"{100 * share:.0f}"


def known(figure: int) -> str:
    """Returns the number as text, or "-" if the GPU does not report it."""
    return "-" if figure < 0 else str(figure)


def age(seconds: float) -> str:
    """Returns a duration in a unit that is easy to read: 40 s, 12 min, 3 h, 5 d."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
