# SPDX-License-Identifier: Apache-2.0
"""Tests the MIG geometry of a host whose driver does not answer. tests/native/nvml_readers/test_mig_host.py tests hosts
with a driver.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import mig_nvml, mig_unit
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu.mig_host import MigHost
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu.nvml import NvmlError
from ansible_collections.vgpu.fleet.plugins.module_utils.host.host import Answer


class NoDriver(mig_nvml.Mig):
    def __init__(self) -> None:
        """Loads no library."""

    def start(self) -> None:
        raise NvmlError(12, "libnvidia-ml.so.1")


def bare(tmp_path, check_mode):
    return MigHost("/var/lib/mig.json", check_mode, str(tmp_path), lambda _argv: Answer(1, "", ""))


def test_check_mode_predicts_the_geometry_without_a_driver(tmp_path):
    host = bare(tmp_path, check_mode=True)
    host.present(NoDriver, {"1g.10gb": 7})
    assert host.plan[0] == "set the GPUs to 7 x 1g.10gb"
    assert f"write {mig_unit.UNIT_PATH}" in host.plan
    assert "libnvidia-ml.so.1 failed with 12" in host.warnings[0]
    assert list(tmp_path.iterdir()) == []


def test_run_without_a_driver_fails_before_any_change(tmp_path):
    host = bare(tmp_path, check_mode=False)
    with pytest.raises(NvmlError):
        host.present(NoDriver, {"1g.10gb": 7})
    assert list(tmp_path.iterdir()) == []
