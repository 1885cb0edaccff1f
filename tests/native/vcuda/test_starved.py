# SPDX-License-Identifier: Apache-2.0
"""If the library has no host memory to record an allocation, it logs this, and the memory stays charged until exit."""

from __future__ import annotations

import pytest
from conftest import MIB, OK, PRELOAD, Host, compile_program
from test_coverage_graphs import say

# The test replaces the allocator, as a sanitizer does, so both cannot be used together.
pytestmark = pytest.mark.own_build

SIZE = 4 * MIB
# Keys: the command to programs/puppet.c that runs while no host memory is left. Values: the commands before it; the
# commands that free the GPU memory.
MADE = {
    f"alloc 20 {SIZE}": ((), ("free 20",)),
    # test_vmm.py tests cuMemCreate and cuMemMap: if these calls cannot be recorded, the library undoes them.
}


@pytest.mark.parametrize("call", MADE)
def test_unrecorded_allocation_is_logged_and_stays_charged(host: Host, call: str) -> None:
    starve = compile_program(host.folder, "starve.so", "starve.c", flags=("-shared", "-fPIC", "-ldl"))
    starved = host.folder / "starved"
    before, gone = MADE[call]
    puppet = host.puppet(preload=False, LD_PRELOAD=f"{starve}:{PRELOAD}", STARVED=str(starved)).start()
    say(puppet, *before)
    starved.touch()
    assert puppet.result(call) == OK
    starved.unlink()
    assert f"no host memory to remember a block of {SIZE} bytes: it stays charged until exit" in puppet.errors()
    held = host.on_card()
    assert host.charged() == held
    say(puppet, *gone)
    assert host.on_card() == held - SIZE
    assert host.charged() >= host.on_card(), "the charge must never be below the memory on the card"
    puppet.end()
    assert host.charged() == 0
