# SPDX-License-Identifier: Apache-2.0
"""Runs the part of the isolation check (attempts to exceed the limits on a node) that tests the driver's own memory
limits, without a container engine. It acts like a runtime: it starts a process in a new cgroup, with a bundle and the
hooks of the device plugin's CDI file (which tells an engine what to add for a device). Tests start this file as a
separate program.

Arguments, as JSON: ``socket``, ``vgpuctl``, ``cgroup_root``, ``cdi`` (the CDI file), ``groups`` (folder for new
cgroups), ``hooks`` (whether hooks run), ``names`` (of checks) and ``beside`` (whether a second container runs too).
Prints the results of the checks.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ansible_collections.vgpu.fleet.plugins.module_utils.host.mount_namespace import Outcome
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation.check import Plugin, SliceCheck
from ansible_collections.vgpu.fleet.plugins.module_utils.isolation.runner import WAIT_FOR_GO, RunnerError

WORDS = json.loads(sys.argv[1])
NUMBERS = itertools.count()


class GroupRunner:
    name = "podman"
    overhead_s = 0.0

    def __init__(self, lease: Any) -> None:
        self._lease = lease
        self._group = Path(WORDS["groups"]) / f"c{next(NUMBERS)}"

    def _hooks(self) -> list[dict]:
        spec = json.loads(Path(WORDS["cdi"]).read_text())
        edits = [one["containerEdits"] for one in spec["devices"] if one["name"] == self._lease.uuid]
        return [hook for one in edits for hook in one.get("hooks", [])]

    def run(self, argv: Any, _timeout: float, before_start: Any = None, while_running: Any = None) -> Outcome:
        self._group.mkdir()
        enter = ["sh", "-c", f'echo $$ > "$0/cgroup.procs" && exec sh -c \'{WAIT_FOR_GO}\' "$@"', str(self._group)]
        with subprocess.Popen([*enter, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                while str(process.pid) not in (self._group / "cgroup.procs").read_text().split():
                    time.sleep(0.01)
                self._create(process.pid)
                if before_start:
                    before_start(process.pid)
                out, _err = process.communicate("go\n")
            finally:
                process.kill()
                process.wait()
        for _attempt in range(200):
            try:
                self._group.rmdir()
                break
            except OSError:
                time.sleep(0.02)
        return Outcome(process.returncode, out, "", False)

    def _create(self, pid: int) -> None:
        with tempfile.TemporaryDirectory() as bundle:
            mounts = [{"destination": one.container_path, "source": one.host_path} for one in self._lease.mounts]
            Path(bundle, "config.json").write_text(json.dumps({"mounts": mounts}))
            state = json.dumps({"id": "c", "pid": pid, "bundle": bundle})
            for hook in self._hooks() if WORDS["hooks"] else []:
                command = [hook["path"], *hook["args"][1:]]
                done = subprocess.run(command, input=state, env={}, capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    raise RunnerError(done.stderr)


class Engine:
    @staticmethod
    def runner(lease: Any) -> GroupRunner:
        return GroupRunner(lease)

    @staticmethod
    def heed(_fault: Exception) -> None:
        return


def main() -> None:
    plugin = Plugin(WORDS["vgpuctl"], WORDS["socket"])
    params = {"timeout": 60, "duration": 0, "checks": WORDS["names"], "cgroup_root": WORDS["cgroup_root"]}
    params |= {"omit_mounts": [], "environment": {}, "socket": WORDS["socket"]}
    lease = plugin.ask("lease", "--ttl", "300")
    try:
        one = SliceCheck(params, plugin, lease, plugin.ask("status"), Engine())
        print(json.dumps([*one._check_driver(), *([one._driver_beside()] if WORDS["beside"] else [])]))
    finally:
        plugin.ask("release", lease["allocation"])


if __name__ == "__main__":
    main()
