# SPDX-License-Identifier: Apache-2.0
"""The processes that use one ledger share a limit, whatever their pids, and damage to a ledger stays in its container.

The ledger is the file in which a container's processes record the GPU memory that they use. Strings such
as ``alloc 50 4096`` (allocate 4096 bytes, keep the address in register 50) are commands to programs/puppet.c.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import layouts
import pytest
from conftest import LIMIT, MIB, OK, OOM, Host, Puppet

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a namespace needs root")
APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@needs_root
def test_processes_with_equal_pids_are_accounted_separately(host: Host) -> None:
    """Each of the two processes has pid 1, in a pid namespace of its own. If the library identified processes by their
    pids, it would confuse them."""
    first, second = host.puppet(wrapper=APART).start(), host.puppet(wrapper=APART).start()
    assert first.say("pid") == second.say("pid") == [OK, 1]
    context = host.on_card() // 2
    first.get("alloc", LIMIT - host.on_card())
    assert host.charged() == host.on_card() == LIMIT
    assert second.refused("alloc", 1) == OOM
    shell = first.process.pid  # The pid of the command unshare, whose child process is the puppet program.
    os.kill(int(Path(f"/proc/{shell}/task/{shell}/children").read_text()), signal.SIGKILL)
    first.process.wait()
    second.get("alloc", LIMIT - context)
    assert host.charged() == host.on_card() == LIMIT


# --- two containers of one GPU ---------------------------------------------------------------------------------------


def neighbour(host: Host) -> Puppet:
    """Starts a process of another container, which has separate limits and a separate ledger."""
    limits, ledger = host.folder / "other.limits", host.folder / "other.ledger"
    devices = [{"uuid": uuid, "memory_bytes": LIMIT} for uuid in host.uuids]
    limits.write_bytes(layouts.pack_limits({"allocation": "other", "devices": devices}))
    ledger.write_bytes(layouts.pack_ledger(host.uuids, "other"))
    return host.puppet(VGPU_LIMITS_FILE=str(limits), CUDA_DEVICE_MEMORY_SHARED_CACHE=str(ledger)).start()


def scribbled(path: Path) -> None:
    with path.open("r+b") as ledger:
        ledger.write(b"\xff" * layouts.fields.LEDGER_FILE_SIZE)


# Keys: damage by the tenant. Values: the function that does it; whether the tenant's processes can continue, where None
# means that SIGBUS kills them.
HARM = {
    "grown": (lambda path: os.truncate(path, 64 * MIB), True),
    "truncated": (lambda path: os.truncate(path, 0), None),
    "deleted": (lambda path: path.unlink(), True),
    "replaced by an empty file": (lambda path: (path.unlink(), path.write_bytes(b"")), True),
    "overwritten": (scribbled, False),
}


@pytest.mark.parametrize("harm", HARM)
def test_damaged_ledger_affects_only_its_container(host: Host, harm: str) -> None:
    do, goes_on = HARM[harm]
    tenant, other = host.puppet().start(), neighbour(host)
    tenant.get("alloc", 100 * MIB)
    held = host.physical()[tenant.process.pid]
    do(host.ledger)
    if goes_on is None:
        tenant.send("alloc 50 4096")
        assert tenant.process.wait(20) == -signal.SIGBUS
    else:
        answers = [tenant.result(f"alloc {50 + i} {LIMIT // 4}") for i in range(5)]
        assert OOM in answers or not goes_on
        assert tenant.result("free 50") in (OK, 1)
        assert not goes_on or host.physical()[tenant.process.pid] <= LIMIT
        assert host.physical()[tenant.process.pid] >= held
    # The neighbour's running and new processes still get exactly the neighbour's limit.
    context = host.physical()[other.process.pid]
    other.get("alloc", LIMIT - context)
    assert other.refused("alloc", 1) == OOM
    assert other.say("info") == [OK, 0, LIMIT]
    assert host.physical()[other.process.pid] == LIMIT
