# SPDX-License-Identifier: Apache-2.0
"""Tests that the report of a node's capacity and the plan (the changes that a run would make) name each lost GPU once.
A GPU is lost if NVML cannot read it, or if the device plugin knew it and NVML does not list it any more. Slices are
parts of a GPU.
"""

from __future__ import annotations

import copy

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import lost
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import plan
from capacity_samples import GPUS, IDS, checkpoint, compared, plugin, slices
from plan_samples import CONVERGED, changed, made

# NVML's error for a GPU that it lists but cannot read
BUS = "nvmlDeviceGetHandleByIndex_v2 failed with 15: a GPU has fallen off the bus"


def status(*unhealthy, known=("GPU-a", "GPU-b"), unknown=()):
    """Returns a device plugin's status. ``unhealthy`` has (UUID, reason) pairs, ``known`` the UUIDs of all GPUs,
    ``unknown`` the indexes of GPUs whose UUID the plugin never read."""
    reasons = dict(unhealthy)
    gpus = [
        {"index": n, "uuid": uuid, "model": "Tesla T4", "healthy": uuid not in reasons, "reason": reasons.get(uuid, "")}
        for n, uuid in enumerate(known)
    ]
    gpus += [{"index": n, "uuid": "", "model": "unknown", "healthy": False, "reason": "lost: x"} for n in unknown]
    return {"gpus": gpus}


# columns: label, unreadable GPUs with NVML's errors, GPUs that NVML reads, the plugin's status; expected lost GPUs as
# (index, UUID, words of the reason)
ROWS = [
    ("no GPU is lost", [], GPUS, status(), []),
    ("unreadable GPU, no plugin", [{"index": 2, "error": BUS}], GPUS, None, [(2, "", "fallen off")]),
    (
        "unreadable GPU, known to the plugin",
        [{"index": 1, "error": BUS}],
        GPUS[:1],
        status(),
        [(1, "GPU-b", "fallen off")],
    ),
    (
        "unlisted GPU, lost for the plugin",
        [],
        GPUS[:1],
        status(("GPU-b", "lost: x")),
        [(1, "GPU-b", "does not list it")],
    ),
    (
        "unlisted GPU, with an earlier Xid",
        [],
        GPUS[:1],
        status(("GPU-b", "Xid 79")),
        [(1, "GPU-b", "does not list it")],
    ),
    ("listed GPU with an Xid", [], GPUS, status(("GPU-b", "Xid 79")), []),
    (
        "unreadable GPU, without a UUID",
        [{"index": 1, "error": BUS}],
        GPUS[:1],
        status(known=("GPU-a",), unknown=(1,)),
        [(1, "", "bus")],
    ),
    ("listed GPU, lost for the plugin", [], GPUS, status(("GPU-b", "lost: x")), []),
    ("unlisted GPU, plugin reports no GPUs", [], GPUS[:1], {}, []),
]


@pytest.mark.parametrize(("about", "unreadable", "read", "said", "expected"), ROWS, ids=[one[0] for one in ROWS])
def test_lost_gpus_are_found(about, unreadable, read, said, expected):
    found = lost.find(read, unreadable, said)
    assert [(one["index"], one["uuid"]) for one in found] == [one[:2] for one in expected]
    assert all(word in one["reason"] for one, (_index, _uuid, word) in zip(found, expected))


def one_lost(**more):
    nvml = {"ok": True, "error": "", "gpus": GPUS[:1], "lost": [{"index": 1, "error": BUS}]}
    return compared(nvml=nvml, **more)


# columns: label, slices that the plugin has, checkpoint of the kubelet. In all rows GPU-b is lost. The report must name
# this GPU once, not once for each of its slices.
MADE = [
    ("plugin has unhealthy slices of the GPU", slices(), checkpoint(IDS[:2])),
    ("kubelet still advertises the GPU's slices", slices(), checkpoint(IDS)),
    ("plugin has no slices of the GPU", slices()[:2], checkpoint(IDS[:2])),
]


@pytest.mark.parametrize(("about", "pieces", "kept"), MADE, ids=[one[0] for one in MADE])
def test_capacity_names_a_lost_gpu_once(about, pieces, kept):
    pieces = copy.deepcopy(pieces)
    for one in pieces[2:]:
        one["health"] = "Unhealthy"
    answered = plugin(slices=pieces, **status(("GPU-b", "lost: x")))
    found = one_lost(plugin=answered, checkpoint_text=kept)
    (said,) = found["sentences"] if "sentences" in found else [" ".join(one.values()) for one in found["drift"]]
    assert "GPU 1" in said and "GPU-b" in said
    assert "fallen off the bus" in said
    assert "reset or replace it" in said
    assert "restart" not in said
    assert found["ok"] is False
    assert [(one["index"], one["uuid"]) for one in found["lost"]] == [(1, "GPU-b")]


def test_gpu_that_left_the_bus_may_be_forgotten():
    nvml = {"ok": True, "error": "", "gpus": GPUS[:1], "lost": []}
    found = compared(nvml=nvml, plugin=plugin(**status(("GPU-b", "lost: x"))), checkpoint_text=checkpoint(IDS[:2]))
    (only,) = found["drift"]
    assert "vgpuctl forget GPU-b" in only["remedy"]


@pytest.mark.parametrize("counted", [True, False])
def test_plan_names_a_lost_gpu_before_any_change(counted):
    state = {"gpus": CONVERGED["gpus"][:1], "nvml.lost": [{"index": 1, "error": BUS}] if counted else []}
    told = {**CONVERGED["plugin"]["status"], **status(("GPU-b", "lost: x"))}
    planned = made(state={**state, "plugin.status": told})
    (warning,) = planned["warnings"]
    assert "GPU 1 (GPU-b)" in warning
    assert "reset or replace it" in warning
    lines = plan.describe(planned, changed(CONVERGED, {**state, "plugin.status": told}))
    assert lines[0] == "1 of 2 GPUs: 1 x Tesla V100-SXM2-16GB 16160 MiB"
