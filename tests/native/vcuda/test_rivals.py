# SPDX-License-Identifier: Apache-2.0
"""Threads of one process against each other: afterwards the ledger and the driver agree to the byte."""

from __future__ import annotations

import subprocess

import pytest
from conftest import Host

# what the threads do, how often
RIVALS = [("primary", 4000), ("create", 300)]


@pytest.mark.parametrize(("work", "rounds"), RIVALS)
def test_threads_leave_the_accounts_equal(host: Host, work: str, rounds: int) -> None:
    command = [host.programs / "rivals", work, str(rounds)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=host.env(), stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "0\n", "something that fits was refused"
        assert host.charged() == host.on_card()
    finally:
        process.kill()
        process.wait()
