# SPDX-License-Identifier: Apache-2.0
"""Runs the project's Ansible modules as Ansible does: one process, arguments on stdin, one JSON object as result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from .programs import ROOT


def run_module(module: str, check: bool = False, **params: Any) -> dict[str, Any]:
    """Runs a module and returns its JSON result; ``msg`` has the error of a failed module."""
    own = {"_ansible_check_mode": check, "_ansible_remote_tmp": "/tmp", "_ansible_keep_remote_files": False}
    name = f"ansible_collections.vgpu.fleet.plugins.modules.{module}"
    done = subprocess.run(
        [sys.executable, "-c", f"import runpy; runpy.run_module({name!r}, run_name='__main__')"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": {**params, **own}}),
        capture_output=True,
        text=True,
        check=False,
        # The machine's proxy variables do not apply to addresses of the box (separate namespaces on this machine).
        env={**os.environ, "PYTHONPATH": str(ROOT / ".build" / "collections"), "no_proxy": "*"},
    )
    assert done.stdout, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
