# SPDX-License-Identifier: Apache-2.0
"""A program may release memory that is still bound to a sparse array or a multicast object. Such memory stays in use on
the card, so it must stay charged. Other tests check that invalid memory pools are refused.

Strings such as ``alloc 10 4096`` (allocate 4096 bytes, keep the address in register 10) are commands to
programs/puppet.c."""

from __future__ import annotations

import pytest
from conftest import INVALID, LIMIT, MIB, NOT_SUPPORTED, OK, OOM, PROFILE, Host
from test_coverage_graphs import say

SIZE = 4 * MIB
MAP, UNMAP = 1, 2
PINNED, MANAGED = 1, 2
NOWHERE, DEVICE, HOST_MEMORY = 0, 1, 2


@pytest.mark.parametrize("route", ["link", "proc"])
@pytest.mark.parametrize("per_thread", [0, 1])
def test_tile_of_a_sparse_array_keeps_its_memory_charged(host: Host, route: str, per_thread: int) -> None:
    puppet = host.puppet(route).start()
    before = host.on_card()
    say(puppet, "sparse 10 4096 4096")
    assert host.charged() == host.on_card() == before, "a sparse array without tiles must be charged nothing"
    handle = puppet.get("create", SIZE, 0)
    say(puppet, f"tile 10 {handle} {MAP} {per_thread}", f"release-handle {handle}")
    assert host.on_card() == before + SIZE, "the driver released the memory, so the test proves nothing"
    assert host.charged() == host.on_card()
    say(puppet, f"tile 10 {handle} {UNMAP} {per_thread}")
    assert host.on_card() == before
    assert host.charged() >= host.on_card(), (
        "the charge must not be below the use: memory of tiles stays charged until the process exits"
    )


def test_tiles_do_not_exceed_the_limit(host: Host) -> None:
    puppet = host.puppet().start()
    size = 512 * MIB
    for number in range(20):
        status = puppet.result(f"create 50 {size} 0")
        if status != OK:
            break
        say(puppet, f"sparse {100 + number} 4096 4096", f"tile {100 + number} 50 {MAP} 0", "release-handle 50")
    assert status == OOM and number > 5
    assert host.charged() == host.on_card() <= LIMIT


@pytest.mark.parametrize("route", ["link", "proc"])
@pytest.mark.parametrize("bound", ["multicast-bind 10 {0}", "multicast-bind-address 10 {1}"])
def test_memory_bound_to_a_multicast_object_stays_charged(host: Host, route: str, bound: str) -> None:
    host.become(PROFILE.replace("V100-16GB", "H100-80GB"))
    puppet = host.puppet(route).start()
    before = [host.on_card(0), host.on_card(1)]
    say(puppet, f"multicast 10 {SIZE} 2", "multicast-add 10 0", "multicast-add 10 1")
    assert [host.on_card(0), host.on_card(1)] == before == [host.charged(0), host.charged(1)]
    handle, address = puppet.get("create", SIZE, 0), puppet.get("reserve", SIZE)
    say(puppet, f"map {address} {SIZE} {handle}", f"{bound.format(handle, address)} {SIZE}")
    say(puppet, f"unmap {address} {SIZE}", f"release-handle {handle}")
    assert host.on_card() == before[0] + SIZE == host.charged()
    say(puppet, f"multicast-unbind 10 {SIZE}", "release-handle 10")
    assert host.charged() >= host.on_card() == before[0]


def test_multicast_is_refused_on_a_card_without_it(host: Host) -> None:
    for preload in (False, True):
        assert host.puppet(preload=preload).start().result(f"multicast 10 {SIZE} 2") == NOT_SUPPORTED


def test_managed_pool_without_a_device_is_refused(host: Host) -> None:
    """The memory of a managed pool without a device may migrate to any GPU. The library could not know which slice to
    charge, so it refuses the pool."""
    puppet = host.puppet().start()
    for place in (NOWHERE, HOST_MEMORY):
        assert puppet.result(f"pool-of 10 {MANAGED} {place}") == NOT_SUPPORTED
    assert "managed memory" in puppet.errors()
    say(puppet, f"pool-of 10 {PINNED} {DEVICE}")


def test_invalid_pool_gets_the_drivers_error(host: Host) -> None:
    for preload in (False, True):
        assert host.puppet(preload=preload).start().result(f"frompool-nothing 10 {SIZE}") == INVALID
