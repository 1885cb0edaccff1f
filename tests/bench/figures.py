# SPDX-License-Identifier: Apache-2.0
"""The rows of the table that `make bench` prints. A run has the form short, bench or long, which sets the size of each
measurement, such as its repetitions.

A goal is the desired value, and a gate is a bound whose violation fails the test. Both were set in the project's plan.
"The library" is libvgpu, which intercepts CUDA calls. In the library's rows the values of other projects are our
measurements of HAMi-core, commit 8f3a89c, on a stub driver.
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
    """One row of the table. ``held`` is true if the gate holds; None means no gate, for the reason ``why``."""

    what: str
    goal: str
    elsewhere: str
    gate: str = ""
    measured: str = ""
    held: bool | None = None
    control: str = ""
    why: str = ""


# Name of the row → measured quantity, goal, best value of other projects. "Over the bare call" means that the cost of
# the same call without the library is subtracted. "8 × 10" in the rows of the device plugin means 8 GPUs of 10 slices
# each.
FIGURES = {
    "launch": Figure(
        "cuLaunchKernel over the bare call, without an SM limit",
        "≤ 12 instructions (2 ns), no locked instruction",
        "248 instructions, 16 ns",
    ),
    "launch-limited": Figure(
        "cuLaunchKernel over the bare call, with an SM limit",
        "≤ 60 instructions (20 ns; 25 ns if reading the clock costs 14 ns), no locked instruction",
        "319 instructions, 31 ns",
    ),
    "turns": Figure(
        "alternating launches of two kernels, with an SM limit", "the cost of launches of one kernel", "not measured"
    ),
    "pair": Figure(
        "cuMemAlloc + cuMemFree over the bare pair",
        "≤ 300 instructions (100 ns), no system call",
        "1620 instructions, 630 ns, 4 system calls",
    ),
    "info": Figure("cuMemGetInfo over the bare call", "no system call (50 ns)", "1000 ns, 2 system calls"),
    "others": Figure(
        "cuMemAlloc + cuMemFree next to other live processes",
        "the same up to 1000 processes",
        "601 ns with 0, 1382 ns with 100",
    ),
    "blocks": Figure(
        "cuMemFree by the number of live blocks", "as many instructions with 10^6 blocks", "43 µs with 50 000 blocks"
    ),
    "race": Figure(
        "2 processes request more than the limit at the same moment",
        "over the limit in no round",
        "over the limit in 64 % of rounds",
    ),
    "last": Figure(
        "64 processes request the last MiB at the same moment",
        "over the limit in no round, one process gets the MiB",
        "not measured",
    ),
    "kills": Figure(
        "1 of 4 processes killed at a random moment and not replaced",
        "0 bytes leaked, no survivor stalls, the quota is free again without a new process",
        "2.1 % of the kills freeze all survivors",
    ),
    "replaced": Figure(
        "1 of 4 processes killed and replaced at once",
        "0 bytes leaked, no survivor stalls",
        "0 of 600 kills, at 50 to 66 ms each",
    ),
    "early": Figure("a process killed during its start", "the next start is not delayed", "329 s, then a crash"),
    "each": Figure(
        "a process killed at each instruction of an allocation and its free",
        "all memory of the slice is free again",
        "not measured",
    ),
    "start": Figure("what the library adds to the start of a program", "≤ 5 ms", "297 ms"),
    "together": Figure("300 programs start at once", "no serial section, ≤ 5 ms each", "one after the other: 89 s"),
    "plugin-start": Figure("device plugin: start until the kubelet has all slices, 8 × 10", "≤ 300 ms", "14 ms (Go)"),
    "plugin-memory": Figure("device plugin: resident memory, 16 × 100", "≤ 60 MB", "27 MB; 45 MB (Go)"),
    "plugin-idle": Figure("device plugin: load when idle, 16 × 100", "≤ 0.1 % of a core", "0.011 %; 0.037 % (Go)"),
    "plugin-idle-cdi": Figure(
        "device plugin: load when idle, 8 × 10, each slice offered by CDI too", "≤ 0.1 % of a core", "-"
    ),
    "plugin-watch": Figure("device plugin: a poll of the watcher, 100 slices in use", "≤ 2 times the former time", "-"),
    "plugin-allocate": Figure("device plugin: Allocate over an empty call, p50, 8 × 10", "≤ 1 ms", "0 (Go, no files)"),
    "plugin-allocate-calls": Figure("device plugin: system calls on files in an Allocate", "few", "0 (Go, no files)"),
    "plugin-preferred": Figure("device plugin: GetPreferredAllocation, 8 of 1600, p50", "≤ 3 ms", "6.7 ms; 20 ms (Go)"),
    "plugin-again": Figure("device plugin: registration after a kubelet restart", "≤ 100 ms", "4 ms; 3 ms (Go)"),
    "scheduler-1000": Figure("scheduler: filter + prioritize, 1 000 nodes, 20 000 pods", "p99 ≤ 5 ms", "403 ms median"),
    "scheduler-5000": Figure(
        "scheduler: filter + prioritize, 5 000 nodes, 100 000 pods", "p99 ≤ 15 ms", "4 340 ms median"
    ),
    "scheduler-jobs": Figure(
        "scheduler: filter + prioritize, 5 000 nodes, pods of four jobs", "less than for different pods", "not measured"
    ),
    "scheduler-memory": Figure("scheduler: resident memory, 5 000 nodes, 100 000 pods", "≤ 300 MB", "not measured"),
    "share-alone": Figure(
        "one tenant with a share of 5 to 95 %, policy force, kernels of 10 µs to 1 ms and 132 to 10^6 blocks",
        "largest error ≤ 1 point in windows of 1 s; no launch delayed for more than 100 ms",
        "71.9 ± 34 % at a share of 30 %; 900 ms",
    ),
    "share-together": Figure(
        "two tenants with shares of 30 and 70 %, four with 10, 20, 30 and 40 %; kernels of 5 µs to 10 ms",
        "error of the mean ≤ 1 point, of the worst window ≤ 4 points",
        "45.7 and 53.9 %",
    ),
    "share-real": Figure(
        "two tenants with shares of 30 and 70 % on the simulated GPU in real time", "30 and 70 %", "45.7 and 53.9 %"
    ),
    "share-mixed": Figure(
        "one tenant with a share of 20 %, policy force, one kernel that takes 20 µs to 5 ms, in real time",
        "≤ 25 %; no more than a kernel of constant duration gets",
        "not measured",
    ),
    "wakes": Figure(
        "wake-ups of the thread that settles launches, in a busy process",
        "≤ 500 wake-ups a second (1 % of a core)",
        "not measured",
    ),
    "settling": Figure("time until a live change of a share takes effect", "≤ 0.5 s", "a restart"),
    "throughput": Figure("total throughput of 4 busy tenants, relative to no limiter", "≥ 97 %", "not measured"),
    "sparse": Figure(
        "a sparse tenant with a share of 10 % next to a busy tenant",
        "80 % of the load that it has alone, up to its share (a goal)",
        "31 %, by a model",
    ),
    "fleet": Figure(
        "controller: site.yml that changes nothing, hosts that answer from a table",
        "1 000 hosts in 10 CPU minutes; growth proportional to the hosts",
        "not measured",
    ),
    "fleet-validation": Figure("controller: check of all variables", "0.05 CPU seconds a host", "not measured"),
    "fleet-first": Figure("controller: first run of site.yml", "-", "not measured"),
    "fleet-upgrade": Figure(
        "controller: upgrade.yml with a new library, batches of 1 host and of 25 %", "-", "not measured"
    ),
    "true": Figure("start of `true` with the library preloaded", "< 0.3 ms more", "not measured"),
}

# Measurement → amount by form: repetitions, seconds, processes, blocks or hosts. `make test` runs the form short,
# `make bench` the form bench, `make bench-long` the form long. 0 means that the measurement is left out.
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
