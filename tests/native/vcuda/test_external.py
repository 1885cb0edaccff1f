# SPDX-License-Identifier: Apache-2.0
"""cuImportExternalMemory imports memory from a descriptor, also memory that cuMemCreate made in another process. Each
such memory must be charged once. Strings such as ``export 11 10`` are commands to programs/puppet.c, whose numbers are
registers or sizes. In arguments of ``call``, $10 is the value of register 10 and @10 its address."""

from __future__ import annotations

import itertools
import os
import signal

import layouts
import pytest
from conftest import LIMIT, MIB, NOT_SUPPORTED, OK, OOM, Host, Puppet
from test_coverage_graphs import say
from test_shareable import HANDLE, MEMORY, SIZE, TAKEN, account, charged_until_the_last, end, make, on_the_node, take

EXTERNAL, BUFFER, CONTEXT, DESCRIPTION, PART = 30, 31, 32, 50, 70
OPAQUE_FD = 1
NO_CONTEXT = 201


def attempt(user: Puppet, size: int = SIZE) -> int:
    """Imports the descriptor that take() duplicated, and returns the CUresult."""
    descriptor = user.say(f"show {TAKEN} 1")[1]
    for at, value in enumerate((OPAQUE_FD, descriptor, 0, size, 0)):
        say(user, f"put {DESCRIPTION + at} {value}")
    return user.result(f"call cuImportExternalMemory @{EXTERNAL} @{DESCRIPTION}")


def map_all(user: Puppet, size: int = SIZE) -> None:
    say(user, f"put {PART} 0", f"put {PART + 1} {size}", f"put {PART + 2} 0")
    say(user, f"call cuExternalMemoryGetMappedBuffer @{BUFFER} ${EXTERNAL} @{PART}")


STEPS = {
    "exporter releases its handle": (0, f"release-handle {MEMORY}"),
    "exporter closes its descriptor": (0, f"close-fd {HANDLE}"),
    "importer destroys the import": (1, f"call cuDestroyExternalMemory ${EXTERNAL}"),
    "importer frees the buffer": (1, f"free {BUFFER}"),
}


@pytest.mark.parametrize("order", list(itertools.permutations(STEPS))[::3])
def test_external_memory_is_charged_once_until_its_last_use_ends(host: Host, three: tuple, order: tuple) -> None:
    maker, user = three[:2]
    before = host.on_card()
    make(maker)
    take(maker, user)
    assert attempt(user) == OK
    map_all(user)
    charged_until_the_last(host, three, before, STEPS, order)


def test_buffer_stays_charged_after_a_failed_free(host: Host, three: tuple) -> None:
    maker, user, watcher = three
    before = host.on_card()
    make(maker)
    take(maker, user)
    assert attempt(user) == OK
    map_all(user)
    for who, line in STEPS.values():
        if "free" not in line:
            assert three[who].result(line) == OK
    say(user, f"call cuCtxPopCurrent_v2 @{CONTEXT}")
    assert user.result(f"free {BUFFER}") == NO_CONTEXT
    say(user, f"call cuCtxPushCurrent_v2 ${CONTEXT}")
    assert account(watcher, maker, user) == host.on_card() == before + SIZE
    assert user.result(f"free {BUFFER}") == OK
    assert account(watcher, maker, user) == host.on_card() == before


@pytest.mark.parametrize("killed", [False, True])
def test_import_stays_charged_after_the_exporters_exit(host: Host, three: tuple, killed: bool) -> None:
    maker, user, watcher = three
    context = host.physical()[watcher.process.pid]
    make(maker)
    take(maker, user)
    assert attempt(user) == OK
    end(maker, killed)
    assert host.on_card() == 2 * context + SIZE, (
        "the driver released the memory with the exporter, so the test proves nothing"
    )
    assert account(watcher) == on_the_node(host) == host.on_card()
    assert watcher.refused("alloc", LIMIT - 2 * context - SIZE + 1) == OOM
    end(user, killed)
    assert account(watcher) == host.on_card() == context


def test_repeated_imports_do_not_exceed_the_limit(host: Host, three: tuple) -> None:
    """The import closes the descriptor. So a search for open descriptors would not show that the memory is in use."""
    maker, user, _watcher = three
    status, got = OK, 0
    for _unused in range(20):
        status = maker.result(f"create-shared {MEMORY} {SIZE} 0")
        if status != OK:
            break
        say(maker, f"export {HANDLE} {MEMORY}")
        take(maker, user)
        assert attempt(user) == OK
        got += 1
        say(maker, f"release-handle {MEMORY}", f"close-fd {HANDLE}")
    assert status == OOM and got > 5
    assert host.on_card() <= LIMIT


def test_without_the_library_repeated_imports_exceed_the_limit(host: Host) -> None:
    """The negative control: without the library repeated imports exceed the limit."""
    maker, user = host.puppet(preload=False).start(), host.puppet(preload=False).start()
    for _unused in range(10):
        make(maker)
        take(maker, user)
        assert attempt(user) == OK
        say(maker, f"release-handle {MEMORY}", f"close-fd {HANDLE}")
    assert host.on_card() > LIMIT


@pytest.mark.parametrize("made_here", [False, True])
def test_external_memory_of_another_container_is_refused(host: Host, made_here: bool) -> None:
    elsewhere = host.folder / "elsewhere"
    elsewhere.write_bytes(layouts.pack_ledger(host.uuids, "other"))
    maker = host.puppet(CUDA_DEVICE_MEMORY_SHARED_CACHE=str(elsewhere)).start()
    user, bare = host.puppet().start(), host.puppet(preload=False).start()
    make(maker)
    if made_here:
        make(user)
    for puppet in (user, bare):
        take(maker, puppet)
    assert attempt(user) == NOT_SUPPORTED
    assert "another container" in user.errors()
    say(user, f"close-fd {TAKEN}")  # A refused import does not close the program's descriptor.
    assert attempt(bare) == OK, "the driver refuses the import itself, so the test proves nothing"


def test_unmarked_memory_is_charged_to_the_importer(host: Host) -> None:
    """The exporting process does not load the library, as with Vulkan's memory. So the importing process is charged."""
    maker, user = host.puppet(preload=False).start(), host.puppet().start()
    make(maker)
    before = host.charged()
    take(maker, user)
    # This size is larger than the memory, so the driver refuses, and nothing may stay charged.
    assert attempt(user, 3 * SIZE) != OK
    assert host.charged() == before
    assert attempt(user) == OK
    map_all(user)
    assert host.charged() == before + SIZE
    say(user, f"call cuDestroyExternalMemory ${EXTERNAL}")
    assert host.charged() == before + SIZE, "the mapped buffer must keep the memory charged"
    say(user, f"free {BUFFER}")
    assert host.charged() == before
    take(maker, user)
    say(user, f"alloc 80 {LIMIT - before - SIZE + MIB}")
    assert attempt(user) == OOM
    assert host.charged() == LIMIT - SIZE + MIB


def test_invalid_descriptor_gets_the_drivers_error(host: Host) -> None:
    user = host.puppet().start()
    before = host.charged()
    say(user, f"put {TAKEN} 4095")
    assert attempt(user) not in (OK, NOT_SUPPORTED)
    assert user.result(f"call cuImportExternalMemory @{EXTERNAL} 0") not in (OK, NOT_SUPPORTED)
    assert host.charged() == before


def test_forked_child_is_not_charged_its_parents_imports(host: Host, three: tuple) -> None:
    maker, user, watcher = three
    before = host.on_card()
    make(maker)
    take(maker, user)
    assert attempt(user) == OK
    child = user.say("fork-away")[1]
    try:
        say(user, f"call cuDestroyExternalMemory ${EXTERNAL}")
        say(maker, f"release-handle {MEMORY}", f"close-fd {HANDLE}")
        assert account(watcher, maker) == before
    finally:
        os.kill(child, signal.SIGKILL)
