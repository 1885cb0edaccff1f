# SPDX-License-Identifier: Apache-2.0
"""Tests what the plan (the changes that a run would make) says about memory enforcement (by the driver or by the
library): one line, and an error if vgpu_memory_enforcement is "driver" but the host's driver cannot enforce limits.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.config import node_config
from ansible_collections.vgpu.fleet.plugins.module_utils.plan import desired, plan
from plan_samples import CONVERGED, VARIABLES, changed

# A host that needs no change and whose driver has branch 615, the first that limits control groups.
CAN = changed(
    CONVERGED,
    {
        "nvml.driver_version": "615.71.09",
        "driver.loaded_version": "615.71.09",
        "driver.open_module": True,
        "driver.cgroup2": True,
        "driver.registry": "",
        "kubelet": (1, 34),
        "kubelet_engine": {"engine": "containerd", "endpoint": "", "cgroup_driver": "systemd"},
        "packages": {"containerd.io": "1.7.27-1"},
        "plugin.status.memory_enforcement": "driver-dmem",
        "plugin.status.memory_enforcement_reason": "memory is enforced by the driver: it was tried",
    },
)
VOLTA = [{"address": "0000:01:00.0", "device": "0x1db1"}]
NO_PLUGIN = {"plugin.status.memory_enforcement": "", "plugin.status.memory_enforcement_reason": ""}
# the device plugin's status if the driver did not enforce its test limit
FAILED = {
    "plugin.status.memory_enforcement": "library",
    "plugin.status.memory_enforcement_reason": "memory is enforced by the library alone: GPU-1: it does not hold",
    "plugin.status.memory_enforcement_probed": True,
}
# the device plugin's status if vgpu_memory_enforcement was "library", so the plugin made no probe
UNTRIED = {
    "plugin.status.memory_enforcement": "library",
    "plugin.status.memory_enforcement_reason": "memory is enforced by the library alone: it was requested",
    "plugin.status.memory_enforcement_probed": False,
}

ROWS = [
    # columns: facts of the host that differ; expected words of the line, whether the driver enforces the limits
    ({}, "set and read back on this host (backend dmem)", True),
    (NO_PLUGIN, "the device plugin probes the driver's limits when it starts", False),
    (FAILED, "GPU-1: it does not hold", False),
    (UNTRIED, "the device plugin probes the driver's limits when it starts", False),
    ({"nvml.driver_version": "580.95.05"}, "driver branch 580 has no memory limits", False),
    ({"pci_gpus": VOLTA}, "the Volta GPU at 0000:01:00.0 is older than Turing", False),
    ({"pci_gpus": [{"address": "0000:01:00.0", "device": "0x1eb8"}]}, "read back", True),  # a T4, a Turing GPU
    # No driver answers, so its branch is unknown and is no reason to refuse limits.
    ({"nvml.driver_version": None}, "read back", True),
    ({"driver.open_module": False}, "the proprietary kernel modules have no such limits", False),
    ({"driver.registry": "PowerMizerEnable=1;RmMemacctMode=0"}, "RmMemacctMode=0", False),
    ({"driver": {"loaded_version": "615.71.09", "nouveau": False}}, "read back", True),  # The other facts are unknown.
    ({"driver.cgroup2": False}, "version 2 of control groups alone", False),
    ({"driver.controllers": []}, "the driver counts memory by the controller dmem (CONFIG_CGROUP", False),
    (
        {"driver.controllers": ["dmem", "misc"], "oci_runtime": {"engine": "containerd", "runtime": "runc"}},
        "(the kernel has dmem and misc; containerd starts containers by runc)",
        True,
    ),
    (
        {"driver.controllers": ["misc"], "oci_runtime": {"engine": "crio", "runtime": "crun"}},
        "(the kernel has misc; crio starts containers by crun, which enables neither dmem nor misc, so the hook "
        "enables them)",
        True,
    ),
    ({"kubelet": (1, 28)}, "kubelet 1.28 passes no CDI devices", False),
    ({"kubelet": (1, 29)}, "read back", True),
    ({"packages": {"containerd.io": "1.6.33-1"}}, "containerd 1.6 has no CDI", False),
    ({"packages": {"containerd.io": "1.7.0-1"}}, "read back", True),
    ({"kubelet_engine": None, "docker.info.ServerVersion": "24.0.9"}, "docker 24.0 has no CDI", False),
    ({"kubelet_engine": None, "docker.info.ServerVersion": "25.0.0"}, "read back", True),
    ({"kubelet_engine": None, "docker.info.ServerVersion": "20.10.24+dfsg1"}, "docker 20.10 has no CDI", False),
    ({"kubelet_engine": None, "docker.info.ServerVersion": "26.1.5+dfsg1"}, "read back", True),
]


@pytest.mark.parametrize("wish", ["auto", "driver"])
@pytest.mark.parametrize(("host", "said", "by_driver"), ROWS)
def test_enforcement_has_a_line_and_an_error(host, said, by_driver, wish):
    variables = {**VARIABLES, "vgpu_memory_enforcement": wish}
    state = changed(CAN, host)
    made = plan.make_plan(desired.collect(variables), state)
    assert said in made["memory_enforcement"]
    assert made["memory_enforcement"].startswith(f"memory is enforced by the {'driver' if by_driver else 'library'}")
    assert made["memory_enforcement"] in plan.describe(made, state)
    refused = [one for one in made["errors"] if "vgpu_memory_enforcement" in one]
    expected = wish == "driver" and not by_driver and host not in (NO_PLUGIN, UNTRIED)
    assert [said in one for one in refused] == [True] * expected


# columns: variables of a host whose driver could enforce limits; expected words of the line
CONFIGURED = [
    ({"vgpu_memory_enforcement": "driver", "nvidia_driver_branch": "580"}, "driver branch 580 has no memory limits"),
    ({"vgpu_count_context": False}, "library alone: vgpu_count_context is false"),
    ({"vgpu_memory_enforcement": "library"}, "library alone"),
    ({"vgpu_memory_enforcement": "driver", "vgpu_sharing": "time-slicing"}, "set and read back on this host"),
]


@pytest.mark.parametrize(("variables", "said"), CONFIGURED)
def test_enforcement_follows_the_configuration(variables, said):
    made = plan.make_plan(desired.collect({**VARIABLES, **variables}), CAN)
    assert said in made["memory_enforcement"]


# columns: variables with which the driver cannot enforce limits; expected words of the error
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"vgpu_count_context": False}, "driver always counts contexts"),
        ({"vgpu_sharing": "none"}, "whole GPUs have no limit"),
        (
            {"vgpu_sharing": "mig", "vgpu_mig_geometry": {"1g.5gb": 7}, "vgpu_mig_strategy": "mixed"},
            "memory of a MIG device is separate",
        ),
    ],
)
def test_impossible_enforcement_is_an_error_of_the_variables(variables, said):
    with pytest.raises(node_config.ConfigError, match=said):
        node_config.from_vars({"vgpu_memory_enforcement": "driver", **variables})


def test_unset_enforcement_is_not_written_to_the_file():
    assert "memoryEnforcement" not in str(node_config.from_vars({}))
    assert (
        node_config.from_vars({"vgpu_memory_enforcement": "library"})["flags"]["plugin"]["memoryEnforcement"]
        == "library"
    )


def test_enforcement_by_the_driver_installs_the_library_for_its_hook():
    shared = {**VARIABLES, "vgpu_sharing": "time-slicing"}
    assert "vcuda" not in desired.collect(shared)["roles"]
    found = desired.collect({**shared, "vgpu_memory_enforcement": "driver"})
    assert "vcuda" in found["roles"]
    assert found["node_config"]["flags"]["plugin"]["libraryRoot"] == VARIABLES.get(
        "vcuda_root", node_config.LIBRARY_ROOT
    )
