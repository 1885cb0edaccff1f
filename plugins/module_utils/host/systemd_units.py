# SPDX-License-Identifier: Apache-2.0
"""Installs a systemd unit with its files, starts the unit, and removes unit and files without a trace."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Sequence

from .files import read_bytes, write_bytes
from .host import Runner, run_program


class UnitError(Exception):
    """systemd refused; the text holds the command and systemd's message."""


class UnitFiles:
    """Installs or removes a unit in one run; ``plan`` lists the changes made, or in check mode predicted. Tests set
    ``root`` to a folder with a host's files.
    """

    def __init__(self, unit: str, check_mode: bool = False, root: str = "/", run: Runner = run_program) -> None:
        self.unit, self.check_mode, self.root, self.run = unit, check_mode, root, run
        self.plan: list[str] = []

    def path(self, path: str) -> str:
        return os.path.join(self.root, path.lstrip("/"))

    def install(self, wanted: dict[str, str], start: bool) -> None:
        """Writes the files that differ and enables the unit. With ``start`` it also ensures that the unit runs with the
        files on disk.
        """
        changed = []
        for path, text in sorted(wanted.items()):
            raw = read_bytes(self.path(path))
            if raw is None or raw.decode("utf-8", "replace") != text:
                changed.append(path)
                self.plan.append(f"write {path}")
        active, enabled = self._is("active"), self._is("enabled")
        if not enabled:
            self.plan.append(f"enable {self.unit}")
        unread, stale = (False, False) if changed else self._left_over(wanted)
        verb = "restart" if active and (changed or stale) else "start" if not active else ""
        if start and verb:
            self.plan.append(f"{verb} {self.unit}")
        elif unread:
            self.plan.append(f"let systemd read {self.unit}")
        if self.check_mode:
            return
        for path in changed:
            write_bytes(self.path(path), wanted[path].encode("utf-8"))
        if unread or any(path.endswith(self.unit) for path in changed):
            # Reload systemd only if the unit changed, because a reload removes the GPUs from containers of NVIDIA's
            # legacy mode.
            self.must("daemon-reload")
        if not enabled:
            self.must("enable", self.unit)
        if start and verb:
            self.must(verb, self.unit)

    def remove(self, paths: Sequence[str], folders: Sequence[str] = ()) -> None:
        there = sorted(path for path in paths if read_bytes(self.path(path)) is not None)
        self.plan += [f"remove {path}" for path in there]
        if self.check_mode or not there:
            return
        answer = self.run(["systemctl", "disable", "--now", self.unit])
        if answer.rc != 0 and self._is("active"):
            # Stopping failed, so keep the unit file. Without it nothing could stop the service any more, and the GPUs
            # would keep the service's settings.
            raise UnitError(f"systemctl disable --now {self.unit} failed with {answer.rc}: {answer.err.strip()}")
        for path in there:
            os.unlink(self.path(path))
        for folder in folders:
            with contextlib.suppress(OSError):
                os.rmdir(self.path(folder))
        self.must("daemon-reload")

    def _left_over(self, wanted: dict[str, str]) -> tuple[bool, bool]:
        """Finds what a killed run left undone. Returns two values: whether systemd has not read the unit file yet, and
        whether the service started before one of its files was written.
        """
        what = "NeedDaemonReload,ExecMainStartTimestampMonotonic"
        answer = self.run(["systemctl", "show", "-p", what, self.unit])
        fields = dict(line.partition("=")[::2] for line in answer.out.splitlines())
        started = int(fields.get("ExecMainStartTimestampMonotonic") or 0)
        began = time.time() - (time.monotonic() - started / 1e6)
        newest = max(os.stat(self.path(path)).st_mtime for path in wanted)
        return fields.get("NeedDaemonReload") == "yes", bool(started) and newest > began

    def try_restart(self, units: Sequence[str]) -> list[str]:
        """Restarts the running units and returns the faults. A unit that is absent or does not run stays as it is.
        Exception: an enabled oneshot unit, such as NVIDIA's unit for CDI files, ends after its work, so it is started
        again.
        """
        faults = []
        for unit in units:
            shown = self.run(["systemctl", "show", "-p", "Type,UnitFileState", unit]).out
            again = {"Type=oneshot", "UnitFileState=enabled"} <= {*shown.splitlines()}
            answer = self.run(["systemctl", "restart" if again else "try-restart", unit])
            if answer.rc not in (0, 5):
                faults.append(f"{unit} could not be restarted: {answer.err.strip()}")
        return faults

    def _is(self, what: str) -> bool:
        return self.run(["systemctl", f"is-{what}", self.unit]).out.strip() == what

    def must(self, *words: str) -> None:
        answer = self.run(["systemctl", *words])
        if answer.rc != 0:
            said = answer.err.strip() or answer.out.strip()
            raise UnitError(f"systemctl {' '.join(words)} failed with {answer.rc}: {said}")
