# SPDX-License-Identifier: Apache-2.0
"""Tests named configurations: configuration files in addition to node.yaml. A node label selects one of them for the
device plugin. The plan (the changes that a run would make) must list the files that differ from the group's variables.
It must also find out whether the running device plugin loaded an older text of its file.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.config import named_configs, node_config
from ansible_collections.vgpu.fleet.plugins.module_utils.host.digest import sha256

PATH = "/etc/vgpu/node.yaml"
VARIABLES = {"vgpu_split_count": 3, "vgpu_configs": {"big": {"split_count": 2}}}
DESIRED = {
    "node_config": node_config.from_vars(VARIABLES),
    "node_configs": node_config.named_from_vars(VARIABLES),
}
BASE, BIG = (node_config.dump(one) for one in (DESIRED["node_config"], DESIRED["node_configs"]["big"]))
GPU = {"index": 0, "uuid": "GPU-a", "model": "Tesla T4", "memory_mib": 15360, "mig_enabled": False, "mig": []}


def state(text=BASE, named=None, **status):
    return {
        "node_config": {"text": text, "named": {"big": BIG} if named is None else named},
        "plugin": {"status": status or None},
        "gpus": [GPU],
    }


# columns: label, state of the host with its files; expected changes in the plan. The group configures node.yaml and the
# named file big.yaml.
CHANGES = [
    ("files as configured", state(), []),
    ("named file missing", state(named={}), ["write /etc/vgpu/configs/big.yaml"]),
    (
        "named file with another split",
        state(named={"big": BIG.replace('"splitCount": 2', '"splitCount": 5')}),
        ["/etc/vgpu/configs/big.yaml: sharing.vcuda.splitCount from 5 to 2"],
    ),
    (
        "named file that is not configured",
        state(named={"big": BIG, "old": "{}"}),
        ["remove /etc/vgpu/configs/old.yaml"],
    ),
    ("named file unreadable", state(named={"big": None}), ["write /etc/vgpu/configs/big.yaml"]),
    ("node.yaml missing", state(text=None), ["write /etc/vgpu/node.yaml"]),
]


@pytest.mark.parametrize(("about", "found", "changes"), CHANGES, ids=[one[0] for one in CHANGES])
def test_files_that_differ(about, found, changes):
    assert named_configs.changes(PATH, DESIRED, found) == changes


IN_FORCE = [
    # columns: label, status of the running device plugin; expected: whether its file has changed since the program
    # loaded the file
    ("program does not respond", {}, False),
    ("current node.yaml", {"config_path": PATH, "config_sha256": sha256(BASE)}, False),
    ("outdated node.yaml", {"config_path": PATH, "config_sha256": "x"}, True),
    ("older program that reports no path", {"config_sha256": sha256(BASE)}, False),
    ("current named file", {"config_path": "/etc/vgpu/configs/big.yaml", "config_sha256": sha256(BIG)}, False),
    ("outdated named file", {"config_path": "/etc/vgpu/configs/big.yaml", "config_sha256": sha256(BASE)}, True),
    ("named file that was removed", {"config_path": "/etc/vgpu/configs/x.yaml", "config_sha256": sha256(BIG)}, True),
]


@pytest.mark.parametrize(("about", "status", "behind"), IN_FORCE, ids=[one[0] for one in IN_FORCE])
def test_program_is_compared_with_the_file_that_it_loaded(about, status, behind):
    assert named_configs.is_behind(PATH, state(**status)) is behind


@pytest.mark.parametrize(("kubeconfig", "lines"), [("", 1), ("/etc/kubernetes/kubelet.conf", 0)])
def test_requested_sizes_need_the_api_server(kubeconfig, lines):
    desired = {
        **DESIRED,
        "node_configs": node_config.named_from_vars({"vgpu_configs": {"x": {"slice_sizing": "requested"}}}),
    }
    told = named_configs.faults(desired, kubeconfig)
    assert len(told) == lines
    assert all("requested (x)" in one and "device_plugin_kubeconfig" in one for one in told)


def test_containers_are_counted_by_the_active_configuration():
    held = {"allocations": [{"kind": "kubelet", "slice_ids": ["GPU-a::1"]}]}
    halves = [{"id": f"GPU-a::{n}", "memory_mib": 7680, "sm_percent": 100} for n in (0, 1)]
    of_big = {"config_path": "/etc/vgpu/configs/big.yaml", "slices": halves, **held}
    assert named_configs.reshaped(PATH, DESIRED, state(**of_big)) == 0
    assert named_configs.reshaped(PATH, DESIRED, state(**{**of_big, "config_path": PATH})) == 1
