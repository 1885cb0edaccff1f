# SPDX-License-Identifier: Apache-2.0
"""Measure libvgpu.so on this host's GPU: ``make gpu-check``, or ``python3 tests/gpu/check.py --help``.

A stage is a group of measurements, and a gate is a requirement on a result. Each stage runs in its own process with a
time limit; if a stage fails or hangs, the others still run. The exit status is 0 if every gate passed, 1 if a gate
failed, 2 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpucheck import compute, host, limits, memory, processes, report, rough, shown

# Stage → (function, time limit in seconds), in the order of a whole run: a stage comes after the stages that it depends
# on.
STAGES = {
    "environment": (processes.environment, 120),
    "granularity": (memory.granularity, 60),
    "load": (processes.load, 240),
    "exact": (memory.exact, 120),
    "rounding": (memory.rounding, 60),
    "contexts": (memory.contexts, 60),
    "data": (memory.data, 60),
    "shown": (shown.shown, 60),
    "nvidia-smi": (shown.nvidia_smi, 60),
    "race": (processes.race, 120),
    "kill": (processes.kill, 90),
    "cost": (compute.cost, 120),
    "private-context": (rough.private_context, 60),
    "loader": (rough.loader, 60),
    "capture": (rough.capture, 30),
    "exit": (rough.leave, 90),
    "mixed-shares": (rough.mixed_shares, 60),
    "driver-limits": (limits.driver_limits, 60),
    "pytorch": (shown.pytorch, 240),
    "alone": (compute.alone, 300),
    "together": (compute.together, 90),
    "graphs": (compute.graphs, 90),
    "device": (compute.device, 60),
}
LEAST = 10  # A stage starts only if at least this many seconds of the run's time are left.


def work(name: str, options: argparse.Namespace, path: Path) -> int:
    """Runs one stage in this process and writes its report; returns the exit status 0."""
    found = report.Report(path, name)
    try:
        here = host.Host(options.folder, options.library, options.gpu, options.quick)
        found.data["driver"] = "simulated" if here.simulated else here.card.driver()
        STAGES[name][0](here, found)
        found.end()
    except report.Skip as missing:
        found.note("left out: " + str(missing))
        # If gates were measured before the skip, they count, so the stage is not marked as skipped.
        found.end(skipped="" if found.data["gates"] else str(missing))
    except Exception as error:
        traceback.print_exc()
        found.end(failure=f"{type(error).__name__}: {error}"[-600:])
    return 0


def stage(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Runs one stage as a process group with a time limit. A stopped stage keeps the results that it has stored."""
    path = options.folder / f"stage-{name}.json"
    path.unlink(missing_ok=True)
    command = [
        sys.executable,
        __file__,
        "--worker",
        name,
        "--folder",
        str(options.folder),
        "--library",
        str(options.library),
    ]
    command += ["--gpu", str(options.gpu)] + (["--quick"] if options.quick else [])
    log = (options.folder / f"stage-{name}.log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    reason = ""
    try:
        process.wait(seconds)
        if process.returncode:
            reason = f"failed: the stage's process ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"failed: the stage took more than {seconds:.0f} s"
    finally:
        # The process group contains only the stage and its programs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = report.Report(None, name).data
    words = (options.folder / f"stage-{name}.log").read_text(errors="replace").strip()
    if words:
        found["log"] = words[-2000:]
    if reason or found["reason"] == "the stage has not ended":
        found["status"], found["reason"] = "failed", reason or "failed: the stage ended without a result"
    return found


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n", maxsplit=1)[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the stages and their time limits, and end")
    parser.add_argument(
        "--stage", action="append", choices=list(STAGES), metavar="NAME", help="run only this stage (may be repeated)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=540,
        metavar="SECONDS",
        help="time for all stages (default: %(default)s); stages that no longer fit are skipped",
    )
    parser.add_argument("--out", type=Path, help="folder of the result (default: $OUT, else .build/gpu-check)")
    parser.add_argument(
        "--gpu",
        type=int,
        default=0,
        metavar="INDEX",
        help="number of the measured GPU in NVML's order (default: %(default)s)",
    )
    parser.add_argument("--library", type=Path, help="measure this libvgpu.so instead of building one")
    parser.add_argument("--quick", action="store_true", help="measure briefly; this shows only that the stages work")
    parser.add_argument("--folder", type=Path, default=host.ROOT / ".build/gpu-check/work", help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=list(STAGES), help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.folder = options.folder.resolve()
    if options.library:
        options.library = options.library.resolve()
    return options


def prepare(options: argparse.Namespace) -> str:
    """Finds the driver and builds the programs. Returns the reason if nothing can be measured, else ""."""
    if not host.compiler() or not (options.library or shutil.which("make")):
        return "this host has no C compiler or no make"
    folder = host.driver_folder()
    if folder is None:
        return "there is no libcuda.so.1 on this host"
    if folder:
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("LD_LIBRARY_PATH")]))
    os.environ.pop("LD_PRELOAD", None)
    try:
        options.library = host.build(options.folder, options.library)
    except subprocess.CalledProcessError as error:
        return f"the build failed: {error.cmd[0]}: {error.stdout[-1500:]}"
    return ""


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    if options.list:
        for name, (function, seconds) in STAGES.items():
            sentence = " ".join((function.__doc__ or "").split()).split(". ", maxsplit=1)[0].rstrip(".")
            print(f"{name:<15} at most {seconds:>3} s  {sentence}")
        return 0
    if options.worker:
        return work(options.worker, options, options.folder / f"stage-{options.worker}.json")
    began = time.monotonic()
    out = options.out or Path(os.environ.get("OUT") or host.ROOT / ".build/gpu-check")
    out.mkdir(parents=True, exist_ok=True)
    missing = prepare(options)
    if missing:
        print(f"gpu-check: {missing}; nothing is measured")
        return 2
    stages = []
    for name in options.stage or STAGES:
        left = options.budget - (time.monotonic() - began)
        if left < LEAST:
            found = report.Report(None, name)
            stages.append(
                found.end(skipped=f"no time left of {options.budget:.0f} s; run it alone with --stage {name}")
            )
        else:
            stages.append(stage(name, options, min(STAGES[name][1], left)))
        print(report.table(stages[-1:]), flush=True)
        drivers = [one["driver"] for one in stages if one.get("driver")]
        result = {
            "version": 1,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "driver": drivers[0] if drivers else "unknown",
            "quick": options.quick,
            "seconds": round(time.monotonic() - began, 1),
            "stages": stages,
        }
        (out / "result.json").write_text(json.dumps(result, indent=1, default=str))
        (out / "result.txt").write_text(report.table(stages) + "\n")
    states = [one["status"] for one in stages]
    gates = [gate["held"] for one in stages for gate in one["gates"]]
    print(
        f"driver {result['driver']}: {sum(gates)} gates held, {len(gates) - sum(gates)} not; stages: "
        + ", ".join(
            f"{states.count(state)} {state}" for state in ("passed", "measured", "skipped", "failed") if state in states
        )
    )
    print(f"result: {out / 'result.json'}")
    return report.verdict(stages)


if __name__ == "__main__":
    sys.exit(main())
