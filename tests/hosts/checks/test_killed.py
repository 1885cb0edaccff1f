# SPDX-License-Identifier: Apache-2.0
"""A run that is killed in the middle. What follows it (converge) must finish the work; here it is only cut off."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from conftest import INVENTORY, ROOT, Node, environment, play_command

LIMIT = 300.0


@pytest.mark.parametrize(
    ("task", "seconds"),
    [
        # In the middle of apt's transaction, in the middle of docker's configuration, in the middle of the plugin.
        ("nvidia_driver", 1.0),
        ("container_runtime", 1.5),
        ("device_plugin", 1.0),
    ],
)
def test_cut_off(nodes: dict[str, Node], task: str, seconds: float) -> None:
    command = play_command("site.yml", INVENTORY)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    started, seen = time.monotonic(), []
    try:
        for line in process.stdout:
            seen.append(line)
            assert time.monotonic() - started < LIMIT, "".join(seen)
            if line.startswith("TASK [") and f"{task} : " in line and "Validating" not in line:
                time.sleep(seconds)
                break
        else:
            pytest.fail(f"the run ended without a task of {task}:\n{''.join(seen)}")
    finally:
        # The whole session, as a lost controller would be; what it started on the hosts is on its own.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
