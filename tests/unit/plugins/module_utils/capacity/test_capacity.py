# SPDX-License-Identifier: Apache-2.0
"""Tests the comparison of the slices (parts of a GPU) that a host's configuration gives with those that the device
plugin and the kubelet advertise. A difference is a reported fault with its remedy; a note is no fault.

Each row of a table changes one fact of a host without differences. A ledger is the file in which the library counts a
container's GPU memory. A lease reserves a slice for an isolation check (attempts to exceed its limits).
"""

from __future__ import annotations

import copy
import json
import socket
import tempfile
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.capacity import capacity
from ansible_collections.vgpu.fleet.plugins.module_utils.config import node_config
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import nvml
from ansible_collections.vgpu.fleet.plugins.module_utils.host.digest import sha256
from capacity_samples import CONFIG, GPUS, IDS, checkpoint, compared, plugin, slices
from doubles.host import host as host_double


def test_consistent_host_has_no_difference():
    found = compared()
    assert found["ok"] is True
    assert found["drift"] == []
    assert [piece["id"] for piece in found["expected"]] == IDS
    assert {(piece["memory_mib"], piece["sm_percent"]) for piece in found["expected"]} == {(7680, 50)}
    assert [(gpu["slices"], gpu["advertised"], gpu["slice_mib"]) for gpu in found["gpus"]] == [(2, 2, 7680)] * 2
    assert [(gpu["sm_percent"], gpu["mode"]) for gpu in found["gpus"]] == [(50, "vcuda")] * 2
    assert found["library"] == "0.1.0-x"


WAITS = [  # slices of GPU-a, which keeps its former split while one of them is in use
    {
        "id": f"GPU-a::{n}",
        "uuid": "GPU-a",
        "memory_mib": 5120,
        "sm_percent": 33,
        "resource": "nvidia.com/gpu",
        "mode": "vcuda",
        "device": "GPU-a",
        "health": "Healthy",
        "in_use": n == 2,
    }
    for n in range(3)
]


def test_gpu_that_waits_for_slices_in_use_is_a_note():
    ids = [one["id"] for one in WAITS] + IDS[2:]
    status = plugin(waiting=["GPU-a"], slices=WAITS + slices()[2:])
    found = compared(plugin=status, checkpoint_text=checkpoint(ids))
    assert (found["ok"], found["drift"]) == (True, [])
    assert [piece["id"] for piece in found["expected"]] == ids
    assert [(gpu["slices"], gpu["advertised"], gpu["slice_mib"]) for gpu in found["gpus"]] == [
        (3, 3, 5120),
        (2, 2, 7680),
    ]
    assert [(one["what"], one["where"], one["expected"]) for one in found["notes"]] == [("split", "GPU-a", "2 slices")]


def test_gpu_that_keeps_unused_old_slices_is_a_difference():
    idle = [{**one, "in_use": False} for one in WAITS]
    found = compared(plugin=plugin(waiting=["GPU-a"], slices=idle + slices()[2:]))
    assert found["ok"] is False
    assert ("split", "GPU-a", "2 slices") in [(one["what"], one["where"], one["expected"]) for one in found["drift"]]


def test_gpu_that_keeps_unused_old_slices_does_not_hide_the_next_gpu():
    idle = [{**one, "in_use": False} for one in WAITS]
    held = [{**one, "id": f"GPU-b::{n}", "uuid": "GPU-b", "device": "GPU-b"} for n, one in enumerate(WAITS)]
    found = compared(plugin=plugin(waiting=["GPU-a", "GPU-b"], slices=idle + held))
    assert ("split", "GPU-a") in [(one["what"], one["where"]) for one in found["drift"]]
    assert [(one["what"], one["where"]) for one in found["notes"]] == [("split", "GPU-b")]


def test_whole_gpus_are_slices_without_a_number():
    text = node_config.dump(node_config.from_vars({"vgpu_sharing": "none"}))
    whole = [{"id": gpu["uuid"], "uuid": gpu["uuid"], "memory_mib": 15360, "sm_percent": 100} for gpu in GPUS]
    status = plugin(config_sha256=sha256(text), slices=whole)
    found = compared(config_text=text, plugin=status, checkpoint_text=checkpoint(["GPU-a", "GPU-b"]))
    assert (found["drift"], found["shared"]) == ([], False)
    assert compared()["shared"] is True


LEASE = {"id": "1", "kind": "lease", "slice_ids": ["GPU-a::1"]}

# columns: changed facts of the host; expected subject of each difference, words in one of the differences
SPOILED = [
    ({"config_text": None}, ["configuration"], "run site.yml"),
    ({"config_text": "{"}, ["configuration"], "not valid JSON"),
    ({"nvml": {"ok": False, "error": "kernel module", "gpus": [], "lost": []}}, ["driver"], "kernel module"),
    (
        {"nvml": {"ok": True, "error": "", "gpus": GPUS, "lost": [{"index": 2, "error": "fallen off the bus"}]}},
        ["GPU"],
        "fallen off the bus",
    ),
    ({"nvml": {"ok": True, "error": "", "gpus": [], "lost": []}}, ["GPU"], "at least one GPU"),
    ({"plugin": None}, ["device plugin"], "systemctl status vgpu-device-plugin"),
    ({"plugin": plugin(config_sha256="older")}, ["configuration"], "systemctl restart vgpu-device-plugin"),
    (
        {"plugin": plugin(config_sha256="0123456789abcdef")},
        ["configuration"],
        f"expected {sha256(CONFIG)[:12]}, found 0123456789ab;",
    ),
    ({"plugin": plugin(slices=slices(memory_mib=15360))}, ["slice memory_mib"], "expected 7680, found 15360"),
    ({"plugin": plugin(slices=slices(sm_percent=100))}, ["slice sm_percent"], "expected 50, found 100"),
    ({"plugin": plugin(slices=slices(id="GPU-a::7"))}, ["slice", "slice"], "GPU-a::7"),
    ({"plugin": plugin(slices=slices(health="Unhealthy"))}, ["slice health"], "Unhealthy"),
    ({"checkpoint_text": checkpoint(IDS[:3])}, ["advertised"], "3 of 4; missing GPU-b::1"),
    ({"checkpoint_text": checkpoint([*IDS, "GPU-c"])}, ["advertised"], "another device plugin"),
    ({"checkpoint_text": checkpoint(IDS, "example.com/gpu")}, ["kubelet", "advertised"], "not in the checkpoint"),
    ({"checkpoint_text": None}, ["kubelet", "advertised"], "not in the checkpoint"),
    ({"checkpoint_text": "torn"}, ["kubelet", "advertised"], "not in the checkpoint"),
    # Two files outlive the kubelet: the checkpoint file after any exit, and the socket file after a kill. So the
    # kubelet must also accept a connection.
    ({"kubelet_fault": "kubelet.sock: Connection refused"}, ["kubelet"], "Connection refused"),
    ({"kubelet": False, "kubelet_fault": "No such file"}, ["kubelet"], "systemctl status kubelet"),
    (
        {"plugin": plugin(registered=False, kubelet_error="waiting for the kubelet")},
        ["kubelet"],
        "found waiting for the kubelet",
    ),
    ({"plugin": plugin(registered=False)}, ["kubelet"], "found not registered"),
    ({"plugin": plugin(library="")}, ["library"], "refuses every container"),
]


@pytest.mark.parametrize(("spoiled", "about", "words"), SPOILED)
def test_every_difference_has_a_remedy(spoiled, about, words):
    found = compared(**spoiled)
    assert found["ok"] is False
    assert [one["what"] for one in found["drift"]] == about
    assert words in "\n".join(capacity.sentence(one) for one in found["drift"])
    assert all(one["remedy"] for one in found["drift"])


BARE = {"config_text": None, "plugin": None, "checkpoint_text": None, "kubelet": False, "kubelet_fault": "No such file"}


# columns: changed answer of NVML. The collection is installed on neither host. The first host has a driver, the second
# has none.
@pytest.mark.parametrize("nvml_answer", [{}, {"nvml": {"ok": False, "error": "no NVML", "gpus": [], "lost": []}}])
def test_host_without_an_installation_has_one_difference(nvml_answer):
    found = compared(**BARE, **nvml_answer, unit=False)
    assert (found["ok"], found["installed"]) == (False, False)
    (text,) = [capacity.sentence(one) for one in found["drift"]]
    assert text.startswith("vgpu.fleet on this host: expected installed, found not installed (no /etc/vgpu/node.yaml")
    assert text.endswith("; run site.yml for this host")


def test_host_whose_device_plugin_died_counts_as_installed():
    found = compared(**BARE, unit=True)
    assert found["installed"] is True
    assert [one["what"] for one in found["drift"]] == ["configuration", "device plugin"]


def test_dead_kubelet_advertises_no_slice_of_its_checkpoint():
    for spoiled in ({"kubelet_fault": "Connection refused"}, {"plugin": plugin(registered=False)}):
        found = compared(**spoiled)
        assert (found["kubelet"], found["advertised"], [gpu["advertised"] for gpu in found["gpus"]]) == (
            True,
            [],
            [0, 0],
        )


def test_slice_leased_by_the_isolation_check_is_no_difference():
    status = plugin(slices=slices(health="Unhealthy"), allocations=[LEASE])
    found = compared(plugin=status, checkpoint_text=checkpoint([one for one in IDS if one != "GPU-a::1"]))
    assert found["drift"] == []
    assert found["gpus"][0]["advertised"] == 2


def test_host_without_a_kubelet_advertises_the_slices_of_the_device_plugin():
    status = plugin(registered=False, kubelet_error="waiting for the kubelet")
    found = compared(kubelet=False, kubelet_fault="No such file", checkpoint_text=None, plugin=status)
    assert (found["ok"], found["kubelet"], found["advertised"]) == (True, False, IDS)


def test_whole_gpus_need_no_library():
    text = node_config.dump(node_config.from_vars({"vgpu_sharing": "none"}))
    whole = [{"id": gpu["uuid"], "uuid": gpu["uuid"], "memory_mib": 15360, "sm_percent": 100} for gpu in GPUS]
    status = plugin(config_sha256=sha256(text), slices=whole, library="")
    assert compared(config_text=text, plugin=status, checkpoint_text=checkpoint(["GPU-a", "GPU-b"]))["ok"] is True


# columns: state of the kubelet's socket; expected: whether the host has a kubelet, words of the connection error
SOCKETS = [
    ("listening", True, ""),
    ("killed", True, "Connection refused"),
    ("absent", False, "No such file or directory"),
]


@pytest.mark.parametrize(("kind", "present", "words"), SOCKETS)
def test_kubelet_is_found_by_connecting_to_its_socket(monkeypatch, kind, present, words):
    monkeypatch.setattr(nvml, "read", lambda: {"ok": False})
    # tmp_path may be too long: a socket's path holds at most 107 bytes.
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        if kind != "absent":
            server.bind(str(Path(folder) / "kubelet.sock"))
        if kind == "listening":
            server.listen()
        host = host_double(Path(folder))
        seen = capacity.observe(host, kubelet_dir="/")
    assert seen["kubelet"] is present
    assert seen["kubelet_fault"] == (f"{folder}/kubelet.sock: {words}" if words else "")


def test_socket_without_a_checkpoint_is_a_difference():
    found = compared(kubelet=True, checkpoint_text=None)
    assert found["kubelet"] is True
    assert found["ok"] is False


# --- running containers, whose ledgers and allocations are compared, and the configuration of the host's group ---

MIB = 1 << 20


def usage(used_mib, allocation="a1", uuid="GPU-a", pod="trainer"):
    named = {"namespace": "default", "pod": pod, "container": "main"} if pod else {}
    return {"allocation": allocation, "uuid": uuid, "memory_used": used_mib * MIB, "memory_limit": 7680 * MIB, **named}


def given(*ids, resource="nvidia.com/gpu", uid="u1", numa=True):
    text = json.loads(checkpoint(IDS))
    entry = {
        "PodUID": uid,
        "ContainerName": "main",
        "ResourceName": resource,
        "DeviceIDs": {"-1": list(ids)} if numa else list(ids),
    }
    text["Data"]["PodDeviceEntries"] = [entry]
    return json.dumps(text)


def allocation(*ids, library="0.1.0-x", kind="kubelet", name="a1"):
    return {"id": name, "kind": kind, "slice_ids": list(ids), "library": library}


def used(mib):
    return {"ok": True, "error": "", "lost": [], "gpus": [dict(GPUS[0], used_mib=mib), GPUS[1]]}


# A finding of the watcher, the part of the device plugin that looks for processes that bypass the library.
FINDING = {
    "allocation": "a1",
    "kind": "kubelet",
    "namespace": "default",
    "pod": "trainer",
    "container": "main",
    "text": "process 7 (x) holds 64 MiB without a live slot",
}
LEGACY = node_config.dump(
    node_config.from_vars({"vgpu_split_count": 2, "vgpu_cores_scaling": 1, "vgpu_legacy_preferred": True})
)
WATCHING = {"findings": [], "fault": "", "interval_s": 2.0}
RUNS = {
    "asked_usage": True,
    "usage": [usage(3000)],
    "nvml": used(3000),
    "checkpoint_text": given("GPU-a::0"),
    "plugin": plugin(allocations=[allocation("GPU-a::0")]),
    "watch": WATCHING,
}

# columns: label, changed facts of a host with one pod; expected subject of each difference, words in one of the
# differences
RUNNING = [
    ("all agree", {}, [], ""),
    ("ledger above the driver's figure", {"nvml": used(2000)}, ["ledger"], "default/trainer/main"),
    ("ledger above the driver's figure, within tolerance", {"nvml": used(2820)}, [], ""),
    ("driver's figure above the ledger (a process of the host)", {"nvml": used(9000)}, [], ""),
    (
        "sum of two ledgers above the driver's figure",
        {"usage": [usage(2000), usage(2000, "b2", pod="")], "nvml": used(3000)},
        ["ledger"],
        "4000 MiB charged",
    ),
    ("ledger of an idle GPU", {"usage": [usage(3000, uuid="GPU-b")]}, ["ledger"], "GPU-b"),
    (
        "allocation record without a container",
        {"checkpoint_text": checkpoint(IDS)},
        ["allocation"],
        "expected a container of the kubelet",
    ),
    ("container without an allocation record", {"plugin": plugin()}, ["allocation"], "a record of GPU-a::0"),
    (
        "lease unknown to the kubelet",
        {"plugin": plugin(allocations=[allocation("GPU-a::0"), allocation("GPU-b::0", kind="lease", name="l")])},
        [],
        "",
    ),
    (
        "kubelet has another id of the slice, with legacyPreferred",
        {"config_text": LEGACY, "plugin": plugin(config_sha256=sha256(LEGACY), allocations=[allocation("GPU-a::1")])},
        [],
        "",
    ),
    (
        "kubelet has another id of the slice, without legacyPreferred",
        {"plugin": plugin(allocations=[allocation("GPU-a::1")])},
        ["allocation"] * 2,
        "GPU-a::0",
    ),
    ("another plugin's container", {"checkpoint_text": given("GPU-a::0", "NIC-1")}, [], ""),
    ("process that bypasses the library", {"watch": {**WATCHING, "findings": [FINDING]}}, ["process"], "process 7"),
    (
        "finding about a running isolation check",
        {"watch": {**WATCHING, "findings": [dict(FINDING, kind="lease")]}},
        [],
        "",
    ),
    (
        "finding about a running isolation check, and then one about a pod",
        {"watch": {**WATCHING, "findings": [dict(FINDING, kind="lease", text="process 8"), FINDING]}},
        ["process"],
        "process 7",
    ),
    ("an older kubelet's checkpoint", {"checkpoint_text": given("GPU-a::0", numa=False)}, [], ""),
]


@pytest.mark.parametrize(("about", "spoiled", "what", "words"), RUNNING, ids=[row[0] for row in RUNNING])
def test_running_containers_are_compared_with_their_records(about, spoiled, what, words):
    found = compared(**{**copy.deepcopy(RUNS), **spoiled})
    assert [one["what"] for one in found["drift"]] == what
    assert words in "\n".join(capacity.sentence(one) for one in found["drift"])
    assert all(one["remedy"] for one in found["drift"])
    assert found["notes"] == []


def test_unqueried_ledgers_are_a_missing_source():
    found = compared(**{**copy.deepcopy(RUNS), "asked_usage": False, "nvml": used(0)})
    assert (found["drift"], found["missing"]) == ([], {"ledgers": "not asked"})


def test_oversold_memory_in_host_memory_is_no_difference():
    text = node_config.dump(node_config.from_vars({"vgpu_split_count": 2, "vgpu_memory_scaling": "2"}))
    made = [{**one, "memory_mib": 15360, "sm_percent": 100} for one in slices()]
    status = plugin(config_sha256=sha256(text), slices=made, allocations=[allocation("GPU-a::0")])
    found = compared(**{**copy.deepcopy(RUNS), "nvml": used(10), "config_text": text, "plugin": status})
    assert found["drift"] == []


def test_older_mapped_library_is_a_note():
    status = plugin(allocations=[allocation("GPU-a::0", library="0.0.9-older")])
    found = compared(**{**copy.deepcopy(RUNS), "plugin": status})
    assert (found["ok"], found["drift"]) == (True, [])
    (note,) = found["notes"]
    assert (note["where"], note["expected"], note["found"]) == (
        "default/trainer/main",
        "0.1.0-x",
        "0.0.9-older, still mapped",
    )


def test_split_that_differs_from_the_group_variables():
    wanted = node_config.dump(node_config.from_vars({"vgpu_split_count": 7, "vgpu_cores_scaling": 1}))
    found = compared(wanted_text=wanted, base_text=CONFIG, base_path="/etc/vgpu/node.yaml")
    assert found["ok"] is False
    (one,) = found["drift"]
    assert (one["what"], one["where"]) == ("group variables", "/etc/vgpu/node.yaml: sharing.vcuda.splitCount")
    assert (one["expected"], one["found"]) == ("7", "2")
    assert compared(wanted_text=CONFIG, base_text=CONFIG, base_path="x")["ok"] is True


def test_exception_that_only_the_group_has():
    wanted = {"vgpu_split_count": 2, "vgpu_cores_scaling": 1}
    wanted["vgpu_devices"] = [{"match": {"index": 1}, "split_count": 1}]
    text = node_config.dump(node_config.from_vars(wanted))
    found = compared(wanted_text=text, base_text=CONFIG, base_path="f")
    assert [(one["where"], one["expected"], one["found"]) for one in found["drift"]] == [
        ("f: sharing.vcuda.devices", "not set", "[]"),
        ("f: sharing.vcuda.devices[0].match.index", "1", "not set"),
        ("f: sharing.vcuda.devices[0].splitCount", "1", "not set"),
    ]


MISSING = [
    ({"nvml": {"ok": False, "error": "no driver", "gpus": [], "lost": []}}, "nvml", "no driver"),
    ({"plugin": None}, "device plugin", "does not answer"),
    ({"plugin": None}, "ledgers", "does not answer"),
    ({"kubelet": False, "checkpoint_text": None, "kubelet_fault": "x"}, "kubelet", "has no kubelet"),
    ({"kubelet_fault": "Connection refused"}, "kubelet", "Connection refused"),
    ({"watch": None}, "watcher", "has no watcher"),
    ({"watch": {**WATCHING, "fault": "GPU is lost"}}, "watcher", "GPU is lost"),
    ({"watch": {**WATCHING, "interval_s": 0.0}}, "watcher", "switched off"),
]


@pytest.mark.parametrize(("spoiled", "source", "words"), MISSING)
def test_source_that_does_not_answer_is_named(spoiled, source, words):
    assert words in compared(**{**copy.deepcopy(RUNS), **spoiled})["missing"][source]


def test_no_source_is_missing_where_all_answer():
    assert compared(**copy.deepcopy(RUNS))["missing"] == {}


# columns: status of the device plugin (None: no answer); expected words about what enforces the memory limits
ENFORCED = [
    (plugin(memory_enforcement_reason="memory is enforced by the driver"), "memory is enforced by the driver"),
    (plugin(memory_enforcement_reason=None), ""),
    (plugin(), ""),
    (None, ""),
]


@pytest.mark.parametrize(("status", "words"), ENFORCED)
def test_device_plugin_says_what_enforces_the_memory_limits(status, words):
    assert compared(plugin=status)["memory_enforcement"] == words


PROVEN = compared()["fingerprint"]


@pytest.mark.parametrize(
    ("about", "spoiled", "proven"),
    [
        ("proof of the running fingerprint", {"proof": PROVEN}, True),
        ("no proof", {}, False),
        ("proof of another fingerprint", {"proof": "f" * 64}, False),
        ("proof of an older library", {"proof": PROVEN, "plugin": plugin(library="0.2.0-y")}, False),
        ("no device plugin and no proof", {"plugin": None, "proof": None}, False),
    ],
)
def test_isolation_proof_counts_only_for_its_fingerprint(about, spoiled, proven):
    """A proven host is not checked again, so a proof of another state must not count."""
    assert compared(**spoiled)["proven"] is proven


USES = [
    ({}, "default/trainer/main"),
    ({"pod": ""}, "default/main"),
    ({"namespace": "", "pod": "", "container": ""}, "a1"),
    ({"namespace": "", "pod": "", "container": "", "allocation": None}, ""),
    ({"namespace": "", "pod": "", "container": "", "holder": "docker web"}, "docker web"),
]


@pytest.mark.parametrize(("changed", "by"), USES)
def test_usage_names_the_holder_of_a_slice(changed, by):
    one = {**usage(3000), "slice_ids": ["GPU-a::0"], "processes": 2, **changed}
    (found,) = compared(**{**copy.deepcopy(RUNS), "usage": [one]})["usage"]
    assert found == {
        "by": by,
        "uuid": "GPU-a",
        "slices": ["GPU-a::0"],
        "limit_mib": 7680,
        "used_mib": 3000,
        "processes": 2,
    }


# columns: bytes by the container's own count, bytes by the driver's count; expected MiB, which is the greater figure
FIGURES = [(3000 * MIB, 2000 * MIB, 3000), (2000 * MIB, 3000 * MIB, 3000), (0, 0, 0), (None, None, 0)]


@pytest.mark.parametrize(("own", "drivers", "used_mib"), FIGURES)
def test_usage_has_the_greater_figure(own, drivers, used_mib):
    one = {**usage(0), "slice_ids": ["GPU-a::0"], "memory_used": own, "memory_driver": drivers}
    assert compared(**{**copy.deepcopy(RUNS), "usage": [one]})["usage"][0]["used_mib"] == used_mib


@pytest.mark.parametrize("number", [None, 0])
def test_usage_without_processes_has_none(number):
    one = {**usage(3000), "slice_ids": ["GPU-a::0"], "processes": number}
    assert compared(**{**copy.deepcopy(RUNS), "usage": [one]})["usage"][0]["processes"] == 0


def row(name, held_by="", state="in use"):
    return {"id": name, "uuid": name[:5], "state": state, "in_use": bool(held_by), "held_by": held_by}


def test_usage_lists_every_holder_of_a_slice():
    """The list includes whole GPUs, which have no limit or ledger, and slices that an engine got by a CDI name."""
    pod = {**usage(3000), "slice_ids": ["GPU-a::0"], "processes": 1}
    outside = {**usage(50, "slice-GPU-b-0", uuid="GPU-b", pod=""), "slice_ids": ["GPU-b::0"], "processes": 1}
    outside.update(namespace="", container="", kind="static")
    rows = [
        row("GPU-a::0", "default/trainer/main"),
        row("GPU-a::1", "docker web"),
        row("GPU-b::0", "docker cdi"),
        row("GPU-b::1", state="free"),
    ]
    found = compared(**{**copy.deepcopy(RUNS), "usage": [pod, outside], "slices": rows})["usage"]
    assert [(one["by"], one["uuid"], one["slices"], one["used_mib"]) for one in found] == [
        ("default/trainer/main", "GPU-a", ["GPU-a::0"], 3000),
        ("docker cdi", "GPU-b", ["GPU-b::0"], 50),
        ("docker web", "GPU-a", ["GPU-a::1"], None),
    ]
    assert [(one["limit_mib"], one["processes"]) for one in found][2] == (None, None)
    assert compared(**{**copy.deepcopy(RUNS), "usage": [], "slices": rows, "asked_usage": False})["usage"] == []


FULL = "what is missing in /run/vgpu cannot be made again: No space left on device"
BLIND = "the watcher cannot check all processes: allocation aa has files that were removed; start it again"
NAMES = "the watcher names 1 container; see: vgpuctl watch"
LOST_B = "GPU 1 (Tesla T4, GPU-b) is lost: NVML: GPU is lost; reset or replace it"
LACKS_B = {"ok": True, "error": "", "gpus": GPUS[:1], "lost": [{"index": 1, "error": "bus"}]}
SLOW = "GPU GPU-a keeps its old slices until the last one in use is free"
TROUBLED = {**WATCHING, "findings": [FINDING]}

# columns: warnings of the device plugin, other changes to the host; expected warnings in the report. A warning is left
# out if the report has a difference for its cause.
WARNED = [
    ([FULL, BLIND], {}, [FULL, BLIND]),
    ([NAMES], {}, [NAMES]),
    ([NAMES, FULL], {"watch": TROUBLED}, [FULL]),
    ([LOST_B, FULL], {"nvml": LACKS_B}, [FULL]),
    ([SLOW], {}, [SLOW]),
]


@pytest.mark.parametrize(("warnings", "spoiled", "left"), WARNED)
def test_report_repeats_warnings_of_the_device_plugin(warnings, spoiled, left):
    gpus = [{**one, "healthy": True, "reason": ""} for one in GPUS]
    seen = {**copy.deepcopy(RUNS), **spoiled}
    seen["plugin"] = {**seen["plugin"], "warnings": warnings, "gpus": gpus}
    found = compared(**seen)
    assert found["plugin_warnings"] == left
    assert found["ok"] is not bool(spoiled)


def test_split_that_waits_is_a_note_and_no_warning():
    status = plugin(waiting=["GPU-a"], slices=WAITS + slices()[2:], warnings=[SLOW, FULL])
    ids = [one["id"] for one in WAITS] + IDS[2:]
    assert compared(plugin=status, checkpoint_text=checkpoint(ids))["plugin_warnings"] == [FULL]


SICK = {"index": 1, "uuid": "GPU-b", "model": "Tesla T4", "healthy": False, "reason": "Xid 79: fallen off the bus"}


def test_gpu_with_a_fault_is_one_difference():
    """A difference for each slice of the GPU would hide the other differences."""
    made = slices()
    for one in made[2:]:
        one["health"] = "Unhealthy"
    status = plugin(slices=made, gpus=[{**SICK, **GPUS[0], "healthy": True}, SICK])
    (one,) = compared(plugin=status, checkpoint_text=checkpoint(IDS[:2]))["drift"]
    assert (one["what"], one["where"], one["expected"]) == ("GPU", "1 (GPU-b)", "healthy")
    assert one["found"] == SICK["reason"] and "5 minutes" in one["remedy"]


def test_library_of_a_node_with_an_unreadable_configuration_is_not_judged():
    """Whether the node shares GPUs by the library is unknown then."""
    found = compared(config_text="{", plugin=plugin(library=""))
    assert "library" not in [one["what"] for one in found["drift"]]


def test_gpu_without_advertised_slices_counts_none():
    assert [gpu["advertised"] for gpu in compared(checkpoint_text=None)["gpus"]] == [0, 0]
