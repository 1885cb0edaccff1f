# SPDX-License-Identifier: Apache-2.0
"""Tests vgpuctl's text output about a node: no two lines contradict each other."""

from __future__ import annotations

from typing import Any

import pytest
from vgpu_plugin.ctl import explanation, tables
from vgpu_plugin.ctl import text as ctl_text

GPU = {
    "index": 0,
    "uuid": "GPU-a",
    "model": "A100",
    "memory_mib": 40960,
    "healthy": True,
    "reason": "",
    "memory_used_mib": 1234,
    "utilisation": 37,
    "temperature": -1,
}


def piece(number: int, **changes: Any) -> dict[str, Any]:
    one = {"id": f"GPU-a::{number}", "uuid": "GPU-a", "mode": "vcuda", "resource": "nvidia.com/gpu"}
    return {
        **one,
        "memory_mib": 20480,
        "sm_percent": 50,
        "health": "Healthy",
        "in_use": False,
        "state": "free",
        **changes,
    }


def status(slices: list[dict[str, Any]], kinds: dict[str, str] | None = None, **gpu: Any) -> dict[str, Any]:
    """Returns a status response of the plugin. ``kinds``: slice → kind of the allocation that uses the slice."""
    return {
        "version": "1",
        "pid": 1,
        "resource": "nvidia.com/gpu",
        "resources": [],
        "registered": True,
        "config_path": "node.yaml",
        "config_sha256": "0" * 64,
        "library": "1",
        "gpus": [{**GPU, **gpu}],
        "slices": slices,
        "allocations": [
            {"id": "aa", "kind": kind, "slice_ids": [name], "expires_in_s": 5, "holder": ""}
            for name, kind in (kinds or {}).items()
        ],
        "hand_over": "cdi",
        "hand_over_reason": "",
        "warnings": [],
    }


def texts(answer: dict[str, Any], what: str) -> list[str]:
    return [one["text"] for one in explanation.explain(answer, what)]


MIG = [
    piece(0, mode="mig", resource="nvidia.com/mig-1g.5gb", memory_mib=4864, sm_percent=14),
    piece(1, mode="mig", resource="nvidia.com/mig-3g.20gb", memory_mib=19968, sm_percent=42, in_use=True),
]


def test_slices_of_two_sizes_are_two_lines():
    lines = texts(status(MIG), "0")
    assert lines == [
        "GPU 0 (A100, GPU-a): 1 of nvidia.com/mig-1g.5gb by mig, 4864 MiB and 14 % of the SMs each; 0 in use",
        "GPU 0 (A100, GPU-a): 1 of nvidia.com/mig-3g.20gb by mig, 19968 MiB and 42 % of the SMs each; 1 in use",
    ]


def test_promised_memory_is_the_sum_of_the_slices():
    (line,) = texts(status(MIG), "GPU-a::0")
    assert texts(status(MIG), "0::0") == [line]
    assert line.startswith(
        "slice GPU-a::0: 4864 MiB and 14 % of the SMs; one of 2 slices (24832 MiB in total) of a GPU with 40960 MiB;"
    )


# columns: kind of the allocation that uses the slice ("" means none), health and state of the slice, fault of the GPU;
# expected reason why the kubelet cannot assign the slice
WITHHELD = [
    ("", "Healthy", "free", "", ""),
    ("kubelet", "Healthy", "in use", "", ""),
    ("lease", "Unhealthy", "in use", "", "it is leased to a check"),
    ("container", "Unhealthy", "in use", "", "it is used outside Kubernetes"),
    ("exec", "Unhealthy", "in use", "", "it is used outside Kubernetes"),
    ("", "Unhealthy", "in use", "", "it is used outside Kubernetes"),
    ("lease", "Unhealthy", "unhealthy", "Xid 79", "Xid 79"),
    ("", "Unhealthy", "unhealthy", "Xid 79", "Xid 79"),
]


@pytest.mark.parametrize(("kind", "health", "state", "reason", "why"), WITHHELD)
def test_withheld_slice_has_a_reason(kind, health, state, reason, why):
    held = {"GPU-a::0": kind} if kind else {}
    one = piece(0, health=health, in_use=state == "in use", state=state)
    answer = status([one], held, reason=reason, healthy=not reason)
    (row,) = ctl_text.slices(ctl_text.slice_rows(answer, [])).splitlines()[1:]
    assert row.removeprefix("0    ").startswith(state)
    assert f"1 {state}" in ctl_text.status(answer)
    withheld = [line for line in texts(answer, "GPU-a::0") if "cannot assign it" in line]
    assert withheld == ([f"the kubelet cannot assign it: {why}"] if why else [])


# columns: the terminal's width (0 means unlimited); the expected name of a slice in the output
WIDTHS = [(0, "GPU-a-with-a-long-uuid-067d-967c-c921-df91885a18d2::0"), (60, "0::0"), (80, "0::0"), (200, "GPU-a")]


@pytest.mark.parametrize(("width", "name"), WIDTHS)
def test_slices_fit_the_terminal(width, name):
    uuid = "GPU-a-with-a-long-uuid-067d-967c-c921-df91885a18d2"
    one = piece(0, id=f"{uuid}::0", uuid=uuid, state="in use", in_use=True)
    answer = status([one], {f"{uuid}::0": "kubelet"}, uuid=uuid)
    usages = [{"allocation": "aa", "namespace": "ml", "pod": "p" * 30, "container": "main"}]
    lines = ctl_text.slices(ctl_text.slice_rows(answer, usages), width).splitlines()
    assert lines[1].split()[-1].startswith(name)
    assert not width or max(map(len, lines)) <= width
    assert "in use" in lines[1] and "ml/pppppp" in lines[1]


def test_slices_show_their_current_size():
    """A slice shows its current size, which differs from the offered size if the slice was resized or if its pod
    requested a size. If one container has two slices of a GPU, they have one size together, so each of them shows the
    offered size.
    """
    pieces = [piece(n, state="in use", in_use=True) for n in range(3)] + [piece(3)]
    answer = status(pieces, {"GPU-a::0": "kubelet"})
    (mine,) = answer["allocations"]
    answer["allocations"].append({**mine, "id": "both", "slice_ids": ["GPU-a::1", "GPU-a::2"]})
    usage = {"namespace": "", "pod": "", "uuid": "GPU-a", "share_limit": 0.07}
    usages = [
        {**usage, "allocation": mine["id"], "memory_limit": 8000 << 20},
        {**usage, "allocation": "both", "memory_limit": 9 << 30},
    ]
    nominal = (pieces[0]["memory_mib"], pieces[0]["sm_percent"])
    found = [(one["memory_mib"], one["sm_percent"]) for one in ctl_text.slice_rows(answer, usages)]
    assert found == [(8000, 7), nominal, nominal, nominal]


def test_table_of_gpus():
    lost = {**GPU, "index": 1, "uuid": "", "model": "unknown", "memory_mib": 0, "memory_used_mib": -1}
    lost.update(utilisation=-1, reason="lost: GPU is lost", healthy=False)
    answer = status([piece(0), piece(1, state="in use"), piece(2, state="in use")])
    answer["gpus"].append(lost)
    lines = [" ".join(line.split()) for line in ctl_text.gpu_table(answer)]
    assert lines == [
        "GPU MODEL MiB OF MiB UTIL % °C SLICES HEALTH",
        "0 A100 1234 40960 37 - 1 free, 2 in use healthy",
        "1 unknown - - - - none lost: GPU is lost",
    ]


# ---- vgpuctl watch: findings about processes that bypass the library


def finding(kind: str, reason: str = "no-slot", **changes: Any) -> dict[str, Any]:
    one = {"kind": kind, "namespace": "", "pod": "", "container": "", "reason": reason, "text": f"{reason} of {kind}"}
    return {**one, "action": "", "age_s": 130.0, "over_s": 7200.0, **changes}


def watched(now: list[dict[str, Any]], past: list[dict[str, Any]], everything: bool = False) -> list[str]:
    answer = {"policy": "report", "looks": 9, "interval_s": 2.0, "looks_to_name": 2, "fault": "", "old_mounts": []}
    return ctl_text.watch({**answer, "findings": now, "past": past}, everything).splitlines()[1:]


LEASED, POD = finding("lease"), finding("kubelet", pod="train", namespace="ml", container="main")
COUNTED = "findings of this host's own checks that are over: 1, the last for 2 h; see: vgpuctl watch --all"
# columns: current findings, past findings, whether --all is given; the expected lines (None means that every line is
# about a past finding)
WATCHED = [
    ([], [], False, ["no process bypasses the library"]),
    ([], [LEASED], False, ["no process bypasses the library", COUNTED]),
    ([], [LEASED], True, ["over for 2 h  a check of this host  no-slot: no-slot of lease"]),
    ([LEASED], [], False, ["now, for 2 min  a check of this host  no-slot: no-slot of lease"]),
    ([POD], [LEASED], False, ["now, for 2 min  ml/train/main  no-slot: no-slot of kubelet", COUNTED]),
    ([], [finding("exec"), POD], False, None),
]


@pytest.mark.parametrize(("now", "past", "everything", "lines"), WATCHED)
def test_finished_checks_are_not_shown_as_problems(now, past, everything, lines):
    found = watched(now, past, everything)
    assert found == lines or (lines is None and all(one.startswith("over for 2 h") for one in found))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119.4, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (86400, "24 h"), (259200, "3 d")],
)
def test_age_is_shown_in_one_unit(seconds, text):
    assert tables.age(seconds) == text
