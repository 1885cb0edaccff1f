# SPDX-License-Identifier: Apache-2.0
"""Memory that processes share by CUDA IPC is charged once, to the exporting process. The charge lasts as long as any
process uses the memory. Strings such as ``alloc 10 4096`` (allocate 4096 bytes, keep the address in register 10) and
``call cuMemFree_v2 $10`` are commands to programs/puppet.c: $10 is the value of register 10, @10 its address."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import layouts
import pytest
from conftest import INVALID, LIMIT, MIB, NOT_PERMITTED, NOT_SUPPORTED, OK, OOM, Host, Puppet
from test_coverage_graphs import say

SIZE = 600 * MIB


def lend(maker: Puppet, register: int) -> str:
    say(maker, f"call cuIpcGetMemHandle @200 ${register}")
    return " ".join(str(word) for word in maker.say("show 200 8")[1:])


@pytest.fixture
def two(host: Host) -> tuple[Puppet, Puppet]:
    return host.puppet().start(), host.puppet().start()


def test_imported_memory_is_charged_once(host: Host, two: tuple) -> None:
    maker, user = two
    say(maker, f"alloc 10 {SIZE}")
    before = host.on_card()
    handle = lend(maker, 10)
    for register in (20, 21):
        say(user, f"ipc-open {register} {handle}")
        assert host.charged() == host.on_card() == before
    say(user, "call cuIpcCloseMemHandle $20", "call cuIpcCloseMemHandle $21")
    say(maker, "free 10")
    assert host.charged() == host.on_card() == before - SIZE


@pytest.mark.parametrize("freed", ["free 10", "free-async 10"])
@pytest.mark.parametrize("closed", ["call cuIpcCloseMemHandle $20", "end", "kill"])
def test_freed_memory_stays_charged_while_it_is_imported(host: Host, two: tuple, freed: str, closed: str) -> None:
    maker, user = two
    say(maker, f"alloc 10 {SIZE}")
    before = host.on_card()
    say(user, f"ipc-open 20 {lend(maker, 10)}")
    say(maker, freed)
    assert host.on_card() == before, "the driver released the memory, so the test proves nothing"
    assert host.charged() == host.on_card()
    rest = LIMIT - host.on_card()
    assert maker.refused("alloc", rest + 1) == OOM
    contexts = 0
    if closed.startswith("call"):
        say(user, closed)
    else:
        contexts = host.physical()[user.process.pid]
        user.process.kill() if closed == "kill" else user.end()
        user.process.wait(20)
    if not contexts:  # The library checks for dead processes periodically, and before it refuses an allocation.
        assert maker.say("info")[1] == rest + SIZE
    say(maker, f"alloc 11 {rest + SIZE + contexts}")
    assert host.charged() == host.on_card() == LIMIT


def test_repeated_exports_do_not_exceed_the_limit(host: Host, two: tuple) -> None:
    """In each round a process exports memory, releases it and leaves the import open. If the library did not record
    open imports, each round would get the same memory again."""
    maker, user = two
    for number in range(20):
        status = maker.result(f"alloc 10 {SIZE}")
        if status != OK:
            break
        say(user, f"ipc-open {20 + number} {lend(maker, 10)}")
        say(maker, "free 10")
    assert status == OOM and number > 5
    assert host.charged() == host.on_card() <= LIMIT


def test_without_the_library_repeated_exports_exceed_the_limit(host: Host) -> None:
    """The negative control: without the library, repeated exports exceed the limit."""
    maker, user = host.puppet(preload=False).start(), host.puppet(preload=False).start()
    for number in range(10):
        say(maker, f"alloc 10 {SIZE}")
        say(user, f"ipc-open {20 + number} {lend(maker, 10)}")
        say(maker, "free 10")
    assert host.on_card() > LIMIT


@pytest.mark.parametrize("end", ["end", "kill"])
def test_memory_of_a_dead_exporter_stays_charged_while_it_is_imported(host: Host, two: tuple, end: str) -> None:
    """The exporter dies while its memory is imported. Its other memory is released. Hardware keeps the exported memory,
    so its charge stays, although the simulated driver frees it."""
    maker, user = two
    say(maker, f"alloc 10 {SIZE}", f"alloc 11 {3 * SIZE}")
    say(user, f"ipc-open 20 {lend(maker, 10)}")
    maker.process.kill() if end == "kill" else maker.end()
    maker.process.wait(20)
    context = host.on_card()
    assert context == host.physical()[user.process.pid]
    assert user.refused("alloc", LIMIT - context - SIZE + 1) == OOM
    say(user, f"alloc 30 {LIMIT - context - SIZE}", "free 30")
    # The memory is charged in the dead process's slot, its entry in the ledger. A new process must not take this slot.
    third = host.puppet().start()
    assert third.refused("alloc", LIMIT - 2 * context - SIZE + 1) == OOM
    assert host.charged() == 2 * context + SIZE, (
        "the node's own sum of the ledger must also contain the exported memory"
    )
    say(user, "call cuIpcCloseMemHandle $20")
    assert host.charged() == 2 * context
    say(third, f"alloc 30 {LIMIT - 2 * context}")
    assert host.charged() == host.on_card() == LIMIT


def test_forked_child_has_no_open_imports(host: Host, two: tuple) -> None:
    """If a forked child outlives its parent, it must not keep the parent's imports charged."""
    maker, user = two
    say(maker, f"alloc 10 {SIZE}")
    say(user, f"ipc-open 20 {lend(maker, 10)}")
    child = user.say("fork-away")[1]
    try:
        say(user, "call cuIpcCloseMemHandle $20")
        before = host.on_card()
        say(maker, "free 10")
        assert host.charged() == host.on_card() == before - SIZE
    finally:
        os.kill(child, signal.SIGKILL)


def test_import_without_a_ledger_is_refused(host: Host, two: tuple) -> None:
    maker, user = two
    say(maker, f"alloc 10 {SIZE}")
    handle = lend(maker, 10)
    host.ledger.rename(host.folder / "elsewhere")
    assert user.result(f"ipc-open 20 {handle}") == NOT_PERMITTED


@pytest.fixture
def apart(host: Host) -> Puppet:
    """Returns a process of another container. That container has its own ledger, the record of its GPU memory."""
    elsewhere = host.folder / "elsewhere"
    elsewhere.write_bytes(layouts.pack_ledger(host.uuids, "other"))
    return host.puppet(CUDA_DEVICE_MEMORY_SHARED_CACHE=str(elsewhere)).start()


@pytest.mark.parametrize("made_here", [False, True])
def test_import_from_another_container_is_refused(host: Host, apart: Puppet, made_here: bool) -> None:
    user, bare = host.puppet().start(), host.puppet(preload=False).start()
    if made_here:  # This container has itself exported another handle.
        say(user, f"alloc 10 {MIB}")
        lend(user, 10)
    say(apart, f"alloc 10 {SIZE}")
    handle = lend(apart, 10)
    assert user.result(f"ipc-open 20 {handle}") == NOT_SUPPORTED
    assert "another container" in user.errors()
    assert bare.result(f"ipc-open 20 {handle}") == OK, (
        "the driver refuses the handle itself, so the test proves nothing"
    )
    say(bare, "call cuIpcCloseMemHandle $20")
    # The refused import left nothing open, so when the exporting process frees the memory, the GPU gets it back.
    before = host.on_card()
    say(apart, "free 10")
    assert host.on_card() == before - SIZE


def test_exports_between_containers_do_not_exceed_their_limits(host: Host, apart: Puppet) -> None:
    """If another container could import memory, no container would be charged for it after the exporter's free."""
    user = host.puppet().start()
    for number in range(10):
        say(apart, f"alloc 10 {SIZE}")
        user.say(f"ipc-open {20 + number} {lend(apart, 10)}")
        say(apart, "free 10")
    context = host.physical()[user.process.pid]
    assert host.on_card() == 2 * context


def test_exporter_without_descriptors_logs_why_the_import_fails(host: Host, two: tuple) -> None:
    maker, user = two
    say(maker, f"alloc 10 {SIZE}")
    usual = resource.prlimit(maker.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(maker.process.pid, resource.RLIMIT_NOFILE, (0, usual[1]))
    handle = lend(maker, 10)
    assert user.result(f"ipc-open 20 {handle}") == NOT_SUPPORTED
    said = maker.errors()
    assert str(host.ledger) in said and "ulimit -n" in said
    resource.prlimit(maker.process.pid, resource.RLIMIT_NOFILE, usual)
    assert user.result(f"ipc-open 20 {lend(maker, 10)}") == OK, (
        "after the next export of the handle the import must succeed"
    )


def test_invalid_handle_gets_the_drivers_error(host: Host) -> None:
    user = host.puppet().start()
    assert user.result("ipc-open 20 " + " ".join("7" * 8)) == INVALID
    assert user.errors() == ""


def maps(puppet: Puppet) -> int:
    return len(Path(f"/proc/{puppet.process.pid}/maps").read_text().splitlines())


def test_exported_handle_is_known_until_its_memory_is_freed(host: Host, two: tuple) -> None:
    maker, user = two
    say(maker, f"alloc 10 {SIZE}", f"alloc 11 {SIZE}")
    say(user, f"ipc-open 20 {lend(maker, 11)}")
    third = host.puppet().start()
    before = maps(maker)
    for number in range(100):
        handle = lend(maker, 10)
        assert lend(maker, 10) == handle
        assert (user, third)[number % 2].result(f"ipc-open 21 {handle}") == OK
        say((user, third)[number % 2], "call cuIpcCloseMemHandle $21")
        if number % 2:  # an import that the user still has open must not hide the handle from the third process
            say(maker, "free 10")
            say(maker, f"alloc 10 {SIZE}")
    assert maps(maker) <= before + 2, "the mapping that marks an exported handle must be removed with the memory"
    say(maker, "free 11")
    assert third.result(f"ipc-open 22 {lend(maker, 10)}") == OK
