# SPDX-License-Identifier: Apache-2.0
"""Tests rare inputs of the comparison of expected and advertised capacity, which returns differences (faults): a source
(NVML, device plugin, kubelet) reports less than usual, several differences have one cause, or a node label selected
another configuration file. A slice is a part of a GPU, and a lease reserves it for an isolation check. A ledger is the
file in which the library counts a container's GPU memory.
"""

from __future__ import annotations

import copy
import json

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.capacity import capacity
from ansible_collections.vgpu.fleet.plugins.module_utils.config import node_config
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import nvml
from ansible_collections.vgpu.fleet.plugins.module_utils.host.digest import sha256
from ansible_collections.vgpu.fleet.plugins.module_utils.state import running_plugin
from capacity_samples import AGREEING, GPUS, IDS, checkpoint, compared, plugin, slices
from doubles.host import host as host_double
from doubles.host import write

LEASE = {"id": "1", "kind": "lease", "slice_ids": ["GPU-a::1"]}
ENGINE = {"id": "1", "kind": "container", "slice_ids": ["GPU-a::1"]}
HELD = {"id": "2", "kind": "kubelet", "slice_ids": ["GPU-a::1"]}
WITHOUT_ONE = checkpoint([one for one in IDS if one != "GPU-a::1"])
NVML_LOST = {"ok": True, "error": "", "gpus": GPUS[:1], "lost": []}

# columns: label, changed facts of the host; expected words of each difference, in order
SAID = [
    ("plugin that reports no configuration", {"plugin": plugin(config_sha256="")}, []),
    ("plugin that reports no library", {"plugin": plugin(library=None)}, []),
    ("slice whose health is not reported", {"plugin": plugin(slices=slices(health="Healthy"))}, []),
    (
        "unhealthy slice with a lease",
        {"plugin": plugin(slices=slices(health="Unhealthy"), allocations=[LEASE]), "checkpoint_text": WITHOUT_ONE},
        [],
    ),
    (
        "unhealthy slice in a docker container",
        {"plugin": plugin(slices=slices(health="Unhealthy"), allocations=[ENGINE]), "checkpoint_text": WITHOUT_ONE},
        [],
    ),
    (
        "unhealthy slice in use by its CDI name",
        {"plugin": plugin(slices=slices(health="Unhealthy", state="in use")), "checkpoint_text": WITHOUT_ONE},
        [],
    ),
    (
        "slice of an unhealthy GPU",
        {"plugin": plugin(slices=slices(health="Unhealthy", state="unhealthy")), "checkpoint_text": WITHOUT_ONE},
        ["slice health GPU-a::1: expected Healthy, found Unhealthy", "found 3 of 4; missing GPU-a::1"],
    ),
    (
        "unhealthy slice in a container of the kubelet",
        {"plugin": plugin(slices=slices(health="Unhealthy"), allocations=[HELD]), "checkpoint_text": WITHOUT_ONE},
        ["slice health GPU-a::1: expected Healthy, found Unhealthy", "found 3 of 4; missing GPU-a::1"],
    ),
    ("three missing slices", {"checkpoint_text": checkpoint(IDS[3:])},
     ["found 1 of 4; missing GPU-a::0, GPU-a::1, GPU-b::0; systemctl"]),
    ("four missing slices", {"checkpoint_text": checkpoint([])},
     ["found 0 of 4; missing GPU-a::0, GPU-a::1, GPU-b::0 and 1 more"]),
    ("resource null in the checkpoint", {"checkpoint_text": checkpoint(None)},
     ["found not in the checkpoint", "expected 4 slices, found 0 of 4"]),
    ("lost GPU whose slices are still advertised", {"nvml": NVML_LOST},
     ["slice GPU-b::0: expected not to exist", "slice GPU-b::1: expected not to exist", "found GPU-b::0, GPU-b::1"]),
    # A missing configuration or kubelet also hides the slices; only that cause is reported, once.
    ("no configuration", {"config_text": None}, ["configuration /etc/vgpu/node.yaml"]),
    ("no configuration, and slices missing", {"config_text": None, "checkpoint_text": WITHOUT_ONE},
     ["configuration /etc/vgpu/node.yaml"]),
    ("unresponsive kubelet, and slices missing",
     {"kubelet_fault": "Connection refused", "checkpoint_text": WITHOUT_ONE}, ["kubelet its socket"]),
    ("plugin that reports no registration", {"plugin": plugin(registered=None)}, []),
]  # fmt: skip


@pytest.mark.parametrize(("about", "spoiled", "words"), SAID, ids=[one[0] for one in SAID])
def test_capacity_names_each_difference_once(about, spoiled, words):
    found = compared(**spoiled)
    said = [capacity.sentence(one) for one in found["drift"]]
    assert len(said) == len(words), said
    assert all(word in one for word, one in zip(words, said)), said
    assert found["ok"] is (not words)


# columns: label, changed facts of the host; expected words about the kubelet in the list of sources that gave no answer
# (None: the kubelet is not in this list)
KUBELETS = [
    ("kubelet responds and has a checkpoint", {}, None),
    ("kubelet responds and has no checkpoint", {"checkpoint_text": None}, None),
    ("socket missing, checkpoint exists", {"kubelet": False, "kubelet_fault": "No such file"}, "No such file"),
    (
        "socket and checkpoint missing",
        {"kubelet": False, "kubelet_fault": "No such file", "checkpoint_text": None},
        "this host has no kubelet",
    ),
]


@pytest.mark.parametrize(("about", "spoiled", "said"), KUBELETS, ids=[one[0] for one in KUBELETS])
def test_missing_kubelet_is_a_missing_source(about, spoiled, said):
    found = compared(**spoiled)["missing"].get("kubelet")
    assert (found is None) if said is None else said in found
    assert compared(**spoiled)["kubelet"] is (said != "this host has no kubelet")


def test_only_ledgers_are_missing_without_the_usage_query():
    """If the usage of containers is not queried, only the ledgers are listed as a missing source. The watcher (the part
    of the device plugin that looks for processes that bypass the library) is not queried in this case, so it is not
    listed as a source without an answer."""
    assert compared()["missing"] == {"ledgers": "not asked"}


def test_plugin_without_a_kubelet_advertises_its_healthy_slices():
    spoiled = {"kubelet": False, "kubelet_fault": "No such file", "checkpoint_text": None}
    found = compared(**spoiled, plugin=plugin(slices=slices(health="Unhealthy")))
    assert found["advertised"] == [one for one in IDS if one != "GPU-a::1"]
    assert [one["advertised"] for one in found["gpus"]] == [1, 2]


@pytest.mark.parametrize("held", [0, 1])
def test_gpu_that_will_have_no_slices_keeps_those_in_use(held):
    """If the configuration leaves a GPU no slices, its current slices are still expected while one of them is in use.
    The list of expected slices has them after the slices of the other GPUs."""
    made = [{**one, "resource": "nvidia.com/gpu", "mode": "vcuda", "device": one["uuid"]} for one in slices()]
    made[3]["in_use"] = bool(held)
    only_a = {"ok": True, "error": "", "gpus": GPUS[:1], "lost": []}
    found = compared(nvml=only_a, plugin=plugin(slices=made, waiting=["GPU-b"]))
    assert [one["id"] for one in found["expected"]] == (IDS if held else IDS[:2])
    assert [(one["what"], one["expected"]) for one in found["notes"]] == [("split", "0 slices")] * held


def test_gpu_whose_slices_would_be_empty_has_none():
    """The memory scaling of GPU-b gives less than 1 MiB a slice, so its entry in vgpu_devices is reported."""
    scaled = [{"match": {"index": 1}, "memory_scaling": "0.00001"}]
    text = node_config.dump(
        node_config.from_vars({"vgpu_split_count": 2, "vgpu_cores_scaling": 1, "vgpu_devices": scaled})
    )
    answered = plugin(config_sha256=sha256(text), slices=slices()[:2])
    found = compared(config_text=text, plugin=answered, checkpoint_text=checkpoint(IDS[:2]))
    assert [(one["what"], one["where"]) for one in found["drift"]] == [
        ("slices", "sharing.vcuda.devices[0].splitCount")
    ]
    keys = ("slices", "slice_mib", "sm_percent", "mode", "advertised")
    assert [tuple(one[key] for key in keys) for one in found["gpus"]] == [(2, 7680, 50, "vcuda", 2), (0, 0, 0, None, 0)]


@pytest.mark.parametrize(
    ("status", "path"),
    [
        ({"config_path": "/etc/vgpu/configs/large.yaml", "config_name": "large"}, "/etc/vgpu/configs/large.yaml"),
        ({"config_path": "/etc/vgpu/node.yaml"}, "/etc/vgpu/node.yaml"),
        (None, "/etc/vgpu/node.yaml"),
    ],
)
def test_expected_configuration_is_the_one_selected_by_label(tmp_path, monkeypatch, status, path):
    monkeypatch.setattr(nvml, "read", lambda: copy.deepcopy(AGREEING["nvml"]))
    monkeypatch.setattr(running_plugin, "status", lambda _host: status)
    for name in ("node.yaml", "configs/large.yaml"):
        write(tmp_path, f"etc/vgpu/{name}", json.dumps({"of": name}))
    host = host_double(tmp_path)
    seen = capacity.observe(host, wanted_text="{}")
    assert (seen["config_path"], json.loads(seen["config_text"])["of"]) == (path, path[len("/etc/vgpu/") :])
    assert (seen["base_path"], json.loads(seen["base_text"])["of"]) == ("/etc/vgpu/node.yaml", "node.yaml")
    assert capacity.observe(host)["base_text"] is None


def test_last_isolation_check_is_read_only_with_the_usage(tmp_path, monkeypatch):
    monkeypatch.setattr(nvml, "read", lambda: copy.deepcopy(AGREEING["nvml"]))
    write(tmp_path, running_plugin.PROOF.lstrip("/"), json.dumps({"isolation": {"time": 5, "verdict": "passed"}}))
    host = host_double(tmp_path)
    assert capacity.observe(host)["isolation"] is None
    assert capacity.observe(host, usage=True)["isolation"] == {"time": 5, "verdict": "passed"}


# columns: data that the device plugin is asked for only with the usage; expected value without the usage
@pytest.mark.parametrize(("name", "unasked"), [("usage", []), ("slices", []), ("watch", None)])
def test_running_containers_are_read_only_with_the_usage(tmp_path, monkeypatch, name, unasked):
    answer = [{"allocation": "a1"}]
    monkeypatch.setattr(nvml, "read", lambda: copy.deepcopy(AGREEING["nvml"]))
    monkeypatch.setattr(running_plugin, name, lambda _host: answer)
    host = host_double(tmp_path)
    assert capacity.observe(host)[name] == unasked
    assert capacity.observe(host, usage=True)[name] == answer


# A GPU with two unequal MIG devices. The first one is shared by time.
MIG = {
    **GPUS[0],
    "mig_enabled": True,
    "mig": [
        {"index": 0, "uuid": "MIG-x", "profile": "3g.20gb", "memory_mib": 19968},
        {"index": 1, "uuid": "MIG-y", "profile": "1g.5gb", "memory_mib": 4864},
    ],
}


def test_gpu_with_unequal_slices_shows_the_first_one():
    shared = [{"name": "nvidia.com/mig-3g.20gb", "replicas": 2}]
    text = json.dumps(
        {"version": "v1", "flags": {"migStrategy": "mixed"}, "sharing": {"timeSlicing": {"resources": shared}}}
    )
    found = compared(config_text=text, nvml={"ok": True, "error": "", "gpus": [MIG], "lost": []})
    assert [(one["id"], one["memory_mib"], one["mode"]) for one in found["expected"]] == [
        ("MIG-x::0", 19968, "time-slicing"),
        ("MIG-x::1", 19968, "time-slicing"),
        ("MIG-y", 4864, "mig"),
    ]
    assert [(one["slices"], one["slice_mib"], one["mode"]) for one in found["gpus"]] == [(3, 19968, "time-slicing")]
