# SPDX-License-Identifier: Apache-2.0
"""Functions that are passed on although they bind memory or queue work: the card's use stays what is accounted."""

from __future__ import annotations

import re

from conftest import LIMIT, MIB, OK, ROOT, Host
from test_coverage import ROWS, STREAM_VARIANT
from test_coverage_graphs import say

SIZE = 8 * MIB
BOTH_DEVICES = 1  # CUmemLocation of device 0, as one number
EVERYWHERE = 0xFFFFFFFF  # CU_DEVICE_CPU, -1
# Register 10 holds plain memory, 11 managed memory, 2 the context of the other device, 50 an access to device 0.
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
# What can bind memory. The other reasons cannot, or their functions end in one of these.
BINDING = {"managed", "host-memory", "handles", "address", "shared", "lent", "pool-setting"}
# Functions of these reasons that no row above calls, and where they are called or why they cannot be.
ELSEWHERE = {
    "cuIpcOpenEventHandle": "its handle is passed by value, and no memory stands behind it",
    "cuMemImportFromShareableHandle": "test_memory.py",
}


def base(name: str) -> str:
    return re.sub(r"_v\d+$", "", STREAM_VARIANT.sub("", name))


def test_what_is_passed_takes_nothing_that_is_not_accounted(host: Host) -> None:
    puppet = host.puppet().start()
    assert puppet.get("ctx", 1) == 2
    say(puppet, "set 1", f"alloc 10 {SIZE}", f"managed 11 {SIZE}", f"create 60 {SIZE} 0", "pool 61 0")
    say(puppet, f"put 50 {BOTH_DEVICES}", "put 51 3", "put 52 0")
    before = host.on_card()
    for line in CALLS.strip().splitlines():
        status = puppet.result(f"call {line}")
        assert status == OK, f"{line}: the simulated driver answers {status}, this proves nothing"
        # Managed memory stays charged where the program sends it to the host: it may come back at any touch.
        away = SIZE if "Prefetch" in line and " 0xffffffff " in line else 0
        for gpu in (0, 1):
            assert host.charged(gpu) == host.on_card(gpu) + (0 if gpu else away), line
    assert host.on_card() == before, "something has stayed"


def test_memory_of_the_host_is_not_the_cards(host: Host) -> None:
    puppet = host.puppet().start()
    before = host.on_card()
    say(puppet, f"call cuMemHostAlloc @30 {2 * LIMIT} 0")
    assert host.charged() == host.on_card() == before


def answers_nothing() -> set[str]:
    """Functions that the simulated driver exports and does not do."""
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
