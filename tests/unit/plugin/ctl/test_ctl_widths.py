# SPDX-License-Identifier: Apache-2.0
"""Tests vgpuctl's output about a faulty node at several terminal widths: no line is too wide, no sentence is cut, each
column of figures has a unit, and each fault appears once.

On this node GPU 0 is full, GPU 1 had Xid 79 (an error number of the driver), GPU 2 has a process that belongs to no
allocation, GPU 3 is off the bus, and a lease (a slice reserved for a container of docker or podman) has no container.
"""

from __future__ import annotations

from typing import Any

import pytest
from vgpu_plugin.ctl import explanation, tables
from vgpu_plugin.ctl import text as ctl_text
from vgpu_plugin.ctl import top as ctl_top

UUIDS = [f"GPU-{n}8761ffe-067d-967c-c921-df91885a18d2" for n in range(4)]
INDEXES = {uuid: index for index, uuid in enumerate(UUIDS)}
XID = "Xid 79: the GPU has fallen off the bus, or its power failed"
LOST = (
    f"GPU 3 (NVIDIA A100-SXM4-80GB, {UUIDS[3]}) is lost: NVML: GPU is lost; reset or replace it, then: "
    f"site.yml; removed for good: vgpuctl forget {UUIDS[3]}"
)
NOBODYS = f"GPU {UUIDS[2]}: 612 MiB are held by processes of no allocation; see: vgpuctl watch"
POD = {"namespace": "machine-learning", "pod": "trainer-7c9d8b6f5d-x2x7q", "container": "main"}
WIDTHS = [80, 100, 120]


def gpu(index: int, **changes: Any) -> dict[str, Any]:
    one = {"index": index, "uuid": UUIDS[index], "model": "NVIDIA A100-SXM4-80GB", "memory_mib": 81920, "reason": ""}
    return {**one, "healthy": True, "memory_used_mib": 1234, "utilisation": 37, "temperature": 41, **changes}


def piece(index: int, number: int, state: str) -> dict[str, Any]:
    one = {"id": f"{UUIDS[index]}::{number}", "uuid": UUIDS[index], "mode": "vcuda", "resource": "nvidia.com/gpu"}
    healthy = "Healthy" if state == "free" else "Unhealthy"
    return {**one, "memory_mib": 20480, "sm_percent": 25, "health": healthy, "in_use": "use" in state, "state": state}


def held(name: str, kind: str, number: int, **changes: Any) -> dict[str, Any]:
    return {"id": name * 8, "kind": kind, "slice_ids": [f"{UUIDS[0]}::{number}"], "expires_in_s": 0, "holder": ""} | (
        changes
    )


# The status response of the device plugin on the faulty node.
STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "pid": 4711,
    "resource": "nvidia.com/gpu",
    "resources": ["nvidia.com/gpu"],
    "registered": False,
    "kubelet_error": "/var/lib/kubelet/device-plugins/kubelet.sock does not exist; waiting for the kubelet",
    "config_path": "/etc/vgpu/node.yaml",
    "config_sha256": "ab" * 32,
    "library": "0.1.0-5f2c1a",
    "hand_over": "mounts",
    "hand_over_reason": "docker 20.10.24 reads no CDI files, and no runtime of NVIDIA's is its default",
    "gpus": [
        gpu(0, memory_used_mib=81900, utilisation=100, temperature=83),
        gpu(1, healthy=False, reason=XID),
        gpu(2),
        gpu(3, healthy=False, memory_used_mib=-1, utilisation=-1, temperature=-1, reason="lost: NVML: GPU is lost"),
    ],
    "slices": [
        *(piece(0, n, "in use") for n in range(3)),
        piece(0, 3, "free"),
        *(piece(1, n, "unhealthy") for n in range(4)),
        *(piece(2, n, "free") for n in range(4)),
        *(piece(3, n, "unhealthy") for n in range(4)),
    ],
    "allocations": [
        held("aa", "kubelet", 0),
        held("bb", "container", 1, holder="docker web"),
        held("cc", "container", 2, holder="docker", expires_in_s=3540),
    ],
    "warnings": [LOST, NOBODYS],
}


def usage(name: str, **changes: Any) -> dict[str, Any]:
    one = {"allocation": name * 8, "uuid": UUIDS[0], "namespace": "", "pod": "", "container": "", "holder": ""}
    full = {"memory_limit": 20480 << 20, "memory_used": 20480 << 20, "share_limit": 0.25, "share_granted": 0.25}
    programs = [{"pid": 4194303, "name": "python3.11", "bytes": 512 << 20}]
    return {**one, **full, "kind": "container", "processes": 1, "device_seconds": 1.5, "programs": programs, **changes}


NONE_YET = {"holder": "docker", "processes": 0, "programs": [], "memory_used": 0, "share_granted": -1.0}
USAGES = [usage("aa", **POD, kind="kubelet"), usage("bb", holder="docker web"), usage("cc", **NONE_YET)]
FINDING = {
    **POD,
    "kind": "kubelet",
    "reason": "no-slot",
    "text": f"the process 4194303 (python3.11) holds 612 MiB of GPU {UUIDS[0]} and has no slot in the ledger",
    "action": "",
    "age_s": 130.0,
    "over_s": 0.0,
}
WATCH = {"policy": "report", "looks": 900, "interval_s": 2.0, "looks_to_name": 2, "fault": "", "old_mounts": []}


def explained(what: str, width: int) -> str:
    return tables.wrapped("\n".join(one["text"] for one in explanation.explain(STATUS, what)), width)


SHOWN = {
    "status": lambda width: ctl_text.status(STATUS, width),
    "slices": lambda width: ctl_text.slices(ctl_text.slice_rows(STATUS, USAGES), width),
    "top": lambda width: ctl_top.top(USAGES, {("aa" * 8, UUIDS[0]): 1.0}, 2.0, width, INDEXES),
    "screen": lambda width: ctl_top.screen(ctl_top.top(USAGES, width=width, indexes=INDEXES), STATUS, (width, 40), 2.0),
    "explain": lambda width: explained("", width),
    "explain 3": lambda width: explained("3", width),
    "explain 0::1": lambda width: explained("0::1", width),
    "watch": lambda width: ctl_text.watch({**WATCH, "findings": [FINDING], "past": []}, False, width),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SHOWN)
def test_no_line_is_wider_than_the_terminal(name, width):
    assert [line for line in SHOWN[name](width).splitlines() if len(line) > width] == []


# columns: the command; expected: words of its output at every width, and how often they occur
SAID = [
    ("status", XID, 1),
    ("status", LOST, 1),
    ("status", "NVML: GPU is lost", 1),
    ("status", NOBODYS, 1),
    ("status", STATUS["kubelet_error"], 1),
    ("status", "(container, docker): 0::2, ends in 59 min", 1),
    ("screen", XID, 1),
    ("screen", LOST, 1),
    ("screen", NOBODYS, 1),
    ("explain", LOST, 1),
    ("explain 3", LOST, 1),
    ("explain 3", "is lost: NVML: GPU is lost; reset or replace it", 2),
    ("explain 3", "without errors", 0),
    ("explain", "without errors", 1),
    ("watch", FINDING["text"], 1),
    ("watch", "900 polls, one every 2 s", 1),
]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("name", "words", "times"), SAID)
def test_each_problem_appears_once_and_uncut(name, words, times, width):
    assert " ".join(SHOWN[name](width).split()).count(words) == times


# The expected table of GPUs, with single spaces between the columns.
GPUS = [
    "GPU MODEL MiB OF MiB UTIL % °C SLICES HEALTH",
    "0 A100-SXM4-80GB 81900 81920 100 83 1 free, 3 in use healthy",
    "1 A100-SXM4-80GB 1234 81920 37 41 4 unhealthy Xid 79",
    "2 A100-SXM4-80GB 1234 81920 37 41 4 free healthy",
    "3 A100-SXM4-80GB - 81920 - - 4 unhealthy lost",
]


@pytest.mark.parametrize("width", WIDTHS)
def test_narrow_gpu_table_is_complete(width):
    lines = [" ".join(line.split()) for line in ctl_text.gpu_table(STATUS, width)]
    assert lines == GPUS or width > 80


@pytest.mark.parametrize("width", [0, *WIDTHS])
def test_columns_of_figures_have_units(width):
    units = {"MiB", "%", "s", "°C"}
    for name, words in (("top", "GPU TENANT PID PROGRAM"), ("slices", "GPU STATE MODE HELD BY SLICE")):
        head = SHOWN[name](width).splitlines()[0]
        columns = [one for one in head.split("  ") if one.strip()]
        named = [one.strip() for one in columns if one.strip() not in words]
        assert [one for one in named if not any(one.endswith(unit) for unit in units)] == [], head


# columns: a text, the width (0 means unlimited); the expected lines
@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("a word\n\n  a table  is left as it is", 40, ["a word", "", "  a table  is left as it is"]),
        ("one two three", 0, ["one two three"]),
        ("one two three", 8, ["one two", "  three"]),
        ("a-very-long-name of-it", 8, ["a-very-long-name", "  of-it"]),
    ],
)
def test_lines_wrap_between_words(text, width, lines):
    assert tables.wrapped(text, width).splitlines() == lines
