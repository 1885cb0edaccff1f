# SPDX-License-Identifier: Apache-2.0
"""Tests the interface of the simulated libcuda: its exported names, cuGetProcAddress, and which GPUs a process sees.
Strings with ``cu`` are Python statements that cuda_program.py executes. The test gets the value of an expression,
mostly a CUresult."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LIBRARY = ROOT / "native" / "build" / "gpusim" / "libcuda.so.1"
EXPORTS = ROOT / "native" / "gpusim" / "cuda" / "exports-535.txt"


def exported() -> dict[str, str]:
    listing = subprocess.run(["nm", "-D", "--defined-only", str(LIBRARY)], check=True, capture_output=True, text=True)
    return {line.split()[2]: line.split()[1] for line in listing.stdout.splitlines()}


def test_exports_are_exactly_the_drivers():
    names = {}
    for line in EXPORTS.read_text().splitlines():
        if not line.startswith("#"):
            fields = line.split()
            names[fields[0]] = "B" if fields[-1] == "data" else "T"
    assert len(names) == 620
    assert exported() == names


def test_library_has_the_real_soname_and_needs_only_libc():
    dynamic = subprocess.run(["readelf", "-d", str(LIBRARY)], check=True, capture_output=True, text=True).stdout
    assert "Library soname: [libcuda.so.1]" in dynamic
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert set(needed) <= {"libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


@pytest.mark.parametrize("folder", ["gpusim", "gpusim-550", "gpusim-615"])
def test_either_name_is_the_library(folder):
    """Both libcuda.so.1 and libcuda.so must exist, because some programs, such as taichi, open libcuda.so."""
    link = LIBRARY.parents[1] / folder / "libcuda.so"
    assert link.is_symlink()
    assert link.samefile(link.with_name("libcuda.so.1"))


DEFAULT, LEGACY, PER_THREAD = 0, 1, 2
FOUND, NO_SYMBOL, OLD = (0, 0), (500, 1), (500, 2)
# Columns 1 to 3 are passed to cuGetProcAddress: the name; the CUDA version, as in cudaTypedefs.h; the flags. Column 4:
# the expected symbol or error.
LOOKUPS = [
    ("cuMemAlloc", 2000, DEFAULT, "cuMemAlloc"),
    ("cuMemAlloc", 3010, DEFAULT, "cuMemAlloc"),
    ("cuMemAlloc", 3020, DEFAULT, "cuMemAlloc_v2"),
    ("cuMemAlloc", 12020, PER_THREAD, "cuMemAlloc_v2"),
    ("cuCtxCreate", 3019, DEFAULT, "cuCtxCreate"),
    ("cuCtxCreate", 11030, DEFAULT, "cuCtxCreate_v2"),
    ("cuCtxCreate", 11040, DEFAULT, "cuCtxCreate_v3"),
    ("cuGetProcAddress", 11030, DEFAULT, "cuGetProcAddress"),
    ("cuGetProcAddress", 12000, DEFAULT, "cuGetProcAddress_v2"),
    ("cuMemPrefetchAsync", 8000, DEFAULT, "cuMemPrefetchAsync"),
    ("cuMemPrefetchAsync", 12020, DEFAULT, "cuMemPrefetchAsync_v2"),
    ("cuMemPrefetchAsync", 12020, PER_THREAD, "cuMemPrefetchAsync_v2_ptsz"),
    ("cuLaunchKernel", 4000, DEFAULT, "cuLaunchKernel"),
    ("cuLaunchKernel", 12020, LEGACY, "cuLaunchKernel"),
    ("cuLaunchKernel", 12020, PER_THREAD, "cuLaunchKernel_ptsz"),
    ("cuMemcpyHtoD", 12020, PER_THREAD, "cuMemcpyHtoD_v2_ptds"),
    ("cuMemcpyHtoD", 3020, DEFAULT, "cuMemcpyHtoD_v2"),
    ("cuStreamBeginCapture", 10000, DEFAULT, "cuStreamBeginCapture"),
    ("cuStreamBeginCapture", 13000, DEFAULT, "cuStreamBeginCapture_v2"),
    ("cuDeviceGetUuid", 11040, DEFAULT, "cuDeviceGetUuid_v2"),
    ("cuLaunchKernel", 3020, DEFAULT, OLD),
    ("cuGreenCtxCreate", 12040, DEFAULT, NO_SYMBOL),
    ("cuMemAlloc_v2", 12020, DEFAULT, NO_SYMBOL),
    ("cuNoSuchThing", 12020, DEFAULT, NO_SYMBOL),
]


@pytest.mark.parametrize("name, version, flags, expected", LOOKUPS)
def test_get_proc_address_finds_the_form_of_a_version(host, name, version, flags, expected):
    a = host.start()
    for function in ("cuGetProcAddress", "cuGetProcAddress_v2"):
        status = ", ctypes.byref(s)" if function.endswith("_v2") else ""
        a.ask("p = PTR(1); s = ctypes.c_int(-1)")
        result = a.ask(f"cu.raw('{function}', b'{name}', ctypes.byref(p), {version}, {flags}{status})")
        if isinstance(expected, str):
            assert result == 0
            assert a.ask(f"p.value == ctypes.cast(cu.library.{expected}, PTR).value") is True
        else:
            # If cuGetProcAddress_v2 does not find a name, it still returns success, as in NVIDIA's driver. Only the
            # pointer and the status output show that the name was not found.
            assert (result, a.ask("p.value")) == (0 if status else expected[0], None)
        if status:
            assert a.ask("s.value") == (expected if isinstance(expected, tuple) else FOUND)[1]


def test_every_base_name_resolves(host):
    rows = [line.split() for line in EXPORTS.read_text().splitlines() if not line.startswith("#")]
    versions = {row[0]: row[1] for row in rows if len(row) == 2 and row[1] != "data"}
    assert len(versions) == 589
    a = host.start()
    for symbol, version in versions.items():
        name = re.sub(r"(_v[0-9]+)?(_ptsz|_ptds)?$", "", symbol)
        flags = PER_THREAD if symbol.endswith(("_ptsz", "_ptds")) else LEGACY
        a.ask(f"p = PTR(); cu.cuGetProcAddress(b'{name}', ctypes.byref(p), {version}, {flags})")
        assert a.ask(f"p.value == ctypes.cast(cu.library.{symbol}, PTR).value") is True, symbol


def test_unimplemented_functions_return_not_supported(host):
    a = host.start()
    assert a.ask("cu.raw('cuGLGetDevices_v2')") == 801
    a.ask("t = PTR(); cu.cuGetExportTable(ctypes.byref(t), bytes(16))")
    assert a.ask("ctypes.cast(t, ctypes.POINTER(U64))[0]") > 8


FOUR = "".join(f"[gpu]\nmodel = T4\nuuid = GPU-{i}{i}{i}{i}0000-0000-0000-0000-000000000000\n" for i in "aabc")
FOUR = FOUR.replace("GPU-aaaa0000", "GPU-aaaa1111", 1)
# Keys: values of CUDA_VISIBLE_DEVICES. Values: the GPUs of the host that the process sees, in the order in which it
# sees them.
VISIBLE = {
    None: [0, 1, 2, 3],
    "": [],
    "2": [2],
    "3,0": [3, 0],
    " 1 , 2": [1, 2],
    "1,7,2": [1],
    "-1": [],
    "0,-1,2": [0],
    "1,1": [],
    "GPU-bbbb": [2],
    "gpu-cccc0000-0000-0000-0000-000000000000,GPU-aaaa1": [3, 0],
    "GPU-aaaa": [],  # This prefix matches two GPUs, so it selects none.
    "GPU-dddd,0": [],
    "NoDevFiles": [],
}


@pytest.mark.parametrize("visible", VISIBLE)
def test_cuda_visible_devices_selects_gpus(make_host, visible):
    host = make_host(FOUR)
    a = host.start(**({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    expected = VISIBLE[visible]
    assert a.ask("cu.raw('cuInit', 0)") == (0 if expected else 100)
    for index, gpu in enumerate(expected):
        a.ask("b = ctypes.create_string_buffer(16)")
        a.ask(f"cu.cuDeviceGetUuid(b, {index})")
        assert a.ask("b.raw[:4].hex()") == ["aaaa1111", "aaaa0000", "bbbb0000", "cccc0000"][gpu]
        a.ask(f"bus = ctypes.create_string_buffer(16); cu.cuDeviceGetPCIBusId(bus, 16, {index})")
        assert int(a.ask("bus.value.decode()").split(":")[1], 16) == 0x1B + 12 * gpu
    if expected:
        assert a.ask("cu.out(ctypes.c_int, 'cuDeviceGetCount')") == len(expected)
        # Memory must be charged to the GPU that the variable selects, not to the host's GPU with the same number.
        a.ask(f"cu.context({len(expected) - 1}); cu.alloc(77)")
        assert host.usage(expected[-1])["processes"][0]["memory"] == 77


MIXED = "".join(f"[gpu]\nmodel = {model}\n" for model in ("T4", "V100-16GB", "A100-40GB"))
# Columns: the environment variables; the expected GPU models, in the order in which the process sees the GPUs.
ORDERS = [
    ({}, ["A100", "T4", "V100"]),
    ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, ["A100", "T4", "V100"]),
    ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ["T4", "V100", "A100"]),
    ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2,0"}, ["A100", "T4"]),
    ({"CUDA_VISIBLE_DEVICES": "1,0"}, ["T4", "A100"]),
]


@pytest.mark.parametrize("environment, expected", ORDERS)
def test_devices_have_the_order_that_the_variables_set(make_host, environment, expected):
    a = make_host(MIXED).start(**environment)
    a.ask("cu.cuInit(0); n = ctypes.create_string_buffer(96)")
    for index, model in enumerate(expected):
        a.ask(f"cu.cuDeviceGetName(n, 96, {index})")
        assert model in a.ask("n.value.decode()")


def test_device_nodes_can_be_required(make_host):
    host = make_host("device_nodes = require\n[gpu]\nmodel = T4\nminor = 253\n[gpu]\nmodel = T4\nminor = 254\n")
    assert not Path("/dev/nvidia253").exists() and not Path("/dev/nvidia254").exists()
    assert host.start().ask("cu.raw('cuInit', 0)") == 100


# Keys: the number of a CUdevice_attribute. Values: its value on a T4.
ATTRIBUTES = {1: 1024, 10: 32, 16: 40, 33: 0x1B, 75: 7, 76: 5, 39: 1024, 41: 1, 83: 1, 97: 65536, 102: 1, 115: 1}


def test_t4_has_the_expected_attributes(host):
    a = host.start()
    a.ask("cu.cuInit(0); v = ctypes.c_int()")
    for attribute, expected in ATTRIBUTES.items():
        assert a.ask(f"cu.out(ctypes.c_int, 'cuDeviceGetAttribute', {attribute}, 0)") == expected
    known = a.ask("[i for i in range(1, 135) if cu.raw('cuDeviceGetAttribute', ctypes.byref(v), i, 0) == 0]")
    assert sorted(set(range(1, 135)) - set(known)) == [128, 133], (
        "only the numbers that CUDA 12.2 does not define may be refused"
    )
    assert a.ask("cu.raw('cuDeviceGetAttribute', ctypes.byref(v), 1, 1)") == 101
    assert a.ask("cu.raw('cuDeviceGetAttribute', ctypes.byref(v), 1000, 0)") == 1


ERRORS = {0: "CUDA_SUCCESS", 2: "CUDA_ERROR_OUT_OF_MEMORY", 999: "CUDA_ERROR_UNKNOWN", 801: "CUDA_ERROR_NOT_SUPPORTED"}


def test_result_codes_have_names(host):
    a = host.start()
    for code, name in ERRORS.items():
        a.ask(f"s = ctypes.c_char_p(); cu.cuGetErrorName({code}, ctypes.byref(s))")
        assert a.ask("s.value.decode()") == name
    assert a.ask("cu.raw('cuGetErrorString', 12345, ctypes.byref(s))") == 1


CALLS_BEFORE_INIT = ["cuDeviceGetCount", "cuMemAlloc_v2", "cuCtxSynchronize", "cuLaunchKernel", "cuMemFree_v2"]


@pytest.mark.parametrize("name", CALLS_BEFORE_INIT)
def test_calls_before_cuinit_are_refused(host, name):
    assert host.start().ask(f"cu.raw('{name}', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)") == 3


def test_calls_without_a_context_are_refused(host):
    a = host.start()
    a.ask("cu.cuInit(0)")
    assert a.ask("cu.try_alloc(1)") == 201
    a.ask("c = cu.context(); cu.cuCtxDestroy_v2(c)")
    assert a.ask("cu.try_alloc(1)") == 201
    a.ask("c = cu.context(); d = PTR(); cu.cuCtxPushCurrent_v2(c); cu.cuCtxDestroy_v2(c)")
    assert a.ask("cu.try_alloc(1)") == 709
