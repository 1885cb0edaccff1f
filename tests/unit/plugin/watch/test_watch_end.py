# SPDX-License-Identifier: Apache-2.0
"""Tests with real processes how the watcher, which looks for processes that bypass the library, terminates them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from vgpu_plugin.watch.end import GRACE_S, Ender
from vgpu_plugin.watch.processes import Process, Processes


@pytest.fixture
def victim() -> Any:
    """Starts a process that ignores SIGTERM, so only SIGKILL ends it."""
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('x', flush=True); time.sleep(60)"
    one = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert one.stdout is not None
    assert one.stdout.readline()
    yield one
    one.kill()
    one.wait()


def test_sigterm_comes_before_sigkill(victim):
    processes = Processes()
    ender = Ender(processes.process)
    found = processes.process(victim.pid)
    assert found is not None
    # No signal is sent, because the caller no longer wants to terminate the process.
    assert ender.end(found, 100.0, lambda _one: False) == ""
    assert ender.end(found, 100.0, lambda _one: True) == "SIGTERM"
    assert ender.end(found, 100.0 + GRACE_S - 0.1, lambda _one: True) == ""
    time.sleep(0.05)
    assert victim.poll() is None
    assert ender.end(found, 100.0 + GRACE_S, lambda _one: True) == "SIGKILL"
    victim.wait(30)
    assert victim.returncode == -signal.SIGKILL
    assert ender.end(found, 200.0, lambda _one: True) == ""  # No further signal is sent, because the process has ended.
    assert ender.sent == {"SIGTERM": 1, "SIGKILL": 1}


def test_process_with_a_reused_pid_is_spared(victim):
    processes = Processes()
    found = processes.process(victim.pid)
    assert found is not None
    older = Process(found.pid, found.start - 1, found.name, found.own)
    assert Ender(processes.process).end(older, 1.0, lambda _one: True) == ""
    assert victim.poll() is None


def test_all_processes_of_a_finding_share_one_grace_period(victim):
    """If each process had its own grace period, a container could survive by starting a new process
    every few seconds.
    """
    processes = Processes()
    found = processes.process(victim.pid)
    assert found is not None
    late = Ender(processes.process).end(found, 100.0 + GRACE_S, lambda _one: True, begun=100.0)
    assert late == "SIGKILL"
    victim.wait(30)


def test_grace_period_starts_again_if_the_policy_was_off(victim):
    processes = Processes()
    ender = Ender(processes.process)
    found = processes.process(victim.pid)
    assert found is not None
    assert ender.end(found, 1.0, lambda _one: True) == "SIGTERM"
    ender.forget()
    assert ender.end(found, 1000.0, lambda _one: True) == "SIGTERM"
