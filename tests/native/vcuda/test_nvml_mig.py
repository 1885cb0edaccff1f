# SPDX-License-Identifier: Apache-2.0
"""Tests what NVML shows in a container with a slice of a MIG device: the memory of the MIG device and of the GPU, and
the processes. test_visible.py tests CUDA in a MIG device.

The test process plays a process of the container. For this it takes a slot (the entry of a process) in the ledger, the
container's record of its GPU memory."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
from pathlib import Path

import layouts
import pytest
from conftest import MIB, Host
from nvml_inside import ask
from test_nvidia_smi_inside import fetched

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change MIG mode")
GIB = 1 << 30


@pytest.fixture
def mig(tmp_path: Path, programs: Path):
    """Yields a host of two A100; GPU 0 has the MIG devices 3g.40gb, 2g.20gb and 1g.10gb, whose UUIDs are `host.mig`."""
    folder = fetched("bookworm")
    version = (folder / "version").read_text().strip()
    profile = f"driver_version = {version}\ncuda_version = 12.2\n[gpu]\nmodel = A100-80GB\ncount = 2\n"
    host = Host(tmp_path, programs, profile)

    def smi(*arguments: str, **options: object) -> str:
        env = host.env(**options)  # type: ignore[arg-type]
        done = subprocess.run([folder / "nvidia-smi", *arguments], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return done.stdout

    smi("-i", "0", "-mig", "1", preload=False)
    smi("mig", "-i", "0", "-cgi", "3g.40gb,2g.20gb,1g.10gb", "-C", preload=False)
    host.mig = re.findall(r"UUID: (MIG-[0-9a-f-]{36})", smi("-L", preload=False))  # type: ignore[attr-defined]
    host.smi = smi  # type: ignore[attr-defined]
    assert len(host.mig) == 3  # type: ignore[attr-defined]
    yield host
    host.close()


def slices(host: Host, sizes: dict) -> None:
    devices = [{"uuid": uuid, "memory_bytes": size} for uuid, size in sizes.items()]
    host.limits.write_bytes(layouts.pack_limits({"allocation": "t", "devices": devices}))
    host.ledger.write_bytes(layouts.pack_ledger(list(sizes), "t"))


class Member:
    """Registers the test process in the ledger as a process of the container, with these bytes on each device."""

    def __init__(self, host: Host, *used: int) -> None:
        self.stream = host.ledger.open("r+b")
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, layouts.fields.LEDGER_ALIVE_BASE, 1, 0)
        fcntl.fcntl(self.stream, 37, lock)  # Number of the command F_OFD_SETLK.
        fields, slot = layouts.fields.LEDGER_SLOT_FIELDS, layouts.fields.LEDGER_SLOT_OFFSET
        for offset, fmt, values in (
            (slot + fields["used"][0], f"<{len(used)}Q", used),
            (slot + fields["pid"][0], "<I", (os.getpid(),)),
            (layouts.fields.LEDGER_FIELDS["slot_high"][0], "<I", (1,)),
        ):
            self.stream.seek(offset)
            self.stream.write(struct.pack(fmt, *values))
        self.stream.flush()


MEMORY = "[nvmlDeviceGetMemoryInfo({0}).total, nvmlDeviceGetMemoryInfo({0}).used, nvmlDeviceGetMemoryInfo({0}).free]"
DEVICE = "nvmlDeviceGetHandleByUUID('{}')"
LIST = (
    "sorted([p.pid, p.usedGpuMemory, p.gpuInstanceId, p.computeInstanceId] for p in "
    "nvmlDeviceGetComputeRunningProcesses_v3({}))"
)


def test_mig_device_and_its_gpu_show_the_slice(mig) -> None:
    first, second, third = mig.mig
    slices(mig, {first: 10 * GIB, third: 3 * GIB})
    member = Member(mig, 2 * GIB, 5 * MIB)
    handles = [DEVICE.format(first), DEVICE.format(second), DEVICE.format(third), "gpu(0)", "gpu(1)"]
    denied = "NVML_ERROR_NO_PERMISSION"
    assert ask(mig, *(MEMORY.format(handle) for handle in handles)) == [
        [10 * GIB, 2 * GIB, 8 * GIB],
        denied,
        [3 * GIB, 5 * MIB, 3 * GIB - 5 * MIB],
        # For the GPU, NVML shows the sum of the slice's MIG devices.
        [13 * GIB, 2 * GIB + 5 * MIB, 11 * GIB - 5 * MIB],
        denied,
    ]
    instances = ask(
        mig, *(f"[nvmlDeviceGetGpuInstanceId({h}), nvmlDeviceGetComputeInstanceId({h})]" for h in handles[:3])
    )
    mine = os.getpid()
    on_first, on_third = [mine, 2 * GIB, *instances[0]], [mine, 5 * MIB, *instances[2]]
    assert ask(mig, *(LIST.format(handle) for handle in handles)) == [
        [on_first],
        [],
        [on_third],
        sorted([on_first, on_third]),
        [],
    ]
    member.stream.close()
    assert ask(mig, MEMORY.format("gpu(0)"), LIST.format("gpu(0)")) == [[13 * GIB, 0, 13 * GIB], []]


def test_nvidia_smi_shows_the_mig_device_and_its_process(mig) -> None:
    slices(mig, {mig.mig[1]: 7 * GIB})
    member = Member(mig, 100 * MIB)
    text = mig.smi()
    assert re.search(r"100MiB / +7168MiB", text)
    row = re.search(r"\|\s+0\s+(\d+)\s+(\d+)\s+(\d+)\s+C\s+(\S+)\s+100MiB", text)
    assert row and int(row[3]) == os.getpid()
    member.stream.close()
    assert "No running processes found" in mig.smi()
