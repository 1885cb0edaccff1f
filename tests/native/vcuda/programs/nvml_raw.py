# SPDX-License-Identifier: Apache-2.0
"""Functions that call NVML's C functions with the structures of nvml.h. gpusim_nvml/ask_nvml.py executes this file. For
an NVML function that fills a list they return [status, count, entries], for others plain figures."""

import ctypes

import pynvml

lib = ctypes.CDLL("libnvidia-ml.so.1")
UINT, ULONG, POINTER = ctypes.c_uint, ctypes.c_ulonglong, ctypes.c_void_p


def gpu(index):
    return pynvml.nvmlDeviceGetHandleByIndex(index)


class One(ctypes.Structure):
    _fields_ = [("pid", UINT), ("bytes", ULONG)]


class Two(ctypes.Structure):
    _fields_ = [*One._fields_, ("gi", UINT), ("ci", UINT)]


class Detail(ctypes.Structure):
    _fields_ = [*Two._fields_, ("protected", ULONG)]


class Details(ctypes.Structure):
    _fields_ = [("version", UINT), ("mode", UINT), ("count", UINT), ("array", POINTER)]


class Use(ctypes.Structure):
    _fields_ = [("time", ULONG), ("pid", UINT), *((name, UINT) for name in ("sm", "mem", "enc", "dec", "jpg", "ofa"))]


class Uses(ctypes.Structure):
    _fields_ = [("version", UINT), ("count", UINT), ("since", ULONG), ("array", POINTER)]


def version_1(structure):
    return ctypes.sizeof(structure) | 1 << 24


def lists(name, entry, room=8, device=0):
    array, count = (entry * 8)(), UINT(room)
    status = getattr(lib, name)(gpu(device), ctypes.byref(count), array if room else None)
    found = [[e.pid, e.bytes] + ([e.gi, e.ci] if entry is Two else []) for e in array[: count.value]]
    return [status, count.value, sorted(found) if status == 0 else []]


def details(mode, room=8):
    array = (Detail * 8)()
    info = Details(version_1(Details), mode, room, ctypes.addressof(array) if room else None)
    status = lib.nvmlDeviceGetRunningProcessDetailList(gpu(0), ctypes.byref(info))
    found = [[e.pid, e.bytes, e.gi, e.ci] for e in array[: info.count]]
    return [status, info.count, sorted(found) if status == 0 else []]


def process_utilization(since=0):
    return sorted([e.pid, e.smUtil, e.memUtil] for e in pynvml.nvmlDeviceGetProcessUtilization(gpu(0), since))


def processes_utilization(room=8):
    array = (Use * 8)()
    info = Uses(version_1(Uses), room, 0, ctypes.addressof(array) if room else None)
    status = lib.nvmlDeviceGetProcessesUtilizationInfo(gpu(0), ctypes.byref(info))
    return [status, info.count, sorted([e.pid, e.sm, e.mem] for e in array[: info.count]) if status == 0 else []]


def newest():
    return max(s.timeStamp for s in pynvml.nvmlDeviceGetSamples(gpu(0), pynvml.NVML_GPU_UTILIZATION_SAMPLES, 0)[1])


def rates():
    found = pynvml.nvmlDeviceGetUtilizationRates(gpu(0))
    return [found.gpu, found.memory]


def samples(kind, since=0):
    return [s.sampleValue.uiVal for s in pynvml.nvmlDeviceGetSamples(gpu(0), kind, since)[1]]


class Found(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", POINTER), ("name", ctypes.c_char_p), ("address", POINTER)]


def object_of(address):
    """Returns the path of the shared object that contains the function."""
    found = Found()
    return found.file.decode() if ctypes.CDLL(None).dladdr(POINTER(address), ctypes.byref(found)) else ""


def smi_table():
    """Returns NVML's private table for nvidia-smi: the table size in bytes, then function addresses."""
    table, uuid = ctypes.POINTER(ULONG)(), bytes.fromhex("c4fe3e6cc98f6c4ea327ee696e12f7c4")
    assert lib.nvmlInternalGetExportTable(ctypes.byref(table), uuid) == 0
    return table


def stats_v2(pid):
    """Calls nvmlDeviceGetAccountingStats_v2 and returns [status, GPU utilisation in percent, sum of the samples]."""
    fields = [
        ("pid", UINT),
        *((name, UINT) for name in ("running", "gpu", "memory")),
        ("most", ULONG),
        ("samples", UINT),
    ]
    kind = type(
        "Stats",
        (ctypes.Structure,),
        {"_fields_": [*fields, ("sum_gpu", ULONG), ("sum_fb", ULONG), ("more", ULONG * 2)]},
    )
    stats = kind(pid)
    status = lib.nvmlDeviceGetAccountingStats_v2(gpu(0), ctypes.byref(stats))
    return [status, stats.gpu, stats.sum_gpu]
