# SPDX-License-Identifier: Apache-2.0
"""Tests that the profiles of all kinds of GPU instances that NVML has are read. tests/native/nvml_readers tests the
calls of NVML against the simulated driver.
"""

from __future__ import annotations

import pynvml
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu import mig_nvml
from ansible_collections.vgpu.fleet.plugins.module_utils.gpu.nvml import NvmlError


class Session(mig_nvml.Mig):
    """Answers for every kind that pynvml, NVIDIA's own reader, knows."""

    def __init__(self) -> None:
        """Loads no library."""

    def _call(self, name, *arguments):
        _handle, number, info = arguments
        if number.value >= pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT:
            raise NvmlError(mig_nvml.INVALID_ARGUMENT, name)
        info._obj.name = b"MIG %d" % number.value


def test_profiles_of_all_kinds_are_read():
    found = Session().profiles(None)
    assert list(found) == [str(number) for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)]
