# SPDX-License-Identifier: Apache-2.0
"""ACTIVE_OOM_KILLER: the limit of a running container is lowered, and a process of it is killed."""

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
    """Returns whether the process is killed at its next driver call."""
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


# oom_killer of the limits file, the variable
SWITCHES = [(True, None), (True, "false"), (False, "true"), (False, "1")]


@pytest.mark.parametrize(("file", "variable"), SWITCHES)
def test_the_one_that_holds_the_most_ends_at_its_next_call(host: Host, pair, file: bool, variable: str | None) -> None:
    host.write_limits(oom_killer=file)
    large, small = pair(**({"ACTIVE_OOM_KILLER": variable} if variable else {}))
    lower(host, 2000 * MIB)
    assert [ended(small), ended(small)] == [False, False], "who holds less stays, also when it looks first"
    assert small.refused("alloc", 1) == OOM
    assert ended(large)
    [line] = [line for line in large.errors().splitlines() if "is killed" in line]
    assert host.uuids[0] in line and str(2000 * MIB) in line
    assert not ended(small) and small.errors().count("ended") == 0
    held = host.on_card()
    assert host.charged() == held < 2000 * MIB
    small.get("alloc", 2000 * MIB - held)


def test_the_next_one_follows_where_that_was_not_enough(host: Host, pair) -> None:
    host.write_limits(oom_killer=True)
    large, small = pair()
    lower(host, 500 * MIB)
    assert ended(large) and ended(small)
    assert host.charged() == host.on_card() == 0
    assert host.puppet().start().say("info")[2] == 500 * MIB


def test_the_first_process_of_a_container_ends_too(host: Host) -> None:
    """Pid 1 of a pid namespace: the kernel drops every signal that it sends to itself, SIGKILL among them."""
    host.write_limits(oom_killer=True)
    first = host.puppet(wrapper=("unshare", "--pid", "--fork", "--kill-child")).start()
    first.get("alloc", 1000 * MIB)
    lower(host, 500 * MIB)
    with pytest.raises(AssertionError, match="puppet ended with"):
        first.say("info")
    assert first.process.wait() == 137
    assert host.charged() == host.on_card() == 0


@pytest.mark.parametrize("variables", [{}, {"ACTIVE_OOM_KILLER": "false"}, {"ACTIVE_OOM_KILLER": "maybe"}])
def test_off_it_only_refuses(host: Host, pair, variables: dict) -> None:
    """The negative control, and the default."""
    large, small = pair(**variables)
    lower(host, 500 * MIB)
    assert [ended(large), ended(small)] == [False, False]
    assert [large.refused("alloc", 1), small.refused("alloc", 1)] == [OOM, OOM]
    assert large.say("info") == [OK, 0, 500 * MIB]


def test_switched_on_while_it_is_over(host: Host, pair) -> None:
    large, small = pair()
    lower(host, 2000 * MIB)
    assert not ended(large)
    changed = layouts.parse_limits(host.limits.read_bytes())
    del changed["version"], changed["min_reader"]
    layouts.rewrite_limits(str(host.limits), dict(changed, oom_killer=True))
    assert [ended(small), ended(large), ended(small)] == [False, True, False]


def test_nobody_is_ended_while_it_fits(host: Host, pair) -> None:
    host.write_limits(oom_killer=True)
    puppets = pair()
    assert puppets[0].refused("alloc", LIMIT) == OOM, "asking for too much is no crime"
    lower(host, host.on_card())
    assert [ended(one) for one in puppets] == [False, False]


def test_a_refusal_ends_nobody(host: Host) -> None:
    """A framework may ask for too much, free memory and ask again; usage never exceeds the limit, so none is killed."""
    host.write_limits(oom_killer=True)
    puppet = host.puppet(ACTIVE_OOM_KILLER="true").start()
    cached = puppet.get("alloc", 3000 * MIB)
    for size in (LIMIT, LIMIT // 2, 3000 * MIB):
        assert puppet.refused("alloc", size) == OOM
        assert host.on_card() <= LIMIT
    assert puppet.result(f"free {cached}") == OK
    puppet.get("alloc", 4000 * MIB)
    assert not ended(puppet)


def test_what_a_pool_keeps_for_later_is_given_back_before_anybody_ends(host: Host) -> None:
    host.write_limits(oom_killer=True)
    puppet = host.puppet().start()
    pool = puppet.get("pool", 0)
    for register in [puppet.get("frompool", 200 * MIB, pool) for _unused in range(4)]:
        assert puppet.result(f"free-async {register}") == OK
    assert host.charged() == host.on_card() > 800 * MIB
    lower(host, 600 * MIB)
    assert not ended(puppet)
    assert host.charged() == host.on_card() < 600 * MIB
