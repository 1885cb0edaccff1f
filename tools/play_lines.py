# SPDX-License-Identifier: Apache-2.0
"""Filters a playbook's output for the terminal: tasks that change a host, faults, warnings and reports.

The input is the output of Ansible's default callback with results as JSON (``ANSIBLE_CALLBACK_RESULT_FORMAT=json``).
The log keeps all other lines.
"""

from __future__ import annotations

import json
import re

# Name of the task that shows a host's plan. Only the first host's plan is printed, because the plans of one inventory's
# hosts hardly differ.
PLAN = "Show the plan"
# Tasks whose messages are printed.
SHOWN = (PLAN, "Show the report", "Show all tables")
TASK = re.compile(r"TASK \[(?:(\w+)\.(\w+)\.(\w+) : )?(.*)\] \*+$")
RESULT = re.compile(r"(ok|changed|failed|fatal): \[([^\]]+)\](.*)$")


class PlayLines:
    """Takes the lines of the output one by one and returns the lines to print, without line ends. ``log`` is the path
    that is printed instead of an omitted text."""

    def __init__(self, log: str) -> None:
        self._log = log
        self.task = self._name = ""
        self._announced = self._recap = self._faulty = self._planned = False
        self._play: list[str] = []
        # The lines of the JSON message that is being read; None outside of a message.
        self._message: list[str] | None = None

    def of(self, line: str) -> list[str]:
        """Returns the lines to print after one more line of the output."""
        line = line.rstrip()
        if self._message is not None:
            self._message.append(line)
            return self._read() if line == "}" else []
        if found := TASK.match(line):
            play, self._play = self._play, []
            self.task, self._name = f"{found[3]}: {found[4]}" if found[3] else found[4], found[4]
            self._announced = self._faulty = False
            return play
        if line.startswith("PLAY RECAP"):
            self._recap = True
            return ["result by host:"]
        if line.startswith("PLAY ["):
            self._faulty = False
            # The play's name is printed with its first task, so a play without hosts is not printed.
            self._play = [line.partition("[")[2].rpartition("]")[0]]
            return []
        if self._recap:
            return [f"  {line}"] if line else []
        if found := RESULT.match(line):
            return self._result(found[1], found[2], line)
        if line.startswith(("[WARNING]", "[ERROR]", "[DEPRECATION", "ERROR")):
            self._faulty = True
        return [line] if self._faulty and line else []

    def _result(self, verdict: str, host: str, line: str) -> list[str]:
        self._faulty = verdict in ("failed", "fatal")
        if self._faulty:
            return [f"{self.task}:", line]
        if self._name.startswith(SHOWN) and line.endswith("=> {"):
            if not self._name.startswith(PLAN) or not self._planned:
                self._message = ["{"]
                if not self._name.startswith(PLAN):
                    return []
                self._planned = True
                return [f"{host}: plan:"]
            return [f"{host}: plan: in {self._log}"]
        if verdict == "changed" and not self._announced:
            self._announced = True
            return [f"  {self.task}"]
        return []

    def _read(self) -> list[str]:
        lines, self._message = self._message or [], None
        try:
            said = json.loads("\n".join(lines)).get("msg") or []
        except ValueError:
            return lines
        return [f"  {one}".rstrip() for one in ([said] if isinstance(said, str) else said)]
