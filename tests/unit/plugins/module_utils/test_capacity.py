# SPDX-License-Identifier: Apache-2.0
"""Expected against advertised: each row starts from a host where both agree and spoils one thing."""

from __future__ import annotations

import copy
import json
import socket
import tempfile
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils import capacity, node_config, nvml
from ansible_collections.vgpu.fleet.plugins.module_utils.hardware import Answer, Host
from ansible_collections.vgpu.fleet.plugins.module_utils.node_state import sha256

CONFIG = node_config.dump(node_config.from_vars({"vgpu_split_count": 2, "vgpu_cores_scaling": 1}))
GPUS = [
    {"index": n, "uuid": uuid, "model": "Tesla T4", "memory_mib": 15360, "used_mib": 0}
    for n, uuid in enumerate(("GPU-a", "GPU-b"))
]
IDS = ["GPU-a::0", "GPU-a::1", "GPU-b::0", "GPU-b::1"]


def checkpoint(ids, resource="nvidia.com/gpu"):
    return json.dumps({"Data": {"PodDeviceEntries": [], "RegisteredDevices": {resource: ids}}, "Checksum": 1})


def slices(**spoiled):
    made = [
        {"id": one, "uuid": one[:5], "memory_mib": 7680, "sm_percent": 50, "health": "Healthy", "in_use": False}
        for one in IDS
    ]
    made[1].update(spoiled)
    return made


AGREEING = {
    "nvml": {"ok": True, "error": "", "gpus": GPUS, "lost": []},
    "config_text": CONFIG,
    "config_path": "/etc/vgpu/node.yaml",
    "kubelet": True,
    "kubelet_fault": "",
    "checkpoint_text": checkpoint(IDS),
    "plugin": {
        "config_sha256": sha256(CONFIG),
        "library": "0.1.0-x",
        "registered": True,
        "kubelet_error": "",
        "slices": slices(),
        "allocations": [],
    },
}


def compared(**spoiled):
    return capacity.compare({**copy.deepcopy(AGREEING), **spoiled})


def plugin(**spoiled):
    return {**copy.deepcopy(AGREEING["plugin"]), **spoiled}


def test_a_host_where_all_agree():
    found = compared()
    assert found["ok"] is True
    assert found["drift"] == []
    assert [piece["id"] for piece in found["expected"]] == IDS
    assert {(piece["memory_mib"], piece["sm_percent"]) for piece in found["expected"]} == {(7680, 50)}
    assert [(gpu["slices"], gpu["advertised"], gpu["slice_mib"]) for gpu in found["gpus"]] == [(2, 2, 7680)] * 2
    assert found["library"] == "0.1.0-x"


def test_whole_gpus_are_slices_without_a_number():
    text = node_config.dump(node_config.from_vars({"vgpu_sharing": "none"}))
    whole = [{"id": gpu["uuid"], "uuid": gpu["uuid"], "memory_mib": 15360, "sm_percent": 100} for gpu in GPUS]
    status = plugin(config_sha256=sha256(text), slices=whole)
    found = compared(config_text=text, plugin=status, checkpoint_text=checkpoint(["GPU-a", "GPU-b"]))
    assert (found["drift"], found["shared"]) == ([], False)
    assert compared()["shared"] is True


LEASE = {"id": "1", "kind": "lease", "slice_ids": ["GPU-a::1"]}

# What is spoiled, what the differences are about, a word of one of them.
SPOILED = [
    ({"config_text": None}, ["configuration"], "run playbooks/site.yml"),
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
    ({"plugin": plugin(slices=slices(memory_mib=15360))}, ["slice memory_mib"], "expected 7680, found 15360"),
    ({"plugin": plugin(slices=slices(sm_percent=100))}, ["slice sm_percent"], "expected 50, found 100"),
    ({"plugin": plugin(slices=slices(id="GPU-a::7"))}, ["slice", "slice"], "GPU-a::7"),
    ({"plugin": plugin(slices=slices(health="Unhealthy"))}, ["slice health"], "Unhealthy"),
    ({"checkpoint_text": checkpoint(IDS[:3])}, ["advertised"], "3 of 4; missing GPU-b::1"),
    ({"checkpoint_text": checkpoint([*IDS, "GPU-c"])}, ["advertised"], "another device plugin"),
    ({"checkpoint_text": checkpoint(IDS, "example.com/gpu")}, ["kubelet", "advertised"], "not in the checkpoint"),
    ({"checkpoint_text": None}, ["kubelet", "advertised"], "not in the checkpoint"),
    ({"checkpoint_text": "torn"}, ["kubelet", "advertised"], "not in the checkpoint"),
    # The checkpoint outlives the kubelet, and so does the file of its socket where it was killed.
    ({"kubelet_fault": "kubelet.sock: Connection refused"}, ["kubelet"], "Connection refused"),
    ({"kubelet": False, "kubelet_fault": "No such file"}, ["kubelet"], "systemctl status kubelet"),
    (
        {"plugin": plugin(registered=False, kubelet_error="waiting for the kubelet")},
        ["kubelet"],
        "found waiting for the kubelet",
    ),
    ({"plugin": plugin(registered=False)}, ["kubelet"], "found not registered"),
    ({"plugin": plugin(library="")}, ["library"], "every container is refused"),
]


@pytest.mark.parametrize("spoiled, about, words", SPOILED)
def test_every_difference_is_told_with_a_remedy(spoiled, about, words):
    found = compared(**spoiled)
    assert found["ok"] is False
    assert [one["what"] for one in found["drift"]] == about
    assert words in "\n".join(capacity.sentence(one) for one in found["drift"])
    assert all(one["remedy"] for one in found["drift"])


def test_a_kubelet_that_is_dead_advertises_nothing_whatever_its_checkpoint_holds():
    for spoiled in ({"kubelet_fault": "Connection refused"}, {"plugin": plugin(registered=False)}):
        found = compared(**spoiled)
        assert (found["kubelet"], found["advertised"], [gpu["advertised"] for gpu in found["gpus"]]) == (
            True,
            [],
            [0, 0],
        )


def test_a_slice_that_the_isolation_check_holds_is_no_difference():
    status = plugin(slices=slices(health="Unhealthy"), allocations=[LEASE])
    found = compared(plugin=status, checkpoint_text=checkpoint([one for one in IDS if one != "GPU-a::1"]))
    assert found["drift"] == []
    assert found["gpus"][0]["advertised"] == 2


def test_without_a_kubelet_the_device_plugin_stands_for_it():
    status = plugin(registered=False, kubelet_error="waiting for the kubelet")
    found = compared(kubelet=False, kubelet_fault="No such file", checkpoint_text=None, plugin=status)
    assert (found["ok"], found["kubelet"], found["advertised"]) == (True, False, IDS)


def test_whole_gpus_need_no_library():
    text = node_config.dump(node_config.from_vars({"vgpu_sharing": "none"}))
    whole = [{"id": gpu["uuid"], "uuid": gpu["uuid"], "memory_mib": 15360, "sm_percent": 100} for gpu in GPUS]
    status = plugin(config_sha256=sha256(text), slices=whole, library="")
    assert compared(config_text=text, plugin=status, checkpoint_text=checkpoint(["GPU-a", "GPU-b"]))["ok"] is True


# What stands where the kubelet's socket should, whether there is a kubelet, what connecting says.
SOCKETS = [
    ("listening", True, ""),
    ("killed", True, "Connection refused"),
    ("absent", False, "No such file"),
]


@pytest.mark.parametrize("kind, present, words", SOCKETS)
def test_a_kubelet_is_asked_and_not_believed_from_its_file(monkeypatch, kind, present, words):
    monkeypatch.setattr(nvml, "read", lambda: {"ok": False})
    # Not tmp_path: the path of a socket holds 107 bytes.
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        if kind != "absent":
            server.bind(str(Path(folder) / "kubelet.sock"))
        if kind == "listening":
            server.listen()
        host = Host(folder, run=lambda argv: Answer(127, "", "absent"))
        seen = capacity.observe(host, kubelet_dir="/")
    assert seen["kubelet"] is present
    assert words in seen["kubelet_fault"] and bool(words) is bool(seen["kubelet_fault"])


def test_a_socket_without_a_checkpoint_is_a_kubelet_that_was_not_told():
    found = compared(kubelet=True, checkpoint_text=None)
    assert found["kubelet"] is True
    assert found["ok"] is False
