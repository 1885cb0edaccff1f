# SPDX-License-Identifier: Apache-2.0
"""Tests the Python reader of NVML if calls of the driver fail: a GPU that fails must not hide the other GPUs.
tests/native/nvml_readers tests the reader on a complete driver.
"""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import nvml
from doubles.nvml import Reader


def test_complete_driver_is_read():
    driver = Reader()
    found = nvml.read(driver)
    assert (found["ok"], found["driver_version"], found["cuda_version"]) == (True, "535.261.03", "12.2")
    assert [gpu["index"] for gpu in found["gpus"]] == [0, 1, 2]
    assert found["gpus"][0]["memory_mib"] == 15360
    assert [gpu["mig_enabled"] for gpu in found["gpus"]] == [False, False, True]
    assert [one["profile"] for one in found["gpus"][2]["mig"]] == ["1g.5gb", "1c.3g.8gb"]
    assert driver.stopped == 1


# columns: NVML's return codes by failing call, or by (call, GPU index); expected: whether NVML is usable, indexes of
# the GPUs that were read, indexes of the lost GPUs, words of the error
@pytest.mark.parametrize(
    ("failing", "ok", "indices", "lost", "words"),
    [
        ({"start": 12}, False, [], [], "user-space packages are not installed"),
        ({"start": 9}, False, [], [], "kernel module is not loaded"),
        ({"start": 18}, False, [], [], "differs from that of the loaded kernel module"),
        ({"count": 999}, False, [], [], "unknown error"),
        ({("handle", 1): 15}, True, [0, 2], [1], ""),
        ({("memory", 2): 15}, True, [0, 1], [2], ""),
        ({("pci", 0): 15}, True, [1, 2], [0], ""),
        ({"mig_mode": 3, "minor": 3}, True, [0, 1, 2], [], ""),  # 3 is "not supported", which is no fault
    ],
)
def test_failures_are_reported_and_do_not_hide_the_other_gpus(failing, ok, indices, lost, words):
    found = nvml.read(Reader(failing))
    assert found["ok"] is ok
    assert [gpu["index"] for gpu in found["gpus"]] == indices
    assert [gpu["index"] for gpu in found["lost"]] == lost
    assert words in found["error"]


def test_nvml_is_shut_down_after_a_failed_call():
    driver = Reader({"count": 999})
    nvml.read(driver)
    assert driver.stopped == 1


def test_missing_library_is_named_by_ctypes():
    with pytest.raises(nvml.NvmlError) as caught:
        nvml.CtypesReader("libvgpu-no-such-library.so.1")
    assert caught.value.code == 12
