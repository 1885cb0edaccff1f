# SPDX-License-Identifier: Apache-2.0
"""Processes can share memory by descriptors. Such memory must be charged exactly once in the container as long as it is
on the GPU, whichever of the processes dies. Strings such as ``export 11 10`` (export the memory in register 10, keep
the descriptor in register 11) are commands to programs/puppet.c."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import struct
import time
from typing import Iterator

import layouts
import pytest
from conftest import LIMIT, MIB, NOT_SUPPORTED, OK, OOM, Host, Puppet
from test_coverage_graphs import say

pytestmark = pytest.mark.slow

SIZE = 600 * MIB
MEMORY, HANDLE, TAKEN, IMPORT, PLACE = 10, 11, 20, 21, 22


def make(maker: Puppet) -> None:
    say(maker, f"create-shared {MEMORY} {SIZE} 0", f"export {HANDLE} {MEMORY}")


def take(maker: Puppet, user: Puppet, register: int = TAKEN) -> None:
    say(user, f"take-fd {register} {maker.process.pid} {maker.say(f'show {HANDLE} 1')[1]}")


def use(user: Puppet) -> None:
    say(user, f"import {IMPORT} {TAKEN}", f"reserve {PLACE} {SIZE}", f"map {PLACE} {SIZE} {IMPORT}")


def account(watcher: Puppet, *living: Puppet) -> int:
    for puppet in living:  # At its next call a process checks whether other processes have released the memory.
        puppet.free_bytes()
    return LIMIT - watcher.free_bytes()


def end(puppet: Puppet, killed: bool) -> None:
    puppet.process.kill() if killed else puppet.end()
    puppet.process.wait(20)
    time.sleep(0.12)  # The library checks for dead processes every 0.1 s.


STEPS = {
    "exporter releases its handle": (0, f"release-handle {MEMORY}"),
    "exporter closes its descriptor": (0, f"close-fd {HANDLE}"),
    "importer closes its descriptor": (1, f"close-fd {TAKEN}"),
    "importer unmaps the memory": (1, f"unmap {PLACE} {SIZE}"),
    "importer releases its handle": (1, f"release-handle {IMPORT}"),
}


def charged_until_the_last(host: Host, three: tuple, before: int, steps: dict, order: tuple) -> None:
    """Runs ``steps`` in this ``order``; asserts that SIZE is charged exactly once until the last step.

    ``steps`` is a dict from the step's name to (index of the process in ``three``, puppet command).
    """
    maker, watcher = three[0], three[2]
    for step in order:
        assert account(watcher, maker) == host.on_card() == before + SIZE, (
            f"the memory must be charged once before the step '{step}' of {order}"
        )
        who, line = steps[step]
        assert three[who].result(line) == OK
    assert account(watcher, maker) == host.on_card() == before


@pytest.mark.parametrize("order", list(itertools.permutations(STEPS))[::5])
def test_shared_memory_is_charged_once_until_its_last_use_ends(host: Host, three: tuple, order: tuple) -> None:
    maker, user = three[:2]
    before = host.on_card()
    make(maker)
    take(maker, user)
    use(user)
    charged_until_the_last(host, three, before, STEPS, order)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("holds", ["a handle", "an import", "both"])
@pytest.mark.parametrize("maker_first", [False, True])
def test_death_of_the_last_user_frees_shared_memory(
    host: Host, three: tuple, killed: bool, holds: str, maker_first: bool
) -> None:
    maker, user, watcher = three
    context = host.physical()[watcher.process.pid]
    make(maker)
    take(maker, user)
    if holds != "a handle":
        use(user)
    if holds == "an import":
        say(user, f"close-fd {TAKEN}")
    first, second = (maker, user) if maker_first else (user, maker)
    end(first, killed)
    assert host.on_card() == 2 * context + SIZE, (
        "the driver released the memory with one process, so the test proves nothing"
    )
    assert account(watcher) == host.on_card()
    assert watcher.refused("alloc", LIMIT - 2 * context - SIZE + 1) == OOM
    if not maker_first:
        say(maker, f"release-handle {MEMORY}", f"close-fd {HANDLE}")
        assert account(watcher, maker) == host.on_card() == 2 * context
    # The memory is charged in the dead process's slot, its entry in the ledger. A new process must not take this slot.
    third = host.puppet().start()
    assert account(watcher, third) == host.on_card() == 3 * context + SIZE * maker_first
    end(second, killed)
    assert account(watcher) == host.on_card() == 2 * context
    say(watcher, f"alloc 30 {LIMIT - 2 * context}")
    assert host.on_card() == LIMIT


def on_the_node(host: Host) -> int:
    """Returns the total in the ledger (the container's record of its GPU memory), as the device plugin and vgpuctl read
    it from outside the container."""
    return sum(one["used"] + one["context"] for one in layouts.read_ledger(str(host.ledger))["totals"])


def test_observer_sees_memory_of_a_dead_exporter(host: Host) -> None:
    """The observer, like nvidia-smi, has no slot in the ledger. So it only reads the ledger and repairs nothing."""
    maker, user, onlooker = host.puppet().start(), host.puppet().start(), host.puppet()
    context = host.physical()[user.process.pid]
    make(maker)
    take(maker, user)
    end(maker, True)
    kept = host.on_card()
    assert kept == context + SIZE, "the driver released the memory with the exporter, so the test proves nothing"
    assert onlooker.say("nvml 0")[1:4] == [LIMIT, kept, LIMIT - kept]
    assert on_the_node(host) == kept
    say(user, f"close-fd {TAKEN}")
    assert onlooker.say("nvml 0")[1:4] == [LIMIT, context, LIMIT - context]
    assert on_the_node(host) == host.on_card() == context, "memory without a remaining user must not be counted"


POOL, BLOCK = 40, 41
EXPORT_POOL = f"call cuMemPoolExportToShareableHandle @{HANDLE} ${POOL} 1 0"
IMPORT_POOL = f"call cuMemPoolImportFromShareableHandle @{IMPORT} ${TAKEN} 1 0"


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("holds", ["a handle", "an import", "nothing"])
def test_shared_pool_stays_charged_after_the_exporters_death(
    host: Host, three: tuple, killed: bool, holds: str
) -> None:
    maker, user, watcher = three
    context = host.physical()[watcher.process.pid]
    say(maker, f"pool-shared {POOL} 0", f"frompool {BLOCK} {SIZE // 2} {POOL}", EXPORT_POOL)
    # The pool grows and shrinks again.
    say(maker, f"frompool {BLOCK + 1} {SIZE} {POOL}", f"free-async {BLOCK}", "sync")
    assert account(watcher) == host.on_card() == 3 * context + SIZE
    take(maker, user)
    if holds != "a handle":
        assert holds == "nothing" or user.result(IMPORT_POOL) == OK
        say(user, f"close-fd {TAKEN}")
    end(maker, killed)
    kept = 0 if holds == "nothing" else SIZE
    assert host.on_card() == 2 * context + kept
    assert account(watcher) == host.on_card()
    assert watcher.refused("alloc", LIMIT - 2 * context - kept + 1) == OOM
    end(user, not killed)
    assert account(watcher) == host.on_card() == context
    say(watcher, f"alloc 30 {LIMIT - context}")


def test_pool_of_another_container_is_refused(host: Host) -> None:
    elsewhere = host.folder / "elsewhere"
    elsewhere.write_bytes(layouts.pack_ledger(host.uuids, "other"))
    maker = host.puppet(CUDA_DEVICE_MEMORY_SHARED_CACHE=str(elsewhere)).start()
    user, bare = host.puppet().start(), host.puppet(preload=False).start()
    say(maker, f"pool-shared {POOL} 0", EXPORT_POOL)
    for puppet in (user, bare):
        take(maker, puppet)
    assert user.result(IMPORT_POOL) == NOT_SUPPORTED
    assert "another container" in user.errors()
    assert bare.result(IMPORT_POOL) == OK, "the driver refuses the import itself, so the test proves nothing"


def test_repeated_exports_leave_no_charge(host: Host, three: tuple) -> None:
    maker, user, watcher = three
    before = host.on_card()
    for _unused in range(40):
        make(maker)
        take(maker, user)
        use(user)
        say(maker, f"release-handle {MEMORY}", f"close-fd {HANDLE}")
        say(user, f"unmap {PLACE} {SIZE}", f"close-fd {TAKEN}", f"release-handle {IMPORT}")
    assert account(watcher, maker) == host.on_card() == before


def test_exports_of_dead_processes_do_not_exceed_the_limit(host: Host, three: tuple) -> None:
    """Each exporting process passes its handle to a process that does not use CUDA, and dies. The memory must stay
    charged."""
    keeper = three[1]
    status, number = OK, 0
    for number in range(20):
        maker = host.puppet()
        assert maker.result("init") == OK
        status = maker.result("ctx 1 0")
        status = status or maker.result(f"create-shared {MEMORY} {SIZE} 0")
        if status != OK:
            break
        say(maker, f"export {HANDLE} {MEMORY}")
        take(maker, keeper, 100 + number)
        end(maker, True)
    assert status == OOM and number > 5
    assert host.on_card() <= LIMIT


def test_without_the_library_exports_of_dead_processes_exceed_the_limit(host: Host) -> None:
    """The negative control: without the library, repeated exports exceed the limit."""
    keeper = host.puppet(preload=False).start()
    for number in range(10):
        maker = host.puppet(preload=False).start()
        make(maker)
        take(maker, keeper, 100 + number)
        end(maker, True)
    assert host.on_card() > LIMIT


def test_memory_with_several_handles_is_charged_until_the_last_is_closed(host: Host, three: tuple) -> None:
    maker, user, watcher = three
    before = host.on_card()
    make(maker)
    say(maker, f"export 12 {MEMORY}", f"export 13 {MEMORY}", f"release-handle {MEMORY}")
    take(maker, user)
    say(maker, f"close-fd {HANDLE}", "close-fd 12")
    use(user)
    say(user, f"close-fd {TAKEN}", f"unmap {PLACE} {SIZE}", f"release-handle {IMPORT}")
    assert account(watcher, maker) == host.on_card() == before + SIZE
    say(maker, "close-fd 13")
    assert account(watcher, maker) == host.on_card() == before


def test_handle_of_another_container_is_refused(host: Host) -> None:
    elsewhere = host.folder / "elsewhere"
    elsewhere.write_bytes(layouts.pack_ledger(host.uuids, "other"))
    maker = host.puppet(CUDA_DEVICE_MEMORY_SHARED_CACHE=str(elsewhere)).start()
    user, bare = host.puppet().start(), host.puppet(preload=False).start()
    # From now on the library marks the handles that it exports, so that it can recognise this container's handles.
    make(user)
    make(maker)
    for puppet in (user, bare):
        take(maker, puppet)
    assert user.result(f"import {IMPORT} {TAKEN}") == NOT_SUPPORTED
    assert "another container" in user.errors()
    assert bare.result(f"import {IMPORT} {TAKEN}") == OK, (
        "the driver refuses the import itself, so the test proves nothing"
    )


@pytest.mark.parametrize("first", [False, True])
def test_foreign_handle_is_refused_in_a_container_without_own_handles(host: Host, first: bool) -> None:
    """If the exporting process dies, an import that is never mapped would keep memory that is charged to no process."""
    elsewhere = host.folder / "elsewhere"
    elsewhere.write_bytes(layouts.pack_ledger(host.uuids, "other"))
    maker = host.puppet(CUDA_DEVICE_MEMORY_SHARED_CACHE=str(elsewhere)).start()
    user = host.puppet()
    assert user.result("init") == OK
    if not first:  # With first=True the import is refused before the importing process has a context.
        user.get("ctx", 0)
    make(maker)
    take(maker, user)
    assert user.result(f"import {IMPORT} {TAKEN}") == NOT_SUPPORTED
    assert "another container" in user.errors()
    end(maker, True)
    say(user, f"close-fd {TAKEN}")
    assert host.on_card() == host.charged()


def test_mapped_import_of_an_unmarked_handle_is_charged(host: Host) -> None:
    """This container has itself made handles without a mark. So the library cannot know which container made this
    handle."""
    with host.ledger.open("r+b") as ledger:
        ledger.seek(layouts.fields.LEDGER_FIELDS["shareable_unmarked"][0])
        ledger.write(b"\1")
    elsewhere = host.folder / "elsewhere"
    elsewhere.write_bytes(layouts.pack_ledger(host.uuids, "other"))
    maker = host.puppet(CUDA_DEVICE_MEMORY_SHARED_CACHE=str(elsewhere)).start()
    user = host.puppet().start()
    before = host.charged()
    make(maker)
    take(maker, user)
    use(user)
    assert host.charged() == before + SIZE
    say(user, f"unmap {PLACE} {SIZE}")
    assert host.charged() == before + SIZE
    say(user, f"alloc 30 {LIMIT - before - SIZE}", f"map {PLACE} {SIZE} {IMPORT}")
    say(user, f"unmap {PLACE} {SIZE}", f"release-handle {IMPORT}")
    assert host.charged() == LIMIT - SIZE
    say(user, f"alloc 31 {SIZE}", f"import {IMPORT} {TAKEN}")
    assert user.result(f"map {PLACE} {SIZE} {IMPORT}") == OOM


def test_exporter_of_unmarked_handles_stays_charged(host: Host) -> None:
    maker = host.puppet().start()
    before = host.on_card()
    with host.ledger.open("r+b") as ledger:
        ledger.seek(layouts.fields.LEDGER_FIELDS["shareable"][0])
        ledger.write(b"/dev/null\0")
    make(maker)
    place = layouts.fields.LEDGER_FIELDS["shareable_unmarked"][0]
    assert host.ledger.read_bytes()[place] == 1
    say(maker, f"release-handle {MEMORY}", f"close-fd {HANDLE}")
    assert host.on_card() == before
    assert host.charged() == before + SIZE


MARKS = 1 << 62  # file offset of the library's lock marks


@contextlib.contextmanager
def locked(maker: Puppet, first: int, count: int) -> Iterator[None]:
    """Holds a read lock on ``count`` bytes (0: to the end) of the file in which the library marks handles by locks."""
    descriptor = os.open(f"/proc/{maker.process.pid}/fd/{maker.say(f'show {HANDLE} 1')[1]}", os.O_RDWR)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, first, count, 0))
        yield
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("made_here", [True, False])
@pytest.mark.parametrize(
    "first, count",
    [(MARKS, MARKS - 1), (MARKS >> 1, 0), (MARKS >> 1, MARKS)],
    ids=["lock over all marks", "lock before and over all marks", "lock before and over some marks"],
)
def test_lock_over_the_marks_does_not_hide_the_origin(host: Host, first: int, count: int, made_here: bool) -> None:
    """Any container with the device node can set such a lock. Foreign handles must still be recognised and refused."""
    elsewhere = host.folder / "elsewhere"
    elsewhere.write_bytes(layouts.pack_ledger(host.uuids, "other"))
    other = {} if made_here else {"CUDA_DEVICE_MEMORY_SHARED_CACHE": str(elsewhere)}
    maker, user = host.puppet(**other).start(), host.puppet().start()
    make(user)  # this container now has marked handles
    make(maker)
    take(maker, user)
    with locked(maker, first, count):
        assert user.result(f"import {IMPORT} {TAKEN}") == (OK if made_here else NOT_SUPPORTED)


def test_lock_over_the_marks_keeps_released_memory_charged(host: Host, three: tuple) -> None:
    """The released memory stays charged as long as the lock is held."""
    maker, _user, watcher = three
    before = host.on_card()
    make(maker)
    with locked(maker, MARKS, MARKS - 1):
        say(maker, f"release-handle {MEMORY}", f"close-fd {HANDLE}")
        assert host.on_card() == before
        assert account(watcher, maker) == before + SIZE
    assert account(watcher, maker) == before


def test_released_memory_that_is_open_elsewhere_hides_no_code(host: Host) -> None:
    """NVML does not show such memory for its process, so the library must not compare it with NVML's figure."""
    maker = host.puppet().start()
    make(maker)
    say(maker, f"release-handle {MEMORY}")
    before = host.on_card()
    assert host.orphans() == SIZE
    say(maker, f"image 40 {SIZE // 2}")
    assert host.charged() == host.on_card() >= before + SIZE // 2
    say(maker, f"close-fd {HANDLE}", "unload 40", "sync")
    assert host.charged() == host.on_card() == before - SIZE
