# SPDX-License-Identifier: Apache-2.0
"""Tests burst memory. A pod may be promised (guaranteed) less memory than its limit. GPU memory that is promised to no
pod is distributed among such pods, up to their limits. The tests read the limits files on disk. A child process that
locks a slot of a container's ledger (its file of memory counts) simulates a program.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vgpu_plugin._shared.pods.annotations import Device
from vgpu_plugin.allocation import sizing
from vgpu_plugin.allocation.burst import PATIENCE_S, Burst, Holder, spread
from vgpu_plugin.allocation.leases import Leases
from vgpu_plugin.allocation.sizing import Bounds
from vgpu_plugin.errors import NoFreeSlice, NotNow, Refused

from .test_allocation_resizer import MIB, REQUESTED, Ground

# columns: the case; MiB of the GPU that are promised to no pod; (promised, limit, used) MiB of each pod; expected MiB
# that each pod may use
SPREAD = [
    ("one pod and enough memory", 10000, [(2000, 8000, 0)], [8000]),
    ("less free memory than the pod's limit", 3000, [(2000, 8000, 0)], [5000]),
    ("no free memory", 0, [(2000, 8000, 0)], [2000]),
    ("oversold GPU", -500, [(2000, 8000, 0)], [2000]),
    ("two equal pods", 6000, [(2000, 8000, 0), (2000, 8000, 0)], [5000, 5000]),
    ("small pod leaves the rest to the large pod", 6000, [(2000, 3000, 0), (2000, 12000, 0)], [3000, 7000]),
    ("odd number of free MiB", 5, [(10, 100, 0), (10, 100, 0)], [12, 13]),
    ("one pod uses more than its part", 6000, [(2000, 8000, 7000), (2000, 8000, 0)], [7000, 3000]),
    ("one pod uses all free memory", 6000, [(2000, 8000, 8000), (2000, 8000, 0)], [8000, 2000]),
    (
        "one pod uses memory promised later to another",
        -1000,
        [(2000, 8000, 6000), (2000, 8000, 1000)],
        [6000, 2000],
    ),
    (
        "three pods, two of them over their part",
        3000,
        [(100, 5000, 1900), (100, 5000, 1200), (100, 5000, 0)],
        [1900, 1200, 200],
    ),
    ("no pods", 5000, [], []),
]


@pytest.mark.parametrize(("_about", "room", "holders", "expected"), SPREAD, ids=[row[0] for row in SPREAD])
def test_burst_memory_is_distributed_among_bursting_pods(_about, room, holders, expected):
    found = [Holder(Bounds(promised, limit), used) for promised, limit, used in holders]
    assert spread(room, found) == expected


@given(
    st.integers(-5000, 20000),
    st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 8000), st.integers(0, 12000)), max_size=6),
)
def test_each_pod_gets_its_promise_and_its_used_memory_and_no_memory_is_distributed_twice(room, drawn):
    holders = [Holder(Bounds(low, low + more), min(used, low + more)) for low, more, used in drawn]
    out = spread(room, holders)
    extra = [mib - one.bounds.promised for mib, one in zip(out, holders, strict=True)]
    needed = [max(0, one.used - one.bounds.promised) for one in holders]
    for mib, one in zip(out, holders, strict=True):
        assert max(one.bounds.promised, one.used) <= mib <= one.bounds.limit
    assert sum(extra) <= max(room, sum(needed))
    # Memory may remain undistributed only if all pods have reached their limits.
    if sum(extra) < room:
        assert out == [one.bounds.limit for one in holders]


class Node(Ground):
    """A node with bursting pods on its first GPU, which has 15360 MiB."""

    def begin(self) -> None:
        super().begin()
        self.time = 0.0
        parts = self.records, self.pool, self.files, self.allocator.sizer, self.resizer
        self.burst = Burst(*parts, now=lambda: self.time)
        self.allocator.sizer.lender = self.resizer.lender = self.burst

    def pod(self, n: int, promised: int, limit: int = 0, now: int = 0, **flags) -> str:
        """Makes a container in slice ``n`` as PreStartContainer leaves it; ``now`` is its current limit in MiB."""
        allocation = self.take(self.first, n)
        self.sized(allocation, (now or promised, 0))
        if limit:
            record = self.records.get(allocation)
            (row,) = record.limits["devices"]
            rows = [{**row, sizing.PROMISED: promised, sizing.LIMIT: limit}]
            with self.records.lock:
                self.records.put(replace(record, limits={**record.limits, "devices": rows, **flags}))
        return allocation

    def comes(self, n: int, promised: int, burst: int = 0, place: sizing.Place | None = None) -> str:
        """Starts a container in slice ``n``. If the start fails, for example because it is refused, the error is
        raised. A container with a place in its pod gets an allocation of its own even if the slice has one."""
        found = [one for one in self.records.all() if one.slice_ids == (f"{self.first.uuid}::{n}",)]
        allocation = found[0].id if found and place is None else self.take(self.first, n)
        record, sizer = self.records.get(allocation), self.allocator.sizer
        record = sizing.placed(record, place) if place else record
        sizer._reserve_promised(record, [Device(self.first.uuid, promised, 0, burst)], 1)
        with self.records.lock:
            self.records.put(sizer._reserved.pop(allocation))
        self.files.make(self.records.get(allocation))
        return allocation

    def mib(self, *allocations: str) -> list[int]:
        """Returns the current limits of the allocations in MiB; checks that limits files and records agree."""
        found = [self.sizes(one)[0][0] for one in allocations]
        assert found == [self.kept(one)[0][0] for one in allocations]
        return found


@pytest.fixture
def ground(node):
    made = []

    def begin(**vcuda):
        made.append(Node(node, **{**REQUESTED, **vcuda}))
        return made[-1]

    yield begin
    for one in made:
        for pid in list(one.children):
            one.end(pid)


def test_burst_memory_is_used_and_returned(ground):
    here = ground()
    one = here.comes(0, 2000, 10000)
    assert here.mib(one) == [12000], "some programs read the memory size only once, so the first limit is the highest"
    plain = here.comes(1, 3360)
    assert here.mib(one, plain) == [12000, 3360]
    # Only 1000 of the 12000 MiB are in use. The new pod gets its promised memory before it starts.
    here.holds(one, 1000)
    other = here.comes(2, 6000)
    assert here.mib(one, plain, other) == [6000, 3360, 6000]
    here.allocator.forget(other)
    here.burst.poll()
    assert here.mib(one, plain) == [12000, 3360]


def test_new_pod_waits_with_a_reason_while_other_pods_use_its_promised_memory(ground):
    here = ground()
    one, plain = here.comes(0, 2000, 10000), here.comes(1, 3360)
    pid = here.holds(one, 9000)
    words = "3000 MiB of GPU .* are promised to it, but still used as burst memory by other containers"
    with pytest.raises(NotNow, match=words):
        here.comes(2, 6000)
    assert here.mib(one, plain) == [9000, 3360], "the bursting pod's limit is exactly its used memory"
    # While a pod waits, freed memory is not distributed to bursting pods.
    here.end(pid)
    here.holds(one, 4000)
    here.burst.poll()
    assert here.mib(one) == [6000]
    assert here.mib(here.comes(2, 6000), one, plain) == [6000, 6000, 3360]
    here.burst.poll()
    assert here.mib(one) == [6000]


def test_memory_reserved_for_a_starting_pod_counts_once(ground):
    """A new pod's memory is first reserved, then written to the pod's record. If a poll runs between the two steps, the
    memory must count only once.
    """
    here = ground()
    one, plain = here.comes(0, 2000, 10000), here.comes(1, 3360)
    sizer, newcomer = here.allocator.sizer, here.take(here.first, 2)
    sizer._reserve_promised(here.records.get(newcomer), [Device(here.first.uuid, 6000, 0)], 1)
    here.burst.poll()
    assert here.mib(one, plain) == [6000, 3360]
    # The same holds for a pod that grows: if a poll runs while the resize calls the API server, the memory must count
    # only once.
    with here.records.lock:
        here.records.put(sizer._reserved.pop(newcomer))
    here.files.make(here.records.get(newcomer))
    seen = []

    def publish(_devices, _leaving):
        here.burst.poll()
        seen.append(here.mib(one))

    here.resize(plain, 5000, publish=publish)
    assert seen == [[4360]] and here.mib(one, plain, newcomer) == [4360, 5000, 6000]


def test_memory_of_a_pod_that_stopped_waiting_is_distributed(ground):
    here = ground()
    one = here.comes(0, 2000, 10000)
    pid = here.holds(one, 12000)
    with pytest.raises(NotNow):
        here.comes(1, 6000)
    here.end(pid)
    here.burst.poll()
    assert here.mib(one) == [9360]
    here.time += PATIENCE_S + 1
    here.burst.poll()
    assert here.mib(one) == [12000]


def test_promise_larger_than_the_free_memory_is_refused(ground):
    here = ground()
    one = here.comes(0, 2000, 10000)
    with pytest.raises(Refused, match="13361 MiB are asked for, 2000 of 15360 are held by others"):
        here.comes(1, 13361)
    assert here.mib(one) == [12000]


def test_oom_killer_setting_of_a_pod_does_not_apply_to_its_neighbour(ground):
    """The OOM killer is an option per pod. If it is on, the limit of the pod may fall below its used memory, but only
    as far as other pods need the memory. The limit of a neighbour without the option must never fall below the memory
    that the neighbour uses.
    """
    here = ground()
    kills = here.pod(0, 2000, 9000, 9000, oom_killer=True)
    gentle = here.pod(1, 2000, 6000, 6000)
    here.holds(kills, 8000)
    here.holds(gentle, 5500)
    here.burst.poll()
    assert here.mib(kills, gentle) == [9000, 6000]
    with pytest.raises(NotNow, match="still used"):
        here.comes(2, 4000)
    # 7360 MiB are promised to no pod; each pod gets half.
    assert here.mib(kills, gentle) == [5680, 5680]
    assert here.resizer.leaving(kills)
    here.end(here.children[0])
    assert here.mib(here.comes(2, 4000), kills, gentle) == [4000, 5680, 5680]
    assert not here.resizer.leaving(kills)


def test_two_bursting_pods_yield_to_a_third_pods_promise(ground):
    here = ground()
    one, two = here.comes(0, 1000, 20000), here.comes(1, 1000, 20000)
    assert here.mib(one, two) == [7680, 7680]
    three = here.comes(2, 10000, 5360)
    assert here.mib(one, two, three) == [2120, 2120, 11120]
    assert sum(here.mib(one, two, three)) == 15360


def test_growing_neighbour_gets_its_promise(ground):
    here = ground()
    one, plain = here.comes(0, 2000, 10000), here.comes(1, 3360)
    here.resize(plain, 9000)
    assert here.mib(one, plain) == [6360, 9000]
    with pytest.raises(Refused, match="13361 MiB are asked for"):
        here.resize(plain, 13361)
    assert here.mib(one, plain) == [6360, 9000]
    here.holds(one, 6000)
    with pytest.raises(Refused, match="held by others"):
        here.resize(plain, 10000)
    assert here.mib(one, plain) == [6000, 9000]


def test_burst_memory_cannot_be_resized_but_cores_can(ground):
    here = ground()
    one = here.comes(0, 2000, 10000)
    with pytest.raises(Refused, match="changes from 2000 to 12000 MiB with the free memory"):
        here.resize(one, 5000)
    here.resize(one, None, 30)
    assert here.sizes(one) == [(12000, 30)]
    assert sizing.bounds_of(here.records.get(one), here.first.uuid) == Bounds(2000, 12000)


def test_promise_and_limit_survive_a_restart(ground):
    here = ground()
    one = here.comes(0, 2000, 10000)
    here.begin()
    here.resizer.restore()
    assert here.mib(one) == [12000]
    assert here.mib(here.comes(1, 9360), one) == [9360, 6000]


def test_limit_is_not_lowered_below_memory_allocated_during_the_start_of_a_pod(ground):
    here = ground()
    one = here.comes(0, 2000, 10000)
    here.while_waiting = lambda: here.holds(one, 11000) if not here.children else None
    with pytest.raises(NotNow, match="still used"):
        here.comes(1, 9360)
    assert here.mib(one) == [11000]


def test_lease_gets_free_memory_only(ground):
    """A lease (a slice for a container outside Kubernetes) has no promise, so it never takes memory that a pod uses,
    even if the OOM killer is on for the pod.
    """
    here = ground()
    leases = Leases(here.allocator, here.pool, here.node.paths.checkpoint, lambda: False, here.node.clock)
    one = here.pod(0, 2000, 20000, 15360, oom_killer=True)
    pid = here.holds(one, 13000)
    with pytest.raises(NoFreeSlice):
        leases.lease(here.first.uuid)
    assert here.mib(one) == [13000] and not here.resizer.leaving(one)
    here.end(pid)
    lease = leases.lease(here.first.uuid)
    assert here.sizes(lease.allocation) == [(3840, 100)]
    assert here.mib(one) == [11520]
    leases.release(lease.allocation)
    here.burst.poll()
    assert here.mib(one) == [15360]


def test_init_container_and_container_share_a_slice(ground):
    """Both containers belong to one pod and never run at once, so only the greater of their promises counts."""
    here = ground()
    first = here.comes(0, 2000, 10000)
    (answer,) = here.allocator.allocate([[f"{here.first.uuid}::0"]])
    sizer, second = here.allocator.sizer, answer.allocation
    sizer._reserve_promised(here.records.get(second), [Device(here.first.uuid, 3000, 0, 3000)], 1)
    with here.records.lock:
        here.records.put(sizer._reserved.pop(second))
    here.files.make(here.records.get(second))
    assert here.mib(first, second) == [12000, 6000]
    assert here.mib(here.comes(1, 10360), first, second) == [10360, 5000, 5000]


def test_containers_of_one_pod_never_burst_into_each_others_promises(ground):
    """Two containers run after an init container that was promised more than both. The first of them has its slice."""
    here = ground()
    other = here.comes(2, 5000)
    init = here.comes(0, 10000, 2000, sizing.Place("uid", "init", 0, True))
    first = here.comes(0, 2000, 10000, sizing.Place("uid", "app", 1, False))
    second = here.comes(1, 4000, 0, sizing.Place("uid", "app", 2, False))
    here.burst.poll()
    assert here.mib(other, init, first, second) == [5000, 10360, 2360, 4000]


def test_waiting_container_counts_within_its_pod(ground):
    """The two containers that run after an init container need less than it. So the second of them takes memory from
    the first, and nothing from a neighbour.
    """
    here = ground()
    neighbour = here.pod(2, 3000, 8000, 5000, oom_killer=True)
    here.holds(neighbour, 5000)
    here.comes(0, 10000, 0, sizing.Place("uid", "init", 0, True))
    first = here.comes(0, 2000, 8000, sizing.Place("uid", "app", 1, False))
    assert here.mib(neighbour, first) == [5000, 10000]
    second = here.comes(1, 4000, 0, sizing.Place("uid", "app", 2, False))
    assert here.mib(neighbour, first, second) == [5000, 2360, 4000]
    assert not here.resizer.leaving(neighbour)
    # The same holds for a container that grows.
    here.resize(second, 8000)
    assert here.mib(neighbour, first, second) == [5000, 2360, 8000]
    assert not here.resizer.leaving(neighbour)


def test_limits_stay_after_sharing_is_disabled(ground):
    here = ground()
    one = here.comes(0, 2000, 10000)
    assert here.records.get(one).limits["devices"][0]["memory_bytes"] == 12000 * MIB
    here.allocator.sizer.settings.config["sharing"].pop("vcuda")
    here.burst.poll()
    assert here.mib(one) == [12000]
