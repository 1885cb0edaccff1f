# SPDX-License-Identifier: Apache-2.0
"""The NVML reader where parts of the driver fail; tests/native/nvml_readers reads a whole driver."""

from __future__ import annotations

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import nvml


class Fake:
    """A driver with three GPUs, of which calls can be told to fail with a code."""

    def __init__(self, failing=()):
        self.failing = dict(failing)
        self.stopped = 0

    def _answer(self, call, value, index=None):
        code = self.failing.get((call, index), self.failing.get(call))
        if code:
            raise nvml.NvmlError(code, call)
        return value

    def start(self):
        self._answer("start", None)

    def stop(self):
        self.stopped += 1

    def driver_version(self):
        return self._answer("driver_version", "535.261.03")

    def cuda_version(self):
        return self._answer("cuda_version", 12020)

    def count(self):
        return self._answer("count", 3)

    def handle(self, index):
        return self._answer("handle", index, index)

    def uuid(self, handle):
        return self._answer("uuid", f"GPU-{handle}", handle)

    def model(self, handle):
        return self._answer("model", "Tesla T4", handle)

    def memory(self, handle):
        return self._answer("memory", ((15360 << 20) + 5, 3 << 20), handle)

    def mig_devices(self, handle):
        return [("MIG-a", "Tesla T4 MIG 1g.5gb", 1, 1, 4864), ("MIG-b", "", 3, 1, 7680)]

    def pci(self, handle):
        return self._answer("pci", "00000000:00:04.0", handle)

    def minor(self, handle):
        return self._answer("minor", handle, handle)

    def compute_capability(self, handle):
        return self._answer("compute_capability", "7.5", handle)

    def mig_mode(self, handle):
        return self._answer("mig_mode", 1 if handle == 2 else 0, handle)


def test_a_whole_driver():
    driver = Fake()
    found = nvml.read(driver)
    assert (found["ok"], found["driver_version"], found["cuda_version"]) == (True, "535.261.03", "12.2")
    assert [gpu["index"] for gpu in found["gpus"]] == [0, 1, 2]
    assert found["gpus"][0]["memory_mib"] == 15360
    assert [gpu["mig_enabled"] for gpu in found["gpus"]] == [False, False, True]
    assert [one["profile"] for one in found["gpus"][2]["mig"]] == ["1g.5gb", "1c.3g.8gb"]
    assert driver.stopped == 1


@pytest.mark.parametrize(
    "failing, ok, indices, lost, words",
    [
        ({"start": 12}, False, [], [], "user-space packages are not installed"),
        ({"start": 9}, False, [], [], "kernel module is not loaded"),
        ({"start": 18}, False, [], [], "differs from that of the loaded kernel module"),
        ({"count": 999}, False, [], [], "unknown error"),
        ({("handle", 1): 15}, True, [0, 2], [1], ""),
        ({("memory", 2): 15}, True, [0, 1], [2], ""),
        ({("pci", 0): 15}, True, [1, 2], [0], ""),
        ({"mig_mode": 3, "minor": 3}, True, [0, 1, 2], [], ""),  # not supported is no fault
    ],
)
def test_failures_are_told_and_do_not_hide_the_other_gpus(failing, ok, indices, lost, words):
    found = nvml.read(Fake(failing))
    assert found["ok"] is ok
    assert [gpu["index"] for gpu in found["gpus"]] == indices
    assert [gpu["index"] for gpu in found["lost"]] == lost
    assert words in found["error"]


def test_a_driver_that_started_is_stopped_even_when_a_call_fails():
    driver = Fake({"count": 999})
    nvml.read(driver)
    assert driver.stopped == 1


def test_without_the_library_ctypes_says_what_is_missing():
    with pytest.raises(nvml.NvmlError) as caught:
        nvml.CtypesReader("libvgpu-no-such-library.so.1")
    assert caught.value.code == 12
