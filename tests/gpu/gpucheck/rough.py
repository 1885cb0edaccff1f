# SPDX-License-Identifier: Apache-2.0
"""Stages of gpu-check about difficult behaviour of a driver or a program: contexts whose creation the library did not
see, the lock of the dynamic loader, kernels of mixed length, stream captures, and the end of a process. A
gate is a requirement on a result: if one is not met, the stage fails."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any

from . import compute
from .arbiter import Arbiter
from .host import MIB, OUT_OF_MEMORY, PROGRAMS, Host
from .report import Report, Skip
from .shown import torch_python

SPREAD = 32  # ratio of the longest to the shortest kernel


def _past_the_hooks(host: Host, env: dict[str, str], words: list[str]) -> tuple[dict[str, Any], int, str]:
    """Runs unseen.py, which creates a context that the library does not see. Returns its figures, the bytes that its
    process uses at the limit, and the source of this number."""
    python = sys.executable if host.simulated else (torch_python() or sys.executable)
    command = [python, str(PROGRAMS / "unseen.py"), *words, *(["simulated"] if host.simulated else [])]
    before = host.card.memory()["used"]
    with (host.folder / "unseen.stderr").open("wb") as errors:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert process.stdout
    try:
        first = process.stdout.readline()
        held, how = host.held([process.pid], before) if first.strip() == "full" else (0, "not full")
        text, _unused = process.communicate("go\n", timeout=60)
    finally:
        process.kill()
        process.wait()
    lines = (first + text).strip().splitlines()
    if process.returncode or not lines:
        words_of_it = (host.folder / "unseen.stderr").read_text(errors="replace")[-300:]
        raise RuntimeError(f"unseen.py ended with {process.returncode}: {words_of_it}")
    found = json.loads(lines[-1])
    if found.get("skipped"):
        raise Skip(found["skipped"])
    return found, held, how


def private_context(host: Host, report: Report) -> None:
    """Lets NVIDIA's runtime retain a primary context that the library's hooks do not see. The context must be charged,
    and the limit must hold."""
    limit = min(2048 * MIB, host.card.memory()["free"] // 4 // MIB * MIB)
    for name, words in {"alone": [], "then the public retain": ["public"]}.items():
        slice_ = host.slice(limit)
        found, held, how = _past_the_hooks(host, slice_.env(), words)
        report.figure(name, dict(found, on_card=held, seen_by=how))
        refused = found["refusal"] == OUT_OF_MEMORY
        report.gate(f"{name}: refused with CUDA_ERROR_OUT_OF_MEMORY", refused, OUT_OF_MEMORY, found["refusal"])
        less = found["granted"] + 64 * MIB <= limit
        report.gate(f"{name}: the context is charged", less, f"<= {limit - 64 * MIB}", found["granted"])
        most = limit + 96 * MIB
        report.gate(f"{name}: bytes used on the GPU ({how})", held <= most, f"<= {most}", held)


def loader(host: Host, report: Report) -> None:
    """Tests whether two threads end: one inside dlopen whose constructor uses CUDA, and one that makes a call, either
    the process's first call or a later one. If the first call hangs without the library too, it has no gate."""
    rounds = 2 if host.quick else 10
    slices = {
        "without the library": host.base_env,
        "with a memory limit": host.slice(host.limit()).env(),
        "with an SM limit": host.slice(host.limit(), sm=30).env(),
    }
    for call in ("first", "later"):
        for name, env in slices.items():
            ended = 0
            with contextlib.suppress(subprocess.TimeoutExpired):
                for _unused in range(rounds):
                    ended += host.program("loader", host.folder / "plugin.so", call, env=env, seconds=10)["ended"]
            if call == "first" and env is host.base_env and not ended:
                report.note("first call: both threads hang without the library too, so it is not measured with it")
                break
            report.gate(f"{call} call, {name}: both threads end", ended == rounds, rounds, ended)


def mixed_shares(host: Host, report: Report) -> None:
    """Measures the share of a kernel whose launches take from 50 µs to 1.6 ms, alone and under an arbiter."""
    us, share = 50, 20
    steps = host.program("spin", 0, us, 0, 32, host.folder / "calibration", seconds=60)["steps"]

    def run(env: dict[str, str], spread: int) -> compute.Run:
        return compute.Run(host, [(us, steps, env)], [0.0], spread=spread)

    bare = run(host.base_env, SPREAD)
    report.figure("bare", bare.figures())
    most = 40 if host.simulated else 80
    report.gate("control: mixed kernels without the library", bare.mean() > most, f"> {most} %", f"{bare.mean():.1f} %")
    for name, spread in {"constant": 1, "mixed": SPREAD}.items():
        slice_ = host.slice(host.limit(), sm=share)
        found = run(slice_.env(), spread)
        report.figure(name, found.figures())
        most = share + (10 if host.simulated else 5)
        report.gate(f"{name} alone: no more than {most} %", found.mean() <= most, f"<= {most}", f"{found.mean():.2f}")
        report.goal(f"{name} alone: at least 18 %", found.mean() >= 18, ">= 18", f"{found.mean():.2f}")
    if not host.arbiter.exists():
        raise Skip("the library's folder has no vgpu-arbiter")
    slices = [host.slice(host.limit(), sm=one) for one in (share, 100 - share)]
    with Arbiter(host, slices):
        found = compute.Run(host, [(us, steps, one.env()) for one in slices], [0.0, 0.0], spread=SPREAD)
    report.figure("under an arbiter", [found.figures(0), found.figures(1)])
    # On a real GPU the share is only reported, because the stamps of two tenants overlap in the driver's time slices.
    if host.simulated:
        most = share + 10
        report.gate(
            f"under an arbiter: no more than {most} %", found.mean() <= most, f"<= {most}", f"{found.mean():.2f}"
        )


def capture(host: Host, report: Report) -> None:
    """Captures a graph while the limiter is busy: it must have exactly the program's nodes.

    The stage captures once with each call that begins a capture."""
    native = host.program("capture", env=host.base_env)
    report.figure("without the library", native)
    limited = host.program("capture", env=host.slice(host.limit(), sm=20).env())
    report.figure("with a limit", limited)
    for name, found in limited.items():
        report.gate(f"{name}: ends", found["status"] == 0, 0, found["status"])
        report.gate(f"{name}: nodes", found["nodes"] == native[name]["nodes"] == 200, 200, found["nodes"])
        near = found["milliseconds"] < native[name]["milliseconds"] + 50
        report.gate(f"{name}: captures without a delay", near, "< 50 ms more", f"{found['milliseconds']:.1f} ms")
    if "again" not in limited:
        report.note("this driver has no cuStreamBeginRecaptureToGraph")


def leave(host: Host, report: Report) -> None:
    """Ends processes with unfinished launches: their exit status must be 0, without any output."""
    rounds = 10 if host.quick else 50
    for name, env in {
        "without the library": host.base_env,
        "with a limit": host.slice(host.limit(), sm=30).env(),
    }.items():
        ends: dict[str, int] = {}
        for _unused in range(rounds):
            done = subprocess.run(
                [str(host.folder / "leave")],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                timeout=60,
                check=False,
            )
            said = done.stderr.decode(errors="replace").strip()[-200:] or "silent"
            ends[f"{done.returncode} {said}"] = ends.get(f"{done.returncode} {said}", 0) + 1
        report.gate(
            f"{name}: ends with status 0 and no output", ends == {"0 silent": rounds}, {"0 silent": rounds}, ends
        )
