# SPDX-License-Identifier: Apache-2.0
"""What vgpuctl prints of a node: no line contradicts another."""

from __future__ import annotations

from typing import Any

import pytest
from vgpu_plugin.ctl import main as ctl
from vgpu_plugin.ctl import text as ctl_text

GPU = {"index": 0, "uuid": "GPU-a", "model": "A100", "memory_mib": 40960, "healthy": True, "reason": ""}


def piece(number: int, **changes: Any) -> dict[str, Any]:
    one = {"id": f"GPU-a::{number}", "uuid": "GPU-a", "mode": "vcuda", "resource": "nvidia.com/gpu"}
    return {**one, "memory_mib": 20480, "sm_percent": 50, "health": "Healthy", "in_use": False, **changes}


def status(slices: list[dict[str, Any]], kinds: dict[str, str] | None = None, **gpu: Any) -> dict[str, Any]:
    """``kinds``: slice → kind of the allocation that holds it."""
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
            {"id": "aa", "kind": kind, "slice_ids": [name], "expires_in_s": 5} for name, kind in (kinds or {}).items()
        ],
        "hand_over": "cdi",
        "hand_over_reason": "",
        "warnings": [],
    }


MIG = [
    piece(0, mode="mig", resource="nvidia.com/mig-1g.5gb", memory_mib=4864, sm_percent=14),
    piece(1, mode="mig", resource="nvidia.com/mig-3g.20gb", memory_mib=19968, sm_percent=42, in_use=True),
]


def test_slices_of_two_sizes_are_two_lines():
    lines = ctl_text.explain(status(MIG), "0")
    assert lines == [
        "GPU 0 (A100, GPU-a): 1 of nvidia.com/mig-1g.5gb by mig, 4864 MiB and 14 % of the SMs each; 0 in use",
        "GPU 0 (A100, GPU-a): 1 of nvidia.com/mig-3g.20gb by mig, 19968 MiB and 42 % of the SMs each; 1 in use",
    ]


def test_what_is_sold_is_the_sum_of_the_slices():
    (line,) = ctl_text.explain(status(MIG), "GPU-a::0")
    assert line.startswith("slice GPU-a::0: 4864 MiB, one of 2 of a GPU of 40960 MiB (24832 MiB sold)")


# Kind of the allocation, health and use of the slice, reason of the GPU; the health that is shown, why it is withheld.
WITHHELD = [
    ("", "Healthy", False, "", "Healthy", ""),
    ("kubelet", "Healthy", True, "", "Healthy", ""),
    ("lease", "Unhealthy", True, "", "Healthy", "it is leased to a check"),
    ("slice", "Unhealthy", True, "", "Healthy", "it is used outside Kubernetes"),
    ("", "Unhealthy", True, "", "Healthy", "it is used outside Kubernetes"),
    ("lease", "Unhealthy", True, "Xid 79", "Unhealthy", "Xid 79"),
    ("", "Unhealthy", False, "Xid 79", "Unhealthy", "Xid 79"),
]


@pytest.mark.parametrize(("kind", "health", "used", "reason", "shown", "why"), WITHHELD)
def test_a_slice_in_use_is_not_unhealthy(kind, health, used, reason, shown, why):
    held = {"GPU-a::0": kind} if kind else {}
    answer = status([piece(0, health=health, in_use=used)], held, reason=reason, healthy=not reason)
    assert ctl_text.slices(answer).splitlines()[1].split()[5] == shown
    row = next(line for line in ctl.status_text(answer).splitlines() if line.startswith("GPU-a::0"))
    assert row.split()[3:] == [shown, "yes" if used else "no"]
    withheld = [line for line in ctl_text.explain(answer, "GPU-a::0") if "may not give it out" in line]
    assert withheld == ([f"the kubelet may not give it out: {why}"] if why else [])
