# SPDX-License-Identifier: Apache-2.0
"""If the memory limit of a running container is lowered below its usage, the library can kill a process of the
container. The variable ACTIVE_OOM_KILLER or the limits file enables this."""

from __future__ import annotations

import layouts
import pytest
from conftest import LIMIT, MIB, OK, OOM, Host


def lower(host: Host, memory: int) -> None:
    changed = layouts.parse_limits(host.limits.read_bytes())
    del changed["version"], changed["min_reader"]
    for device in changed["devices"]:
        device["memory_bytes"] = memory
    layouts.rewrite_limits(str(host.limits), changed)


def ended(puppet) -> bool:
    """Makes a driver call in the process. Returns whether this call kills the process."""
    try:
        puppet.say("info")
    except (AssertionError, BrokenPipeError):
        return puppet.process.wait() == -9
    return False


@pytest.fixture
def pair(host: Host):
    """Returns a function that starts two processes with these variables; they allocate 3000 and 1000 MiB."""

    def start(**variables: str) -> list:
        puppets = [host.puppet(**variables).start() for _unused in range(2)]
        puppets[0].get("alloc", 3000 * MIB)
        puppets[1].get("alloc", 1000 * MIB)
        return puppets

    return start


# Columns: the key oom_killer in the limits file; the variable ACTIVE_OOM_KILLER. In each row one of the two enables the
# OOM killer.
SWITCHES = [(True, None), (True, "false"), (False, "true"), (False, "1")]


@pytest.mark.parametrize(("file", "variable"), SWITCHES)
def test_process_with_the_most_memory_is_killed_at_its_next_call(
    host: Host, pair, file: bool, variable: str | None
) -> None:
    host.write_limits(oom_killer=file)
    large, small = pair(**({"ACTIVE_OOM_KILLER": variable} if variable else {}))
    lower(host, 2000 * MIB)
    assert [ended(small), ended(small)] == [False, False], (
        "the process with less memory must survive, even if it calls first"
    )
    assert small.refused("alloc", 1) == OOM
    assert ended(large)
    [line] = [line for line in large.errors().splitlines() if "is killed" in line]
    assert host.uuids[0] in line and str(2000 * MIB) in line
    assert not ended(small) and small.errors().count("ended") == 0
    held = host.on_card()
    assert host.charged() == held < 2000 * MIB
    small.get("alloc", 2000 * MIB - held)


def test_next_process_is_killed_if_the_usage_is_still_too_high(host: Host, pair) -> None:
    host.write_limits(oom_killer=True)
    large, small = pair()
    lower(host, 500 * MIB)
    assert ended(large) and ended(small)
    assert host.charged() == host.on_card() == 0
    assert host.puppet().start().say("info")[2] == 500 * MIB


def test_pid_1_of_a_container_is_killed(host: Host) -> None:
    """The kernel drops signals, even SIGKILL, that pid 1 of a pid namespace sends to itself, so the library ends pid 1
    by exit_group.
    """
    host.write_limits(oom_killer=True)
    first = host.puppet(wrapper=("unshare", "--pid", "--fork", "--kill-child")).start()
    first.get("alloc", 1000 * MIB)
    lower(host, 500 * MIB)
    with pytest.raises(AssertionError, match="puppet ended with"):
        first.say("info")
    assert first.process.wait() == 137
    assert host.charged() == host.on_card() == 0


@pytest.mark.parametrize("variables", [{}, {"ACTIVE_OOM_KILLER": "false"}, {"ACTIVE_OOM_KILLER": "maybe"}])
def test_disabled_oom_killer_only_refuses_allocations(host: Host, pair, variables: dict) -> None:
    """The negative control: with the OOM killer off (the default) allocations are refused but no process is killed."""
    large, small = pair(**variables)
    lower(host, 500 * MIB)
    assert [ended(large), ended(small)] == [False, False]
    assert [large.refused("alloc", 1), small.refused("alloc", 1)] == [OOM, OOM]
    assert large.say("info") == [OK, 0, 500 * MIB]


def test_oom_killer_enabled_while_over_the_limit_kills_a_process(host: Host, pair) -> None:
    large, small = pair()
    lower(host, 2000 * MIB)
    assert not ended(large)
    changed = layouts.parse_limits(host.limits.read_bytes())
    del changed["version"], changed["min_reader"]
    layouts.rewrite_limits(str(host.limits), dict(changed, oom_killer=True))
    assert [ended(small), ended(large), ended(small)] == [False, True, False]


def test_no_process_is_killed_within_the_limit(host: Host, pair) -> None:
    host.write_limits(oom_killer=True)
    puppets = pair()
    assert puppets[0].refused("alloc", LIMIT) == OOM, "a refused allocation must not kill the process"
    lower(host, host.on_card())
    assert [ended(one) for one in puppets] == [False, False]


def test_refused_allocation_kills_no_process(host: Host) -> None:
    """A framework may request too much, free memory, and request again. Its usage never exceeds the limit, so the
    library must not kill it."""
    host.write_limits(oom_killer=True)
    puppet = host.puppet(ACTIVE_OOM_KILLER="true").start()
    cached = puppet.get("alloc", 3000 * MIB)
    for size in (LIMIT, LIMIT // 2, 3000 * MIB):
        assert puppet.refused("alloc", size) == OOM
        assert host.on_card() <= LIMIT
    assert puppet.result(f"free {cached}") == OK
    puppet.get("alloc", 4000 * MIB)
    assert not ended(puppet)


def test_unused_pool_memory_is_released_before_a_process_is_killed(host: Host) -> None:
    host.write_limits(oom_killer=True)
    puppet = host.puppet().start()
    pool = puppet.get("pool", 0)
    for register in [puppet.get("frompool", 200 * MIB, pool) for _unused in range(4)]:
        assert puppet.result(f"free-async {register}") == OK
    assert host.charged() == host.on_card() > 800 * MIB
    lower(host, 600 * MIB)
    assert not ended(puppet)
    assert host.charged() == host.on_card() < 600 * MIB
