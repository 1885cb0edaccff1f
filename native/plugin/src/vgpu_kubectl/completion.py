# SPDX-License-Identifier: Apache-2.0
"""Completion of ``kubectl vgpu``: kubectl runs the program ``kubectl_complete-vgpu`` with the words of the command
line.

Each candidate is printed on a line, with a tab before its description. The last line is a number for cobra, kubectl's
library; 4 means: do not complete file names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .main import COMMANDS, FORMATS, OPTIONS

NO_FILES = ":4"


def candidates(words: Sequence[str]) -> list[str]:
    """Returns the candidates. ``words``: the words after ``kubectl vgpu``; the last is unfinished and may be empty."""
    last = words[-1] if words else ""
    before = words[-2] if len(words) > 1 else ""
    command = next((one for one in words[:-1] if one in COMMANDS), "")
    if not command:
        return [f"{name}\t{about}" for name, (about, _examples) in COMMANDS.items() if name.startswith(last)]
    if before in ("-o", "--output"):
        return [one for one in FORMATS if one.startswith(last)]
    if not last.startswith("-"):
        return []
    return [one for one in OPTIONS[command] if one.startswith(last)]


def main(arguments: Sequence[str] | None = None) -> int:
    print("\n".join([*candidates(sys.argv[1:] if arguments is None else arguments), NO_FILES]))
    return 0
