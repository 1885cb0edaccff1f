# SPDX-License-Identifier: Apache-2.0
"""Tests the values that nvidia-ml-py reads from GPUs of every model. The expected figures are the vendor's.

Strings such as ``nvmlDeviceGetCount()`` are Python expressions that ask_nvml.py evaluates in a new process. ``gpu(0)``
is the handle of GPU 0."""

from __future__ import annotations

import pytest

MIB = 1 << 20

# Keys: models. Values, all expected: name; memory in MiB; number of SMs; compute capability; PCI device; brand; whether
# the model has ECC; maximum number of MIG instances; power limit in W.
MODELS = {
    "T4": ("Tesla T4", 15360, 40, [7, 5], 0x1EB810DE, "NVML_BRAND_TESLA", True, 0, 70),
    "V100-16GB": ("Tesla V100-SXM2-16GB", 16160, 80, [7, 0], 0x1DB110DE, "NVML_BRAND_TESLA", True, 0, 300),
    "A100-40GB": ("NVIDIA A100-SXM4-40GB", 40960, 108, [8, 0], 0x20B010DE, "NVML_BRAND_NVIDIA", True, 7, 400),
    "A100-80GB": ("NVIDIA A100-SXM4-80GB", 81920, 108, [8, 0], 0x20B210DE, "NVML_BRAND_NVIDIA", True, 7, 400),
    "H100-80GB": ("NVIDIA H100 80GB HBM3", 81559, 132, [9, 0], 0x233010DE, "NVML_BRAND_NVIDIA", True, 7, 700),
    "H200": ("NVIDIA H200", 143771, 132, [9, 0], 0x233510DE, "NVML_BRAND_NVIDIA", True, 7, 700),
    "GTX-1080-Ti": ("NVIDIA GeForce GTX 1080 Ti", 11178, 28, [6, 1], 0x1B0610DE, "NVML_BRAND_GEFORCE", False, 0, 250),
}

ARCHITECTURES = {(6, 1): 4, (7, 0): 5, (7, 5): 6, (8, 0): 7, (9, 0): 9}


@pytest.mark.parametrize("model", MODELS)
def test_each_model_has_its_published_figures(make_host, model):
    name, memory, sms, capability, device_id, brand, ecc, mig, watts = MODELS[model]
    host = make_host(f"[gpu]\nmodel = {model}\n")
    cores = {6: 128, 7: 64, 8: 64, 9: 128}[capability[0]]
    expected = {
        "nvmlDeviceGetCount()": 1,
        "nvmlDeviceGetName(gpu(0))": name,
        "nvmlDeviceGetMemoryInfo(gpu(0)).total": memory * MIB,
        "nvmlDeviceGetNumGpuCores(gpu(0))": sms * cores,
        "nvmlDeviceGetCudaComputeCapability(gpu(0))": capability,
        "nvmlDeviceGetPciInfo(gpu(0)).pciDeviceId": device_id,
        f"nvmlDeviceGetBrand(gpu(0)) == {brand}": True,
        "nvmlDeviceGetEccMode(gpu(0))": [1, 1] if ecc else "NVML_ERROR_NOT_SUPPORTED",
        "nvmlDeviceGetMaxMigDeviceCount(gpu(0))": mig,
        "nvmlDeviceGetMigMode(gpu(0))": [0, 0] if mig else "NVML_ERROR_NOT_SUPPORTED",
        "nvmlDeviceGetPowerManagementDefaultLimit(gpu(0))": watts * 1000,
        "nvmlDeviceGetArchitecture(gpu(0))": {60: 4, 61: 4, 70: 5, 75: 6, 80: 7, 90: 9}[
            capability[0] * 10 + capability[1]
        ],
        "nvmlDeviceGetFanSpeed(gpu(0))": "NVML_ERROR_NOT_SUPPORTED" if ecc else 20,
        "nvmlDeviceGetPowerUsage(gpu(0)) < nvmlDeviceGetPowerManagementDefaultLimit(gpu(0)) / 2": True,
    }
    assert dict(zip(expected, host.nvml(*expected))) == expected


# UUIDs and PCI addresses of the four GPUs of the profile `mixed`, in the order of their indices.
UUIDS = [f"GPU-5a4f1d3e-000{n}-4c6b-9d57-7430c1a2b3d4" for n in (1, 2, 3, 4)]
BUSES = ["00000000:3B:00.0", "00000000:5E:00.0", "00000000:AF:00.0", "00000000:D8:00.0"]

# Columns: the expression; its expected value on a host with the profile `mixed`.
CALLS = {
    "nvmlSystemGetDriverVersion()": "535.261.03",
    "nvmlSystemGetNVMLVersion()": "12.535.261.03",
    "nvmlSystemGetCudaDriverVersion()": 12020,
    "nvmlErrorString(NVML_ERROR_GPU_IS_LOST)": "GPU is lost",
    "nvmlErrorString(NVML_ERROR_DRIVER_NOT_LOADED)": "Driver Not Loaded",
    "nvmlErrorString(12345)": "Unknown Error",
    "nvmlDeviceGetCount()": 4,
    "[nvmlDeviceGetUUID(gpu(i)) for i in range(4)]": UUIDS,
    "[nvmlDeviceGetPciInfo(gpu(i)).busId for i in range(4)]": BUSES,
    "[nvmlDeviceGetPciInfo(gpu(i)).busIdLegacy for i in range(2)]": ["0000:3B:00.0", "0000:5E:00.0"],
    "[nvmlDeviceGetIndex(gpu(i)) for i in range(4)]": [0, 1, 2, 3],
    "[nvmlDeviceGetMinorNumber(gpu(i)) for i in range(4)]": [0, 1, 2, 3],
    f"[nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID(u)) for u in {UUIDS}]": [0, 1, 2, 3],
    f"nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID('{UUIDS[1].upper()}'))": 1,
    f"[nvmlDeviceGetIndex(nvmlDeviceGetHandleByPciBusId(b)) for b in {BUSES}]": [0, 1, 2, 3],
    "nvmlDeviceGetIndex(nvmlDeviceGetHandleByPciBusId('0000:af:00.0'))": 2,
    "nvmlDeviceGetIndex(nvmlDeviceGetHandleByPciBusId('5e:00'))": 1,
    "nvmlDeviceGetIndex(nvmlDeviceGetHandleBySerial(nvmlDeviceGetSerial(gpu(2))))": 2,
    "gpu(4)": "NVML_ERROR_INVALID_ARGUMENT",
    "nvmlDeviceGetHandleByUUID('GPU-none')": "NVML_ERROR_NOT_FOUND",
    "nvmlDeviceGetHandleByPciBusId('0000:01:00.0')": "NVML_ERROR_NOT_FOUND",
    "nvmlDeviceGetHandleByPciBusId('word')": "NVML_ERROR_INVALID_ARGUMENT",
    "nvmlDeviceGetHandleBySerial('0')": "NVML_ERROR_NOT_FOUND",
    "nvmlDeviceGetSerial(gpu(3))": "NVML_ERROR_NOT_SUPPORTED",
    "nvmlDeviceGetUUID(None)": "NVML_ERROR_INVALID_ARGUMENT",
    "nvmlDeviceGetMemoryInfo(gpu(0))": {"total": 15360 * MIB, "free": 15360 * MIB, "used": 0},
    "nvmlDeviceGetMemoryInfo(gpu(0), version=nvmlMemory_v2)": {
        "version": 0x02000028,
        "total": 15360 * MIB,
        "reserved": 0,
        "free": 15360 * MIB,
        "used": 0,
    },
    "nvmlDeviceGetUtilizationRates(gpu(0))": {"gpu": 0, "memory": 0},
    "nvmlDeviceGetComputeRunningProcesses(gpu(0))": [],
    "nvmlDeviceGetComputeRunningProcesses_v2(gpu(0))": [],
    "nvmlDeviceGetGraphicsRunningProcesses(gpu(0))": [],
    "nvmlDeviceGetMPSComputeRunningProcesses(gpu(0))": [],
    "nvmlDeviceGetProcessUtilization(gpu(0), 0)": "NVML_ERROR_NOT_FOUND",
    "nvmlDeviceGetPersistenceMode(gpu(0))": 0,
    "nvmlDeviceGetComputeMode(gpu(0))": 0,
    "nvmlDeviceGetDisplayActive(gpu(0))": 0,
    "nvmlDeviceGetVirtualizationMode(gpu(0))": 0,
    "nvmlDeviceGetClockInfo(gpu(1), NVML_CLOCK_MEM)": 877,
    "nvmlDeviceGetMaxClockInfo(gpu(0), NVML_CLOCK_SM)": 1590,
    "nvmlDeviceGetApplicationsClock(gpu(0), NVML_CLOCK_MEM)": 5001,
    "nvmlDeviceGetTemperature(gpu(0), NVML_TEMPERATURE_GPU)": 30,
    "nvmlDeviceGetTemperatureThreshold(gpu(0), NVML_TEMPERATURE_THRESHOLD_SHUTDOWN)": 96,
    "nvmlDeviceGetPerformanceState(gpu(0))": 8,
    "nvmlDeviceGetPowerUsage(gpu(0))": 9000,
    "nvmlDeviceGetCurrPcieLinkGeneration(gpu(2))": 4,
    "nvmlDeviceGetCurrPcieLinkWidth(gpu(2))": 16,
    "nvmlDeviceGetTotalEccErrors(gpu(0), NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)": 0,
    "nvmlDeviceGetTotalEccErrors(gpu(3), 0, NVML_VOLATILE_ECC)": "NVML_ERROR_NOT_SUPPORTED",
    "nvmlDeviceGetRetiredPages(gpu(0), 0)": [],
    "nvmlDeviceGetRetiredPages(gpu(2), 0)": "NVML_ERROR_NOT_SUPPORTED",
    "nvmlDeviceGetRemappedRows(gpu(2))": [0, 0, 0, 0],
    "nvmlDeviceGetRemappedRows(gpu(0))": "NVML_ERROR_NOT_SUPPORTED",
    "nvmlDeviceGetSupportedEventTypes(gpu(0))": 0x1 | 0x2 | 0x8,
    "nvmlDeviceGetSupportedEventTypes(gpu(3))": 0x8,
    "nvmlDeviceGetTopologyCommonAncestor(gpu(0), gpu(1))": 30,
    "nvmlDeviceGetP2PStatus(gpu(0), gpu(1), 0)": 2,
    "nvmlDeviceGetP2PStatus(gpu(0), gpu(0), 0)": "NVML_ERROR_INVALID_ARGUMENT",
    "nvmlDeviceOnSameBoard(gpu(0), gpu(0))": 1,
    "nvmlDeviceIsMigDeviceHandle(gpu(2))": 0,
    "nvmlDeviceGetMigDeviceHandleByIndex(gpu(0), 0)": "NVML_ERROR_NOT_SUPPORTED",
    "nvmlDeviceGetMigDeviceHandleByIndex(gpu(2), 0)": "NVML_ERROR_NOT_FOUND",
    "nvmlDeviceGetAttributes(gpu(2))": "NVML_ERROR_INVALID_ARGUMENT",
    "nvmlDeviceGetVbiosVersion(gpu(0))": "96.00.00.00.01",
    "nvmlDeviceGetBAR1MemoryInfo(gpu(0)).bar1Total": 256 * MIB,
    "nvmlDeviceGetMemoryBusWidth(gpu(2))": 5120,
    "nvmlDeviceGetEncoderUtilization(gpu(0))[0]": 0,
    "nvmlDeviceGetAccountingPids(gpu(0))": "NVML_ERROR_NOT_SUPPORTED",
    "nvmlDeviceGetNvLinkState(gpu(0), 0)": "NVML_ERROR_NOT_SUPPORTED",
    "nvmlUnitGetCount()": 0,
    "nvmlSystemGetProcessName(1) != ''": True,
    "nvmlSystemGetProcessName(4194300)": "NVML_ERROR_NOT_FOUND",
    "[v.value.ullVal for v in nvmlDeviceGetFieldValues(gpu(2), [1, 189, 31])][:2]": [1, 400000],
    "[v.nvmlReturn for v in nvmlDeviceGetFieldValues(gpu(2), [1, 189, 31, 9999])]": [0, 0, 3, 3],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Evaluates all these expressions in one process and returns their values."""
    from simulated_host import PROFILES, Host

    host = Host(tmp_path_factory.mktemp("mixed"), (PROFILES / "mixed.profile").read_text())
    return dict(zip(CALLS, host.nvml(*CALLS)))


@pytest.mark.parametrize("call", CALLS)
def test_each_call_returns_its_expected_value(answers, call):
    assert answers[call] == CALLS[call]


def test_nvml_counts_initialisations(mixed):
    setup = "nvmlLib = ctypes.CDLL('libnvidia-ml.so.1')\nnvmlLib.nvmlInit_v2()\nnvmlLib.nvmlShutdown()"
    assert mixed.nvml("nvmlDeviceGetCount()", setup=setup) == [4]
    shut = setup + "\nnvmlLib.nvmlShutdown()"
    assert mixed.nvml("nvmlDeviceGetCount()", "nvmlLib.nvmlShutdown()", setup=shut) == ["NVML_ERROR_UNINITIALIZED", 1]


# Columns: the version of the structure; the expected return code.
VERSIONS = [(0x02000028, 0), (0x01000028, 25), (0x02000030, 25), (0, 25)]


@pytest.mark.parametrize(("version", "code"), VERSIONS)
def test_memory_info_v2_checks_the_version_of_its_structure(mixed, version, code):
    setup = f"m = c_nvmlMemory_v2_t()\nm.version = {version}\nlib = ctypes.CDLL('libnvidia-ml.so.1')"
    assert mixed.nvml("lib.nvmlDeviceGetMemoryInfo_v2(gpu(0), ctypes.byref(m))", setup=setup) == [code]


def test_forked_child_queries_nvml_without_a_new_init(mixed):
    setup = (
        "import os\nread, write = os.pipe()\npid = os.fork()\n"
        "if pid == 0:\n    os.write(write, nvmlDeviceGetName(gpu(0)).encode())\n    os._exit(0)\nos.waitpid(pid, 0)"
    )
    assert mixed.nvml("os.read(read, 100).decode()", "nvmlDeviceGetName(gpu(0))", setup=setup) == ["Tesla T4"] * 2


def test_texts_are_never_cut(mixed):
    setup = "lib = ctypes.CDLL('libnvidia-ml.so.1')\nb = ctypes.create_string_buffer(64)"
    small = "lib.nvmlDeviceGetName(gpu(0), b, 8)"
    right = "lib.nvmlDeviceGetName(gpu(0), b, 9)"
    assert mixed.nvml(small, right, "b.value.decode()", setup=setup) == [7, 0, "Tesla T4"]


def test_threads_may_call_at_once(mixed):
    """ctypes releases Python's global lock during a call, so the calls of several threads really overlap."""
    setup = (
        "import threading\nwrong = []\n"
        "def ask(i):\n    for _ in range(200):\n"
        "        if nvmlDeviceGetIndex(gpu(i)) != i or nvmlDeviceGetMemoryInfo(gpu(i)).used != 0:\n"
        "            wrong.append(i)\n"
        "threads = [threading.Thread(target=ask, args=(n % 4,)) for n in range(8)]\n"
        "[thread.start() for thread in threads]\n[thread.join() for thread in threads]"
    )
    assert mixed.nvml("wrong", "len(threads)", setup=setup) == [[], 8]
