# SPDX-License-Identifier: Apache-2.0
"""Starts and stops the programs of the cluster, each with a log, and waits for conditions."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Time limit of a wait, so that a test fails instead of hanging. No test asserts a duration.
LIMIT_S = 180.0


class NeverCame(AssertionError):
    """Raised if an awaited condition did not become true in time."""


def until(what: Callable[[], Any], about: str, limit_s: float = LIMIT_S, pause_s: float = 0.2) -> Any:
    """Polls ``what`` until it returns a true value, and returns that value. Raises NeverCame after ``limit_s``.

    ``about``: a noun phrase, because the error reads "there was no …".
    """
    limit = time.monotonic() + limit_s
    while True:
        found = what()
        if found:
            return found
        if time.monotonic() > limit:
            raise NeverCame(f"within {limit_s:.0f} s there was no {about}")
        time.sleep(pause_s)


class Service:
    """A program that a test can start and stop repeatedly."""

    def __init__(self, name: str, command: list[str], logs: Path, environment: dict[str, str] | None = None) -> None:
        self.name, self.command = name, command
        self.log = logs / f"{name}.log"
        self.environment = environment
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        if self.running:
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **(self.environment or {})}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was never started"
        return self.process.pid

    def stop(self, kill: bool = False) -> None:
        """Stops the program by SIGTERM, or by SIGKILL with ``kill``. Does nothing if it does not run."""
        if self.process is None:
            return
        (self.process.kill if kill else self.process.terminate)()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
        self.process = None

    def must_run(self) -> None:
        """Raises AssertionError with the end of the log if the program is not running."""
        if not self.running:
            code = None if self.process is None else self.process.returncode
            raise AssertionError(f"{self.name} ended with {code}; the end of its log:\n{self.tail()}")

    def tail(self, lines: int = 30) -> str:
        if not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
