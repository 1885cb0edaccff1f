# SPDX-License-Identifier: Apache-2.0
"""Installs or removes the MIG geometry of a host (MIG profiles with counts), with the systemd unit that creates it
again at boot.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Callable, Sequence

from ..host.files import read_bytes, write_bytes
from ..host.host import Runner, run_program
from ..host.systemd_units import UnitFiles
from . import mig_apply, mig_plan, mig_unit
from .mig_apply import MigError
from .mig_nvml import Mig
from .nvml import NvmlError


class MigHost:
    """Applies or removes a geometry in one run. Tests set ``root`` to a folder with a host's files."""

    def __init__(
        self, record: str | None = None, check_mode: bool = False, root: str = "/", run: Runner = run_program
    ) -> None:
        self.record, self.check_mode, self.root = record, check_mode, root
        self.unit = UnitFiles(mig_unit.UNIT, check_mode, root, run)
        self.plan: list[str] = []
        self.warnings: list[str] = []
        self.before: dict[str, dict[str, int]] = {}
        self.after: dict[str, dict[str, int]] = {}
        self.moved = False

    def path(self, path: str) -> str:
        return os.path.join(self.root, path.lstrip("/"))

    def present(
        self,
        session: Callable[[], Mig],
        geometry: dict[str, int],
        boot: bool = True,
        python: str = "/usr/bin/python3",
    ) -> None:
        if not geometry:
            raise MigError(
                "the geometry is empty; name at least one profile, such as {1g.10gb: 7}, or use state: absent"
            )
        try:
            nvml = _started(session)
        except NvmlError as fault:
            if not self.check_mode:
                raise
            # The role nvidia_driver installs the driver only in the real run.
            self.plan.append(f"set the GPUs to {mig_plan.show(geometry)}")
            self.warnings.append(f"the geometry of the GPUs is not known yet: {fault}")
        else:
            # Record the former geometry before the first change, so that a killed run does not lose it.
            self._apply(nvml, geometry, None, keep=True)
        if boot:
            self.warnings += self.without_python(python)
            self.unit.install(mig_unit.files(geometry, python), start=False)
            self.plan += self.unit.plan

    def without_python(self, python: str) -> list[str]:
        """Returns a warning if the Python that the unit runs is missing. Without the warning this fault would appear
        only at the next boot.
        """
        if os.access(self.path(python), os.X_OK):
            return []
        return [
            f"{python} is missing, and {mig_unit.UNIT} needs it at the next boot: use the role device_plugin, which "
            "installs it, or install it, or name a Python 3.8 or newer in mig_python"
        ]

    def absent(self, session: Callable[[], Mig]) -> None:
        """Removes the geometry. If there is no record, the collection configured nothing, so the GPUs stay as
        they are.
        """
        raw = read_bytes(self.path(self.record)) if self.record else None
        if raw is not None:
            try:
                kept = json.loads(raw.decode("utf-8"))["before"]
            except (ValueError, KeyError, TypeError) as fault:
                raise MigError(f"the record {self.record} cannot be read ({fault}); restore it or remove it") from None
            try:
                self._apply(_started(session), {}, kept, keep=False)
            except NvmlError as fault:
                # This is only a warning, because a host whose driver was removed has no geometry to restore.
                self.warnings.append(f"the former geometry of the GPUs was not restored: {fault}")
        self.unit.remove(list(mig_unit.files({})), mig_unit.folders())
        self.plan += self.unit.plan
        if self.record and not self.check_mode:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(self.record))

    def _apply(self, nvml: Mig, geometry: dict[str, int], of_gpu: dict[str, dict[str, int]] | None, keep: bool) -> None:
        try:
            predicted = mig_apply.apply(nvml, geometry, True, of_gpu)
            if (
                predicted.plan
                and keep
                and self.record
                and not self.check_mode
                and not read_bytes(self.path(self.record))
            ):
                kept = json.dumps({"before": predicted.before}, indent=1, sort_keys=True) + "\n"
                write_bytes(self.path(str(self.record)), kept.encode("utf-8"), 0o600)
            done = predicted if self.check_mode else mig_apply.apply(nvml, geometry, False, of_gpu)
        finally:
            nvml.stop()
        self.plan += done.plan
        self.warnings += done.warnings
        self.before, self.after = done.before, done.after
        self.moved = bool(done.plan)

    def restart(self, units: Sequence[str]) -> None:
        if self.moved and not self.check_mode:
            self.warnings += self.unit.try_restart(units)

    def diff(self) -> list[dict[str, Any]]:
        lines = [
            "\n".join(f"{uuid}: {mig_plan.show(one)}" for uuid, one in sorted(found.items())) + "\n"
            for found in (self.before, self.after)
        ]
        title = "MIG geometry"
        return [{"before_header": title, "after_header": title, "before": lines[0], "after": lines[1]}]


def _started(session: Callable[[], Mig]) -> Mig:
    nvml = session()
    nvml.start()
    return nvml
