# SPDX-License-Identifier: Apache-2.0
"""shown.py CLIENT: print a tool's figures of the first GPU as JSON: total and used bytes, and bytes by process id."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20


def nvidia_ml_py() -> tuple[int, int, dict]:
    """Reads the figures by nvidia-ml-py, NVIDIA's binding of NVML."""
    import pynvml

    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    memory = pynvml.nvmlDeviceGetMemoryInfo(device)
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    return memory.total, memory.used, {one.pid: one.usedGpuMemory for one in processes}


def gpustat() -> tuple[int, int, dict]:
    """Reads the figures by the command gpustat, which rounds to MiB."""
    command = [str(Path(sys.executable).with_name("gpustat")), "--json"]
    [device] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)["gpus"]
    processes = {one["pid"]: one["gpu_memory_usage"] * MIB for one in device["processes"]}
    return device["memory.total"] * MIB, device["memory.used"] * MIB, processes


def nvitop() -> tuple[int, int, dict]:
    """Reads the figures by nvitop's Python interface, which its screen uses too."""
    import nvitop

    [device] = nvitop.Device.all()
    processes = {pid: one.gpu_memory() for pid, one in device.processes().items()}
    return device.memory_total(), device.memory_used(), processes


total, used, processes = globals()[sys.argv[1]]()
print(json.dumps({"total": total, "used": used, "processes": processes}))
