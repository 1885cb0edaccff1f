# SPDX-License-Identifier: Apache-2.0
"""Configures containerd with the desired runtime and restarts containerd, or restores the former file.

``prepare`` reads the file, merges the desired keys into a new text and checks that text with ``containerd config
dump``. ``prepare`` changes nothing, so check mode stops after it. ``carry_out`` writes the file and restarts
containerd. If containerd does not start, ``carry_out`` restores the former file. Pods survive a restart, because their
shims are separate processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from typing import Any, NamedTuple

from ..host import host as hardware
from ..host.files import read_bytes, write_text
from ..text import toml_text
from . import containerd_text
from .containerd_text import ConfigError, Desired
from .docker_host import run

# Seconds that a containerd must stay up after a restart to count as started.
SETTLE = 2.0


class Options(NamedTuple):
    path: str
    desired: Desired
    absent: bool = False
    record: str | None = None
    service: str = "containerd"
    restart: str = "always"
    apply: bool = True
    timeout: float = 60.0
    program: str = "containerd"


class Edit(NamedTuple):
    """Holds the text of a file before and after the change; None: no file."""

    path: str
    before: str | None
    after: str | None


class Applier:
    """Configures containerd in one run. After ``prepare`` the attributes hold the report: what changes, and why."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.target = options.path
        self.edits: list[Edit] = []
        self.changes: list[str] = []
        self.applied = "none"
        self.warnings: list[str] = []

    def prepare(self, check_mode: bool = False) -> None:
        if self.options.absent:
            self.prepare_removal()
        else:
            self.prepare_runtime(check_mode)
        self.decide()

    def prepare_removal(self) -> None:
        """Reverts every recorded file. There are two if the keys moved from the main file to a file that it imports."""
        for path, record in self.load_record().items():
            before = text_of(path)
            after = None if before is None else containerd_text.undo(before, record, self.options.desired)
            if after != before:
                self.edits.append(Edit(path, before, after))
                self.changes.append(f"remove NVIDIA's runtime from {path}")

    def prepare_runtime(self, check_mode: bool) -> None:
        daemon = self.version()
        main = text_of(self.options.path)
        base = main if main is not None else containerd_text.fresh(daemon, self.options.desired)
        found = containerd_text.problems(base, daemon)
        if found:
            raise ConfigError("nothing was written to {}: {}".format(self.options.path, "; ".join(found)))
        self.target = containerd_text.place(self.options.path, base)
        before = text_of(self.target)
        if self.target == self.options.path:
            after, self.changes = containerd_text.merge(base, self.options.desired)
        else:
            after = containerd_text.drop_in(base, self.options.desired)
            self.changes = [] if after == before else [f"write {self.target}"]
        if self.changes:
            self.edits = [Edit(self.target, before, after)]
        self.validate(base, after, daemon, check_mode)

    def validate(self, main: str, after: str, daemon: tuple[int, ...], check_mode: bool) -> None:
        """Asks the containerd program how it reads the new text. If the program is not installed, there is nothing to
        check.
        """
        if not daemon:
            self.warnings.append(f"no program {self.options.program} on this host, so the file was not validated")
            return
        if not self.changes:
            return
        if self.options.path.endswith(".tmpl"):
            self.warnings.append(f"{self.options.path} is a template, so the file was not validated")
            return
        with tempfile.TemporaryDirectory(prefix="containerd-") as folder:
            candidate = os.path.join(folder, "config.toml")
            write_text(candidate, after, 0o600)
            if self.target != self.options.path:
                ours = os.path.join(folder, containerd_text.DROP_IN)
                write_text(ours, after, 0o600)
                write_text(candidate, toml_text.put(main, "imports", json.dumps([ours])), 0o600)
            code, said = run([self.options.program, "--config", candidate, "config", "dump"])
        if code != 0:
            raise ConfigError(
                f"nothing was written to {self.target}, because containerd reports: {said.splitlines()[-1]}"
            )
        missing = containerd_text.missing(
            said[said.find("\n[") :] if said.find("\n[") >= 0 else said, self.options.desired
        )
        if missing:
            raise ConfigError(f"nothing was written to {self.target}: " + "; ".join(missing))
        if not check_mode and not os.access(self.options.desired.path, os.X_OK):
            raise ConfigError(
                f"nothing was written to {self.target}: the program {self.options.desired.path} is missing; "
                "install NVIDIA's container toolkit first (role nvidia_docker)"
            )

    def version(self) -> tuple[int, ...]:
        code, said = run([self.options.program, "--version"])
        found = re.search(r" v?(\d+)\.(\d+)", said) if code == 0 else None
        return tuple(int(one) for one in found.groups()) if found else ()

    def decide(self) -> None:
        """Decides whether containerd must be restarted. A restart is needed if containerd started before the file
        changed, because containerd reads the file only at its start.
        """
        if not self.options.apply:
            return
        unit = self.unit()
        if not unit["present"] or (self.options.absent and not unit["active"]):
            return
        if not unit["active"]:
            self.applied = "start"
        elif self.changes or self.older(unit["started"]):
            if self.options.restart == "never":
                raise ConfigError(
                    f"nothing was written to {self.target}: {self.options.service} must be restarted to read it, and "
                    "the option restart is never; pods survive a restart, so set the option to another value"
                )
            self.applied = "restart"

    def older(self, started: float | None) -> bool:
        # The record (the file with the former settings) is written together with containerd's file. Compare the time of
        # the record, because other users may edit containerd's file later, and their edits must not cause a restart.
        record = self.options.record
        if not record or not os.path.exists(record):
            return False
        if self.options.absent:
            # A removal deletes the record last. So if the record still exists, a run was killed between writing the
            # file and the restart. The running containerd still starts every container by NVIDIA's program, which a
            # later step may remove.
            return True
        return bool(started) and os.stat(record).st_mtime > float(started or 0)

    def unit(self) -> dict[str, Any]:
        return hardware.Host().units([self.options.service + ".service"])[self.options.service + ".service"]

    def plan(self) -> list[str]:
        return [*self.changes, *([f"{self.applied} {self.options.service}"] if self.applied != "none" else [])]

    def carry_out(self) -> None:
        former = {edit.path: read_bytes(edit.path) for edit in self.edits}
        record = read_bytes(self.options.record) if self.options.record else None
        for edit in self.edits:
            self.write(edit)
        if self.applied != "none":
            fault = self.restart()
            if fault:
                self.put_back(former, record)
                again = self.restart()
                state = f"does NOT run: see journalctl -u {self.options.service}" if again else "runs with it"
                raise ConfigError(
                    f"containerd did not start with the new file: {fault}; the former file is back, and containerd "
                    f"{state}"
                )
        if self.options.absent and self.options.record:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.options.record)

    def write(self, edit: Edit) -> None:
        if edit.after is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(edit.path)
            return
        if not self.options.absent and self.options.record:
            records = self.load_record()
            known = records.get(edit.path) or {"former": edit.before, "exact": True}
            exact = known.get("exact", False) and edit.before in (known["former"], known.get("ours"))
            records[edit.path] = {"former": known["former"], "ours": edit.after, "exact": exact}
            write_text(self.options.record, json.dumps(records, indent=1) + "\n", 0o600)
        write_text(edit.path, edit.after)

    def put_back(self, former: dict[str, bytes | None], record: bytes | None) -> None:
        for path, content in former.items():
            if content is None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            else:
                write_text(path, content.decode("utf-8", "surrogateescape"))
        if self.options.absent or not self.options.record:
            return
        if record is not None:
            # An earlier run wrote this record. Restore it, because without it no later run could remove that run's
            # keys.
            write_text(self.options.record, record.decode("utf-8"), 0o600)
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.options.record)

    def restart(self) -> str:
        """Restarts containerd, so that it reads the file on disk. Returns an empty text if containerd starts and stays
        up, else the fault.
        """
        unit = self.options.service + ".service"
        run(["systemctl", "reset-failed", unit])
        code, said = run(["systemctl", "restart", unit], self.options.timeout)
        if code != 0:
            return said.splitlines()[0] if said else f"systemctl restart ended with {code}"
        time.sleep(SETTLE)
        return "" if self.unit()["active"] else "containerd ended right after its start"

    def load_record(self) -> dict[str, dict[str, Any]]:
        """Returns for each changed file its record, which ``containerd_text.undo`` describes."""
        raw = read_bytes(self.options.record) if self.options.record else None
        if raw is None:
            return {}
        try:
            record = dict(json.loads(raw.decode("utf-8")))
        except (ValueError, TypeError) as fault:
            raise ConfigError(
                f"the record {self.options.record} cannot be read ({fault}); restore or remove it"
            ) from None
        return self.from_one_file(record) if "ours" in record else record

    def from_one_file(self, record: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Returns the records of each file for a record of version 0.2.0, which names only the last changed file."""
        target = str(record.get("target") or self.options.path)
        if os.path.basename(target) != containerd_text.DROP_IN or record["former"] is None:
            return {target: record}
        # The keys moved from the main file to the drop-in, and the former text is still the main file's.
        return {target: {**record, "former": None}, self.options.path: record}


def text_of(path: str) -> str | None:
    raw = read_bytes(path)
    try:
        return None if raw is None else raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise ConfigError(f"{path} is not UTF-8 text ({fault}); correct the file") from None
