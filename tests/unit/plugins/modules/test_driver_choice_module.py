# SPDX-License-Identifier: Apache-2.0
"""Tests that the module driver_choice also reads which packages a host has. With this list it warns about packages that
are missing for NVLink 5 switches.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ansible_collections.vgpu.fleet.plugins.modules import driver_choice as module_under_test
from doubles.host import host

# A host with NVLink 5 switches, as its GPU and its InfiniBand device show.
FILES = {
    "etc/os-release": 'ID=ubuntu\nVERSION_ID="24.04"\n',
    "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de",
    "sys/bus/pci/devices/0000:01:00.0/class": "0x030200",
    "sys/bus/pci/devices/0000:01:00.0/device": "0x2901",
    "sys/class/infiniband/mlx5_0/device/vpd": "Product SW_MNG switch",
}
INSTALLED = "Package: {}\nStatus: install ok installed\nVersion: 2025.03.1-1\n\n"


@pytest.mark.parametrize(("package", "told"), [("nvlsm", False), ("bash", True)])
def test_missing_subnet_manager_of_nvlink_5_is_a_warning(tmp_path, monkeypatch, package, told):
    machine = host(tmp_path, {**FILES, "var/lib/dpkg/status": INSTALLED.format(package)})
    warnings, left = [], []
    desired = {"source": "cuda", "branch": "580"}
    double = SimpleNamespace(
        params={"desired": desired},
        warn=warnings.append,
        fail_json=pytest.fail,
        exit_json=lambda **told: left.append(told),
    )
    monkeypatch.setattr(module_under_test, "AnsibleModule", lambda **_spec: double)
    monkeypatch.setattr(module_under_test, "Host", lambda: machine)
    module_under_test.main()
    assert any("nvidia-fabricmanager" in name for name in left[0]["choice"]["packages"]), (
        "expected the fabric manager, because the host has NVSwitches"
    )
    assert [True for text in warnings if "nvlsm" in text] == [True] * told
