# SPDX-License-Identifier: Apache-2.0
"""Tests whether the driver or the library enforces the memory limits of containers on a host. Drivers of branch 615 and
later can limit the memory of a control group. If the host's driver cannot enforce limits, the report names only the
first reason.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import enforcement as rule
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu.enforcement import Facts

CAN = Facts(branch=615, modules="open", probed=("misc", ""))

ROWS = [
    # columns: vgpu_memory_enforcement, facts that differ from the capable host CAN, sharing mode, vgpu_count_context
    # (whether CUDA contexts count as used memory); expected enforcement (driver with its backend, library or none),
    # words of the reported line
    ("auto", {}, "vcuda", True, "driver-misc", "set and read back on this host (backend misc)"),
    ("driver", {"probed": ("dmem", "")}, "vcuda", True, "driver-dmem", "backend dmem"),
    ("library", {}, "vcuda", True, "library", "vgpu_memory_enforcement is library"),
    ("auto", {"branch": 580}, "vcuda", True, "library", "driver branch 580 has no memory limits of control groups"),
    ("auto", {"branch": 0}, "vcuda", True, "driver-misc", "read back"),
    ("driver", {"cards": ["the Volta GPU at 00:04.0"]}, "vcuda", True, "library", "older than Turing"),
    (
        "auto",
        {"modules": "proprietary"},
        "vcuda",
        True,
        "library",
        ("the proprietary kernel modules have no such limits"),
    ),
    ("auto", {"mig": ["GPU-1"]}, "vcuda", True, "library", "GPU-1 is in MIG mode"),
    ("auto", {"memacct_mode": "0"}, "vcuda", True, "library", "RmMemacctMode=0 turns"),
    ("auto", {"memacct_mode": "1"}, "vcuda", True, "driver-misc", "read back"),
    ("auto", {"cgroup2": False}, "vcuda", True, "library", "does not use version 2 of control groups alone"),
    ("auto", {"handover": "docker 20.10 has no CDI"}, "vcuda", True, "library", "docker 20.10 has no CDI"),
    ("auto", {"probed": None}, "vcuda", True, "library", "not been probed on this host yet"),
    ("driver", {"probed": ("", "GPU-1: it does not hold")}, "vcuda", True, "library", "GPU-1: it does not hold"),
    ("auto", {}, "vcuda", False, "library", "vgpu_count_context is false"),
    ("auto", {}, "time-slicing", True, "none", "only if vgpu_memory_enforcement is driver"),
    ("auto", {}, "mps", True, "none", "only if vgpu_memory_enforcement is driver"),
    ("driver", {}, "time-slicing", True, "driver-misc", "read back"),
    ("driver", {}, "mps", True, "driver-misc", "read back"),
    ("driver", {}, "mig", True, "none", "no memory limits with vgpu_sharing: mig"),
    ("auto", {}, "none", True, "none", "no memory limits with vgpu_sharing: none"),
]


@pytest.mark.parametrize(("wish", "host", "sharing", "count", "active", "said"), ROWS)
def test_active_enforcement_and_its_reason(wish, host, sharing, count, active, said):
    found = rule.decide(wish, CAN._replace(**host), sharing, count)
    assert found.active == active
    assert said in found.line()
    assert found.by_driver is active.startswith("driver-")
    assert found.backend == (active.partition("-")[2] if found.by_driver else "")


# columns: device list strategies (how the plugin gives devices to a container); expected words of the reason ("": the
# driver can enforce). The driver's limits need CDI.
@pytest.mark.parametrize(
    ("strategies", "said"),
    [(["cdi-cri"], ""), (["envvar", "cdi-annotations"], ""), (["envvar"], "by envvar"), ([], "by no way")],
)
def test_strategies_without_cdi_are_a_reason_against_the_driver(strategies, said):
    assert said in rule.handover_of(strategies)
    assert bool(rule.handover_of(strategies)) is bool(said)
