# SPDX-License-Identifier: Apache-2.0
"""Queries NVML as a process of the container does, through nvidia-ml-py and through NVML's C functions."""

from __future__ import annotations

import json
import subprocess
import sys

from conftest import HERE, ROOT, Host

SCRIPT = ROOT / "tests" / "native" / "gpusim_nvml" / "ask_nvml.py"
SETUP = (HERE / "programs" / "nvml_raw.py").read_text()


def ask(host: Host, *expressions: str, prefix: tuple = (), **options: object) -> list:
    """Evaluates the expressions in a new process and returns the results; with preload=False the new process does not
    load libvgpu.so.
    """
    question = json.dumps({"setup": SETUP, "expressions": expressions})
    command = [*prefix, sys.executable, SCRIPT, question]
    env = host.env(**options)  # type: ignore[arg-type]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or options.get("limits") is False
    return json.loads(done.stdout)
