# SPDX-License-Identifier: Apache-2.0
"""Tests that the simulated driver records the memory of each process. gpusimctl reads these records from the host's
shared state. Strings with ``cu`` are Python statements that cuda_program.py executes. The test gets the value of an
expression, mostly a CUresult."""

from __future__ import annotations

import pytest

MIB = 1 << 20
CONTEXT = 100 * MIB  # The size of a context, which the profile's key context_mib sets.
TOTAL = 15360 * MIB


def held(host, program) -> dict:
    found = [p for p in host.usage()["processes"] if p["pid"] == program.pid]
    assert len(found) <= 1
    return found[0] if found else {"memory": 0, "context": 0, "module": 0, "total": 0}


def test_context_is_charged_and_freed(host):
    a = host.start()
    a.ask("cu.cuInit(0)")
    assert held(host, a)["total"] == 0
    a.ask("c = cu.context()")
    assert held(host, a)["context"] == CONTEXT
    a.ask("d = cu.context()")
    assert held(host, a)["context"] == 2 * CONTEXT
    a.ask("cu.cuCtxDestroy_v2(d)")
    a.ask("p = cu.out(PTR, 'cuDevicePrimaryCtxRetain', 0)")
    a.ask("q = cu.out(PTR, 'cuDevicePrimaryCtxRetain', 0)")
    assert a.ask("p == q") is True
    assert held(host, a)["context"] == 2 * CONTEXT
    a.ask("cu.cuDevicePrimaryCtxRelease_v2(0)")
    assert held(host, a)["context"] == 2 * CONTEXT
    a.ask("cu.cuDevicePrimaryCtxRelease_v2(0)")
    assert held(host, a)["context"] == CONTEXT
    a.end()
    assert host.usage()["used"] == 0


def test_managed_memory_is_charged_only_on_the_gpu(host):
    """Managed memory is placed on the GPU if the GPU has room. On a full GPU an ordinary allocation is refused, but
    managed memory is placed on the host."""
    a = host.start()
    a.ask("c = cu.context()")
    a.ask("full = cu.alloc(cu.info()[0] - 3 * MIB)")
    before = held(host, a)["memory"]
    a.ask("p = cu.out(U64, 'cuMemAllocManaged', 3 * MIB, 1)")
    a.ask("q = cu.out(U64, 'cuMemAllocManaged', 5 * MIB, 1)")
    assert a.ask("cu.try_alloc(1)") == 2
    assert held(host, a)["memory"] == before + 3 * MIB
    a.ask("cu.write(q, bytes(range(256)))")
    advise, location, cpu = (
        "cu.cuMemAdvise(p, 3 * MIB, 3, {})",
        "cu.cuMemPrefetchAsync(q, 5 * MIB, {}, 0)",
        "U32(0xffffffff)",
    )
    a.ask(advise.format(cpu))
    assert held(host, a)["memory"] == before
    a.ask(location.format(0))  # The GPU has no room for 5 MiB, so the block stays in host memory.
    assert held(host, a)["memory"] == before
    a.ask("cu.cuMemFree_v2(full)")
    a.ask(location.format(0))
    a.ask(advise.format(0))
    assert held(host, a)["memory"] == 8 * MIB
    assert a.ask("cu.read(q, 256)") == bytes(range(256)).hex()
    a.ask(location.format(cpu))
    assert held(host, a)["memory"] == 3 * MIB
    a.ask("cu.cuMemFree_v2(q)")
    assert held(host, a)["memory"] == 3 * MIB
    a.ask("cu.cuMemFree_v2(p)")
    assert held(host, a)["memory"] == 0


# Keys: cases. Values: the call that allocates; the expected charge in bytes; the call that frees the memory.
WAYS = {
    "plain": ("p = cu.alloc(1234567)", 1234567, "cu.cuMemFree_v2(p)"),
    "one byte": ("p = cu.alloc(1)", 1, "cu.cuMemFree_v2(p)"),
    "large": ("p = cu.alloc(9 << 30)", 9 << 30, "cu.cuMemFree_v2(p)"),
    "first version": ("p = cu.out(U32, 'cuMemAlloc', 5 * MIB)", 5 * MIB, "cu.cuMemFree(p)"),
    "pitch": (
        "pitch = SIZE(); p = cu.out(U64, 'cuMemAllocPitch_v2', ctypes.byref(pitch), 100, 7, 4)",
        512 * 7,
        "cu.cuMemFree_v2(p)",
    ),
    "managed": ("p = cu.out(U64, 'cuMemAllocManaged', 3 * MIB, 1)", 3 * MIB, "cu.cuMemFree_v2(p)"),
    "async, freed in its stream": (
        "p = cu.out(U64, 'cuMemAllocAsync', 3 * MIB, 0)",
        4 * MIB,
        "cu.cuMemFreeAsync(p, 0); cu.cuStreamSynchronize(0)",
    ),
    "async, freed as plain": (
        "p = cu.out(U64, 'cuMemAllocAsync_ptsz', 2 * MIB, 0)",
        2 * MIB,
        "cu.cuMemFree_v2(p); cu.cuCtxSynchronize()",
    ),
    "plain, freed in a stream": ("p = cu.alloc(77)", 77, "cu.cuMemFreeAsync(p, 0)"),
    "array": (
        "d = (ctypes.c_uint64 * 3)(64, 32, 4 << 32 | 0x20); p = cu.out(PTR, 'cuArrayCreate_v2', d)",
        64 * 32 * 4 * 4,
        "cu.cuArrayDestroy(p)",
    ),
    "3D array": (
        "d = (ctypes.c_uint64 * 5)(16, 8, 4, 1 << 32 | 0x01, 0); p = cu.out(PTR, 'cuArray3DCreate_v2', d)",
        16 * 8 * 4,
        "cu.cuArrayDestroy(p)",
    ),
    "mipmap": (
        "d = (ctypes.c_uint64 * 5)(16, 16, 0, 1 << 32 | 0x01, 0); p = cu.out(PTR, 'cuMipmappedArrayCreate', d, 5)",
        256 + 64 + 16 + 4 + 1,
        "cu.cuMipmappedArrayDestroy(p)",
    ),
    "host memory costs nothing": ("p = cu.out(PTR, 'cuMemAllocHost_v2', 8 * MIB)", 0, "cu.cuMemFreeHost(p)"),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_allocating_call_charges_the_expected_bytes(host, way):
    get, bytes_, give = WAYS[way]
    a = host.start()
    a.ask("cu.context()")
    a.ask("k = cu.kernel(1)")
    for _unused in range(2):
        a.ask(get)
        assert held(host, a)["memory"] == bytes_
        assert a.ask("cu.info()") == [TOTAL - CONTEXT - bytes_, TOTAL]
        a.ask(give)
        assert held(host, a)["memory"] == 0


def test_modules_are_charged(host):
    a = host.start()
    a.ask("cu.context()")
    a.ask(r"m = cu.module('.gpusim bytes 4096\n.gpusim kernel k 5\n.gpusim global g 1000\n')")
    assert held(host, a)["module"] == 4096 + 1000
    a.ask("n = SIZE(); g = U64(); cu.cuModuleGetGlobal_v2(ctypes.byref(g), ctypes.byref(n), m, b'g')")
    assert a.ask("n.value") == 1000
    a.ask("cu.cuModuleUnload(m)")
    assert held(host, a)["module"] == 0


def test_physical_memory_lives_until_unmapped_and_released(host):
    a = host.start()
    a.ask("cu.context()")
    a.ask("prop = (ctypes.c_uint32 * 8)(1, 0, 1, 0, 0, 0, 0, 0); size = 4 * MIB")
    a.ask("h = cu.out(U64, 'cuMemCreate', size, prop, 0)")
    assert held(host, a)["memory"] == 4 * MIB
    a.ask("v = cu.out(U64, 'cuMemAddressReserve', 2 * size, 0, 0, 0); cu.cuMemMap(v, size, 0, h, 0)")
    a.ask("cu.cuMemRelease(h)")
    assert held(host, a)["memory"] == 4 * MIB, "the mapping must keep the memory after the release of the handle"
    a.ask("data = bytes(range(256)) * 16")
    assert a.ask("cu.raw('cuMemcpyHtoD_v2', v, data, len(data))") == 1, (
        "an access before cuMemSetAccess must be refused"
    )
    a.ask("acc = (ctypes.c_uint32 * 3)(1, 0, 3); cu.cuMemSetAccess(v, size, acc, 1); cu.write(v + 5, data)")
    assert a.ask("cu.read(v + 5, len(data)) == data.hex()") is True
    assert a.ask("cu.raw('cuMemFree_v2', v)") == 1
    a.ask("cu.cuMemUnmap(v, size)")
    assert held(host, a)["memory"] == 0
    a.ask("cu.cuMemAddressFree(v, 2 * size)")
    assert a.ask("cu.raw('cuMemCreate', ctypes.byref(U64()), 4096, prop, 0)") == 1, (
        "a size below the granularity of 2 MiB must be refused"
    )


def test_external_memory_lives_until_destroyed_and_freed(host):
    a = host.start()
    a.ask("cu.context(); size = 4 * MIB; prop = (ctypes.c_uint32 * 8)(1, 1, 1, 0, 0, 0, 0, 0)")
    a.ask("h = cu.out(U64, 'cuMemCreate', size, prop, 0)")
    a.ask("fd = cu.out(ctypes.c_int, 'cuMemExportToShareableHandle', h, 1, 0)")
    a.ask("what = (ctypes.c_uint64 * 13)(1, fd, 0, 2 * size)")
    assert a.ask("cu.raw('cuImportExternalMemory', ctypes.byref(PTR()), what)") == 1, (
        "an import beyond the exported size must fail"
    )
    a.ask("what[3] = size; e = cu.out(PTR, 'cuImportExternalMemory', what)")
    a.ask(
        "part = (ctypes.c_uint64 * 11)(2 * MIB, 2 * MIB); v = cu.out(U64, 'cuExternalMemoryGetMappedBuffer', e, part)"
    )
    a.ask("cu.write(v, b'x' * 8); cu.cuMemRelease(h)")
    assert host.usage()["used"] == CONTEXT + 4 * MIB, "the import must keep the memory after the release of the handle"
    a.ask("cu.cuDestroyExternalMemory(e)")
    assert (a.ask("cu.read(v, 8)"), host.usage()["used"]) == ("78" * 8, CONTEXT + 4 * MIB), (
        "the buffer must keep memory and data"
    )
    a.ask("cu.cuMemFree_v2(v)")
    assert host.usage()["used"] == CONTEXT
    assert a.ask("cu.raw('cuMemFree_v2', v)") == 1, "a second free must be refused"


def test_pool_keeps_memory_up_to_its_threshold(host):
    a = host.start()
    a.ask("cu.context(); pool = cu.out(PTR, 'cuDeviceGetDefaultMemPool', 0)")
    a.ask("cu.cuMemPoolSetAttribute(pool, 4, ctypes.byref(U64(6 * MIB)))")
    a.ask("p = cu.out(U64, 'cuMemAllocAsync', 10 * MIB, 0); cu.cuMemFreeAsync(p, 0); k = cu.kernel(1); cu.launch(k)")
    assert held(host, a)["memory"] == 10 * MIB, "freed memory must stay in the pool until a synchronisation"
    a.ask("cu.cuCtxSynchronize()")
    assert held(host, a)["memory"] == 6 * MIB
    a.ask("cu.cuMemPoolTrimTo(pool, 0)")
    assert held(host, a)["memory"] == 0


def test_pool_does_not_exceed_its_maximum(host):
    """CUDA 12.2 added CUmemPoolProps.maxSize; 0 means no maximum."""
    a = host.start()
    a.ask("cu.context()")
    for most, answers in ((64, [0, 2]), (0, [0, 0])):
        a.ask(f"props = (U32 * 22)(1, 0, 1, 0, 0, 0, {most} * MIB, 0)")
        a.ask("pool = cu.out(PTR, 'cuMemPoolCreate', props); out = ctypes.byref(U64())")
        a.ask("take = lambda size: cu.raw('cuMemAllocFromPoolAsync', out, SIZE(size), pool, None)")
        assert a.ask("[take(64 * MIB), take(1)]") == answers


@pytest.mark.parametrize("call", ["cu.out(PTR, 'cuMemHostAlloc', MIB, 3)", "cu.out(PTR, 'cuMemAllocHost_v2', MIB)"])
def test_range_of_mapped_host_memory(host, call):
    a = host.start()
    a.ask("cu.context(); base = U64(); size = SIZE()")
    a.ask(f"page = {call}; device = cu.out(U64, 'cuMemHostGetDevicePointer_v2', page, 0)")
    a.ask("cu.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), device + 4097)")
    assert a.ask("[base.value - page, size.value]") == [0, MIB]
    assert a.ask("cu.raw('cuMemGetAddressRange_v2', None, None, page + MIB)") == 500


def test_pool_frees_its_reserve_for_plain_allocations(host):
    a = host.start()
    a.ask("cu.context(); pool = cu.out(PTR, 'cuDeviceGetDefaultMemPool', 0)")
    a.ask("cu.cuMemPoolSetAttribute(pool, 4, ctypes.byref(U64(2**63)))")
    a.ask("p = cu.out(U64, 'cuMemAllocAsync', 8 << 30, 0); cu.cuMemFreeAsync(p, 0); cu.cuCtxSynchronize()")
    assert held(host, a)["memory"] == 8 << 30
    assert a.ask("cu.try_alloc(12 << 30)") == 0


def test_full_device_refuses_the_next_byte(host):
    a, b = host.start(), host.start()
    a.ask("cu.context()")
    b.ask("cu.context()")
    rest = TOTAL - 2 * CONTEXT
    assert a.ask(f"cu.try_alloc({rest + 1})") == 2
    assert a.ask(f"cu.try_alloc({rest - 1})") == 0
    assert b.ask("cu.try_alloc(2)") == 2
    assert b.ask("cu.try_alloc(1)") == 0
    assert b.ask("cu.raw('cuCtxCreate_v2', ctypes.byref(PTR()), 0, 0)") == 2, (
        "a context that does not fit must be refused"
    )
    assert host.usage()["free"] == 0


def test_killed_process_frees_its_memory(host):
    a, b = host.start(), host.start()
    a.ask("cu.context(); cu.alloc(10 << 30)")
    b.ask("cu.context()")
    assert b.ask("cu.try_alloc(10 << 30)") == 2
    a.kill()
    assert b.ask("cu.info()[0]") == TOTAL - CONTEXT
    assert b.ask("cu.try_alloc(10 << 30)") == 0
    assert host.usage()["used"] == CONTEXT + (10 << 30)


def test_allocation_gets_the_memory_of_a_killed_process(host):
    """No query comes between the kill and the allocation."""
    a, b = host.start(), host.start()
    a.ask("cu.context(); cu.alloc(12 << 30)")
    b.ask("cu.context()")
    a.kill()
    assert b.ask("cu.try_alloc(12 << 30)") == 0


def test_many_killed_processes_leave_no_memory_in_use(host):
    for _unused in range(12):
        programs = [host.start() for _unused in range(3)]
        for program in programs:
            program.send("cu.context(); [cu.alloc(1000 * MIB) for _ in range(3)]; 0")
        programs[0].receive()
        for program in programs:
            program.kill()
    usage = host.usage()
    assert (usage["used"], usage["processes"]) == (0, [])


def test_forked_child_has_no_driver_and_no_memory(host):
    a = host.start()
    a.ask("import os, time; cu.context(); cu.alloc(5 << 30)")
    child = a.ask(
        'exec(\'pid = os.fork()\\nif pid == 0:\\n time.sleep(30 if (cu.raw("cuInit", 0), cu.try_alloc(1)) == (3, 3)'
        " else 0)\\n os._exit(0)') or pid"
    )
    assert host.usage()["used"] == CONTEXT + (5 << 30)
    a.kill()
    try:
        assert host.usage()["used"] == 0, "the child must not keep its parent's slot"
        with open(f"/proc/{child}/status", encoding="ascii") as status:
            assert "zombie" not in status.read()
    finally:
        import os

        os.kill(int(child), 9)


def test_child_of_a_process_that_only_queried_the_version_uses_the_driver(host):
    a = host.start()
    a.ask("import os; cu.out(ctypes.c_int, 'cuDriverGetVersion')")
    a.ask("status = lambda: os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1])")
    a.ask(
        "pid = os.fork() or os._exit(0 if cu.context() and cu.try_alloc(5) == 0 and cu.try_alloc(1 << 40) == 2 else 1)"
    )
    assert a.ask("status()") == 0
    assert host.usage()["used"] == 0


def test_data_is_kept_and_invalid_addresses_are_refused(host):
    a = host.start()
    a.ask("cu.context(); p = cu.alloc(1000); q = cu.alloc(3 * MIB); import random; r = random.Random(7)")
    a.ask("x = r.randbytes(1000); y = r.randbytes(3 * MIB); cu.write(p, x); cu.write(q, y)")
    assert a.ask("cu.read(p, 1000) == x.hex() and cu.read(q, 3 * MIB) == y.hex()") is True
    a.ask("cu.cuMemcpyDtoD_v2(q + 100, p, 1000); cu.cuMemsetD8_v2(p, 0xab, 500)")
    assert a.ask("cu.read(q + 100, 1000) == x.hex() and cu.read(p, 1000) == ('ab' * 500 + x[500:].hex())") is True
    assert a.ask("cu.raw('cuMemcpyHtoD_v2', p, x + b'1', 1001)") == 1, (
        "a copy beyond the end of the block must be refused"
    )
    assert a.ask("cu.raw('cuMemFree_v2', p + 512)") == 1, "a free of an address inside a block must be refused"
    a.ask("cu.cuMemFree_v2(p)")
    assert a.ask("cu.raw('cuMemcpyHtoD_v2', p, x, 1000)") == 1, "a copy to freed memory must be refused"
    assert a.ask("cu.raw('cuMemFree_v2', p)") == 1, "a second free must be refused"


def test_graph_memory(host):
    a = host.start()
    a.ask("cu.context(); g = cu.out(PTR, 'cuGraphCreate', 0)")
    a.ask("P = (ctypes.c_uint64 * 15)(1, 1, *[0] * 9, 0, 0, 6 * MIB, 0)")
    a.ask("n = cu.out(PTR, 'cuGraphAddMemAllocNode', g, None, 0, P)")
    a.ask("deps = (ctypes.c_void_p * 1)(n); f = cu.out(PTR, 'cuGraphAddMemFreeNode', g, deps, 1, P[14])")
    assert held(host, a)["memory"] == 0
    a.ask("e = cu.out(PTR, 'cuGraphInstantiateWithFlags', g, 0)")
    assert held(host, a)["memory"] == 6 * MIB
    a.ask("cu.cuGraphDestroy(g); cu.cuGraphLaunch(e, 0); cu.cuGraphLaunch(e, 0); cu.cuCtxSynchronize()")
    a.ask("cu.cuDeviceGraphMemTrim(0)")
    assert held(host, a)["memory"] == 0
    a.ask("cu.cuGraphLaunch(e, 0)")
    assert held(host, a)["memory"] == 6 * MIB
    a.ask("cu.cuGraphExecDestroy(e)")
    assert held(host, a)["memory"] == 0


def test_ipc_memory_is_shared_and_charged_once(host):
    a, b = host.start(), host.start()
    a.ask("cu.context(); p = cu.alloc(5000); cu.write(p, b'hello'); h = (ctypes.c_char * 64)()")
    a.ask("cu.cuIpcGetMemHandle(h, p)")
    handle = a.ask("bytes(h).hex()")
    b.ask("cu.context(); H = type('H', (ctypes.Structure,), {'_fields_': [('b', ctypes.c_ubyte * 64)]})")
    b.ask(f"q = cu.out(U64, 'cuIpcOpenMemHandle_v2', H.from_buffer_copy(bytes.fromhex('{handle}')), 1)")
    assert b.ask("bytes.fromhex(cu.read(q, 5)).decode()") == "hello"
    b.ask("cu.write(q, b'world')")
    assert a.ask("bytes.fromhex(cu.read(p, 5)).decode()") == "world"
    assert (held(host, a)["memory"], held(host, b)["memory"]) == (5000, 0)
    b.ask("cu.cuIpcCloseMemHandle(q)")
    assert b.ask("cu.raw('cuMemcpyHtoD_v2', q, b'x', 1)") == 1


def test_ipc_event_works_in_the_importing_process(make_host):
    host = make_host("clock = manual\njitter_percent = 0\n[gpu]\nmodel = T4\n")
    a, b = host.start(), host.start()
    a.ask("cu.context(); k = cu.kernel(1000); e = cu.out(PTR, 'cuEventCreate', 6); h = (ctypes.c_char * 64)()")
    a.ask("cu.cuIpcGetEventHandle(h, e)")
    b.ask("cu.context(); H = type('H', (ctypes.Structure,), {'_fields_': [('b', ctypes.c_ubyte * 64)]})")
    b.ask(f"f = cu.out(PTR, 'cuIpcOpenEventHandle', H.from_buffer_copy(bytes.fromhex('{a.ask('bytes(h).hex()')}')))")
    assert b.ask("cu.raw('cuEventQuery', f)") == 0, "an event that was never recorded must count as complete"
    a.ask("cu.launch(k); cu.cuEventRecord(e, 0)")
    assert b.ask("cu.raw('cuEventQuery', f)") == 600
    b.ask("s = cu.stream(1); cu.cuStreamWaitEvent(s, f, 0); m = cu.kernel(10, 1); cu.launch(m, s)")
    host.ctl("clock", "advance", "0.9")
    assert (b.ask("cu.raw('cuEventQuery', f)"), b.ask("cu.raw('cuStreamQuery', s)")) == (600, 600)
    host.ctl("clock", "advance", "0.3")
    assert (b.ask("cu.raw('cuEventQuery', f)"), b.ask("cu.raw('cuStreamQuery', s)")) == (0, 0)
    a.ask("cu.launch(cu.kernel('inf')); cu.cuEventRecord(e, 0)")
    assert b.ask("cu.raw('cuEventQuery', f)") == 600
    a.kill()
    host.usage()
    assert b.ask("cu.raw('cuEventQuery', f)") == 0, "the event of a killed process must count as complete"
