# SPDX-License-Identifier: Apache-2.0
"""Tests size changes of running allocations. The tests read the limits files and the ledgers (files in which a
container's processes count their memory) on disk. A child process that locks a slot of a ledger simulates a program.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from vgpu_plugin._shared.abi import fields
from vgpu_plugin._shared.abi import files as abi_files
from vgpu_plugin._shared.pods.annotations import Device
from vgpu_plugin.allocation import records as records_module
from vgpu_plugin.allocation import resizer as resizer_module
from vgpu_plugin.allocation.leases import Leases
from vgpu_plugin.allocation.records import CLAIM, KUBELET
from vgpu_plugin.allocation.resize_rules import Wanted
from vgpu_plugin.allocation.resizer import Resizer
from vgpu_plugin.errors import BadRequest, NotNow, PluginError, Refused, Taken, Unknown

MIB = 1 << 20
SIZE = struct.calcsize("hhqqi4x")


class Ground:
    """A node with two T4 of four equal slices each, and the allocations that a test makes on it."""

    def __init__(self, node, **vcuda):
        self.node = node
        self.first, self.second = node.gpus
        self.vcuda = {"splitCount": 4, **vcuda}
        self.begin()
        self.children: list[int] = []

    def begin(self) -> None:
        """Assembles the program's parts; a second call simulates a restart of the program."""
        self.pool, self.allocator, self.files = self.node.parts(**self.vcuda)
        self.records = self.allocator.records
        self.resizer = Resizer(self.records, self.pool, self.files, self.allocator.sizer, self.waited)
        self.while_waiting = lambda: None

    def waited(self, _seconds: float) -> None:
        self.while_waiting()

    def take(self, gpu, n: int = 0) -> str:
        (answer,) = self.allocator.allocate([[f"{gpu.uuid}::{n}"]])
        return answer.allocation

    def sized(self, allocation: str, *devices: tuple[int, int]) -> None:
        """Gives an allocation the sizes that its pod requested, as PreStartContainer does."""
        record = self.records.get(allocation)
        rows = [
            {**row, "memory_bytes": mib * MIB, "sm_percent": cores or 100}
            for row, (mib, cores) in zip(record.limits["devices"], devices, strict=True)
        ]
        limits = {key: value for key, value in record.limits.items() if key != "deny"}
        limits.update(devices=rows, priority=1)
        cores = {row["uuid"]: each for row, (_mib, each) in zip(rows, devices, strict=True) if each}
        with self.records.lock:
            self.records.put(replace(record, limits=limits, cores=cores))
        self.files.make(self.records.get(allocation))

    def limits(self, allocation: str) -> dict:
        return abi_files.parse_limits((self.files.folder(allocation) / "limits").read_bytes())

    def sizes(self, allocation: str) -> list[tuple[int, int]]:
        return [(one["memory_bytes"] // MIB, one["sm_percent"]) for one in self.limits(allocation)["devices"]]

    def kept(self, allocation: str) -> list[tuple[int, int]]:
        devices = self.records.get(allocation).limits["devices"]
        return [(one["memory_bytes"] // MIB, one["sm_percent"]) for one in devices]

    def holds(self, allocation: str, mib: int, slot: int = 0, device: int = 0, context: int = 0) -> int:
        """Forks a process that has its own slot in the ledger and uses ``mib`` MiB; returns its pid. ``context``: the
        part of these MiB that a CUDA context uses.
        """
        path = str(self.files.folder(allocation) / "rw" / "ledger")
        base = fields.LEDGER_SLOT_OFFSET + slot * fields.LEDGER_SLOT_SIZE
        offset, _form = fields.LEDGER_SLOT_FIELDS["used"]
        ready, writes = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                fd = os.open(path, os.O_RDWR)
                lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, fields.LEDGER_ALIVE_BASE + slot, 1, 0)
                fcntl.fcntl(fd, fcntl.F_SETLK, lock)
                os.pwrite(fd, struct.pack("<Q", (mib - context) * MIB), base + offset + 8 * device)
                offset, _form = fields.LEDGER_SLOT_FIELDS["context"]
                os.pwrite(fd, struct.pack("<Q", context * MIB), base + offset + 8 * device)
                os.write(writes, b"x")
                signal.pause()
            finally:
                os._exit(0)
        os.close(writes)
        assert os.read(ready, 1) == b"x"
        os.close(ready)
        self.children.append(pid)
        return pid

    def end(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.children.remove(pid)

    def resize(self, allocation: str, memory=None, cores=None, **more):
        uuids = [one["uuid"] for one in self.records.get(allocation).limits["devices"]]
        return self.resizer.resize(allocation, dict.fromkeys(uuids, Wanted(memory, cores)), **more)


@pytest.fixture
def ground(node):
    made = []

    def begin(**vcuda):
        made.append(Ground(node, **vcuda))
        return made[-1]

    yield begin
    for one in made:
        for pid in list(one.children):
            one.end(pid)


REQUESTED = {"sliceSizing": "requested"}
# Resizes of a pod on a T4 of 15360 MiB. A size is (MiB, percent of the SMs). columns: the case; sizes of the other
# pods; the pod's size before; MiB that the pod uses; requested size (None means unchanged); expected new size, or words
# of the expected refusal
TABLE = [
    ("larger size", [], (4000, 20), 0, (8000, 40), (8000, 40)),
    ("all of the GPU's free memory", [(5360, 30)], (4000, 20), 0, (10000, 70), (10000, 70)),
    (
        "one MiB more than is free",
        [(5360, 30)],
        (4000, 20),
        0,
        (10001, 20),
        "10001 MiB are asked for, 5360 of 15360 are held",
    ),
    (
        "one percent more than is free",
        [(5360, 30)],
        (4000, 20),
        0,
        (4000, 71),
        "71 % of the SMs are asked for, 30 % are held",
    ),
    ("more memory than the GPU has", [], (4000, 20), 0, (15361, None), "15361 MiB are asked for, 0 of 15360 are held"),
    ("only memory changes", [], (4000, 20), 0, (8000, None), (8000, 20)),
    ("only cores change", [], (4000, 20), 0, (None, 100), (4000, 100)),
    ("cores without a limit", [], (4000, 20), 0, (None, 0), (4000, 100)),
    ("smallest size", [], (4000, 20), 0, (1, 1), (1, 1)),
    ("down to the used memory", [], (4000, 20), 1500, (1500, None), (1500, 20)),
    (
        "below the used memory",
        [],
        (4000, 20),
        1500,
        (1499, None),
        "1499 MiB are requested, and its programs use 1500",
    ),
    ("unchanged size", [(11360, 80)], (4000, 20), 4000, (4000, 20), (4000, 20)),
    ("empty request", [], (4000, 20), 0, (None, None), (4000, 20)),
    ("more memory for a pod that uses all of its memory", [], (4000, 20), 4000, (4001, None), (4001, 20)),
    ("more cores and less memory", [(11360, 0)], (4000, 20), 100, (100, 90), (100, 90)),
    ("memory of 0 MiB", [], (4000, 20), 0, (0, None), "expected 1 MiB or more"),
    ("negative memory", [], (4000, 20), 0, (-5, None), "expected 1 MiB or more"),
    ("memory of 2^40 MiB", [], (4000, 20), 0, (1 << 40, None), "are asked for, 0 of 15360 are held"),
    ("negative cores", [], (4000, 20), 0, (None, -1), "0 to 100 %"),
    ("cores above 100 %", [], (4000, 20), 0, (None, 101), "0 to 100 %"),
    # In the next two rows the pods have more memory in total than the GPU has. Even then a smaller size is accepted.
    ("smaller size on a full GPU", [(15000, 90)], (4000, 20), 0, (3000, 10), (3000, 10)),
    ("fewer cores and more memory", [(15000, 90)], (4000, 20), 0, (4001, 10), "4001 MiB are asked for"),
]


@pytest.mark.parametrize(("_about", "others", "has", "uses", "asks", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_resize_of_a_pod(ground, _about, others, has, uses, asks, expected):
    here = ground(**REQUESTED)
    neighbours = [here.take(here.first, 1 + n) for n in range(len(others))]
    for neighbour, size in zip(neighbours, others, strict=True):
        here.sized(neighbour, size)
    allocation = here.take(here.first)
    here.sized(allocation, has)
    if uses:
        here.holds(allocation, uses)
    before = (here.sizes(allocation), here.records.get(allocation), [here.sizes(one) for one in neighbours])
    if isinstance(expected, str):
        with pytest.raises(PluginError, match=expected):
            here.resize(allocation, *asks)
        assert (here.sizes(allocation), here.records.get(allocation)) == before[:2]
    else:
        done = here.resize(allocation, *asks)
        assert here.sizes(allocation) == here.kept(allocation) == [expected]
        assert done.changed == (asks not in ((None, None), has))
        again = here.resize(allocation, *asks)
        assert not again.changed and here.sizes(allocation) == [expected]
        promised = asks[1] if asks[1] is not None else has[1]
        assert here.records.get(allocation).cores == ({here.first.uuid: promised} if promised else {})
    assert [here.sizes(one) for one in neighbours] == before[2]
    assert not here.allocator.sizer.reserved(allocation)


def test_size_survives_restarts_and_reboots(ground):
    here = ground(**REQUESTED)
    allocation = here.take(here.first)
    here.sized(allocation, (4000, 20))
    here.resize(allocation, 8000, 40)
    here.begin()
    here.resizer.restore()
    assert here.sizes(allocation) == here.kept(allocation) == [(8000, 40)]
    here.files.remove(allocation)  # The emptied folder simulates a reboot.
    here.allocator.prestart([f"{here.first.uuid}::0"])
    assert here.sizes(allocation) == [(8000, 40)]


@pytest.mark.parametrize("wanted", [(8000, 40), (1000, 10)])
def test_size_after_a_kill_follows_the_record(ground, wanted, monkeypatch):
    """The program is killed in each of the two writes, of the record and of the limits file. After the restart the
    limits must match the record.
    """
    here = ground(**REQUESTED)
    allocation = here.take(here.first)
    for killed_at in ("put", "rewrite"):
        here.sized(allocation, (4000, 20))
        before = here.records.get(allocation)

        class Killed(BaseException):
            pass

        def die(*_words):
            raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(Resizer, "_put_back", lambda *_words: None)
            if killed_at == "put":
                patched.setattr(records_module.RecordStore, "put", die)
            else:
                patched.setattr(resizer_module.live_limits, "rewrite", die)
            with pytest.raises(Killed):
                here.resize(allocation, *wanted)
        here.begin()
        here.resizer.restore()
        assert here.sizes(allocation) == here.kept(allocation)
        assert here.kept(allocation) in ([(4000, 20)], [wanted])
        assert before.id == allocation


def test_allocation_during_a_resize_restores_the_old_size(ground):
    """A process allocates memory under the old limits just before they become smaller. It then uses more than the new
    size, so the resizer restores the old size.
    """
    here = ground(**REQUESTED)
    allocation = here.take(here.first)
    here.sized(allocation, (4000, 20))
    seen = []

    def late():
        seen.append(here.sizes(allocation))
        here.holds(allocation, 2000)

    here.while_waiting = late
    with pytest.raises(Refused, match="1500 MiB are requested, and its programs use 2000"):
        here.resize(allocation, 1500)
    assert seen == [[(1500, 20)]] and here.sizes(allocation) == here.kept(allocation) == [(4000, 20)]


def test_released_memory_counts_until_the_resize_ends(ground):
    here = ground(**REQUESTED)
    one, other = here.take(here.first, 0), here.take(here.first, 1)
    here.sized(one, (10000, 60))
    here.sized(other, (5000, 40))
    found = []

    def ask():
        try:
            here.resize(other, 6000)
        except PluginError as fault:
            found.append(str(fault))

    here.while_waiting = ask
    here.resize(one, 2000)
    assert len(found) == 1 and "10000 of 15360 are held" in found[0]
    here.while_waiting = lambda: None
    here.resize(other, 6000)
    assert here.sizes(other) == [(6000, 40)]


def test_requested_memory_counts_before_it_is_written(ground):
    here = ground(**REQUESTED)
    one, other = here.take(here.first, 0), here.take(here.first, 1)
    here.sized(one, (5000, 40))
    here.sized(other, (5000, 40))
    found = []

    def publish(_devices, _leaving):
        with pytest.raises(Refused, match="10000 of 15360 are held"):
            here.resize(other, 6000)
        with pytest.raises(NotNow, match="an earlier change of its size"):
            here.resize(one, 100)
        found.append(here.kept(one))

    here.resize(one, 10000, publish=publish)
    assert found == [[(5000, 40)]], "a larger size is published before it is applied"


def test_no_resize_without_the_api_server(ground):
    here = ground(**REQUESTED)
    allocation = here.take(here.first)
    here.sized(allocation, (5000, 40))
    heard = []

    def publish(devices, leaving):
        heard.append((devices, leaving, here.kept(allocation)))
        raise NotNow("etcd is away")

    for memory in (9000, 1000):
        with pytest.raises(NotNow, match="etcd is away"):
            here.resize(allocation, memory, publish=publish)
        assert here.sizes(allocation) == here.kept(allocation) == [(5000, 40)]
    uuid = here.first.uuid
    assert heard == [
        ([Device(uuid, 9000, 40)], False, [(5000, 40)]),
        ([Device(uuid, 1000, 40)], False, [(1000, 40)]),
    ], "a smaller size is published after it is applied"


@pytest.mark.parametrize("by", ["group setting", "command option"])
def test_oom_killer_allows_a_size_below_the_use(ground, by):
    """If the OOM killer is on, the pod's processes that use too much are killed at their next CUDA call. Until then
    their memory stays reserved, also over a restart of the program.
    """
    here = ground(**REQUESTED, **({"oomKiller": True} if by == "group setting" else {}))
    allocation, other = here.take(here.first, 0), here.take(here.first, 1)
    here.sized(allocation, (10000, 20))
    here.sized(other, (1000, 20))
    pid = here.holds(allocation, 9000)
    if by == "command option":
        with pytest.raises(Refused, match="its programs use 9000 MiB"):
            here.resize(allocation, 2000)
    done = here.resize(allocation, 2000, kill=by == "command option")
    assert done.leaving and here.limits(allocation)["oom_killer"] and here.sizes(allocation) == [(2000, 20)]
    for _start in range(2):
        with pytest.raises(Refused, match=r"(9000|10000) of 15360 are held"):
            here.resize(other, 7000)
        here.resizer.poll()
        assert here.resizer.leaving(allocation)
        here.begin()
        here.resizer.restore()
    here.end(pid)
    here.resizer.poll()
    assert not here.resizer.leaving(allocation)
    here.resize(other, 13000)


def test_resize_without_waiting_reports_pending_kills(ground):
    here = ground(**REQUESTED, oomKiller=True)
    allocation = here.take(here.first)
    here.sized(allocation, (10000, 20))
    pid = here.holds(allocation, 9000)
    waits = []
    here.while_waiting = lambda: waits.append(1)
    assert here.resize(allocation, 2000, waits=False).leaving and len(waits) == 2
    here.end(pid)
    here.resizer.poll()
    assert not here.resizer.leaving(allocation)


def test_resize_completes_after_the_oom_killer(ground):
    here = ground(**REQUESTED)
    allocation = here.take(here.first)
    here.sized(allocation, (10000, 20))
    pid = here.holds(allocation, 9000)
    here.while_waiting = lambda: here.children and here.end(pid)
    assert not here.resize(allocation, 2000, kill=True).leaving


# columns: the case, a function that returns the id to resize; the expected class of the error, expected words of its
# message
REFUSED = [
    ("unknown allocation", lambda here: "feedfeedfeedfeed", Unknown, "there is no allocation feedfeedfeedfeed"),
    ("container not started", lambda here: here.take(here.first), NotNow, "has no size yet"),
]


@pytest.mark.parametrize(("_about", "make", "kind", "words"), REFUSED, ids=[row[0] for row in REFUSED])
def test_allocations_without_a_size_cannot_be_resized(ground, _about, make, kind, words):
    here = ground(**REQUESTED)
    with pytest.raises(kind, match=words):
        here.resizer.resize(make(here), {})


def test_claims_cannot_be_resized_on_the_node(ground):
    here = ground(**REQUESTED)
    allocation = here.take(here.first)
    here.sized(allocation, (4000, 20))
    with here.records.lock:
        here.records.put(replace(here.records.get(allocation), kind=CLAIM, claim="uid"))
    with pytest.raises(Refused, match="belongs to a claim, whose size the kube-scheduler allocated"):
        here.resize(allocation, 3000)
    assert here.sizes(allocation) == here.kept(allocation) == [(4000, 20)]


def test_invalid_ledger_refuses_only_less_memory(ground):
    here = ground(**REQUESTED)
    allocation = here.take(here.first)
    here.sized(allocation, (4000, 20))
    (here.files.folder(allocation) / "rw" / "ledger").write_bytes(b"nonsense")
    with pytest.raises(NotNow, match="its memory usage is unknown"):
        here.resize(allocation, 3000)
    assert here.resize(allocation, 5000).gpus[0].used == -1
    assert here.sizes(allocation) == [(5000, 20)]


def test_restart_restores_limits_from_the_record(ground):
    """The program was killed after it wrote a smaller share to the record, and a tenant damaged the ledger."""
    here = ground(**REQUESTED)
    allocation = here.take(here.first)
    here.sized(allocation, (4000, 80))
    record = here.records.get(allocation)
    rows = [{**row, "sm_percent": 10} for row in record.limits["devices"]]
    with here.records.lock:
        here.records.put(replace(record, limits={**record.limits, "devices": rows}, cores={here.first.uuid: 10}))
    (here.files.folder(allocation) / "rw" / "ledger").write_bytes(b"nonsense")
    here.begin()
    here.resizer.restore()
    assert here.sizes(allocation) == [(4000, 10)]


def test_forged_ledger_reserves_no_memory_of_other_containers_after_a_restart(ground):
    """A tenant can write any value into its ledger, so a ledger never reserves more than the container's own size."""
    here = ground(**REQUESTED)
    one, other = here.take(here.first, 0), here.take(here.first, 1)
    here.sized(one, (1000, 10))
    here.sized(other, (1000, 10))
    here.holds(one, 1 << 20)
    here.begin()
    here.resizer.restore()
    assert here.resize(other, 14000).changed and here.sizes(other) == [(14000, 10)]


# ---- equal slices


def offered(here, gpu) -> list[str]:
    return [
        one.slice.id.rpartition("::")[2] for one in here.pool.offers()[1] if one.slice.uuid == gpu.uuid and one.healthy
    ]


def test_equal_slice_grows_into_unused_slices(ground):
    """15360 MiB are split into four slices of 3840 MiB. If a slice grows, fewer slices are offered to the kubelet."""
    here = ground()
    one, other = here.take(here.first, 0), here.take(here.first, 1)
    assert offered(here, here.first) == ["0", "1", "2", "3"]
    here.resize(one, 3841)
    assert here.sizes(one) == [(3841, 100)] and offered(here, here.first) == ["0", "1", "2"]
    assert offered(here, here.second) == ["0", "1", "2", "3"] and len(here.resizer.notes()) == 1
    here.resize(one, 11520)
    assert offered(here, here.first) == ["0", "1"]
    with pytest.raises(Refused, match="11521 MiB are asked for, 3840 of 15360 are held"):
        here.resize(one, 11521)
    # The kubelet may allocate slice 2 at the same moment: the allocation is refused, and no memory is sold twice.
    with pytest.raises(Taken, match="3840 MiB are asked for, 15360 of 15360 are held"):
        here.take(here.first, 2)
    here.begin()
    here.resizer.restore()
    assert here.sizes(one) == [(11520, 100)] and offered(here, here.first) == ["0", "1"]
    here.allocator.forget(one)
    here.resizer.poll()
    assert offered(here, here.first) == ["0", "1", "2", "3"] and here.resizer.notes() == []
    assert here.sizes(other) == [(3840, 100)]


def test_ended_slice_is_not_offered_while_a_larger_slice_uses_its_memory(ground):
    here = ground()
    took = [here.take(here.first, n) for n in range(4)]
    with pytest.raises(Refused, match="3841 MiB are asked for, 11520 of 15360"):
        here.resize(took[0], 3841)
    here.resize(took[3], 1000)
    here.resize(took[0], 6000)
    here.allocator.forget(took[3])
    here.resizer.poll()
    assert offered(here, here.first) == ["0", "1", "2"]
    with pytest.raises(Taken):
        here.take(here.first, 3)
    here.resize(took[0], 3840)
    assert offered(here, here.first) == ["0", "1", "2", "3"]
    here.take(here.first, 3)


SHARES = [
    # columns: cores scaling, SM % of each of four slices; expected words of the refusal of 60 % ("": allowed)
    ("1", 25, "60 % of the SMs are asked for, 75 of 100 % are held"),
    ("2", 50, "60 % of the SMs are asked for, 150 of 200 % are held"),
    ("4", 100, ""),
]


@pytest.mark.parametrize(("scaling", "has", "words"), SHARES)
def test_compute_share_of_an_equal_slice_is_resized(ground, scaling, has, words):
    here = ground(coresScaling=scaling)
    took = [here.take(here.first, n) for n in range(4)]
    assert here.sizes(took[0]) == [(3840, has)]
    if words:
        with pytest.raises(Refused, match=words):
            here.resize(took[0], None, 60)
        here.resize(took[1], None, 1)
        here.resize(took[2], None, 1)
    here.resize(took[0], None, 60)
    assert here.sizes(took[0]) == [(3840, 60)]


def test_resized_lease_survives_a_restart_and_frees_its_slices_at_its_end(ground):
    here = ground()
    leases = Leases(here.allocator, here.pool, here.node.paths.checkpoint, lambda: False, here.node.clock)
    lease = leases.lease(here.first.uuid)
    (slice_id,) = lease.slice_ids
    done = here.resize(lease.allocation, 5000, 30)
    assert [(one.before.memory_mib, one.now.memory_mib) for one in done.gpus] == [(3840, 5000)]
    assert here.sizes(lease.allocation) == [(5000, 30)]
    (gone,) = {"0", "1", "2", "3"} - set(offered(here, here.first)) - {slice_id[-1]}
    here.begin()
    here.resizer.restore()
    leases = Leases(here.allocator, here.pool, here.node.paths.checkpoint, lambda: False, here.node.clock)
    leases.restore()
    assert here.records.get(lease.allocation).kind != KUBELET and gone not in offered(here, here.first)
    leases.release(lease.allocation)
    here.resizer.poll()
    assert offered(here, here.first) == ["0", "1", "2", "3"]


def test_leased_slice_is_not_offered_after_the_lease_while_a_container_uses_its_memory(ground):
    """A container grows into the memory that a reduced lease released, so the lease's whole slice no longer fits."""
    here = ground()
    one = here.take(here.first, 0)
    leases = Leases(here.allocator, here.pool, here.node.paths.checkpoint, lambda: False, here.node.clock)
    for _n in range(3):
        lease = leases.lease(here.first.uuid)
    here.resize(lease.allocation, 100)
    here.resize(one, 3840 + 3740)
    leases.release(lease.allocation)
    here.resizer.poll()
    assert lease.slice_ids[0][-1] not in offered(here, here.first)


def test_context_memory_counts_as_used_memory(ground):
    here = ground(**REQUESTED)
    allocation = here.take(here.first)
    here.sized(allocation, (4000, 20))
    here.holds(allocation, 1500, context=300)
    here.holds(allocation, 500, slot=7, context=500)
    with pytest.raises(Refused, match="1999 MiB are requested, and its programs use 2000"):
        here.resize(allocation, 1999)
    assert here.resize(allocation, 2000).gpus[0].used == 2000 * MIB


def test_ledger_below_the_drivers_value_releases_no_memory(ground):
    """The driver is polled every two seconds. The resizer waits for just freed memory and ignores a forged ledger."""
    here = ground(**REQUESTED)
    allocation, other = here.take(here.first, 0), here.take(here.first, 1)
    here.sized(allocation, (10000, 20))
    here.sized(other, (5000, 20))
    shown = {"mib": 9000}
    here.resizer.shown = lambda record, _uuid: shown["mib"] * MIB if record.id == allocation else 0
    with pytest.raises(NotNow, match="the driver reports more memory for them, so it keeps its size"):
        here.resize(allocation, 2000)
    assert here.sizes(allocation) == here.kept(allocation) == [(10000, 20)]
    with pytest.raises(Refused, match="10000 of 15360 are held"):
        here.resize(other, 6000)
    # A request that does not wait is refused at once, and the limit did not fall meanwhile.
    here.while_waiting = lambda: pytest.fail("waits")
    with pytest.raises(NotNow, match="it keeps its size"):
        here.resize(allocation, 2000, waits=False)
    here.while_waiting = lambda: None
    assert here.resize(allocation, 9000).changed
    waits = []

    def looked():
        waits.append(1)
        if len(waits) > 5:
            shown["mib"] = 100

    here.while_waiting = looked
    here.resize(allocation, 2000)
    assert here.sizes(allocation) == [(2000, 20)] and len(waits) > 5
    here.while_waiting = lambda: None
    assert here.resize(allocation, 1000, waits=False).changed


def test_resize_of_one_gpu_leaves_the_other_gpu_unchanged(ground):
    here = ground(**REQUESTED)
    (answer,) = here.allocator.allocate([[f"{here.first.uuid}::0", f"{here.second.uuid}::0"]])
    here.sized(answer.allocation, (4000, 20), (2000, 0))
    here.resizer.resize(answer.allocation, {here.second.uuid: Wanted(9000, 50)})
    assert here.sizes(answer.allocation) == [(4000, 20), (9000, 50)]
    here.holds(answer.allocation, 3000, device=0)
    with pytest.raises(Refused, match=f"GPU {here.first.uuid}: 1000 MiB are requested"):
        here.resize(answer.allocation, 1000)
    assert here.sizes(answer.allocation) == [(4000, 20), (9000, 50)]
    with pytest.raises(BadRequest):
        here.resize(answer.allocation, 1 << 62, 500)
    assert Path(here.files.folder(answer.allocation) / "record").exists()
