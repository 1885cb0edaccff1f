# SPDX-License-Identifier: Apache-2.0
"""A container can have several GPU shares, from several Kubernetes claims. Each share has its own limits file and its
own ledger, the record of the GPU memory that processes use. The container's limit for a card is the sum of its shares
of this card. Two containers with the same share use one budget together. The tests compare the ledgers with the
simulated driver's figures. ``alloc 10 4096`` (4096 bytes, into register 10) is a command to programs/puppet.c."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time

import layouts
import pytest
from conftest import (
    LINKED,
    MIB,
    NOT_PERMITTED,
    NOT_SUPPORTED,
    OK,
    OOM,
    PRELOAD,
    Host,
    Puppet,
    compile_program,
)
from nvml_inside import ask
from shares import wait_for
from test_coverage_ipc import lend
from test_files import FORCED, in_namespace, set_field
from test_probe import run, verdicts

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
A, B = 3000 * MIB, 2000 * MIB


class Share:
    """A share of one or two GPUs. ``of`` is a dict from the GPU's number to the bytes of the share."""

    def __init__(self, host: Host, name: str, of: dict[int, int], percent: int = 30, **more: object) -> None:
        self.host, self.name = host, name
        self.folder = host.folder / name
        self.folder.mkdir()
        self.of, self.percent = of, percent
        self.limits, self.ledger = self.folder / "limits", self.folder / "ledger"
        self.limits.write_bytes(layouts.pack_limits(self.wanted(**more)))
        self.ledger.write_bytes(layouts.pack_ledger([host.uuids[gpu] for gpu in of], name))

    def wanted(self, **more: object) -> dict:
        devices = [
            {"uuid": self.host.uuids[gpu], "memory_bytes": size, "sm_percent": self.percent}
            for gpu, size in self.of.items()
        ]
        return {"allocation": self.name, "devices": devices, **more}

    def change(self, of: dict[int, int] | None = None, **more: object) -> None:
        self.of = of or self.of
        layouts.rewrite_limits(str(self.limits), self.wanted(**more))

    def charged(self, gpu: int = 0) -> int:
        totals = layouts.read_ledger(str(self.ledger))["totals"]
        return sum(one["used"] + one["context"] for one in totals if one["uuid"] == self.host.uuids[gpu])


def files(*shares: Share) -> dict[str, str]:
    return {
        "VGPU_LIMITS_FILE": ":".join(str(one.limits) for one in shares),
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": ":".join(str(one.ledger) for one in shares),
    }


def process(host: Host, *shares: Share, **more: str) -> Puppet:
    """Starts a process of a container with these shares; the process has a context on the first GPU."""
    return host.puppet(**files(*shares), **more).start()


# --- one container ---------------------------------------------------------------------------------


def test_each_card_is_limited_to_its_share(host: Host) -> None:
    first, second = Share(host, "first", {0: A}), Share(host, "second", {1: B})
    puppet = process(host, first, second)
    assert puppet.say("info") == [OK, A - host.on_card(0), A]
    assert puppet.refused("alloc", A - host.on_card(0) + 1) == OOM
    puppet.get("alloc", A - host.on_card(0))
    puppet.get("ctx", 1)
    assert puppet.say("info") == [OK, B - host.on_card(1), B]
    assert puppet.refused("alloc", B - host.on_card(1) + 1) == OOM
    puppet.get("alloc", B - host.on_card(1))
    assert [first.charged(0), second.charged(1)] == [host.on_card(0), host.on_card(1)] == [A, B]
    puppet.end()
    assert [first.charged(0), second.charged(1)] == [0, 0]


def test_card_of_two_shares_has_the_sum_as_limit(host: Host) -> None:
    first, second = Share(host, "first", {0: A}), Share(host, "second", {0: B})
    puppet = process(host, first, second)
    context = host.on_card()
    assert puppet.say("info") == [OK, A + B - context, A + B]
    assert puppet.say("total 0") == [OK, A + B]
    assert puppet.refused("alloc", A + B - context + 1) == OOM
    block = puppet.get("alloc", A + B - context)  # This block is larger than any single share.
    assert [first.charged(), second.charged()] == [A, B] and host.on_card() == A + B
    assert puppet.refused("alloc", 1) == OOM
    assert puppet.result(f"free {block}") == OK
    assert [first.charged(), second.charged()] == [context, 0], "a free must be credited to the last share first"
    small = [puppet.get("alloc", 500 * MIB) for _unused in range(8)]
    assert first.charged() == A and first.charged() + second.charged() == host.on_card()
    for one in small[::2]:  # Blocks of both shares are freed in another order than they were allocated.
        assert puppet.result(f"free {one}") == OK
        assert first.charged() + second.charged() == host.on_card()
    assert second.charged() == 0


@pytest.mark.parametrize("names", [({0: A}, {0: B, 1: B}), ({1: B}, {0: A}), ({0: A, 1: A}, {1: B})])
def test_shares_of_several_cards_are_summed_per_card(host: Host, names: tuple) -> None:
    shares = [Share(host, f"share{at}", of) for at, of in enumerate(names)]
    puppet = process(host, *shares)
    for gpu in (0, 1):
        puppet.get("ctx", gpu)
        limit = sum(one.of.get(gpu, 0) for one in shares)
        assert puppet.say("info") == [OK, limit - host.on_card(gpu), limit]
        puppet.get("alloc", limit - host.on_card(gpu))
        assert puppet.refused("alloc", 1) == OOM
        assert sum(one.charged(gpu) for one in shares) == host.on_card(gpu) == limit


def test_card_without_a_share_is_refused(host: Host) -> None:
    puppet = process(host, Share(host, "first", {0: A}), Share(host, "second", {0: B}))
    assert puppet.refused("ctx", 1) == NOT_PERMITTED
    assert puppet.say("total 1") == [OK, 0]
    assert host.on_card(1) == 0


@pytest.mark.parametrize(("variable", "limit"), [("4g", 4096 * MIB), ("9g", A + B)])
def test_environment_tightens_the_sum(host: Host, variable: str, limit: int) -> None:
    shares = Share(host, "first", {0: A}), Share(host, "second", {0: B})
    puppet = process(host, *shares, CUDA_DEVICE_MEMORY_LIMIT=variable)
    assert puppet.say("info") == [OK, limit - host.on_card(), limit]
    puppet.get("alloc", limit - host.on_card())
    assert puppet.refused("alloc", 1) == OOM


def test_nvml_lists_a_process_of_two_shares_once(host: Host) -> None:
    shares = Share(host, "first", {0: A}), Share(host, "second", {0: B})
    puppet = process(host, *shares)
    puppet.get("alloc", A)
    assert shares[1].charged() > 0
    none = 0xFFFFFFFF
    entry = [puppet.process.pid, host.on_card(), none, none]
    question = "lists('nvmlDeviceGetComputeRunningProcesses_v3', Two)"
    assert ask(host, question, **files(*shares)) == [[0, 1, [entry]]]


@pytest.mark.parametrize("cards", [({0: A}, {1: B}), ({0: A, 1: A}, {0: B}), ({1: B}, {0: A, 1: A})])
def test_probe_measures_the_sum(host: Host, cards: tuple) -> None:
    shares = [Share(host, f"share{at}", of) for at, of in enumerate(cards)]
    checks = ["totals", "visible-devices", "limit-exact", "every-allocator", "four-processes", "freed"]
    status, report = run(host, "--checks", ",".join(checks), **files(*shares))
    assert verdicts(report) == dict.fromkeys(checks, "passed"), report
    limits = [sum(one.of.get(gpu, 0) for one in shares) for gpu in (0, 1)]
    assert [one["total_cuda"] for one in report["devices"]] == limits and status == 0
    assert [one.charged(gpu) for one in shares for gpu in one.of] == [0] * sum(len(one.of) for one in shares)


def test_gpu_time_is_counted_in_the_tenant_page_of_the_cards_first_share(host: Host) -> None:
    """The limit is the sum of the card's shares: 20 + 30 percent of the first GPU, 30 percent of the second."""
    shares = Share(host, "first", {1: A}, 30), Share(host, "second", {0: A}, 20), Share(host, "third", {0: A}, 30)
    for one in shares:
        uuids = [host.uuids[gpu] for gpu in one.of]
        (one.folder / "tenant").write_bytes(layouts.pack_tenant_page(uuids, one.name))
    launcher = compile_program(host.folder, "launcher", "launcher.c", flags=LINKED)
    used = {}
    for gpu in (0, 1):
        command = [launcher, "kernel", "2", "100", str(gpu), "1"]
        subprocess.run(command, env=host.env(**files(*shares)), check=True, stdout=subprocess.DEVNULL)
        for one in shares:
            page = layouts.parse_tenant_page((one.folder / "tenant").read_bytes())
            used[gpu, one.name] = page["devices"][0]["used_ns"] / 2e9
    assert used[0, "first"] == used[0, "third"] == used[1, "third"] == 0
    assert 0.1 < used[0, "second"] < 0.56 and 0.1 < used[1, "first"] < 0.36, used


# Columns: the change of one share's limits file; whether the process may still create a context.
STRICT = [({"deny": True}, False), ({"deny": False}, True)]


@pytest.mark.parametrize(("change", "allowed"), STRICT)
@pytest.mark.parametrize("place", [0, 1])
def test_deny_in_one_limits_file_refuses_every_context(host: Host, change: dict, allowed: bool, place: int) -> None:
    shares = [Share(host, "first", {0: A}), Share(host, "second", {1: B})]
    shares[place].change(**change)
    puppet = host.puppet(**files(*shares))
    assert puppet.result("init") == OK
    assert puppet.refused("ctx", 0) == (OK if allowed else NOT_PERMITTED)
    if not allowed:
        assert f"{shares[place].limits}: this allocation is not ready" in puppet.errors()


@pytest.mark.parametrize("place", [0, 1])
def test_live_change_of_any_share_takes_effect(host: Host, place: int) -> None:
    shares = [Share(host, "first", {0: A}), Share(host, "second", {0: B})]
    puppet = process(host, *shares)
    shares[place].change({0: 2500 * MIB})
    limit = sum(one.of[0] for one in shares)
    assert puppet.say("info") == [OK, limit - host.on_card(), limit]
    puppet.get("alloc", limit - host.on_card())
    assert puppet.refused("alloc", 1) == OOM


@pytest.mark.parametrize("place", [0, 1])
def test_lowered_compute_limit_applies_to_a_program_that_only_launches(host: Host, place: int) -> None:
    shares = [Share(host, "first", {0: A}, 100), Share(host, "second", {1: B}, 100)]
    changed = shares[place]
    page = changed.folder / "tenant"
    page.write_bytes(layouts.pack_tenant_page([host.uuids[place]], changed.name))

    def used() -> int:
        return layouts.parse_tenant_page(page.read_bytes())["devices"][0]["used_ns"]

    launcher = compile_program(host.folder, "launcher", "launcher.c", flags=LINKED)
    command = [launcher, "kernel", "0", "100", str(place)]
    with subprocess.Popen(command, env=host.env(**files(*shares)), stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout and program.stdout.readline() == "ready\n"
            time.sleep(0.1)
            assert used() == 0
            changed.percent = 20
            changed.change(core_policy="force")
            wait_for(used, "the launches are charged")
        finally:
            program.kill()


@pytest.mark.parametrize("place", [0, 1])
def test_lowered_share_kills_the_process_over_the_limit(host: Host, place: int) -> None:
    shares = [Share(host, "first", {0: A}, oom_killer=True), Share(host, "second", {0: B})]
    puppet = process(host, *shares)
    puppet.get("alloc", A + B - host.on_card())
    shares[place].change({0: 1000 * MIB}, oom_killer=True)
    with pytest.raises(AssertionError, match="puppet ended with -9"):
        puppet.say("info")
    assert [one.charged() for one in shares] == [0, 0]


def test_forked_child_takes_separate_slots(host: Host) -> None:
    shares = Share(host, "first", {0: A}), Share(host, "second", {0: B})
    parent = host.puppet(**files(*shares))
    assert parent.result("total 0") != OK  # At this moment the library has started, but the driver is not initialised.
    child = parent.say("fork")[1]
    parent.start()
    parent.get("alloc", A + B - host.on_card())
    assert set(host.physical()) == {child} and [one.charged() for one in shares] == [A, B]
    assert parent.refused("alloc", 1) == OOM


def test_forked_child_does_not_keep_its_parents_slots(host: Host) -> None:
    shares = Share(host, "first", {0: A}), Share(host, "second", {0: B})
    parent = process(host, *shares)
    parent.get("alloc", A)
    assert all(one.charged() for one in shares)
    child = parent.say("fork-away")[1]
    try:
        parent.process.kill()
        parent.process.wait()
        assert [one.charged() for one in shares] == [0, 0]
    finally:
        os.kill(child, signal.SIGKILL)


# --- several containers ----------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_share_of_two_containers_is_one_budget(host: Host, order: tuple) -> None:
    """The first container has both shares, in either order; the second container has only the second share."""
    shares = [Share(host, "own", {0: A}), Share(host, "both", {0: B})]
    one = process(host, *(shares[at] for at in order))
    context = host.on_card()
    other = process(host, shares[1])
    contexts = host.on_card()
    assert contexts == 2 * context
    other.get("alloc", 1000 * MIB)
    left = A + B - 1000 * MIB - contexts
    assert one.say("info") == [OK, left, A + B]
    assert one.refused("alloc", left + 1) == OOM
    block = one.get("alloc", left)
    assert [each.charged() for each in shares] == [A, B] and host.on_card() == A + B
    assert other.refused("alloc", 1) == OOM
    assert one.result(f"free {block}") == OK
    free = B - shares[1].charged()
    other.get("alloc", free)
    assert shares[1].charged() == B
    one.get("alloc", A - shares[0].charged())
    assert one.refused("alloc", 1) == OOM and host.on_card() == A + B


def test_killed_process_is_uncharged_in_all_shares(host: Host) -> None:
    shares = [Share(host, "own", {0: A}), Share(host, "both", {0: B})]
    one, other = process(host, *shares), process(host, shares[1])
    one.get("alloc", A + B - host.on_card())
    assert other.refused("alloc", MIB) == OOM
    one.process.kill()
    one.process.wait()
    other.get("alloc", B - host.on_card())
    assert [each.charged() for each in shares] == [0, B]


@pytest.mark.parametrize("seed", range(12))
def test_kill_at_a_random_moment_leaves_no_charge(host: Host, seed: int) -> None:
    """A process may be killed when it has charged memory in only one of the ledgers. A later process must still be able
    to use the whole sum."""
    shares = [Share(host, "first", {0: A}), Share(host, "second", {0: B})]
    victim = process(host, *shares)
    block = (A + B) // 2
    lines = [line for at in range(2000) for line in (f"alloc {at + 1000} {block}", f"free {at + 1000}")]
    victim.send(*lines[:4])
    assert victim.answer()[0] == OK
    writer = threading.Thread(target=_ignore_the_end, args=(victim, lines[4:]), daemon=True)
    writer.start()
    time.sleep(random.Random(seed).uniform(0.001, 0.05))
    victim.process.kill()
    victim.process.wait()
    writer.join(20)
    other = process(host, *reversed(shares))
    left = A + B - host.on_card()
    assert other.refused("alloc", left + 1) == OOM
    other.get("alloc", left)
    assert [one.charged() for one in shares] == [A, B] and host.on_card() == A + B


def _ignore_the_end(puppet: Puppet, lines: list[str]) -> None:
    with contextlib.suppress(BrokenPipeError, ValueError):
        puppet.send(*lines)


def test_locks_in_opposite_order_do_not_deadlock(host: Host) -> None:
    """Two containers list the same two shares in opposite order. Both must take the locks in the same order."""
    shares = [Share(host, "first", {0: A}), Share(host, "second", {0: B})]
    puppets = [process(host, *shares), process(host, *reversed(shares))]
    block = A // 2 - 600 * MIB  # The blocks of both containers fit at the same time, so no call may fail.
    lines = [line for at in range(200) for line in (f"alloc {at + 1000} {block}", f"free {at + 1000}")]
    for puppet in puppets:
        puppet.send(*lines)
    answers = [[puppet.answer(line)[0] for line in lines] for puppet in puppets]
    assert all(answer == OK for each in answers for answer in each)
    assert sum(one.charged() for one in shares) == host.on_card()
    assert all("held by a process" not in puppet.errors() for puppet in puppets)


def test_exported_memory_is_charged_to_the_exporter_in_either_ledger(host: Host) -> None:
    """A container with both shares exports memory by an IPC handle to a container with the second share alone."""
    shares = [Share(host, "own", {0: A}), Share(host, "both", {0: B})]
    maker, user = process(host, *shares), process(host, shares[1])
    # This block fills the first share, so the exported memory is charged in the second.
    maker.get("alloc", A - shares[0].charged())
    assert maker.result(f"alloc 10 {1000 * MIB}") == OK
    before = shares[1].charged()
    assert user.result(f"ipc-open 20 {lend(maker, 10)}") == OK
    assert shares[1].charged() == before
    maker.process.kill()
    maker.process.wait()
    # The simulated driver frees exported memory when its exporter dies; on hardware the memory stays.
    open_bytes = host.on_card() + 1000 * MIB
    assert user.refused("alloc", B - open_bytes + 1) == OOM
    user.get("alloc", B - open_bytes)
    assert user.result("call cuIpcCloseMemHandle $20") == OK
    user.get("alloc", B - host.on_card())
    assert shares[1].charged() == host.on_card() == B


def test_ipc_handle_of_another_container_is_refused(host: Host) -> None:
    first, second, third = (Share(host, name, {0: B}) for name in ("first", "second", "third"))
    maker, user = process(host, third), process(host, first, second)
    assert maker.result(f"alloc 10 {MIB}") == OK
    assert user.result(f"ipc-open 20 {lend(maker, 10)}") == NOT_SUPPORTED


# --- invalid shares allow no context --------------------------------------------------------------------------------


def torn(share: Share) -> None:
    data = bytearray(share.limits.read_bytes())
    data[20] |= 1
    share.limits.write_bytes(data)


def newer(share: Share) -> None:
    set_field(share.limits, "min_reader", 9)


# Keys: faults. Values: function that damages a share, expected words of the library's log line.
FAULTS = {
    "torn limits": (torn, "limits: it is torn"),
    "missing limits": (lambda share: share.limits.unlink(), "limits: it cannot be opened"),
    "limits of a newer version": (newer, "needs a reader of version 9"),
    "invalid ledger": (lambda share: share.ledger.write_bytes(b"x" * layouts.LEDGER_FILE_SIZE), "ledger"),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_share_allows_no_context_on_any_card(host: Host, place: int, fault: str) -> None:
    shares = [Share(host, "first", {0: A}), Share(host, "second", {1: B})]
    spoil, reason = FAULTS[fault]
    spoil(shares[place])
    puppet = host.puppet(**files(*shares))
    assert puppet.result("init") == OK
    assert [puppet.refused("ctx", gpu) for gpu in (0, 1)] == [NOT_PERMITTED] * 2
    assert host.on_card(0) == host.on_card(1) == 0
    assert f"{shares[place].folder}/" in puppet.errors() and reason in puppet.errors()


# Columns: a function that returns the list of limits files; a function that returns the list of ledgers. The two lists
# do not match, so the library must allow no context.
MISNAMED = [
    (lambda one: f"{one}:{one}", lambda one: f"{one}"),  # One ledger is missing.
    (lambda one: f"{one}:{one}", lambda one: f"{one}:{one}:{one}"),
    (lambda one: ":".join([str(one)] * 9), lambda one: ":".join([str(one)] * 9)),
    (lambda one: f"{one}:{one}", lambda one: f"{one}:{one}"),  # The same ledger is named twice.
]


@pytest.mark.parametrize("at", range(len(MISNAMED)))
def test_inconsistent_file_lists_allow_no_context(host: Host, at: int) -> None:
    share = Share(host, "first", {0: A})
    limits, ledgers = MISNAMED[at]
    variables = {
        "VGPU_LIMITS_FILE": limits(share.limits),
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": ledgers(share.ledger),
    }
    puppet = host.puppet(**variables)
    assert puppet.result("init") == OK
    assert puppet.refused("ctx", 0) == NOT_PERMITTED and host.on_card() == 0
    assert "no context is created" in puppet.errors()


# --- numbered folders, as in a container -----------------------------------------------------------


def container(host: Host, shares: dict[int, Share], places: int = 12, then: tuple = ()) -> tuple:
    """Returns a prefix for a command line, which makes it run in a mount namespace. There each share is mounted at
    /dev/vgpu/<number>; folders with other numbers are empty. ``then`` are a tenant's shell commands, which run there
    before the command line."""
    root = host.folder / "root"
    for one in ("etc", "dev", *(f"above/{number}" for number in range(places))):
        (root / one).mkdir(parents=True)
    commands = [
        f"mount -t tmpfs none {root}/etc",
        f"mkdir {root}/etc/up {root}/etc/work",
        f"mount -t overlay none -o lowerdir=/etc,upperdir={root}/etc/up,workdir={root}/etc/work /etc",
        f"printf '%s\\n' '{PRELOAD}' > /etc/ld.so.preload",
        f"mount -t tmpfs none {root}/dev",
        f"for one in null zero urandom; do : > {root}/dev/$one; mount --bind /dev/$one {root}/dev/$one; done",
        f"mkdir -p {root}/dev/shm {root}/dev/vgpu",
        f"mount --bind {root}/above {root}/dev/vgpu",
        f"mount -o remount,bind,ro {root}/dev/vgpu",
    ]
    for number, share in shares.items():
        place, ro = f"{root}/dev/vgpu/{number}", share.folder / "ro"
        ro.mkdir()
        os.link(share.limits, ro / "limits")
        (ro / "ledger").touch()
        commands += [f"mount --bind {ro} {place}", f"mount -o remount,bind,ro {place}"]
        commands += [f"mount --bind {share.ledger} {place}/ledger"]
    return in_namespace(*commands, f"mount --move {root}/dev /dev", *then)


@needs_root
@pytest.mark.parametrize("numbers", [(0,), (5,), (0, 1), (3, 11), (11, 3)])
def test_in_a_container_every_numbered_folder_is_a_share(host: Host, numbers: tuple) -> None:
    shares = {number: Share(host, f"share{number}", {0: A}) for number in numbers}
    puppet = host.puppet(wrapper=container(host, shares), **FORCED).start()
    limit = A * len(numbers)
    assert puppet.say("info") == [OK, limit - host.on_card(), limit]
    puppet.get("alloc", limit - host.on_card())
    assert puppet.refused("alloc", 1) == OOM
    assert [one.charged() for one in shares.values()] == [A] * len(numbers)


# columns: commands of a tenant that manipulate the second share at /dev/vgpu/7, expected log text
TENANTS = [
    (("mount -o remount,bind,rw /dev/vgpu/7",), "/dev/vgpu/7 is mounted writable"),
    (("mount --bind /dev/null /dev/vgpu/7/limits",), "/dev/vgpu/7/limits: another file is mounted on it"),
    (("mount --bind {other} /dev/vgpu/7/ledger",), "ledger /dev/vgpu/7/ledger: it is of another allocation"),
    (("umount /dev/vgpu/7/ledger",), "ledger /dev/vgpu/7/ledger: "),
]


@needs_root
@pytest.mark.parametrize("at", range(len(TENANTS)))
def test_in_a_container_a_manipulated_share_allows_no_context(host: Host, at: int) -> None:
    shares = {0: Share(host, "first", {0: A}), 7: Share(host, "second", {0: A})}
    other = Share(host, "other", {0: A})
    commands, reason = TENANTS[at]
    then = tuple(one.format(other=other.ledger) for one in commands)
    puppet = host.puppet(wrapper=container(host, shares, then=then), **FORCED)
    assert puppet.result("init") == OK
    assert puppet.refused("ctx", 0) == NOT_PERMITTED
    assert reason in puppet.errors() and host.on_card() == 0


@needs_root
def test_in_a_container_nine_shares_allow_no_context(host: Host) -> None:
    shares = {number: Share(host, f"share{number}", {0: 100 * MIB}) for number in range(9)}
    puppet = host.puppet(wrapper=container(host, shares), **FORCED)
    assert puppet.result("init") == OK
    assert puppet.refused("ctx", 0) == NOT_PERMITTED
    assert "more than 8 shares in /dev/vgpu" in puppet.errors() and host.on_card() == 0


@needs_root
def test_unmounted_share_lowers_the_limit(host: Host) -> None:
    shares = {0: Share(host, "first", {0: A}), 7: Share(host, "second", {0: A})}
    then = ("umount /dev/vgpu/7/ledger", "umount /dev/vgpu/7")
    puppet = host.puppet(wrapper=container(host, shares, then=then), **FORCED).start()
    assert puppet.say("info") == [OK, A - host.on_card(), A]
