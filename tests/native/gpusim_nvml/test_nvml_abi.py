# SPDX-License-Identifier: Apache-2.0
"""Compares the types of the simulated NVML library with those of nvidia-ml-py, and its exported names with those of
NVIDIA's library."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess

import pynvml
import pytest
from simulated_host import LIBRARIES, ROOT

NVML = ROOT / "native" / "gpusim" / "nvml"

# Columns: the C type; the ctypes structure of nvidia-ml-py.
STRUCTURES = [
    ("nvmlPciInfo_t", pynvml.nvmlPciInfo_t),
    ("nvmlPciInfoExt_t", pynvml.nvmlPciInfoExt_v1_t),
    ("nvmlMemory_t", pynvml.c_nvmlMemory_t),
    ("nvmlMemory_v2_t", pynvml.c_nvmlMemory_v2_t),
    ("nvmlBAR1Memory_t", pynvml.c_nvmlBAR1Memory_t),
    ("nvmlUtilization_t", pynvml.c_nvmlUtilization_t),
    ("nvmlProcessInfo_t", pynvml.c_nvmlProcessInfo_v2_t),
    ("nvmlProcessDetail_t", pynvml.c_nvmlProcessDetail_v1_t),
    ("nvmlProcessDetailList_t", pynvml.c_nvmlProcessDetailList_v1_t),
    ("nvmlProcessUtilizationSample_t", pynvml.c_nvmlProcessUtilizationSample_t),
    ("nvmlProcessUtilizationInfo_t", pynvml.c_nvmlProcessUtilizationInfo_v1_t),
    ("nvmlProcessesUtilizationInfo_t", pynvml.c_nvmlProcessesUtilizationInfo_v1_t),
    ("nvmlSample_t", pynvml.c_nvmlSample_t),
    ("nvmlFieldValue_t", pynvml.c_nvmlFieldValue_t),
    ("nvmlPowerValue_v2_t", pynvml.c_nvmlPowerValue_v2_t),
    ("nvmlEccErrorCounts_t", pynvml.c_nvmlEccErrorCounts_t),
    ("nvmlEccSramErrorStatus_t", pynvml.c_nvmlEccSramErrorStatus_v1_t),
    ("nvmlAccountingStats_t", pynvml.c_nvmlAccountingStats_t),
    ("nvmlEventData_t", pynvml.c_nvmlEventData_t),
    ("nvmlPlacement_t", pynvml.c_nvmlGpuInstancePlacement_t),
    ("nvmlGpuInstanceProfileInfo_t", pynvml.c_nvmlGpuInstanceProfileInfo_t),
    ("nvmlGpuInstanceProfileInfo_v2_t", pynvml.c_nvmlGpuInstanceProfileInfo_v2_t),
    ("nvmlGpuInstanceInfo_t", pynvml.c_nvmlGpuInstanceInfo_t),
    ("nvmlComputeInstanceProfileInfo_t", pynvml.c_nvmlComputeInstanceProfileInfo_t),
    ("nvmlComputeInstanceProfileInfo_v2_t", pynvml.c_nvmlComputeInstanceProfileInfo_v2_t),
    ("nvmlComputeInstanceInfo_t", pynvml.c_nvmlComputeInstanceInfo_t),
    ("nvmlDeviceAttributes_t", pynvml.c_nvmlDeviceAttributes),
    ("nvmlRowRemapperHistogram_t", pynvml.c_nvmlRowRemapperHistogramValues),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict:
    """Compiles a program that prints size and field offsets of every structure."""
    folder = tmp_path_factory.mktemp("abi")
    lines = ["#include <stddef.h>", "#include <stdio.h>", '#include "nvml_types.h"', "int main(void) {", 'printf("{");']
    for number, (name, twin) in enumerate(STRUCTURES):
        fields = [field[0] for field in twin._fields_]
        lines.append(f'printf("{"," if number else ""}\\"{name}\\": [%zu", sizeof({name}));')
        lines += [f'printf(", %zu", offsetof({name}, {field}));' for field in fields]
        lines.append('printf("]");')
    lines += ['printf("}");', "return 0; }"]
    source = folder / "abi.c"
    source.write_text("\n".join(lines))
    subprocess.run(["cc", "-std=c11", "-Werror", f"-I{NVML}", "-o", str(folder / "abi"), str(source)], check=True)
    return json.loads(subprocess.check_output([str(folder / "abi")]))


@pytest.mark.parametrize(("name", "twin"), STRUCTURES, ids=[row[0] for row in STRUCTURES])
def test_structure_equals_the_ctypes_structure(measured, name, twin):
    expected = [ctypes.sizeof(twin)] + [getattr(twin, field[0]).offset for field in twin._fields_]
    assert measured[name] == expected


def exported(library) -> set:
    """Returns the names of the functions that a library exports."""
    output = subprocess.check_output(["nm", "-D", "--defined-only", str(library)], text=True)
    return {line.split()[2].split("@")[0] for line in output.splitlines()}


def listed() -> set:
    """Returns the names in the list from which the stubs (functions that are not implemented) are generated."""
    return set(re.findall(r"NVML_EXPORT\((\w+)\)", (NVML / "nvml_exports.def").read_text()))


def test_nothing_but_the_listed_names_is_exported():
    assert exported(LIBRARIES / "libnvidia-ml.so.1") == listed()


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_every_name_of_the_real_library_is_exported(suite, real_smi):
    real = exported(real_smi(suite).folder / "libnvidia-ml.so.1")
    assert len(real) > 300
    assert real - exported(LIBRARIES / "libnvidia-ml.so.1") == set()


def test_stubs_return_not_supported(mixed):
    """A stub, a function that is not implemented, reads no argument, so it can be called with any arguments. Before
    nvmlInit it must return UNINITIALIZED like other functions."""
    stubs = ["nvmlDeviceGetVgpuMetadata", "nvmlUnitGetLedState", "nvmlGpmSampleGet", "nvmlVgpuTypeGetName"]
    calls = [f"nvmlLib.{name}()" for name in stubs]
    setup = "nvmlLib = ctypes.CDLL('libnvidia-ml.so.1')"
    assert mixed.nvml(*calls, setup=setup) == [pynvml.NVML_ERROR_NOT_SUPPORTED] * len(stubs)
    assert mixed.nvml(*calls, setup=setup + "\nnvmlShutdown()") == [pynvml.NVML_ERROR_UNINITIALIZED] * len(stubs)
