# SPDX-License-Identifier: Apache-2.0
"""Tests driver functions that the library does not hook although they bind memory or queue work. After each call, the
memory charged to the process must equal the memory in use on the simulated card. Lines such as ``cuMemFreeHost $33``
name a driver function and its arguments for programs/puppet.c: $33 is the value of register 33, @33 its address."""

from __future__ import annotations

import re

from conftest import LIMIT, MIB, OK, ROOT, Host
from test_coverage import ROWS, STREAM_VARIANT
from test_coverage_graphs import say

SIZE = 8 * MIB
BOTH_DEVICES = 1  # A CUmemLocation that names device 0, as one number.
EVERYWHERE = 0xFFFFFFFF  # The constant CU_DEVICE_CPU, which is -1.
# Contents of the registers: 10 device memory; 11 managed memory; 2 the context of device 1; 50 an access descriptor of
# device 0.
CALLS = """
cuStreamCreate @20 1
cuStreamCreateWithPriority @21 1 0
cuEventCreate @22 0
cuEventCreate @23 6
cuIpcGetEventHandle @100 $23
cuEventRecord $22 $20
cuStreamWaitEvent $21 $22 0
cuMemHostAlloc @30 67108864 0
cuMemHostGetDevicePointer_v2 @31 $30 0
cuMemHostGetFlags @32 $30
cuMemAllocHost_v2 @33 8388608
cuMemHostRegister_v2 @4096 65536 0
cuMemcpyHtoD_v2 $10 @4096 65536
cuMemcpyHtoDAsync_v2 $10 $30 8388608 $20
cuMemcpyDtoHAsync_v2 $30 $10 8388608 $20
cuMemcpyDtoD_v2 $11 $10 65536
cuMemsetD8_v2 $10 0 8388608
cuMemsetD32Async $10 7 1024 $21
cuMemHostUnregister @4096
cuMemFreeHost $33
cuMemAdvise $11 8388608 1 0
cuMemAdvise $11 8388608 3 0
cuMemAdvise_v2 $11 8388608 3 1
cuMemPrefetchAsync $11 8388608 0 $20
cuMemPrefetchAsync $11 8388608 0xffffffff $20
cuMemPrefetchAsync_v2 $11 8388608 1 0 $20
cuStreamAttachMemAsync $20 $11 0 1
cuIpcGetMemHandle @100 $10
cuMemAddressReserve @40 8388608 0 0 0
cuMemMap $40 8388608 0 $60 0
cuMemSetAccess $40 8388608 @50 1
cuMemUnmap $40 8388608
cuMemAddressFree $40 8388608
cuMemPoolSetAttribute $61 4 @52
cuMemPoolSetAccess $61 @50 1
cuDeviceSetMemPool 0 $61
cuMemAllocAsync @62 8388608 $20
cuMemFreeAsync $62 $20
cuCtxEnablePeerAccess $2 0
cuMemcpyPeer $10 $1 $10 $1 65536
cuCtxDisablePeerAccess $2
cuEventQuery $22
cuStreamQuery $20
cuProfilerStart
cuProfilerStop
cuCtxResetPersistingL2Cache
cuStreamSynchronize $20
cuEventDestroy_v2 $22
cuStreamDestroy_v2 $20
"""
# Copies, fills, events and host callbacks. Contents of the registers: 12 and 13 arrays; 30 pinned host memory; 200 a
# descriptor of a 2D copy; 240 of a 3D copy; 280 of a 3D copy between contexts.
QUEUED = """
cuMemcpy $11 $10 65536
cuMemcpyAsync $11 $10 65536 $20
cuMemcpyPeerAsync $11 $1 $10 $1 65536 $20
cuMemcpyDtoH_v2 $30 $10 65536
cuMemcpyHtoD_v2 $10 $30 65536
cuMemcpyHtoDAsync_v2 $10 $30 65536 $20
cuMemcpyDtoHAsync_v2 $30 $10 65536 $20
cuMemcpyDtoD_v2 $11 $10 65536
cuMemcpyDtoDAsync_v2 $11 $10 65536 $20
cuMemcpyPeer $11 $1 $10 $1 65536
cuMemcpy2D_v2 @200
cuMemcpy2DUnaligned_v2 @200
cuMemcpy2DAsync_v2 @200 $20
cuMemcpy3D_v2 @240
cuMemcpy3DAsync_v2 @240 $20
cuMemcpy3DPeer @280
cuMemcpy3DPeerAsync @280 $20
cuMemcpyHtoA_v2 $12 0 $30 4096
cuMemcpyHtoAAsync_v2 $12 0 $30 4096 $20
cuMemcpyAtoH_v2 $30 $12 0 4096
cuMemcpyAtoHAsync_v2 $30 $12 0 4096 $20
cuMemcpyDtoA_v2 $12 0 $10 4096
cuMemcpyAtoD_v2 $10 $12 0 4096
cuMemcpyAtoA_v2 $13 0 $12 0 4096
cuMemsetD8_v2 $10 1 65536
cuMemsetD16_v2 $10 1 65536
cuMemsetD32_v2 $10 1 65536
cuMemsetD8Async $10 1 65536 $20
cuMemsetD16Async $10 1 65536 $20
cuMemsetD32Async $10 1 65536 $20
cuMemsetD2D8_v2 $10 1024 1 512 64
cuMemsetD2D16_v2 $10 1024 1 512 64
cuMemsetD2D32_v2 $10 4096 1 512 64
cuMemsetD2D8Async $10 1024 1 512 64 $20
cuMemsetD2D16Async $10 1024 1 512 64 $20
cuMemsetD2D32Async $10 4096 1 512 64 $20
cuEventRecord $22 $20
cuEventRecordWithFlags $22 $20 0
cuStreamWaitEvent $21 $22 0
cuMemPrefetchAsync $11 65536 0 $20
cuStreamAddCallback $20 &abs 0 0
cuLaunchHostFunc $20 &abs 0
cuStreamSynchronize $20
"""
# Members of the descriptors of a 2D copy and of a 3D copy.
PLANE = ("0 0 2 0 $10 0 1024 0 0 2 0 $11 0 1024", "512 64")
BOX = ("0 0 0 0 2 0 $10 0 {0} 1024 64 0 0 0 0 2 0 $11 0 {0} 1024 64", "512 64 1")
QUEUING = {"copies", "orders", "host-callback"}
# coverage.txt gives a reason why a function is not hooked. Functions with these reasons may bind memory, all others
# cannot.
BINDING = {"managed", "host-memory", "handles", "address", "shared", "exported", "pool-setting"}
# Keys: functions with these reasons that CALLS does not contain. Values: the test that calls the function, or why no
# test can call it.
ELSEWHERE = {
    "cuIpcOpenEventHandle": "its handle is passed by value, and it refers to no memory",
    "cuMemImportFromShareableHandle": "test_memory.py",
}


def base(name: str) -> str:
    return re.sub(r"_v\d+$", "", STREAM_VARIANT.sub("", name))


def test_unhooked_memory_functions_take_no_uncharged_memory(host: Host) -> None:
    puppet = host.puppet().start()
    assert puppet.get("ctx", 1) == 2
    say(puppet, "set 1", f"alloc 10 {SIZE}", f"managed 11 {SIZE}", f"create 60 {SIZE} 0", "pool 61 0")
    say(puppet, f"put 50 {BOTH_DEVICES}", "put 51 3", "put 52 0")
    before = host.on_card()
    for line in CALLS.strip().splitlines():
        status = puppet.result(f"call {line}")
        assert status == OK, f"{line}: the simulated driver returns {status}, so the test proves nothing"
        # Managed memory stays charged after a prefetch to the host, because any access from the GPU may move it back.
        away = SIZE if "Prefetch" in line and " 0xffffffff " in line else 0
        for gpu in (0, 1):
            assert host.charged(gpu) == host.on_card(gpu) + (0 if gpu else away), line
    assert host.on_card() == before, "the calls left memory on the card"


def structure(first: int, *members: str) -> list[str]:
    return [f"put {first + i} {word}" for i, word in enumerate(" ".join(members).split())]


def test_unhooked_work_takes_no_memory(host: Host) -> None:
    puppet = host.puppet().start()
    say(puppet, "set 1", f"alloc 10 {SIZE}", f"managed 11 {SIZE}", "array 12 1024 64 32", "array 13 1024 64 32")
    say(puppet, *(f"call {line}" for line in CALLS.strip().splitlines()[:4]), f"call cuMemHostAlloc @30 {SIZE} 0")
    say(puppet, *structure(200, *PLANE), *structure(240, BOX[0].format(0), BOX[1]))
    say(puppet, *structure(280, BOX[0].format("$1"), BOX[1]))
    before = host.on_card()
    for line in QUEUED.strip().splitlines():
        status = puppet.result(f"call {line}")
        assert status == OK, f"{line}: the simulated driver returns {status}, so the test proves nothing"
        assert host.charged() == host.on_card() == before, line


def test_every_function_that_queues_work_is_called() -> None:
    silent = answers_nothing()
    called = {base(line.split()[0]) for line in (QUEUED + CALLS.lstrip()).strip().splitlines()}
    wanted = {
        base(row.name)
        for row in ROWS
        if row.verdict == "passed" and row.reason in QUEUING and "535" in row.where and row.name not in silent
    }
    assert len(wanted) > 30
    assert wanted - called == set()


def test_host_memory_is_not_charged(host: Host) -> None:
    puppet = host.puppet().start()
    before = host.on_card()
    say(puppet, f"call cuMemHostAlloc @30 {2 * LIMIT} 0")
    assert host.charged() == host.on_card() == before


def answers_nothing() -> set[str]:
    """Returns the functions that the simulated driver exports as stubs without an effect."""
    generated = (ROOT / "native/build/obj/gpusim/cuda/generated/stubs.c").read_text()
    return set(re.findall(r"CUresult (\w+)\(void\) \{ return", generated))


def test_every_function_that_binds_memory_is_called() -> None:
    silent = answers_nothing()
    called = {base(line.split()[0]) for line in CALLS.strip().splitlines()}
    wanted = {
        base(row.name)
        for row in ROWS
        if row.verdict == "passed" and row.reason in BINDING and "535" in row.where and row.name not in silent
    }
    assert len(wanted) > 20
    assert wanted - called - ELSEWHERE.keys() == set()
    assert called & ELSEWHERE.keys() == set()
