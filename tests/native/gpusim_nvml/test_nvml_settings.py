# SPDX-License-Identifier: Apache-2.0
"""Tests NVML's functions that change settings. Every other process must see the change, and only root may call them.
Strings such as ``nvmlDeviceGetCount()`` are Python expressions that ask_nvml.py evaluates in a new process. ``gpu(0)``
is the handle of GPU 0."""

from __future__ import annotations

import pytest
from simulated_host import needs_root

pytestmark = needs_root
AS_NOBODY = "import os\nos.seteuid(65534)"

# Columns: the call that changes a setting; the call that reads it; the value that the reading call then returns in
# another process.
SETTERS = [
    ("nvmlDeviceSetPersistenceMode(gpu(0), 1)", "nvmlDeviceGetPersistenceMode(gpu(0))", 1),
    ("nvmlDeviceSetComputeMode(gpu(0), 3)", "nvmlDeviceGetComputeMode(gpu(0))", 3),
    ("nvmlDeviceSetComputeMode(gpu(0), 2)", "nvmlDeviceGetComputeMode(gpu(0))", 2),
    ("nvmlDeviceSetEccMode(gpu(0), 0)", "nvmlDeviceGetEccMode(gpu(0))", [1, 0]),
    ("nvmlDeviceSetPowerManagementLimit(gpu(0), 50000)", "nvmlDeviceGetEnforcedPowerLimit(gpu(0))", 50000),
    ("nvmlDeviceSetAccountingMode(gpu(0), 1)", "nvmlDeviceGetAccountingMode(gpu(0))", 1),
    ("nvmlDeviceSetMigMode(gpu(2), 1)", "nvmlDeviceGetMigMode(gpu(2))", [1, 1]),
]
# Columns: a call that changes a setting; the error that it returns even for root.
REFUSED = [
    ("nvmlDeviceSetComputeMode(gpu(0), 1)", "NVML_ERROR_NOT_SUPPORTED"),
    ("nvmlDeviceSetComputeMode(gpu(0), 4)", "NVML_ERROR_INVALID_ARGUMENT"),
    ("nvmlDeviceSetPersistenceMode(gpu(0), 2)", "NVML_ERROR_INVALID_ARGUMENT"),
    ("nvmlDeviceSetPowerManagementLimit(gpu(0), 70001)", "NVML_ERROR_INVALID_ARGUMENT"),
    ("nvmlDeviceSetEccMode(gpu(3), 0)", "NVML_ERROR_NOT_SUPPORTED"),
    ("nvmlDeviceSetMigMode(gpu(0), 1)", "NVML_ERROR_NOT_SUPPORTED"),
]


@pytest.mark.parametrize(("setter", "getter", "value"), SETTERS, ids=[f"{row[0]}" for row in SETTERS])
def test_change_by_root_applies_to_every_process(mixed, setter, getter, value):
    before = mixed.nvml(getter)
    assert before != [value]
    assert mixed.nvml(setter, setup=AS_NOBODY) == ["NVML_ERROR_NO_PERMISSION"]
    assert mixed.nvml(getter) == before
    assert "ERROR" not in str(mixed.nvml(setter))
    assert mixed.nvml(getter) == [value]


@pytest.mark.parametrize(("setter", "error"), REFUSED, ids=[row[0] for row in REFUSED])
def test_invalid_changes_are_refused(mixed, setter, error):
    assert mixed.nvml(setter) == [error]


def test_scope_of_a_power_limit_is_one_byte(mixed):
    """The field `scope` is one byte, and nvidia-smi does not clear the padding after it. So the library must read only
    this byte."""
    setup = (
        "lib = ctypes.CDLL('libnvidia-ml.so.1')\n"
        "def limit(scope, milliwatts, version=nvmlPowerValue_v2):\n"
        "    value = c_nvmlPowerValue_v2_t(version, scope, milliwatts)\n"
        "    return lib.nvmlDeviceSetPowerManagementLimit_v2(gpu(0), ctypes.byref(value))"
    )
    calls = ["limit(0xABCDEF00, 61000)", "limit(1, 62000)", "limit(0, 62000, 12)", "limit(0, 71000)"]
    enforced = "nvmlDeviceGetEnforcedPowerLimit(gpu(0))"
    assert mixed.nvml(*calls, enforced, setup=setup) == [0, 3, 25, 2, 61000]
