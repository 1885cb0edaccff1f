# SPDX-License-Identifier: Apache-2.0
"""Rows of the table: measured quantity, goal, best value of other projects, and the amount of work of each form.

Goals and gates are those of the project's plan; "elsewhere" is what we measured of HAMi-core 8f3a89c on a stub driver.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

FORMS = ("short", "bench", "long")


@dataclass
class Figure:
    """One row of the table. ``held`` is None if the row has no gate; ``why`` then gives the reason."""

    what: str
    goal: str
    elsewhere: str
    gate: str = ""
    measured: str = ""
    held: bool | None = None
    control: str = ""
    why: str = ""


FIGURES = {
    "launch": Figure(
        "cuLaunchKernel over the bare call, no SM limit in force",
        "≤ 12 instructions (2 ns), nothing locked",
        "248 instructions, 16 ns",
    ),
    "launch-limited": Figure(
        "cuLaunchKernel over the bare call, SM limit in force",
        "≤ 60 instructions (20 ns; 25 where a clock costs 14), nothing locked",
        "319 instructions, 31 ns",
    ),
    "turns": Figure("launches of two kernels in turns, SM limit in force", "as those of one kernel", "not measured"),
    "pair": Figure(
        "cuMemAlloc + cuMemFree over the bare pair",
        "≤ 300 instructions (100 ns), no system call",
        "1620 instructions, 630 ns, 4 system calls",
    ),
    "info": Figure("cuMemGetInfo over the bare call", "no system call (50 ns)", "1000 ns, 2 system calls"),
    "others": Figure("the pair beside other live processes", "flat to 1000", "601 ns with 0, 1382 ns with 100"),
    "blocks": Figure("cuMemFree among live blocks", "as many instructions among 10^6", "43 µs among 50 000"),
    "race": Figure("2 processes at a barrier ask for more than the limit", "over it in none", "over in 64 % of rounds"),
    "last": Figure("64 processes ask for the last MiB", "over it in none, one gets it", "not measured"),
    "kills": Figure(
        "1 of 4 killed at a random moment, nobody takes its place",
        "0 bytes leaked, no survivor stalls, quota back with no new process",
        "2.1 % freeze all survivors",
    ),
    "replaced": Figure(
        "1 of 4 killed, replaced at once", "0 bytes leaked, no survivor stalls", "0 of 600, at 50 to 66 ms each"
    ),
    "early": Figure("killed inside its start", "the next start is not held up", "329 s, then a crash"),
    "each": Figure("killed at each instruction of an allocation and its free", "the slice is whole", "not measured"),
    "start": Figure("what the library adds to the start of a program", "≤ 5 ms", "297 ms"),
    "together": Figure("300 programs start at once", "no serial section, ≤ 5 ms each", "serial: 89 s for 300"),
    "plugin-start": Figure("device plugin: start to all slices at the kubelet, 8 × 10", "≤ 300 ms", "14 ms (Go)"),
    "plugin-memory": Figure("device plugin: resident, 16 × 100", "≤ 60 MB", "27 MB; 45 MB (Go)"),
    "plugin-idle": Figure("device plugin: idle, 16 × 100", "≤ 0.1 % of a core", "0.011 %; 0.037 % (Go)"),
    "plugin-idle-cdi": Figure("device plugin: idle, 8 × 10, each slice offered by CDI too", "≤ 0.1 % of a core", "-"),
    "plugin-watch": Figure("device plugin: a poll of the watcher, 100 slices in use", "≤ 2 times as before", "-"),
    "plugin-allocate": Figure("device plugin: Allocate over an empty call, p50, 8 × 10", "≤ 1 ms", "0 (Go, no files)"),
    "plugin-allocate-calls": Figure("device plugin: system calls on files of an Allocate", "few", "0 (Go, no files)"),
    "plugin-preferred": Figure("device plugin: preference of 8 out of 1600, p50", "≤ 3 ms", "6.7 ms; 20 ms (Go)"),
    "plugin-again": Figure("device plugin: new kubelet socket to registered", "≤ 100 ms", "4 ms; 3 ms (Go)"),
    "scheduler-1000": Figure("scheduler: filter + prioritize, 1 000 nodes, 20 000 pods", "p99 ≤ 5 ms", "403 ms median"),
    "scheduler-5000": Figure(
        "scheduler: filter + prioritize, 5 000 nodes, 100 000 pods", "p99 ≤ 15 ms", "4 340 ms median"
    ),
    "scheduler-jobs": Figure(
        "scheduler: the same with 5 000 nodes, pods of four jobs", "less than for different pods", "not measured"
    ),
    "scheduler-memory": Figure("scheduler: resident, 5 000 nodes, 100 000 pods", "≤ 300 MB", "not measured"),
    "share-alone": Figure(
        "share of one tenant, policy force, 5 to 95 %, kernels 10 µs to 1 ms, 132 to 10^6 blocks",
        "worst error ≤ 1 point in windows of 1 s; no launch held back > 100 ms",
        "71.9 ± 34 % for 30 %; 900 ms",
    ),
    "share-together": Figure(
        "two tenants 30 + 70 and four of 10/20/30/40, kernels 5 µs to 10 ms",
        "means ≤ 1 point, worst window ≤ 4",
        "45.7 + 53.9",
    ),
    "share-real": Figure("two tenants 30 + 70 on the simulated GPU in real time", "30 + 70", "45.7 + 53.9"),
    "share-mixed": Figure(
        "one tenant of 20 %, policy force, kernels of 20 µs to 5 ms in one function and grid, in real time",
        "≤ 25 %; no more than kernels of one length get",
        "not measured",
    ),
    "wakes": Figure(
        "thread that settles launches, in a busy process", "≤ 500 wake-ups a second (1 % of a core)", "not measured"
    ),
    "settling": Figure("settling after a live change of a limit", "≤ 0.5 s", "a restart"),
    "throughput": Figure("total throughput of 4 busy tenants against no limiter", "≥ 97 %", "not measured"),
    "sparse": Figure(
        "a sparse tenant of 10 % beside a busy one",
        "80 % of its natural load up to its share (a goal)",
        "31 %, by model",
    ),
    "fleet": Figure(
        "controller: site.yml that changes nothing, hosts that answer from a table",
        "1 000 hosts in 10 CPU minutes; grows as the hosts do",
        "not measured",
    ),
    "fleet-validation": Figure("controller: check of all variables", "0.05 CPU seconds a host", "not measured"),
    "fleet-first": Figure("controller: first run of site.yml", "-", "not measured"),
    "fleet-upgrade": Figure("controller: upgrade.yml, a new library, batches of 1 and 25 %", "-", "not measured"),
    "true": Figure("`true` with the library preloaded", "< 0.3 ms more", "not measured"),
}

# How much of it: short runs in `make test`, bench in `make bench`, long in `make bench-long`. 0: left out.
SIZES = {
    "calls": {"short": 5, "bench": 25, "long": 25},
    "repeats": {"short": 30, "bench": 300, "long": 300},
    "timed": {"short": 2000, "bench": 20_000, "long": 20_000},
    "others": {"short": 100, "bench": 100, "long": 1000},
    "blocks": {"short": 100_000, "bench": 1_000_000, "long": 1_000_000},
    "race": {"short": 1000, "bench": 5000, "long": 20_000},
    "last": {"short": 50, "bench": 500, "long": 2000},
    "kills": {"short": 300, "bench": 1000, "long": 10_000},
    "replaced": {"short": 100, "bench": 1000, "long": 10_000},
    "early": {"short": 100, "bench": 500, "long": 2000},
    "each": {"short": 0, "bench": 0, "long": 1},
    "shares": {"short": 1, "bench": 4, "long": 8},
    "seconds": {"short": 2, "bench": 5, "long": 20},
    "together": {"short": 100, "bench": 300, "long": 300},
    "idle": {"short": 0, "bench": 25, "long": 65},
    "fleet": {"short": 0, "bench": 300, "long": 1000},
    "fleet-changed": {"short": 0, "bench": 30, "long": 100},
    "scheduled": {"short": 100, "bench": 400, "long": 2000},
}


def machine() -> dict:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return {
        "processors": os.cpu_count(),
        "processor": model,
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
    }


def save(folder: Path, form: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{form}.json"
    rows = {name: asdict(figure) for name, figure in FIGURES.items() if figure.measured or figure.why}
    path.write_text(json.dumps({"form": form, "machine": machine(), "rows": rows}, indent=1, ensure_ascii=False) + "\n")
    return path


def table(names: list[str]) -> list[str]:
    """Returns the rows as lines: each figure on its own line, because a column of 300 characters is unreadable."""
    lines = []
    for name in names:
        figure = FIGURES[name]
        held = {True: "held", False: "NOT HELD", None: "no gate"}[figure.held]
        lines += [
            f"{name:15} {figure.what}",
            f"{'':15} goal       {figure.goal}",
            f"{'':15} elsewhere  {figure.elsewhere}",
            f"{'':15} here       {figure.measured or 'left out: ' + figure.why}",
            f"{'':15} gate       {held}" + (f": {figure.gate}" if figure.gate else ""),
            *([f"{'':15} control    {figure.control}"] if figure.control else []),
        ]
    return lines
