# SPDX-License-Identifier: Apache-2.0
"""Stores the results of a stage of gpu-check: gates, which decide whether the stage passes; goals, which are only shown
as met or missed; and figures, which are only stored. The file is written after each entry, so that a stopped stage
leaves its results so far."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class Skip(Exception):
    """Raised if a stage cannot be measured on this host; the text names the missing requirement."""


class Report:
    """One stage's results.

    A gate decides the exit status. A goal (an absolute time, or a value that is not reached yet) is shown as met or
    missed and does not affect the exit status. A figure is only stored.
    """

    def __init__(self, path: Path | None, name: str) -> None:
        self._path = path
        self._started = time.monotonic()
        self.data: dict[str, Any] = {
            "name": name,
            "status": "failed",
            "reason": "the stage has not ended",
            "seconds": 0.0,
            "gates": [],
            "goals": [],
            "figures": {},
            "notes": [],
        }
        self._write()

    def _write(self) -> None:
        self.data["seconds"] = round(time.monotonic() - self._started, 1)
        if self._path:
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self.data, indent=1, default=str))
            os.replace(new, self._path)

    def gate(self, name: str, held: bool, expected: Any, found: Any) -> bool:
        """Adds a gate and returns ``held``; if ``held`` is false, the stage fails."""
        row = {"name": name, "held": bool(held), "expected": expected, "found": found}
        self.data["gates"].append(row)
        self._write()
        return bool(held)

    def goal(self, name: str, met: bool, wanted: Any, found: Any) -> None:
        self.data["goals"].append({"name": name, "met": bool(met), "wanted": wanted, "found": found})
        self._write()

    def figure(self, name: str, value: Any) -> None:
        self.data["figures"][name] = value
        self._write()

    def note(self, text: str) -> None:
        self.data["notes"].append(text)
        self._write()

    def end(self, failure: str = "", skipped: str = "") -> dict[str, Any]:
        """Sets the stage's status: skipped, failed with a reason, or else passed or failed according to its gates."""
        missed = [gate["name"] for gate in self.data["gates"] if not gate["held"]]
        self.data["status"] = "skipped" if skipped else "failed" if failure or missed else "passed"
        self.data["reason"] = skipped or failure or ("not held: " + ", ".join(missed) if missed else "")
        if self.data["status"] == "passed" and not self.data["gates"]:
            self.data["status"] = "measured"
        self._write()
        return self.data


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 58 else text[:57] + "…"


def table(stages: list[dict[str, Any]]) -> str:
    """Returns all stages as text: one line each, with gates and goals below."""
    lines = []
    for stage in stages:
        reason = f": {stage['reason']}" if stage["reason"] else ""
        lines.append(f"{stage['name']:<14} {stage['status']}{reason}  ({stage['seconds']:.0f} s)")
        for row in stage["gates"]:
            verdict = "held" if row["held"] else "NOT HELD"
            lines.append(f"    {verdict:<9} {row['name']:<52} {_short(row['expected']):>22}  {_short(row['found'])}")
        for row in stage["goals"]:
            verdict = "met" if row["met"] else "missed"
            lines.append(f"    {verdict:<9} {row['name']:<52} {_short(row['wanted']):>22}  {_short(row['found'])}")
        lines += [f"    note      {note}" for note in stage["notes"]]
    return "\n".join(lines)


def verdict(stages: list[dict[str, Any]]) -> int:
    """Returns the exit status: 1 if a stage failed, 2 if no gate was measured, else 0."""
    states = [stage["status"] for stage in stages]
    if "failed" in states:
        return 1
    return 0 if "passed" in states or "measured" in states else 2
