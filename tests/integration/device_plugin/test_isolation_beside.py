# SPDX-License-Identifier: Apache-2.0
"""Tests that the isolation check, which fills a slice (part of a GPU) and runs kernels in it, does not disturb other
tenants' memory and kernels on a fully allocated GPU. The simulated driver's accounts and the results of the tenants'
calls show this."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import BUILD, SLICE_MIB, SPLIT, until
from .test_watch import Slice

pytestmark = pytest.mark.slow

MIB = 1 << 20
CHURN_MIB = 256
# The program of a tenant: it allocates all of its slice, frees and allocates a part of it repeatedly, and runs kernels.
# It ends when its stdin ends.
TENANT = """
import ctypes, json, sys, threading
image = b'''.version 6.0
.target sm_50
.address_size 64
// .gpusim kernel tenant_spin 500
.visible .entry tenant_spin() { ret; }
'''
cuda = ctypes.CDLL("libcuda.so.1")
context, module, kernel, pointer = (ctypes.c_void_p() for _unused in range(4))
assert cuda.cuInit(0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
assert cuda.cuModuleLoadData(ctypes.byref(module), image) == 0
assert cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"tenant_spin") == 0
def take(size):
    block = ctypes.c_uint64()
    return block.value if cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(size)) == 0 else 0
churn = take(CHURN << 20)
size = 4096 << 20
while size >= 4096:
    if not take(size):
        size //= 2
said = {"rounds": 0, "refused": 0, "launch_faults": 0}
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
print("full", flush=True)
while not ended.is_set():
    for _unused in range(4):
        said["launch_faults"] += cuda.cuLaunchKernel(kernel, *[1] * 6, 0, None, None, None) != 0
    said["launch_faults"] += cuda.cuCtxSynchronize() != 0
    if churn:
        cuda.cuMemFree_v2(ctypes.c_uint64(churn))
    churn = take(CHURN << 20)
    said["refused"] += not churn
    said["rounds"] += 1
print(json.dumps(said), flush=True)
""".replace("CHURN", str(CHURN_MIB))
# A host program without a limit. Its context and allocations need more than the free memory, so it takes memory that a
# tenant has freed.
HOG = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
wanted, until = WANTED, time.monotonic() + 60
while wanted > 0 and time.monotonic() < until:
    wanted -= 64 * (cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(64 << 20)) == 0)
print(wanted, flush=True)
sys.stdin.read()
""".replace("WANTED", str(SLICE_MIB - 64))


def accounts(node) -> dict[int, dict]:
    """Returns the simulated driver's account: pid → total, peak, kernels, busy_ns and more."""
    command = [str(BUILD / "gpusim" / "gpusimctl"), "usage", "--json"]
    done = subprocess.run(command, env=node.environment, capture_output=True, text=True, check=True)
    (gpu,) = json.loads(done.stdout)["gpus"]
    return {one["pid"]: one for one in gpu["processes"]}


def waited(pid: int) -> float:
    """Returns the seconds for which the process was ready to run without a processor (second value of schedstat)."""
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total += int(task.read_text().split()[1])
    return total / 1e9


@pytest.fixture
def tenants(node, request):
    """Starts a working program in every slice except one, or except as many as the test's parameter says. Returns
    ``(pid, process)`` of each program."""
    arbiter = subprocess.Popen([str(BUILD / "vgpu-arbiter"), "--run", str(node.folder / "run")], env=node.environment)
    found = []
    try:
        for n in range(SPLIT - getattr(request, "param", 1)):
            slice_ = Slice(node, node.kubelet.run_pod(f"tenant-{n}")["answer"])
            known = set(accounts(node))
            process = slice_.start(sys.executable, "-c", TENANT)
            assert process.stdout.readline() == "full\n"
            (pid,) = set(accounts(node)) - known
            found.append((pid, process))
        yield found
    finally:
        for _pid, process in found:
            if process.poll() is None:
                subprocess.run(["kill", "-KILL", "--", f"-{process.pid}"], check=False, stderr=subprocess.DEVNULL)
            process.communicate()
        arbiter.terminate()
        arbiter.wait()


def ended(process) -> dict:
    return json.loads(process.communicate("", timeout=60)[0])


# With two free slices, the last checks use both slices.
FREE = [pytest.param(1, "not-run", id="one free slice"), pytest.param(2, "passed", id="two free slices")]


@pytest.mark.parametrize(("tenants", "beside"), FREE, indirect=["tenants"])
def test_check_does_not_disturb_working_tenants(node, tenants, beside):
    before = accounts(node)
    sold = {pid: before[pid]["total"] + CHURN_MIB * MIB for pid, _process in tenants}
    assert all(most > SLICE_MIB * MIB * 9 // 10 for most in sold.values()), (
        "expected tenants that fill their slices before the check"
    )
    start = time.monotonic()
    idle = {pid: waited(pid) for pid, _process in tenants}
    rc, result = node.isolation()
    # The isolation check passes, as on an idle GPU.
    (one,) = result["results"]
    assert (rc, result["verdict"]) == (0, "passed"), result
    assert {check["verdict"] for check in one["checks"] if check["name"] == "bypass-namespace"} == {"detected"}
    assert {check["verdict"] for check in one["checks"] if check["name"] == "import-beside"} == {beside}
    # The driver's account has the same processes, each with all its memory, and their kernels continued to run.
    now, took = accounts(node), time.monotonic() - start
    assert set(now) == {pid for pid, _process in tenants}, "expected exactly the processes of the tenants on the GPU"
    for pid, _process in tenants:
        assert SLICE_MIB * MIB - 2 * CHURN_MIB * MIB <= now[pid]["total"] <= SLICE_MIB * MIB
        share = (now[pid]["busy_ns"] - before[pid]["busy_ns"]) / 1e9 / took
        starved = (waited(pid) - idle[pid]) / took
        assert now[pid]["kernels"] > before[pid]["kernels"]
        # Each tenant may use a third of the GPU's time. A process that waits for a processor launches its kernels late,
        # so its low share proves nothing.
        assert share > 0.25 or starved > 0.05, (share, starved)
    assert max(one["peak"] for one in now.values()) <= SLICE_MIB * MIB
    # The tenants report that no allocation within the limit was refused and that no launch failed.
    for _pid, process in tenants:
        said = ended(process)
        assert said["rounds"] > 0
        assert (said["refused"], said["launch_faults"]) == (0, 0), said


def test_unlimited_program_disturbs_the_tenants(node, tenants):
    """Negative control: a program without a limit next to the same tenants makes their allocations fail."""
    hog = subprocess.Popen(
        [sys.executable, "-c", HOG], env=node.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert int(hog.stdout.readline()) <= 0, "expected the program without a limit to get its whole allocation"
        kernels = {pid: one["kernels"] + 2 * 4 for pid, one in accounts(node).items()}
        until(
            lambda: all(accounts(node)[pid]["kernels"] > kernels[pid] for pid, _process in tenants),
            "two more rounds of kernels of each tenant",
        )
        assert sum(ended(process)["refused"] for _pid, process in tenants) > 0
    finally:
        hog.communicate("")
