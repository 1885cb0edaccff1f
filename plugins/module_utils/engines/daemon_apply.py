# SPDX-License-Identifier: Apache-2.0
"""Configures docker through daemon.json and reloads or restarts the daemon, or restores the former file.

``prepare`` compares the file with the desired keys, checks the new text, and decides between reload and restart.
``prepare`` changes nothing, so check mode stops after it. ``carry_out`` writes the file and makes the daemon apply it.
If the daemon does not apply the file, ``carry_out`` restores the former state. All access to the host goes through
DockerHost.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from typing import Any, NamedTuple, Sequence

from ..host.files import read_bytes, write_bytes, write_text
from . import daemon_check, daemon_json, daemon_record
from .daemon_json import Change, Unapplied
from .docker_host import DockerHost, DockerHostError


class ApplyError(Exception):
    """The desired state was not carried out; the text says what was found and what to do."""


class Options(NamedTuple):
    path: str
    settings: dict[str, Any]
    remove: Sequence[tuple[str, ...]] = ()
    absent: bool = False
    record: str | None = None
    validate: bool = True
    touch_daemon: bool = True
    restart: str = "if_idle"
    timeout: float = 60.0
    check_mode: bool = False
    planned_programs: Sequence[str] = ()
    marker: str = daemon_json.PENDING


class Applier:
    """Configures docker in one run. After ``prepare`` the attributes hold the report: what changes, and why."""

    def __init__(self, options: Options, host: DockerHost) -> None:
        self.options, self.host = options, host
        # If daemon.json is a symbolic link, the link stays and its target is replaced.
        self.target = os.path.realpath(options.path)
        self.before: str | None = None
        self.after: str | None = None
        self.changes: list[Change] = []
        self.unapplied: list[Unapplied] = []
        self.applied = "none"
        self.enable = False
        self.restart_keys: list[str] = []
        self.containers: list[str] = []
        self.warnings: list[str] = []
        self.restored = False
        # True if the daemon was restarted with the new file. Only in this case a rollback to the former file needs
        # another restart.
        self.restarted = False
        self.record_before: bytes | None = None

    def prepare(self) -> None:
        self.before = daemon_json.decode(read_bytes(self.target))
        record = self.load_record()
        if not self.options.absent:
            self.after, self.changes = daemon_record.merge(
                self.before, record, self.options.settings, self.options.remove
            )
        elif record is not None:
            self.after, self.changes = daemon_record.undo(self.before, record)
        else:
            self.after, self.changes = daemon_record.take_out(self.before, self.options.settings)
        document = daemon_json.parse(self.after)
        argv = self.host.argv()
        self.check(document, argv)
        if self.options.touch_daemon:
            self.decide(document, argv)

    def check(self, document: dict[str, Any], argv: list[str]) -> None:
        """Raises an error if the daemon would not start with the new file. Never raises an error for a removal of the
        collection's keys.
        """
        if self.options.absent:
            return
        found = daemon_check.problems(document, argv)
        missing = [one for one in daemon_check.problems(document, argv, self.is_program) if one not in found]
        if self.options.check_mode:
            # In check mode earlier tasks have not installed their packages, so a missing program is only a warning.
            self.warnings.extend(missing)
        else:
            found += missing
        if found:
            raise ApplyError(
                ("nothing was written, because dockerd would not run with this file:\n- ") + "\n- ".join(found)
            )
        if self.options.validate and self.changes:
            complaint = self.ask_dockerd(argv)
            if complaint:
                raise ApplyError(f"nothing was written, because dockerd --validate says: {complaint}")

    def is_program(self, path: str) -> bool:
        """Returns True if the host has the program, or in check mode if an earlier step of the plan installs it."""
        planned = self.options.check_mode and path in self.options.planned_programs
        return planned or self.host.is_program(path)

    def ask_dockerd(self, argv: list[str]) -> str | None:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="daemon-", suffix=".json") as stream:
            stream.write(self.after or "{}")
            stream.flush()
            return self.host.validate(stream.name, argv)

    def decide(self, document: dict[str, Any], argv: list[str]) -> None:
        """Decides whether the daemon must be reloaded, restarted or started, and whether that is allowed."""
        unit = self.host.facts()
        if not unit["present"]:
            return
        if unit["masked"] and not self.options.absent:
            name = self.host.service
            raise ApplyError(f"nothing was written: {name}.service is masked; systemctl unmask {name}.service")
        self.enable = not self.options.absent and not unit["enabled"]
        if not unit["active"]:
            self.applied = "none" if self.options.absent else "start"
            return
        info = self.host.info()
        self.unapplied = daemon_json.unapplied(info, document, argv) if info is not None else []
        pending = read_bytes(self.options.marker)
        self.restart_keys = daemon_json.needs_restart([*self.changes, *self.unapplied])
        if pending is not None and pending.strip() == b"restart" and not self.restart_keys:
            self.restart_keys = ["of an earlier run that was interrupted"]
        if info is None:
            self.restart_keys = self.restart_keys or ["of a daemon that does not answer"]
        if self.restart_keys:
            self.applied = "restart"
            self.allow_restart(info or {})
        elif self.changes or self.unapplied or pending is not None:
            self.applied = "reload"

    def allow_restart(self, info: dict[str, Any]) -> None:
        self.containers = self.host.containers(answers=bool(info))
        keys = ", ".join(self.restart_keys)
        if self.options.restart == "never":
            raise ApplyError(
                f"nothing was written: a restart of docker is needed (keys: {keys}), and the option restart is "
                "never; set it to another value"
            )
        alive = bool(info.get("LiveRestoreEnabled"))
        if self.options.restart == "if_idle" and self.containers and not alive:
            raise ApplyError(
                f"nothing was written: a restart of docker is needed (keys: {keys}) and would stop the running "
                f"containers {', '.join(self.containers)}; stop them, set live-restore, or set the option restart "
                "(in a role: container_runtime_restart) to always"
            )

    def plan(self) -> list[str]:
        steps = [str(change) for change in self.changes]
        if not self.changes:
            steps += [str(one) for one in self.unapplied]
        if self.applied != "none":
            steps.append(f"{self.applied} {self.host.service}")
        if self.enable:
            steps.append(f"enable {self.host.service}")
        return steps

    def carry_out(self) -> None:
        if self.enable:
            self.host.enable()
        self.write_record()
        if self.before == self.after and self.applied == "none":
            self.drop_record()
            return
        former = read_bytes(self.target)
        if self.applied in ("reload", "restart"):
            write_text(self.options.marker, self.applied + "\n")
        if self.before != self.after:
            self.write()
        try:
            self.follow()
        except DockerHostError as fault:
            self.put_back(former)
            back = "the former file is back" if self.before != self.after else "the file is unchanged"
            raise ApplyError(
                f"docker did not apply the file: {fault}\n{back}; docker "
                + ("runs with it" if self.host.info() is not None else "does NOT run: see journalctl -u docker")
            ) from None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.options.marker)
        self.drop_record()

    def write_record(self) -> None:
        """Records the changes before the file is written. A run without changes may only find that a recorded key no
        longer has our value.
        """
        if self.options.absent or not self.options.record:
            return
        record = self.load_record()
        if not self.changes and record is None:
            return
        self.record_before = read_bytes(self.options.record)
        fresh = daemon_record.update(record, self.before, self.after, self.changes)
        if fresh != record:
            write_text(self.options.record, json.dumps(fresh, indent=1) + "\n", 0o600)

    def write(self) -> None:
        if self.after is None:
            os.unlink(self.target)
        else:
            write_text(self.target, self.after)

    def follow(self) -> None:
        """Makes the daemon apply the file by a reload or a restart, and checks that the daemon has the new values."""
        if self.applied == "none":
            return
        document = daemon_json.parse(self.after)
        argv = self.host.argv()

        def shown(info: dict[str, Any]) -> bool:
            return not daemon_json.unapplied(info, document, argv)

        if self.applied == "reload":
            try:
                self.host.reload()
                # If the file is faulty, the reload command exits 0 and the daemon keeps its old values. So check the
                # values that the daemon reports.
                self.host.wait(shown, min(self.options.timeout, 15.0))
                return
            except DockerHostError:
                self.restart_keys = ["which the reload did not apply"]
                try:
                    self.allow_restart(self.host.info() or {})
                except ApplyError as fault:
                    raise DockerHostError(str(fault)) from None
                self.applied = "restart"
        self.restarted = True
        self.host.restart()
        self.host.wait(shown, self.options.timeout)

    def put_back(self, former: bytes | None) -> None:
        if self.before != self.after:
            if former is None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.target)
            else:
                write_bytes(self.target, former)
            self.restored = True
            self.put_record_back()
        with contextlib.suppress(DockerHostError):
            if not self.restarted and self.host.info() is not None:
                # Do not restart here: the daemon still has its former settings, and a restart would end containers that
                # the option ``restart`` protects.
                self.host.reload()
            else:
                self.host.restart()
            self.host.wait(lambda info: True, self.options.timeout)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.options.marker)

    def load_record(self) -> dict[str, Any] | None:
        raw = read_bytes(self.options.record) if self.options.record else None
        if raw is None:
            return None
        try:
            record = json.loads(raw.decode("utf-8"))
        except ValueError as fault:
            raise ApplyError(
                f"the record {self.options.record} cannot be read ({fault}); restore it or remove it"
            ) from None
        return record if isinstance(record, dict) else None

    def put_record_back(self) -> None:
        if self.options.absent or not self.options.record:
            return
        if self.record_before is not None:
            write_bytes(self.options.record, self.record_before)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.options.record)

    def drop_record(self) -> None:
        if self.options.absent and self.options.record:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.options.record)
