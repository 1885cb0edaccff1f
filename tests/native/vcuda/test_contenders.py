# SPDX-License-Identifier: Apache-2.0
"""Threads of one process against each other: afterwards the ledger and the driver agree to the byte."""

from __future__ import annotations

import fcntl
import struct
import subprocess

import pytest
from conftest import Host

CONTEXT_BASE = 0x50000100  # VGPU_LEDGER_CONTEXT_BASE of vgpu_abi.h

# what the threads do, how often
CONTENDERS = [("primary", 4000), ("create", 300), ("churn", 80)]


@pytest.mark.parametrize(("work", "rounds"), CONTENDERS)
def test_threads_leave_the_accounts_equal(host: Host, work: str, rounds: int) -> None:
    command = [host.programs / "contenders", work, str(rounds)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=host.env(), stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "0\n", "something that fits was refused"
        assert host.charged() == host.on_card()
    finally:
        process.kill()
        process.wait()


def test_a_child_does_not_inherit_the_turn_to_measure(host: Host) -> None:
    """The test holds the lock for measuring a context; one thread of the program waits for it while another forks."""
    with host.ledger.open("r+b") as ledger:
        turn = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, CONTEXT_BASE, 16, 0)
        fcntl.fcntl(ledger, 37, turn)  # F_OFD_SETLK
        command = [host.programs / "contenders", "fork", "1"]
        done = subprocess.run(command, env=host.env(), stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == "0\n"
