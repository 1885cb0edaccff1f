# SPDX-License-Identifier: Apache-2.0
"""Tests leases: slices of a GPU that are withheld from the kubelet for a program, a container or a check on this host.
Also tests the collection of allocations: which allocations stay, which end, and when. The kubelet's checkpoint is its
file of allocated devices.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from vgpu_plugin.allocation.collector import GRACE_S, Collector
from vgpu_plugin.allocation.leases import Leases
from vgpu_plugin.errors import BadRequest, NoFreeSlice, NotNow, Unknown
from vgpu_plugin.kubelet.service import to_message

RESOURCE = "nvidia.com/gpu"


def write_checkpoint(node, answers=(), advertised=(), ids_only=(), resource=RESOURCE) -> None:
    entries: list[dict[str, Any]] = [
        {
            "PodUID": "u",
            "ContainerName": "c",
            "ResourceName": resource,
            "DeviceIDs": {"-1": list(answer.slice_ids)},
            "AllocResp": base64.b64encode(to_message(answer).SerializeToString()).decode(),
        }
        for answer in answers
    ]
    entries += [{"PodUID": "v", "ContainerName": "c", "ResourceName": resource, "DeviceIDs": list(ids_only)}]
    data = {"PodDeviceEntries": entries, "RegisteredDevices": {RESOURCE: list(advertised)}}
    node.paths.checkpoint.write_text(json.dumps({"Data": data, "Checksum": 1}))


def leases_of(node, parts, registered=lambda: False) -> Leases:
    pool, allocator, _files = parts
    out = Leases(allocator, pool, node.paths.checkpoint, registered, node.clock)
    out.restore()
    return out


def healthy(pool) -> set[str]:
    return {offer.slice.id for offer in pool.offers()[1] if offer.healthy}


def test_lease_takes_the_kubelets_last_choice(node):
    parts = node.parts(splitCount=3)
    answer = leases_of(node, parts).lease(node.gpus[1].uuid)
    assert answer.slice_ids == (f"{node.gpus[1].uuid}::2",)
    assert answer.slice_ids[0] not in healthy(parts[0])


def test_slices_in_use_are_not_leased(node):
    parts = node.parts(splitCount=1)
    leases = leases_of(node, parts)
    # One of the two slices in use is only in the plugin's records, the other only in the kubelet's checkpoint.
    parts[1].allocate([[f"{node.gpus[0].uuid}::0"]])
    write_checkpoint(node, ids_only=[f"{node.gpus[1].uuid}::0"])  # For this slice no record exists.
    with pytest.raises(NoFreeSlice, match="found 2 slices, each in use, leased or unhealthy"):
        leases.lease()
    assert len(healthy(parts[0])) == 2  # The refused lease withholds no slice from the kubelet.


def test_unhealthy_gpu_is_not_leased(node):
    parts = node.parts(splitCount=2)
    parts[0].mark_unhealthy(node.gpus[0].uuid, "Xid 79")
    assert leases_of(node, parts).lease().slice_ids[0].startswith(node.gpus[1].uuid)
    with pytest.raises(NoFreeSlice, match=f"no free slice of {node.gpus[0].uuid}"):
        leases_of(node, parts).lease(node.gpus[0].uuid)


# columns: the requested GPU ("" means any GPU), the seconds for which the lease is requested; expected class of the
# error, expected words of its message
@pytest.mark.parametrize(
    ("uuid", "ttl", "kind", "sentence"),
    [
        ("GPU-x", 0, Unknown, "this node has no GPU GPU-x; it has GPU-0"),
        ("", -1, BadRequest, "expected 1 to 3600"),
        ("", 3601, BadRequest, "expected 1 to 3600"),
    ],
)
def test_invalid_lease_requests_are_refused(node, uuid, ttl, kind, sentence):
    with pytest.raises(kind, match=sentence):
        leases_of(node, node.parts()).lease(uuid, ttl)


def test_kubelets_concurrent_allocation_wins_over_a_lease(node):
    parts = node.parts(splitCount=1)
    first, second = (f"{gpu.uuid}::0" for gpu in node.gpus)
    asked = []

    def registered() -> bool:
        # The kubelet withdraws each withheld slice, but it has just allocated the first one to a pod.
        if not asked:
            asked.append(True)
            write_checkpoint(node, ids_only=[first], advertised=[second])
        else:
            write_checkpoint(node, ids_only=[first], advertised=[])
        return True

    assert leases_of(node, parts, registered).lease().slice_ids == (second,)
    assert healthy(parts[0]) == {first}


def test_late_allocate_wins_over_a_lease(node, monkeypatch):
    """If the kubelet allocates a slice after the lease's last check of the slices in use, the kubelet keeps this slice
    and the lease gets another one."""
    parts = node.parts(splitCount=1)
    first, second = (f"{gpu.uuid}::0" for gpu in node.gpus)
    look = Leases._withdrawn
    pods = []

    def withdrawn(self, slice_id):
        answer = look(self, slice_id)
        if not pods:
            pods.extend(parts[1].allocate([[slice_id]]))
        return answer

    monkeypatch.setattr(Leases, "_withdrawn", withdrawn)
    assert leases_of(node, parts).lease().slice_ids == (second,)
    holders = {one.slice_ids: one.kind for one in parts[1].records.all()}
    assert holders == {(first,): "kubelet", (second,): "lease"}
    assert healthy(parts[0]) == {first}
    assert parts[2].present() == sorted(one.id for one in parts[1].records.all())


def test_lease_fails_if_the_kubelet_does_not_withdraw(node, monkeypatch):
    monkeypatch.setattr("vgpu_plugin.allocation.leases.CONFIRM_S", 0.05)
    parts = node.parts(splitCount=1)
    write_checkpoint(node, advertised=[one.id for one in parts[0].slices])
    with pytest.raises(NotNow, match="did not withdraw slice"):
        leases_of(node, parts, lambda: True).lease()
    assert len(healthy(parts[0])) == 2


def test_lease_survives_a_restart_and_expires(node):
    parts = node.parts()
    answer = leases_of(node, parts).lease(ttl_s=100)
    parts = node.parts()
    leases = leases_of(node, parts)  # The program restarts.
    assert answer.slice_ids[0] not in healthy(parts[0])
    node.clock.seconds += 99
    leases.expire()
    assert answer.slice_ids[0] not in healthy(parts[0])
    node.clock.seconds += 1
    leases.expire()
    assert answer.slice_ids[0] in healthy(parts[0])
    assert (parts[1].records.all(), parts[2].present()) == ([], [])


@pytest.mark.parametrize(("boot", "seconds"), [("boot-b", 0.0), ("boot-a", 5000.0)])
def test_expired_lease_ends_at_the_start(node, boot, seconds):
    answer = leases_of(node, node.parts()).lease(ttl_s=100)
    node.clock.boot, node.clock.seconds = boot, node.clock.seconds + seconds
    parts = node.parts()
    leases_of(node, parts)
    assert answer.slice_ids[0] in healthy(parts[0])
    assert parts[1].records.all() == []


def test_only_a_lease_is_released(node):
    parts = node.parts()
    leases = leases_of(node, parts)
    (pod,) = parts[1].allocate([[f"{node.gpus[0].uuid}::0"]])
    answer = leases.lease()
    leases.release(answer.allocation)
    assert len(healthy(parts[0])) == 4
    for unknown in (answer.allocation, pod.allocation, "nothing"):
        with pytest.raises(Unknown, match=f"there is no lease {unknown}"):
            leases.release(unknown)


# ---- collection: allocations that the kubelet no longer lists end after a grace period


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_collection_needs_the_kubelets_checkpoint(node):
    parts = node.parts()
    time = Time()
    collector = Collector(parts[1], parts[2], node.paths.checkpoint, monotonic=time)
    (kept,) = parts[1].allocate([[f"{node.gpus[0].uuid}::0"]])
    (gone,) = parts[1].allocate([[f"{node.gpus[1].uuid}::0"]])
    leased = leases_of(node, parts).lease()
    # Without a checkpoint no allocation ends, because a stopped kubelet still has containers.
    assert collector.collect() == []
    time.now += 10 * GRACE_S
    assert collector.collect() == []
    write_checkpoint(node, [kept])
    assert collector.collect() == []  # From this poll on, the checkpoint does not contain one of the allocations.
    time.now += GRACE_S - 1
    assert collector.collect() == []
    node.paths.checkpoint.write_text("{torn")
    time.now += 2
    assert collector.collect() == []
    write_checkpoint(node, [kept])
    assert collector.collect() == [gone.allocation]
    assert parts[2].present() == sorted([kept.allocation, leased.allocation])
    assert {one.id for one in parts[1].records.all()} == {kept.allocation, leased.allocation}


def test_allocation_in_pod_resources_does_not_end(node):
    """The kubelet's PodResources service still lists the allocation, although its checkpoint has lost the entry."""
    parts = node.parts()
    time = Time()
    held = {f"{node.gpus[0].uuid}::0": ("ml", "train", "main")}
    collector = Collector(parts[1], parts[2], node.paths.checkpoint, lambda: held, time)
    (kept,) = parts[1].allocate([[f"{node.gpus[0].uuid}::0"]])
    (gone,) = parts[1].allocate([[f"{node.gpus[1].uuid}::0"]])
    write_checkpoint(node)
    assert collector.collect() == []
    time.now += GRACE_S
    assert collector.collect() == [gone.allocation]
    held.clear()
    assert collector.collect() == []  # From this poll on, neither source contains the allocation.
    time.now += GRACE_S
    assert collector.collect() == [kept.allocation]


def test_former_allocation_of_a_reused_slice_ends(node):
    """PodResources names slices, not allocations. If a slice was allocated twice, only the checkpoint shows which
    allocation has the slice now.
    """
    parts = node.parts()
    time = Time()
    slice_id = f"{node.gpus[0].uuid}::0"
    held = {slice_id: ("ml", "again", "main")}
    collector = Collector(parts[1], parts[2], node.paths.checkpoint, lambda: held, time)
    (former,) = parts[1].allocate([[slice_id]])
    (now,) = parts[1].allocate([[slice_id]])
    write_checkpoint(node)
    assert collector.collect() == []  # The checkpoint names neither allocation, so either may be in use.
    time.now += GRACE_S
    assert collector.collect() == []
    write_checkpoint(node, [now])
    assert collector.collect() == []  # From this poll on, the checkpoint does not contain the former allocation.
    time.now += GRACE_S
    assert collector.collect() == [former.allocation]
    assert parts[2].present() == [now.allocation]


def test_kubelet_is_made_to_write_its_checkpoint(node):
    """The kubelet removes a deleted pod from its checkpoint only when it writes the file the next time, while
    PodResources omits the pod at once. So the plugin causes such a write.
    """
    parts = node.parts()
    time, asked = Time(), []
    slice_id = f"{node.gpus[0].uuid}::0"
    held: dict | None = {slice_id: ("ml", "train", "main")}
    collector = Collector(
        parts[1], parts[2], node.paths.checkpoint, lambda: held, time, send_again=lambda: asked.append(time.now)
    )
    (one,) = parts[1].allocate([[slice_id]])
    write_checkpoint(node, [one])
    start = time.now
    assert (collector.collect(), asked) == ([], [])
    held = None  # Without a response from PodResources it is unknown whether the pod exists.
    assert (collector.collect(), asked) == ([], [])
    held = {}
    assert (collector.collect(), asked) == ([], [start])
    for later in (9, 10, 29, 30, 69, 70):
        time.now = start + later
        # Only the kubelet decides: while its checkpoint names the pod, the allocation stays.
        assert collector.collect() == []
    assert asked == [start, start + 10, start + 30, start + 70]
    write_checkpoint(node)
    assert collector.collect() == []
    time.now += GRACE_S
    assert collector.collect() == [one.allocation]
    assert len(asked) == 4


def test_seen_allocation_restarts_the_grace_period(node):
    parts = node.parts()
    time = Time()
    collector = Collector(parts[1], parts[2], node.paths.checkpoint, monotonic=time)
    (one,) = parts[1].allocate([[f"{node.gpus[0].uuid}::0"]])
    for answers in ([], [one], []):
        write_checkpoint(node, answers)
        assert collector.collect() == []
        time.now += GRACE_S - 1
    assert collector.collect() == []


def test_checkpoint_without_responses_keeps_the_allocation(node):
    parts = node.parts()
    time = Time()
    collector = Collector(parts[1], parts[2], node.paths.checkpoint, monotonic=time)
    parts[1].allocate([[f"{node.gpus[0].uuid}::0"]])
    write_checkpoint(node, ids_only=[f"{node.gpus[0].uuid}::0"])
    for _time in range(3):
        assert collector.collect() == []
        time.now += 2 * GRACE_S


def test_containers_of_a_renamed_resource_keep_their_files(node):
    """The resource was renamed in the configuration, but the kubelet still lists running containers under the old name.
    The files of these containers must stay."""
    parts = node.parts(splitCount=1)
    time = Time()
    (kept,) = parts[1].allocate([[f"{node.gpus[0].uuid}::0"]])
    (lost,) = parts[1].allocate([[f"{node.gpus[1].uuid}::0"]])
    write_checkpoint(node, [kept, lost], resource="example.com/former")
    # Only the kubelet's checkpoint shows to which allocation the folder belongs.
    parts[1].records.drop(lost.allocation)
    collector = Collector(parts[1], parts[2], node.paths.checkpoint, monotonic=time)
    for _time in range(3):
        assert collector.collect() == []
        time.now += 2 * GRACE_S
    assert parts[2].present() == sorted([kept.allocation, lost.allocation])
    with pytest.raises(NoFreeSlice):
        leases_of(node, parts).lease()


def test_unknown_folder_is_removed(node):
    parts = node.parts()
    time = Time()
    collector = Collector(parts[1], parts[2], node.paths.checkpoint, monotonic=time)
    (known,) = parts[1].allocate([[f"{node.gpus[0].uuid}::0"]])
    (lost,) = parts[1].allocate([[f"{node.gpus[1].uuid}::0"]])
    node.paths.records.unlink()
    parts = node.parts()
    collector = Collector(parts[1], parts[2], node.paths.checkpoint, monotonic=time)
    write_checkpoint(node, [known])
    collector.collect()
    time.now += GRACE_S
    assert collector.collect() == [lost.allocation]
    assert parts[2].present() == [known.allocation]
