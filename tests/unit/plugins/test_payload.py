# SPDX-License-Identifier: Apache-2.0
"""Tests the size of the payloads: with each module, Ansible sends the files of module_utils that the module imports to
the host. The table limits the number of these files for each module. Ansible's own packer counts the files.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODULES = ROOT / "plugins" / "modules"

# Greatest number of files in each payload, without __init__.py, which Ansible adds. A higher number needs a reason.
MOST = {
    "apt_packages": 9,  # apt_scratch.py copies apt's sources and lists for check mode.
    "check_variables": 0,
    "containerd_config": 8,  # One file reads the cgroup driver of the running kubelet.
    "docker_daemon": 9,
    "driver_choice": 11,  # repository_keys.py and host_files.py: keys of repositories, driver's files on a host.
    "driver_setup": 5,
    "engine_choice": 10,  # The engine "auto" needs files for the kubelet, CRI-O, k3s and RKE2.
    "gpu_info": 3,
    "host_state": 24,  # daemon_json.py and json_text.py: the socket on which docker answers is in daemon.json.
    "kube_capacity_info": 6,  # cluster_claims.py compares the nodes' ResourceSlices for claims.
    "kube_claims": 6,  # Two of these files define admission policies.
    "kube_cluster_info": 5,  # One of these files checks whether the nodes have the images.
    "kube_device_plugin": 4,
    "kube_mount_policy": 4,
    "kube_node": 2,
    "kube_conflicting_plugins": 5,
    "kube_scheduler": 9,  # Three files define objects, two admission policies; rollout.py checks the rollout.
    "mig_geometry": 13,
    "mps_daemon": 7,
    "node_files": 1,
    "plan": 0,
    "plugin_python": 3,
    "rpm_packages": 6,
    "time_slice": 4,
    "toolkit_config": 3,
    "rollback_point": 12,
    "vcuda_archive": 1,
    "vcuda_library": 4,
    "vgpu_capacity_info": 15,  # lost.py finds lost GPUs; claims.py computes the devices for claims.
    "vgpu_isolation": 21,  # Several files test the driver's own limits; readers.py reads memory in three ways.
    "desired_state": 0,
}


# The packer needs Ansible's loader of collections, but the other tests import the collection without this loader. So
# the packer runs in a separate process.
PACK = """
import datetime, io, json, pathlib, sys, zipfile
from ansible.executor import module_common
from ansible.plugins.loader import init_plugin_loader

init_plugin_loader([sys.argv[1]])
plugins = "ansible_collections/vgpu/fleet/plugins/"
found = {}
for path in pathlib.Path(sys.argv[2]).glob("*.py"):
    with zipfile.ZipFile(io.BytesIO(), "w") as packed:
        module_common.recursive_finder(
            path.stem,
            f"{plugins.replace('/', '.')}modules.{path.stem}",
            path.read_bytes(),
            packed,
            datetime.datetime.now(datetime.timezone.utc),
            module_common._builder.ExtensionManager(),
        )
        core = [one for one in packed.namelist() if one.startswith(plugins + "module_utils/")]
    found[path.stem] = sorted(one for one in core if not one.endswith("__init__.py"))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def payloads() -> dict[str, list[str]]:
    """Returns the packed files of module_utils by module."""
    argv = [sys.executable, "-c", PACK, str(ROOT / ".build" / "collections"), str(MODULES)]
    return json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


def test_every_module_has_its_row(payloads: dict[str, list[str]]) -> None:
    assert set(payloads) == set(MOST)
    assert payloads["node_files"], "expected core files in the payloads, found none"


@pytest.mark.parametrize("module", sorted(MOST))
def test_module_ships_only_the_files_that_it_uses(module: str, payloads: dict[str, list[str]]) -> None:
    assert len(payloads[module]) <= MOST[module], payloads[module]
