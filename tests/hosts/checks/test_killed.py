# SPDX-License-Identifier: Apache-2.0
"""Kills a run of site.yml in the middle of a task. The next step of the molecule scenario (converge) runs site.yml
again and must finish the work."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from conftest import INVENTORY, ROOT, Node, environment, play_command

LIMIT = 300.0


# columns: role, task of the role in which the run is killed, seconds from the start of the task to the kill
@pytest.mark.parametrize(
    ("role", "task", "seconds"),
    [
        ("nvidia_driver", "Install the packages of the driver, by apt", 1.0),
        ("container_runtime", "Set keys of daemon.json and reload the daemon", 0.5),
        ("device_plugin", "Install the version", 1.0),
        ("device_plugin", "Restart the program with the changes", 0.5),
    ],
)
def test_run_is_killed_in_a_task(nodes: dict[str, Node], role: str, task: str, seconds: float) -> None:
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
            if line.startswith("TASK [") and f".{role} : {task}]" in line:
                time.sleep(seconds)
                break
        else:
            pytest.fail(f"the run ended without the task {role} : {task}:\n{''.join(seen)}")
    finally:
        # Kill the whole session, as when the controller is lost. Its processes on the hosts continue.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
