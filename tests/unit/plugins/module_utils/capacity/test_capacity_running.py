# SPDX-License-Identifier: Apache-2.0
"""Tests the rules by which running containers are compared with the records of the device plugin. They return
differences (faults) and notes (no faults). A ledger is the file in which the library counts a container's GPU memory.
The watcher is the part of the device plugin that looks for processes that bypass the library. Each rule is tested just
inside and outside its limit, and test_capacity.py tests all together.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.capacity import running

MIB = 1 << 20
GPU = "nvidia.com/gpu"
OWNER = {"namespace": "team", "pod": "train", "container": "main"}


def usage(mib, allocation="a1", uuid="GPU-a", **named):
    return {"allocation": allocation, "uuid": uuid, "memory_used": mib * MIB, **named}


def gpu(used_mib, slices=2, slice_mib=7680):
    return {"uuid": "GPU-a", "slices": slices, "slice_mib": slice_mib, "memory_mib": 15360, "used_mib": used_mib}


WANTED = [
    # columns: label, configuration of the group, configuration on the node; expected differences as (key, expected
    # value, found value)
    ("equal files", {"a": {"b": 1}}, {"a": {"b": 1}}, []),
    ("another number", {"a": {"b": 1}}, {"a": {"b": 2}}, [("f: a.b", "1", "2")]),
    ("key missing on the node", {"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, [("f: a.c", "2", "not set")]),
    ("key missing in the group", {"a": 1}, {"a": 1, "d": True}, [("f: d", "not set", "true")]),
    ("empty section of the group", {"a": {}, "b": 1}, {"b": 1}, [("f: a", "{}", "not set")]),
    ("empty list of the node", {"a": [1]}, {"a": []}, [("f: a", "not set", "[]"), ("f: a[0]", "1", "not set")]),
    ("library path, which may differ", {"sharing": {"vcuda": {"libraryRoot": "/a", "splitCount": 2}}},
     {"sharing": {"vcuda": {"libraryRoot": "/b", "splitCount": 3}}}, [("f: sharing.vcuda.splitCount", "2", "3")]),
]  # fmt: skip


@pytest.mark.parametrize(("about", "ours", "theirs", "keys"), WANTED, ids=[one[0] for one in WANTED])
def test_configuration_of_the_group_is_compared_by_key(about, ours, theirs, keys):
    found = running.wanted(json.dumps(ours), json.dumps(theirs), "f")
    assert [(one["where"], one["expected"], one["found"]) for one in found] == keys


@pytest.mark.parametrize(("ours", "theirs"), [("", "{}"), (None, "{}"), ('{"a": 1}', None), ('{"a": 1}', "torn")])
def test_missing_configuration_gives_no_difference_by_key(ours, theirs):
    assert running.wanted(ours, theirs, "f") == []


NAMED = [
    (usage(1, **OWNER), {"a1": "team/train/main"}),
    (usage(1, **{**OWNER, "container": ""}), {}),
    (usage(1, **{**OWNER, "namespace": None}), {}),
    (usage(1, allocation=None, **OWNER), {}),
    (usage(1), {}),
]


@pytest.mark.parametrize(("one", "names"), NAMED)
def test_name_of_a_container_needs_all_its_parts(one, names):
    assert running.names([one]) == names


LEDGERS = [
    # columns: label, MiB in the ledger of each container, MiB in use according to the driver; expected: whether a
    # ledger is reported as too large. The ledgers may exceed the driver's figure by 1/16 of the ledgers or by 64 MiB,
    # whichever is more.
    ("ledger equal to the driver's figure", [3000], 3000, False),
    ("ledger 1/16 above the driver's figure", [3000], 3000 - 3000 // 16, False),
    ("ledger 1/16 and 1 MiB above the driver's figure", [3000], 3000 - 3000 // 16 - 1, True),
    ("ledger 64 MiB above the driver's figure, more than 1/16", [200], 136, False),
    ("ledger 65 MiB above the driver's figure", [200], 135, True),
    ("no ledger", [], 0, False),
]


@pytest.mark.parametrize(("about", "charged", "used", "stale"), LEDGERS, ids=[one[0] for one in LEDGERS])
def test_ledger_above_the_drivers_figure_is_reported(about, charged, used, stale):
    assert bool(running.ledgers([usage(one) for one in charged], [gpu(used)])) is stale


@pytest.mark.parametrize(("slice_mib", "stale"), [(7680, True), (7681, False)])
def test_ledger_of_an_oversold_gpu_may_exceed_the_driver(slice_mib, stale):
    assert bool(running.ledgers([usage(3000)], [gpu(10, slice_mib=slice_mib)])) is stale


def test_oversold_gpu_does_not_hide_the_ledger_of_the_next_gpu():
    gpus = [gpu(10, slice_mib=7681), {**gpu(10), "uuid": "GPU-b"}]
    found = running.ledgers([usage(3000), usage(3000, "b2", uuid="GPU-b")], gpus)
    assert [one["where"] for one in found] == ["GPU-b"]


def test_container_without_a_figure_is_not_the_one_with_the_largest_ledger():
    unknown = {**usage(0, "a2", namespace="team", pod="unknown", container="main"), "memory_used": None}
    empty = {**usage(0, "a3", namespace="team", pod="empty", container="main")}
    for usages in ([unknown, usage(3000, **OWNER)], [usage(3000, **OWNER), unknown, empty]):
        (one,) = running.ledgers(usages, [gpu(100)])
        assert "restart team/train/main, which has the largest charge" in one["remedy"]


# columns: bytes in the ledger of each container (None: unknown); expected sum in MiB, rounded down
@pytest.mark.parametrize(
    ("charged", "words"), [([3000 * MIB, None], "3000 MiB charged"), ([3000 * MIB - 1, None, 0], "2999 MiB charged")]
)
def test_ledger_without_a_figure_charges_nothing(charged, words):
    usages = [{**usage(0, f"a{n}"), "memory_used": one} for n, one in enumerate(charged)]
    assert [one["found"] for one in running.ledgers(usages, [gpu(100)])] == [words]


def test_remedy_names_the_container_with_the_largest_ledger():
    small = usage(100, "a2", namespace="team", pod="small", container="main")
    for usages in ([usage(3000, **OWNER), small], [small, usage(3000, **OWNER)]):
        (one,) = running.ledgers(usages, [gpu(100)])
        assert "restart team/train/main, which has the largest charge" in one["remedy"]
        assert one["found"] == "3100 MiB charged"


HELD = [
    # columns: label, device entries in the kubelet's checkpoint; expected device ids by pod UID and container (None:
    # the checkpoint is invalid)
    ("devices by NUMA node", [{"DeviceIDs": {"-1": ["a"], "0": ["b"]}}], {"u/c": ["a", "b"]}),
    ("devices as a list (older kubelets)", [{"DeviceIDs": ["a"]}], {"u/c": ["a"]}),
    ("two entries of one container", [{"DeviceIDs": ["a"]}, {"DeviceIDs": {"0": ["b"]}}], {"u/c": ["a", "b"]}),
    ("no device on a NUMA node", [{"DeviceIDs": {"0": None, "1": ["b"]}}], {"u/c": ["b"]}),
    ("devices null", [{"DeviceIDs": None}], {"u/c": []}),
    ("entry of another resource", [{"DeviceIDs": ["a"], "ResourceName": "example.com/nic"}], {}),
    ("no entries", [], {}),
    ("entries null", None, {}),
    ("entry without a pod", [{"PodUID": ...}], None),
]


@pytest.mark.parametrize(("about", "entries", "given"), HELD, ids=[one[0] for one in HELD])
def test_device_ids_that_the_kubelet_allocated(about, entries, given):
    whole = {"PodUID": "u", "ContainerName": "c", "ResourceName": GPU, "DeviceIDs": []}
    made = entries and [{key: one for key, one in {**whole, **entry}.items() if one is not ...} for entry in entries]
    assert running.held(json.dumps({"Data": {"PodDeviceEntries": made}}), [GPU]) == given


@pytest.mark.parametrize("text", [None, "", "torn", "[]", "{}", '{"Data": null}'])
def test_checkpoint_that_cannot_be_read(text):
    assert running.held(text, [GPU]) is None
    assert running.allocations({"allocations": [{"id": "a1", "kind": "kubelet", "slice_ids": ["a"]}]}, None) == []


LIBRARIES = [
    # columns: label, library version that new containers get, what differs in the record of a running container;
    # expected: whether a note names this container. Normally the container has version 1 and was started by a kubelet.
    # A lease reserves a slice for an isolation check.
    ("older library", "2", {}, True),
    ("current library", "1", {}, False),
    ("older library of a lease", "2", {"kind": "lease"}, False),
    ("container without a library", "2", {"library": ""}, False),
    ("unknown library of new containers", "", {}, False),
]


@pytest.mark.parametrize(("about", "current", "changed", "named"), LIBRARIES, ids=[one[0] for one in LIBRARIES])
def test_older_library_of_a_container_is_a_note(about, current, changed, named):
    one = {"id": "a1", "kind": "kubelet", "library": "1", **changed}
    found = running.older_libraries({"library": current, "allocations": [one]}, {})
    assert [note["where"] for note in found] == (["allocation a1"] if named else [])


@pytest.mark.parametrize(
    ("who", "where"), [(OWNER, "team/train/main"), ({"namespace": "", "pod": None}, "allocation a1")]
)
def test_bypassing_process_is_named_with_its_container(who, where):
    (one,) = running.watched({"findings": [{"allocation": "a1", "kind": "kubelet", "text": "process 7", **who}]})
    assert (one["where"], one["found"]) == (where, "process 7")
    assert running.watched(None) == [] and running.watched({"findings": None}) == []


# columns: what the watcher found; expected container in the reported difference, first words of the difference's
# expected value
@pytest.mark.parametrize(
    ("finding", "where", "expected"),
    [
        ({"reason": "more-memory", "allocation": "a1"}, "allocation a1", "all its GPU memory in its ledger"),
        ({"reason": "more-time", "allocation": "a1"}, "allocation a1", "at most its share of the GPU's time"),
        ({"reason": "foreign-mount", **OWNER}, "team/train/main", "the node's own files"),
        ({"reason": "unplaced", "allocation": ""}, "no known container", "a container with a slice"),
        ({"reason": "of a later version", "allocation": "a1"}, "allocation a1", "all its GPU memory"),
    ],
)
def test_finding_of_the_watcher_has_an_expected_value(finding, where, expected):
    (one,) = running.watched({"findings": [{"kind": "kubelet", "text": "process 7", **finding}]})
    assert one["where"] == where
    assert one["expected"].startswith(expected)


def test_old_mounts_are_a_note():
    (one,) = running.old_mounts({"old_mounts": [{"allocation": "a1", "kind": "kubelet", **OWNER}]})
    assert (one["where"], one["found"]) == ("team/train/main", "single files of a former version")
    assert running.old_mounts(None) == [] and running.old_mounts({"findings": []}) == []
