# SPDX-License-Identifier: Apache-2.0
"""Several threads of one process use the GPU at once. Afterwards the ledger, the container's record of its GPU memory,
must show exactly the memory that the driver reports."""

from __future__ import annotations

import fcntl
import struct
import subprocess

import pytest
from conftest import Host

# Offset in the ledger of the lock for measuring a context (VGPU_LEDGER_CONTEXT_BASE of vgpu_abi.h).
CONTEXT_BASE = 0x50000100

# Columns: the case of programs/contenders.c; the number of rounds.
CONTENDERS = [("primary", 4000), ("create", 300), ("churn", 80)]


@pytest.mark.parametrize(("work", "rounds"), CONTENDERS)
def test_concurrent_threads_leave_an_exact_ledger(host: Host, work: str, rounds: int) -> None:
    command = [host.programs / "contenders", work, str(rounds)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=host.env(), stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "0\n", "every call is within the limit and must succeed"
        assert host.charged() == host.on_card()
    finally:
        process.kill()
        process.wait()


def test_forked_child_does_not_inherit_the_measuring_lock(host: Host) -> None:
    """The test holds the lock for measuring a context; one thread of the program waits for it while another forks."""
    with host.ledger.open("r+b") as ledger:
        turn = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, CONTEXT_BASE, 16, 0)
        fcntl.fcntl(ledger, 37, turn)  # Number of the command F_OFD_SETLK.
        command = [host.programs / "contenders", "fork", "1"]
        done = subprocess.run(command, env=host.env(), stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == "0\n"
