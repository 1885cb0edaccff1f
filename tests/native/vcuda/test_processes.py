# SPDX-License-Identifier: Apache-2.0
"""All processes of a container share one limit, despite races, kills, forks, execs and threads.

The tests compare the ledger with the simulated driver's account. The ledger is the file in which a container's
processes record the GPU memory that they use; each process has a slot (an entry) in it.

Strings such as ``alloc 10 4096`` (allocate 4096 bytes, keep the address in register 10) are commands to
programs/puppet.c."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import time

import layouts
import pytest
from conftest import LIMIT, MIB, NOT_PERMITTED, OK, OOM, PRELOAD, Host
from test_files import plain


@pytest.mark.parametrize(("processes", "rounds"), [(2, 400), (4, 300)])
def test_concurrent_allocations_do_not_exceed_the_limit(host: Host, processes: int, rounds: int) -> None:
    """In each round all processes request memory at once. Only one of these requests fits into what the contexts leave
    free."""
    piece = (LIMIT - 4 * 400 * MIB) * 2 // 3
    command = [host.programs / "racers", PRELOAD, str(processes), str(rounds), str(piece), str(LIMIT)]
    done = subprocess.run(
        command, env=host.env(preload=False), stdout=subprocess.PIPE, text=True, timeout=300, check=True
    )
    ran, over, greatest, grants = (int(word) for word in done.stdout.split())
    assert (ran, over) == (rounds, 0)
    assert greatest <= LIMIT
    assert grants == rounds, "exactly one process must get the memory in every round"


def test_without_the_library_concurrent_allocations_exceed_the_limit(host: Host) -> None:
    piece = (LIMIT - 4 * 400 * MIB) * 2 // 3
    command = [host.programs / "racers", "", "4", "5", str(piece), str(LIMIT)]
    done = subprocess.run(
        command, env=host.env(preload=False), stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert int(done.stdout.split()[1]) == 5


def test_all_processes_of_the_container_share_one_limit(host: Host) -> None:
    first, second = host.puppet().start(), host.puppet().start()
    assert first.free_bytes() == second.free_bytes() == LIMIT - host.on_card()
    first.get("alloc", 3000 * MIB)
    assert second.refused("alloc", 3000 * MIB) == OOM
    second.get("alloc", LIMIT - host.on_card())
    assert host.charged() == host.on_card() == LIMIT
    assert first.refused("alloc", 1) == second.refused("alloc", 1) == OOM


def test_killed_process_is_uncharged_at_once(host: Host) -> None:
    """The surviving process must notice the death at once, and the charge must not last until a new process starts."""
    victim, survivor = host.puppet().start(), host.puppet().start()
    victim.get("alloc", LIMIT - host.on_card())
    assert survivor.refused("alloc", 1) == OOM
    os.kill(victim.process.pid, signal.SIGKILL)
    victim.process.wait()
    assert host.charged() == host.on_card() == survivor_bytes(host, survivor)
    survivor.get("alloc", LIMIT - host.on_card())
    assert host.charged() == host.on_card() == LIMIT


def survivor_bytes(host: Host, survivor: object) -> int:
    return host.physical()[survivor.process.pid]  # type: ignore[attr-defined]


def test_ended_process_is_uncharged(host: Host) -> None:
    for _unused in range(3):
        puppet = host.puppet().start()
        puppet.get("alloc", LIMIT - host.on_card())
        puppet.end()
        assert host.charged() == host.on_card() == 0


def slot_word(host: Host, pid: int) -> int:
    """Returns the value that a process writes into the ledger's lock while it holds the lock."""
    data = host.ledger.read_bytes()
    for slot in layouts.parse_ledger(data)["slots"]:
        if slot["pid"] == pid:
            base = layouts.fields.LEDGER_SLOT_OFFSET + slot["slot"] * layouts.fields.LEDGER_SLOT_SIZE
            generation = struct.unpack_from("<I", data, base + layouts.fields.LEDGER_SLOT_FIELDS["generation"][0])[0]
            return generation << 32 | (slot["slot"] + 1)
    raise AssertionError(f"process {pid} has no slot")


def test_process_killed_inside_the_lock_blocks_no_other_process(host: Host) -> None:
    """The test creates the worst state: a killed process holds the ledger's lock, and the sum of the slots differs from
    the stored total."""
    victim, survivor = host.puppet().start(), host.puppet().start()
    word = slot_word(host, victim.process.pid)
    os.kill(victim.process.pid, signal.SIGKILL)
    victim.process.wait()
    with host.ledger.open("r+b") as ledger:
        ledger.seek(layouts.fields.LEDGER_FIELDS["total"][0])
        ledger.write(struct.pack("<Q", 123 * MIB))
        ledger.seek(layouts.fields.LEDGER_FIELDS["lock"][0])
        ledger.write(struct.pack("<Q", word))
    survivor.get("alloc", LIMIT - survivor_bytes(host, survivor))
    assert host.charged() == host.on_card() == LIMIT


def test_invalid_lock_word_is_ignored(host: Host) -> None:
    puppet = host.puppet().start()
    with host.ledger.open("r+b") as ledger:
        ledger.seek(layouts.fields.LEDGER_FIELDS["lock"][0])
        ledger.write(struct.pack("<Q", 7 << 32 | 5000))
    puppet.get("alloc", MIB)
    assert host.charged() == host.on_card()


def test_forked_child_is_charged_separately(host: Host) -> None:
    parent = host.puppet()
    # CUDA requires that a child that uses the driver is forked before cuInit. The library has already started before
    # this fork.
    assert parent.result("total 0") != OK
    child = parent.say("fork")[1]
    assert child != parent.process.pid
    parent.start()
    parent.get("alloc", 5 * MIB)
    assert set(host.physical()) == {child}
    assert host.charged() == host.on_card()
    assert parent.refused("alloc", LIMIT) == OOM


def test_forked_child_does_not_keep_its_parents_slot(host: Host) -> None:
    parent = host.puppet().start()
    parent.get("alloc", 100 * MIB)
    child = parent.say("fork-away")[1]
    try:
        os.kill(parent.process.pid, signal.SIGKILL)
        parent.process.wait()
        assert host.charged() == 0
        other = host.puppet().start()
        other.get("alloc", LIMIT - survivor_bytes(host, other))
    finally:
        os.kill(child, signal.SIGKILL)


def test_exec_uncharges_the_old_program(host: Host) -> None:
    puppet = host.puppet().start()
    puppet.get("alloc", LIMIT - host.on_card())
    assert puppet.process.stdin
    # After exec the new program, in the same process, continues to read commands.
    puppet.process.stdin.write("exec link\n")
    assert puppet.result("init") == OK
    assert host.charged() == host.on_card() == 0
    puppet.start()
    assert host.charged() == host.on_card() == survivor_bytes(host, puppet)
    puppet.get("alloc", LIMIT - host.on_card())


def test_closing_all_descriptors_keeps_the_charge(host: Host) -> None:
    puppet = host.puppet().start()
    puppet.get("alloc", 1000 * MIB)
    held = host.on_card()
    assert puppet.result("close-all") == OK
    assert host.charged() == held
    other = host.puppet().start()
    assert other.refused("alloc", LIMIT - held) == OOM
    assert other.free_bytes() == LIMIT - held - survivor_bytes(host, other)


def test_threads_leave_no_charge(host: Host) -> None:
    puppet = host.puppet()
    assert puppet.result("init") == OK
    context = puppet.get("ctx", 0)
    before = host.on_card()
    status, granted = puppet.say(f"threads 8 3000 {MIB} {context}")
    assert (status, granted) == (OK, 8 * 3000)
    assert host.charged() == host.on_card() == before
    # Near the limit only some allocations succeed. None may exceed the limit.
    puppet.get("alloc", LIMIT - before - 3 * MIB)
    puppet.say(f"threads 8 1000 {MIB} {context}")
    assert host.charged() == host.on_card() == LIMIT - 3 * MIB


def test_full_ledger_allows_no_context(host: Host) -> None:
    """The test locks the bytes of all 1024 ledger slots, as 1024 other processes would."""
    import fcntl

    with host.ledger.open("r+b") as ledger:
        hold = struct.pack(
            "hhqqi4x", fcntl.F_WRLCK, 0, layouts.fields.LEDGER_ALIVE_BASE, layouts.fields.LEDGER_SLOTS, 0
        )
        fcntl.fcntl(ledger, 37, hold)  # Number of the command F_OFD_SETLK.
        puppet = host.puppet()
        assert puppet.result("init") == OK
        assert puppet.refused("ctx", 0) == NOT_PERMITTED
        assert "1024 slots" in puppet.errors()
    puppet.get("ctx", 0)


def test_kills_at_random_moments_block_no_process_and_leave_no_charge(host: Host) -> None:
    """In each round one of four busy processes is killed, and the three others must continue."""
    import random
    import time

    choice = random.Random(4)
    for _unused in range(12):
        workers = [host.puppet() for _unused in range(4)]
        for worker in workers:
            assert worker.result("init") == OK
            assert worker.process.stdin
            context = worker.get("ctx", 0)
            worker.process.stdin.write(f"threads 1 200000 {MIB} {context}\n")
        time.sleep(choice.uniform(0.01, 0.06))
        victim = choice.choice(workers)
        os.kill(victim.process.pid, signal.SIGKILL)
        victim.process.wait()
        survivors = [worker for worker in workers if worker is not victim]
        for worker in survivors:
            # The survivors' loops end, and all their allocations have succeeded. Then a survivor can allocate all
            # memory that is left.
            assert worker.process.stdout
            assert worker.process.stdout.readline().split() == ["0", "200000"]
        survivors[0].get("alloc", LIMIT - host.on_card())
        assert host.charged() == host.on_card() == LIMIT
        for worker in survivors:
            worker.end()
        assert host.charged() == host.on_card() == 0


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_allocation_within_the_limit_makes_no_system_call(host: Host) -> None:
    calls = {}
    for rounds in (100, 20100):
        trace = host.folder / f"trace.{rounds}"
        wrapper = ("strace", "-f", "-o", str(trace), "-E", f"LD_PRELOAD={PRELOAD}")
        puppet = host.puppet(preload=False, wrapper=wrapper)
        assert puppet.result("init") == OK
        context = puppet.get("ctx", 0)
        assert puppet.say(f"threads 1 {rounds} 4096 {context}") == [OK, rounds]
        puppet.end()
        calls[rounds] = len(trace.read_text().splitlines())
    assert host.charged() == 0
    # Tables may grow a few times, but 20 000 pairs of calls must not each make a system call.
    assert calls[20100] - calls[100] < 200, calls


def test_kills_during_start_up_leave_a_usable_ledger(host: Host) -> None:
    import random
    import time

    choice = random.Random(7)
    for round_number in range(15):
        if round_number % 5 == 0:
            host.ledger.write_bytes(b"")  # The ledger is empty, so the processes must initialise it as well.
        starting = [host.puppet() for _unused in range(5)]
        for puppet in starting:
            assert puppet.process.stdin
            puppet.process.stdin.write("init\nctx 1 0\nalloc 2 1000000\n")
        for puppet in starting:
            time.sleep(choice.uniform(0, 0.008))
            puppet.process.kill()
        for puppet in starting:
            puppet.process.wait()
        assert host.charged() == host.on_card() == 0
    last = host.puppet().start()
    last.get("alloc", LIMIT - host.on_card())
    assert host.charged() == host.on_card() == LIMIT


def test_frozen_lock_holder_blocks_no_process_forever(host: Host) -> None:
    """The test simulates a process that is frozen while it holds the ledger's lock. Meanwhile allocations are refused,
    and a free is credited later."""
    frozen, other = host.puppet().start(), host.puppet().start()
    block = other.get("alloc", 50 * MIB)
    before = host.charged()

    def write_lock(word: int) -> None:
        with host.ledger.open("r+b") as ledger:
            ledger.seek(layouts.fields.LEDGER_FIELDS["lock"][0])
            ledger.write(struct.pack("<Q", word))

    write_lock(slot_word(host, frozen.process.pid))
    assert other.refused("alloc", MIB) == OOM
    assert other.result(f"free {block}") == OK
    assert host.charged() == before, "without the lock the free must not be credited yet"
    write_lock(0)
    other.get("alloc", MIB)
    assert host.charged() == host.on_card() == before - 49 * MIB


@pytest.mark.parametrize("line", ["ctx 1 0", "retain 1 0", f"create 1 {2 * MIB} 0"])
def test_deny_set_before_the_slot_refuses_the_process(host: Host, line: str) -> None:
    """The node sets the flag deny in the limits file and then lists the slots. A process that gets its slot later must
    see the deny flag.

    The test holds the ledger's lock, so that the process waits between its check of the limits and its slot.
    """
    other, late = host.puppet().start(), host.puppet()
    assert late.result("init") == OK
    limits = plain(layouts.parse_limits(host.limits.read_bytes()))
    generation = (
        layouts.fields.LEDGER_SLOT_OFFSET
        + layouts.fields.LEDGER_SLOT_SIZE
        + layouts.fields.LEDGER_SLOT_FIELDS["generation"][0]
    )

    def write_lock(word: int) -> None:
        with host.ledger.open("r+b") as ledger:
            ledger.seek(layouts.fields.LEDGER_FIELDS["lock"][0])
            ledger.write(struct.pack("<Q", word))

    write_lock(slot_word(host, other.process.pid))
    assert late.process.stdin and late.process.stdout
    late.process.stdin.write(line + "\n")
    late.process.stdin.flush()
    while host.ledger.read_bytes()[generation] == 0:
        assert late.process.poll() is None
        time.sleep(0.001)
    layouts.rewrite_limits(str(host.limits), dict(limits, deny=True))
    write_lock(0)
    assert int(late.process.stdout.readline().split()[0]) == NOT_PERMITTED
    assert late.process.pid not in host.physical()
    layouts.rewrite_limits(str(host.limits), limits)
    late.get("ctx", 0)


def test_kill_at_any_instruction_of_an_allocation_leaves_no_charge(host: Host) -> None:
    """programs/stepper.c kills processes during an allocation, each 13 instructions later than the one before."""
    done = subprocess.run(
        [host.programs / "stepper", PRELOAD, "13", str(LIMIT)],
        env=host.env(preload=False),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kills, instructions = (int(word) for word in done.stdout.split())
    assert kills > 30 and instructions > 400
    assert host.charged() == host.on_card() == 0
