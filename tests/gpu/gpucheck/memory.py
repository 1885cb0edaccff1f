# SPDX-License-Identifier: Apache-2.0
"""Stages of gpu-check about memory: how the driver rounds sizes, and whether a slice (part of a GPU) gets exactly the
memory of its limit. A gate is a requirement on a result: if one is not met, the stage fails. A goal is only reported.
Strings such as ``get alloc 4096`` are commands of the program hand.c.
"""

from __future__ import annotations

import time
from typing import Any

from .host import MIB, OK, OUT_OF_MEMORY, Hand, Host
from .report import Report, Skip

SIZES = [
    1,
    512,
    64 << 10,
    512 << 10,
    MIB - 1,
    MIB,
    MIB + 1,
    3 * MIB // 2,
    2 * MIB,
    2 * MIB + 1,
    3 * MIB,
    5 * MIB,
    33 * MIB + 1,
]
# Route → (allocation unit in bytes, maximum bytes that may stay free when the next allocation is refused).
ROUTES = {
    "alloc": (1, 1),
    "managed": (1, 1),
    "pitch": (4096, 2 * MIB),
    "vmm": (2 * MIB, 2 * MIB),
    "async": (512, 34 * MIB),
    "pool": (512, 34 * MIB),
    "array": (16384, 2 * MIB),
    "mipmap": (16384, 2 * MIB),
}
# Allowed excess of the GPU's usage over the limit, because the driver rounds up some twenty allocations.
ROUNDING = 64 * MIB
# Allowed growth of the GPU's usage between two moments at which the library compares its charge with the GPU's usage.
STEP = 80 * MIB


def granularity(host: Host, report: Report) -> None:
    """Measures without the library how the driver rounds sizes, and how much memory contexts, modules and settings
    take."""
    before = host.card.memory()["used"]
    with Hand(host) as hand:
        hand.start()
        first, how = host.held([hand.pid], before)
        report.figure("seen_by", how)
        began = time.monotonic()
        for _unused in range(20):
            host.card.processes()
        report.figure("nvml_process_list_seconds", round((time.monotonic() - began) / 20, 6))
        report.figure("first_context_bytes", first)
        report.figure("vmm_unit", hand.say("unit")[-1])
        rows: dict[str, Any] = {}
        for size in SIZES:
            steps = []
            last = host.held([hand.pid], before)[0]
            for _unused in range(4 if size > MIB // 2 else 8):
                hand.must(f"get alloc {size}")
                now = host.held([hand.pid], before)[0]
                steps.append(now - last)
                last = now
            hand.must("drop-all")
            rows[str(size)] = {"steps": steps, "left": host.held([hand.pid], before)[0] - first}
        report.figure("physical_steps_by_size", rows)
        for what, line in {
            "second_context": "ctx",
            "kernels_loaded_and_run": "load",
            "module_of_64_MiB": f"module {64 * MIB}",
            "heap_of_512_MiB": f"limit 2 {512 * MIB}",
            "printf_of_64_MiB": f"limit 1 {64 * MIB}",
        }.items():
            last = host.held([hand.pid], before)[0]
            status = hand.say(line)[0]
            report.figure(
                what + "_bytes", host.held([hand.pid], before)[0] - last if status == OK else f"status {status}"
            )
        free_card = host.card.memory()["free"]
        report.figure("mem_get_info_below_nvml_free", free_card - hand.say("info")[1])
    report.figure("left_after_exit", host.card.memory()["used"] - before)
    _borrowed(host, report)


def _borrowed(host: Host, report: Report) -> None:
    """Measures whether NVML counts memory opened by an IPC handle for the importing process too."""
    with Hand(host) as owner, Hand(host) as borrower:
        owner.start()
        borrower.start()
        owner.must(f"get alloc {256 * MIB}")
        status, *handle = owner.say("lend 0")
        shown = host.card.processes()
        if status != OK or borrower.pid not in shown:
            report.figure(
                "borrowed_256_MiB", f"unknown: the export has status {status}, NVML shows {len(shown)} processes"
            )
            return
        status = borrower.say("borrow " + " ".join(str(word) for word in handle))[0]
        more = host.card.processes().get(borrower.pid, 0) - shown[borrower.pid]
        report.figure("borrowed_256_MiB", more if status == OK else f"status {status}")


def _route(host: Host, report: Report, route: str, limit: int) -> None:
    unit, slack = ROUTES[route]
    before = host.card.memory()["used"]
    slice_ = host.slice(limit)
    with Hand(host, slice_.env()) as hand:
        hand.start()
        empty = slice_.total()
        status, granted, pieces = hand.say(f"take {route} {limit} {unit}")
        charged = slice_.total()
        held, how = host.held([hand.pid], before)
        if status not in (OUT_OF_MEMORY,) and granted == 0:
            report.note(f"{route}: not measured, because the driver returns {status}")
            return
        report.gate(f"{route}: refused at the limit", status == OUT_OF_MEMORY, OUT_OF_MEMORY, status)
        report.gate(
            f"{route}: charged up to the limit",
            limit - slack < charged <= limit,
            f"{limit - slack + 1}..{limit}",
            charged,
        )
        if route == "alloc":
            # This is only a goal. The driver's rounding is charged too, so the slice may grant less.
            report.goal("alloc: all free bytes are granted", granted == limit - empty, limit - empty, granted)
            report.gate(
                "alloc: more than 90 % of the free bytes are granted",
                granted > 0.9 * (limit - empty),
                limit - empty,
                granted,
            )
        report.gate(f"{route}: bytes used on the GPU ({how})", held <= limit + ROUNDING, f"<= {limit + ROUNDING}", held)
        report.figure(route, {"granted": granted, "pieces": pieces, "charged": charged, "held": held, "how": how})
        dropped = hand.say("drop-all")[0]
        report.gate(
            f"{route}: freed memory is uncharged", dropped == OK and slice_.total() == empty, empty, slice_.total()
        )


def exact(host: Host, report: Report) -> None:
    """Fills a whole slice by each kind of allocation alone."""
    limit = host.limit()
    free = host.card.memory()["free"]
    if free < 2 * limit:
        raise Skip(f"the GPU has {free} free bytes, but the stage needs twice the {limit} bytes of a test slice")
    report.figure("limit", limit)
    for route in ROUTES:
        try:
            _route(host, report, route, limit)
        except RuntimeError as error:
            report.gate(f"{route}: measured", False, "an answer", str(error))


def _many(host: Host, report: Report, name: str, size: int, count: int, keep: int) -> None:
    """Allocates ``count`` blocks of ``size``, keeps each ``keep``-th, and compares the charge with the GPU's usage."""
    before = host.card.memory()["used"]
    slice_ = host.slice(host.limit())
    with Hand(host, slice_.env()) as hand:
        hand.start()
        empty, bare = slice_.total(), host.held([hand.pid], before)[0]
        pieces: list[int] = []
        while len(pieces) < count:
            status, number, _size = hand.say(f"get alloc {size}")
            if status != OK:
                break
            pieces.append(number)
        for at, piece in enumerate(pieces):
            if at % keep:
                hand.must(f"drop {piece}")
        charged, held = slice_.total() - empty, host.held([hand.pid], before)[0] - bare
    report.figure(name, {"charged": charged, "held": held, "ratio": round(held / charged, 3) if charged else None})
    most = int(charged * 1.1) + STEP
    verdict = report.gate if keep == 1 else report.goal
    verdict(f"{name}: GPU usage within the charge", held <= most, f"<= {most}", held)


def rounding(host: Host, report: Report) -> None:
    """Allocates sizes just above the driver's unit: a slice must not get twice its memory by the rounding."""
    count = 400
    _many(host, report, "pieces of 2 MiB + 1", 2 * MIB + 1, count, 1)
    _many(host, report, "pieces of 1 MiB + 1", MIB + 1, count, 1)
    _many(host, report, "one in 16 of 128 KiB kept", 128 << 10, count * 8, 16)


def contexts(host: Host, report: Report) -> None:
    """Compares what contexts and modules are charged with the bytes that NVML shows for the process."""
    before = host.card.memory()["used"]
    slice_ = host.slice(host.limit())
    rows: dict[str, Any] = {}
    with Hand(host, slice_.env(LIBCUDA_LOG_LEVEL="2")) as hand:
        hand.must("init")
        last_charged, last_held = slice_.total(), 0
        for what, line in {
            "first context": "ctx",
            "second context": "ctx",
            "primary context": "retain",
            "module of 64 MiB": f"module {64 * MIB}",
            "kernels loaded and run": "load",
            "the same again": "load",
            "heap of 256 MiB": f"limit 2 {256 * MIB}",
        }.items():
            began = time.monotonic()
            status = hand.say(line)[0]
            took = round(time.monotonic() - began, 4)
            charged = slice_.total()
            held, how = host.held([hand.pid], before)
            rows[what] = {
                "status": status,
                "seconds": took,
                "charged": charged - last_charged,
                "held": held - last_held,
                "how": how,
            }
            last_charged, last_held = charged, held
        report.figure("steps", rows)
        report.figure("library_says", hand.errors()[-2000:])
        first = rows["first context"]
        report.gate("a first context is created", first["status"] == OK, OK, first["status"])
        near = abs(first["charged"] - first["held"]) <= 8 * MIB
        report.gate(f"a first context is charged its size ({first['how']})", near, first["held"], first["charged"])
        second = rows["second context"]
        near = abs(second["charged"] - second["held"]) <= 8 * MIB
        report.gate(f"a second context is charged its size ({second['how']})", near, second["held"], second["charged"])
        module = rows["module of 64 MiB"]
        if how == "process" and module["status"] == OK:
            report.gate(
                "a module is charged its global variables",
                module["charged"] >= 64 * MIB,
                f">= {64 * MIB}",
                module["charged"],
            )
        report.goal(
            "the charge equals the usage of the GPU", abs(last_held - last_charged) <= 8 * MIB, last_held, last_charged
        )
    left = host.card.memory()["used"] - before
    report.figure("left_after_exit", left)


def data(host: Host, report: Report) -> None:
    """Reads back data that a kernel and the copy engine have written, for several kinds of allocation."""
    slice_ = host.slice(host.limit())
    with Hand(host, slice_.env()) as hand:
        hand.start()
        for route, size in {"alloc": 256 * MIB, "vmm": 64 * MIB, "async": 32 * MIB, "managed": 32 * MIB}.items():
            status, number, _size = hand.say(f"get {route} {size}")
            if status != OK:
                report.note(f"{route}: not measured, status {status}")
                continue
            filled = hand.say(f"bytes {number} 165")
            report.gate(f"{route}: bytes set by the driver are read back", filled == [OK, 0], [OK, 0], filled)
            if host.simulated:
                continue
            touched = hand.say(f"data {number} 7")
            report.gate(f"{route}: words written by a kernel are read back", touched == [OK, 0], [OK, 0], touched)
    if host.simulated:
        report.note("words written by a kernel: not measured, because the simulated driver computes nothing")
