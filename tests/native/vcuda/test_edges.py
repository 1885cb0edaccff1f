# SPDX-License-Identifier: Apache-2.0
"""Tests allocations of huge sizes, and frees, destructions and resets that come twice, too early, or from another
thread or context.

Each call must return the same code as the bare driver. After each call the library must have charged exactly the bytes
in use on the card.

Strings such as ``alloc 10 4096`` (allocate 4096 bytes, keep the address in register 10) and ``call cuMemFree_v2 $10``
are commands to programs/puppet.c: $10 is the value of register 10, @10 the address of the register."""

from __future__ import annotations

import pytest
from conftest import LIMIT, MIB, OK, OOM, Host
from test_coverage_graphs import say
from test_coverage_routes import DEVICE, FLOAT, pair, words

ALL = (1 << 64) - 1
HALF = 1 << 63
ROOT = (1 << 32) + 1  # The square of ROOT is slightly above 2^64.
NV12, HALF_FLOAT, BC7 = 0xB0, 0x10, 0x9D
SIZES = (ALL, ALL - 511, ALL - (2 * MIB) + 1, HALF, ROOT * ROOT % (1 << 64) + HALF)
SHAPES = [
    *[
        (ALL, 1, 1),
        (1, ALL, 1),
        (1, 1, ALL),
        (HALF, 2, 1),
        (2, HALF, 1),
        (ROOT, ROOT, 1),
        (ROOT, 1, ROOT),
        (ALL, ALL, ALL),
    ],
    *[(ALL - 2, 4, 0), (4, ALL - 2, 0), (HALF + 4, 2, 0), (1, HALF // 3 * 4 + 2, 0)],
]
PITCHED = [(w, h) for w, h, _deep in SHAPES if w * h > 1 << 60]
PITCHED_V1 = [(2**32 - 1, 2**32 - 1), (2**31, 2**31), (65536, 65536 * 64), (2**32 - 1, 0), (0, 2**32 - 1)]
KINDS = (FLOAT, HALF_FLOAT, NV12, BC7)
DESCRIPTION = [
    words(50, width, height, depth, pair(kind, 4 if kind == FLOAT else 1), 0)
    for width, height, depth in SHAPES
    for kind in KINDS
]
GRAPH = words(60, DEVICE, DEVICE, *[0] * 11)

# Columns: the puppet commands that prepare registers; the call with a huge size.
HUGE = [
    *[
        ((), f"{name} @10 {size}{more}")
        for size in SIZES
        for name, more in [
            ("cuMemAlloc_v2", ""),
            ("cuMemAllocManaged", " 1"),
            ("cuMemAllocAsync", " 0"),
            ("cuMemAllocAsync_ptsz", " 0"),
        ]
    ],
    *[(("pool 20 0",), f"cuMemAllocFromPoolAsync @10 {size} $20 0") for size in SIZES],
    *[(words(50, DEVICE, DEVICE, 0, 0), f"cuMemCreate @10 {size} @50 0") for size in SIZES],
    *[((), f"cuMemAllocPitch_v2 @10 @11 {width} {height} 4") for width, height in PITCHED],
    *[((), f"cuMemAllocPitch @10 @11 {width} {height} 4") for width, height in PITCHED_V1],
    *[(there, "cuArray3DCreate_v2 @10 @50") for there in DESCRIPTION],
    *[(there, f"cuMipmappedArrayCreate @10 @50 {levels}") for there in DESCRIPTION for levels in (1, 30, 2**32 - 1)],
    *[(words(50, w, h, pair(kind, 1)), "cuArrayCreate_v2 @10 @50") for w, h in PITCHED for kind in KINDS],
    *[(("graph 30", *GRAPH, f"put 73 {size}", "put 74 0"), "cuGraphAddMemAllocNode @10 $30 0 0 @60") for size in SIZES],
]
# Calls whose size or address is beyond an existing object.
BEYOND = [
    f"call cuMemMap $3 {2 * MIB} {ALL - (2 * MIB) + 1} $2 0",
    f"call cuMemMap $3 {ALL - (2 * MIB) + 1} {2 * MIB} $2 0",
    f"call cuMemMap {ALL - (2 * MIB) + 1} {4 * MIB} 0 $2 0",
    f"call cuMemUnmap $3 {ALL - (2 * MIB) + 1}",
    f"call cuMemUnmap {ALL - (2 * MIB) + 1} {4 * MIB}",
    f"call cuMemFree_v2 {ALL}",
    f"call cuMemFreeAsync {ALL} 0",
    f"call cuMemRetainAllocationHandle @20 {ALL}",
    f"call cuIpcGetMemHandle @200 {ALL}",
    f"call cuMemPoolTrimTo $4 {ALL}",
    f"call cuCtxSetLimit 0 {ALL}",
    f"call cuCtxSetLimit 2 {ALL}",
]


def test_huge_sizes_are_refused_and_leave_no_charge(host: Host) -> None:
    """The driver refuses sizes that overflow 64 bits. The library must leave none of these bytes charged."""
    answers: list[list[int]] = []
    for preload in (False, True):
        puppet = host.puppet(preload=preload).start()
        before = host.on_card()
        answers.append([])
        for needs, call in HUGE:
            say(puppet, *needs)
            answers[-1].append(puppet.result(f"call {call}"))
            if preload and host.charged() != before:
                pytest.fail(f"{needs} {call}: the refused call leaves {host.charged() - before} bytes charged")
        say(puppet, "sync")
        assert host.on_card() == before
        if preload:
            say(puppet, f"alloc 10 {LIMIT - before}", "free 10")
        puppet.end()
    # If a call is both invalid and over the limit, the library may return OOM instead of the driver's code.
    wrong = [
        (needs, call, bare, ours)
        for (needs, call), bare, ours in zip(HUGE, *answers, strict=True)
        if ours != bare and (bare == OK or ours != OOM)
    ]
    assert wrong == []
    assert sum(answer != OK for answer in answers[0]) > len(HUGE) - len(SIZES) - 1, (
        "only graph allocation nodes may succeed: they reserve an address but no memory"
    )


THERE = (f"alloc 1 {4 * MIB}", f"create 2 {2 * MIB} 0", f"reserve 3 {8 * MIB}", "pool 4 0", f"map 3 {2 * MIB} 2")
# Keys: cases. Values: a flag (1: the process starts without a context), then the puppet commands of the case.
SEQUENCES = {
    "sizes beyond existing objects": (0, *THERE, *BEYOND, f"unmap 3 {2 * MIB}", "release-handle 2", "free 1"),
    "memory freed in another context of the device": (0, f"alloc 10 {8 * MIB}", "ctx 2 0", "free 10", "ctx-destroy 2"),
    "memory freed in a context of another device": (
        0,
        f"alloc 10 {8 * MIB}",
        "ctx 2 1",
        "free 10",
        "free 10",
        "ctx-destroy 2",
    ),
    "memory freed with no current context": (
        0,
        f"alloc 10 {8 * MIB}",
        "call cuCtxPopCurrent_v2 @5",
        "free 10",
        "set 5",
        "free 10",
    ),
    "memory freed by another thread": (0, f"alloc 10 {8 * MIB}", "aside free 10", "free 10"),
    "stream-ordered memory freed by another thread": (
        0,
        f"async 10 {8 * MIB}",
        "aside free-async 10",
        "free-async 10",
        "sync",
    ),
    "memory allocated by a thread that has ended": (0, "get-ctx 5", "aside set 5", f"aside alloc 10 {MIB}", "free 10"),
    "context destroyed by another thread": (
        0,
        "get-ctx 5",
        f"alloc 10 {8 * MIB}",
        "array 11 1024 333 32",
        f"image 12 {MIB}",
        "aside ctx-destroy 5",
        "free 10",
        f"alloc 13 {MIB}",
        f"async 13 {MIB}",
        "pitch 13 1000 100",
        f"managed 13 {MIB}",
        "array 13 16 16 32",
        f"image 13 {MIB}",
        "array-destroy 11",
        "unload 12",
        "info",
        "sync",
        "set-limit 0 4096",
        "ctx-destroy 5",
        "call cuCtxPopCurrent_v2 @6",
        "info",
    ),
    "context destroyed below another on the stack": (
        0,
        "get-ctx 5",
        f"alloc 10 {8 * MIB}",
        "ctx 2 1",
        f"alloc 11 {MIB}",
        "ctx-destroy 5",
        "free 11",
        f"alloc 11 {MIB}",
        "ctx-destroy 2",
        f"alloc 12 {MIB}",
        "free 10",
        "free 11",
        "ctx-destroy 2",
    ),
    "context destroyed twice": (
        0,
        "get-ctx 5",
        f"alloc 10 {8 * MIB}",
        "ctx-destroy 5",
        "ctx-destroy 5",
        "free 10",
        "call cuCtxDetach $5",
    ),
    "primary context passed to cuCtxDestroy": (
        0,
        "retain 2 0",
        "set 2",
        f"alloc 10 {8 * MIB}",
        "array 11 512 512 32",
        "ctx-destroy 2",
        "call cuCtxDestroy $2",
        "call cuCtxDetach $2",
        f"alloc 12 {MIB}",
        "free 10",
        "array-destroy 11",
        "release 0",
        "free 12",
    ),
    "primary context reset while retained several times": (
        1,
        "retain 2 0",
        "retain 3 0",
        "set 2",
        f"alloc 10 {8 * MIB}",
        f"async 11 {8 * MIB}",
        f"image 12 {MIB}",
        "reset 0",
        "free 10",
        "free-async 11",
        "unload 12",
        f"alloc 13 {MIB}",
        "release 0",
        "release 0",
        "release 0",
        "retain 2 0",
        "set 2",
        f"alloc 10 {8 * MIB}",
        "free 10",
        "release 0",
    ),
    "primary context reset by another thread": (
        1,
        "retain 2 0",
        "set 2",
        f"alloc 10 {8 * MIB}",
        "aside reset 0",
        "free 10",
        f"alloc 10 {MIB}",
        "aside retain 3 0",
        f"alloc 10 {MIB}",
        "reset 0",
        "reset 0",
        "reset 99",
        "release 0",
    ),
    "primary context released by another thread": (
        1,
        "aside retain 2 0",
        "set 2",
        f"alloc 10 {8 * MIB}",
        "aside release 0",
        "free 10",
        "aside release 0",
        f"alloc 10 {MIB}",
    ),
    "reset of a device that also has a created context": (
        0,
        f"alloc 10 {8 * MIB}",
        "retain 2 0",
        "reset 0",
        "free 10",
        "reset 0",
        f"alloc 10 {MIB}",
        "free 10",
    ),
    "arrays and mipmaps destroyed by the wrong call": (
        0,
        "array 10 512 512 32",
        "mipmap 11 512 512 8",
        "array-destroy 11",
        "mipmap-destroy 10",
        "mipmap-destroy 11",
        "array-destroy 10",
        "array-destroy 10",
        "mipmap-destroy 11",
    ),
    "handles released and mapped in the wrong order": (
        0,
        f"create 2 {4 * MIB} 0",
        f"reserve 3 {8 * MIB}",
        f"map 3 {4 * MIB} 2",
        f"map 3 {4 * MIB} 2",
        f"unmap 3 {2 * MIB}",
        "release-handle 2",
        "release-handle 2",
        f"map 3 {4 * MIB} 2",
        "ctx-destroy 5",
        f"unmap 3 {4 * MIB}",
        f"unmap 3 {4 * MIB}",
    ),
}
WORDS = {"get-ctx": "call cuCtxGetCurrent @{}"}


def translated(line: str) -> str:
    verb, *rest = line.split()
    return WORDS[verb].format(*rest) if verb in WORDS else line


@pytest.mark.parametrize("what", SEQUENCES)
def test_calls_at_the_wrong_moment_return_the_drivers_codes(host: Host, what: str) -> None:
    bare_start, *lines = SEQUENCES[what]
    answers: list[list] = []
    for preload in (False, True):
        puppet = host.puppet(preload=preload)
        say(puppet, "init", *([] if bare_start else ["ctx 59999 0"]))
        answers.append([])
        for line in lines:
            answers[-1].append((line, puppet.result(translated(line))))
            if preload:
                assert (line, host.charged(0), host.charged(1)) == (line, host.on_card(0), host.on_card(1))
        puppet.end()
        assert host.on_card(0) == host.on_card(1) == 0
    assert answers[0] == answers[1]
    refused = sum(answer != OK for _line, answer in answers[0])
    print(f"{what}: {len(lines)} calls, {refused} refused by the driver")


QUEUED = (
    "image 20 4096",
    "call cuModuleGetFunction @21 $20 'forever",
    "launch 21",
    "pool 4 0",
    f"frompool 10 {64 * MIB} 4",
)


def test_pool_stays_charged_for_a_buffer_freed_behind_a_running_kernel(host: Host) -> None:
    """A buffer freed behind an endless kernel stays charged while the driver keeps its memory.

    The simulated driver frees the memory at once when the pool is trimmed or destroyed; the charge must follow.
    """
    puppet = host.puppet().start()
    say(puppet, *QUEUED[:3])
    loaded = host.charged()
    say(puppet, *QUEUED[3:], "free-async 10")
    assert host.charged() == host.on_card() == loaded + 64 * MIB
    say(puppet, f"alloc 11 {LIMIT - loaded}")
    assert host.charged() == host.on_card()
    say(puppet, "pool-destroy 4")
    assert host.charged() == host.on_card() <= host.peak() <= LIMIT
