# SPDX-License-Identifier: Apache-2.0
"""Calls the device plugin of a host through vgpuctl, for the isolation check."""

from __future__ import annotations

import json
import subprocess
from typing import Any

# The fields that the check reads from vgpuctl's output.
KEYS = {
    "status": frozenset(("gpus", "slices")),
    "watch": frozenset(("findings", "looks", "looks_to_name", "interval_s", "fault")),
    "lease": frozenset(("allocation", "ids", "envs", "mounts", "devices", "cdi_devices")),
}


class PluginError(Exception):
    """The device plugin refused or failed; ``rc`` is the exit status of vgpuctl."""

    def __init__(self, rc: int, message: str) -> None:
        self.rc = rc
        super().__init__(message)


class Plugin:
    """Calls the device plugin of this host through vgpuctl."""

    def __init__(self, program: str, socket: str) -> None:
        self._command = [program, "--socket", socket]

    def ask(self, *arguments: str) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [*self._command, *arguments, "--json"], capture_output=True, text=True, timeout=60, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as fault:
            raise PluginError(
                1, f"{self._command[0]} {arguments[0]}: {fault}; the role device_plugin installs it"
            ) from None
        if done.returncode != 0:
            raise PluginError(
                done.returncode, done.stderr.strip() or f"vgpuctl {arguments[0]} ended with {done.returncode}"
            )
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not KEYS.get(arguments[0], frozenset()) <= set(answer):
            said = " ".join((done.stdout + " " + done.stderr).split())[:200] or "nothing"
            raise PluginError(
                1, f"{self._command[0]} {arguments[0]} answered {said}, expected a JSON object; is it vgpuctl?"
            )
        return answer
