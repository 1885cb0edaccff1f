# SPDX-License-Identifier: Apache-2.0
"""Stages of gpu-check about the values that programs see in a slice (part of a GPU): through NVML, NVIDIA's nvidia-smi,
and PyTorch. Strings such as ``get alloc 4096`` are commands of the program hand.c.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from .host import GIB, MIB, OK, PROGRAMS, Hand, Host
from .report import Report, Skip

SMI_FOLDERS = ["/usr/local/nvidia/bin", "/usr/bin", "/usr/lib/wsl/lib"]


def shown(host: Host, report: Report) -> None:
    """Compares what CUDA and NVML show inside a slice with the expected values: the limit as total, the charge as used,
    and the process under its own pid."""
    limit = host.limit()
    slice_ = host.slice(limit)
    with Hand(host, slice_.env()) as hand:
        hand.start()
        hand.must(f"get alloc {limit // 3}")
        charged = slice_.total()
        inside = host.inside("nvml", slice_.env(), "0")
        report.figure("inside", inside)
        report.figure("outside", {"processes": host.card.processes(), "memory": host.card.memory()})
        info = hand.say("info")
        report.gate("cuMemGetInfo: total", info[2] == limit, limit, info[2])
        report.gate("cuMemGetInfo: free", info[1] == limit - charged, limit - charged, info[1])
        total = hand.say("total")
        report.gate("cuDeviceTotalMem", total == [OK, limit], limit, total)
        for form in ("memory", "memory2"):
            found = inside[form]
            if isinstance(found, str):
                report.note(f"{form}: {found}")
                continue
            want = {"total": limit, "used": charged, "free": limit - charged}
            got = {key: found[key] for key in want}
            report.gate(f"NVML {form}", got == want, want, got)
        pids = list(inside["processes"]) if isinstance(inside["processes"], dict) else []
        outside = host.card.processes()
        how = "own pid" if hand.pid in outside else "other pids" if outside else "no process"
        report.figure("nvml_process_view", how)
        report.goal("NVML inside shows only this slice's process", pids == [str(hand.pid)], [hand.pid], pids)


def find_smi() -> Path | None:
    wanted = os.environ.get("VGPU_NVIDIA_SMI")
    for path in [wanted, shutil.which("nvidia-smi"), *(folder + "/nvidia-smi" for folder in SMI_FOLDERS)]:
        if path and Path(path).exists():
            return Path(path)
    return None


def nvidia_smi(host: Host, report: Report) -> None:
    """Compares what NVIDIA's nvidia-smi shows in a slice with the expected values."""
    program = find_smi()
    if not program:
        raise Skip("this host has no nvidia-smi")
    limit = host.limit()
    slice_ = host.slice(limit)
    with Hand(host, slice_.env()) as hand:
        hand.start()
        hand.must(f"get alloc {limit // 2}")
        charged = slice_.total()
        query = "--query-gpu=uuid,memory.total,memory.used,memory.free"
        text = host.run(program, query, "--format=csv,noheader,nounits", "-i", host.uuid, env=slice_.env(), seconds=60)
        report.figure("query", text.strip())
        fields = [word.strip() for word in text.strip().splitlines()[-1].split(",")]
        numbers = [int(word) for word in fields[1:]]
        # nvidia-smi rounds to whole MiB, up or down.
        report.gate("total", abs(numbers[0] - limit / MIB) <= 1, round(limit / MIB, 1), numbers[0])
        near = abs(numbers[1] - charged / MIB) <= 1
        report.gate("used", near, round(charged / MIB, 1), numbers[1])
        report.gate("free is not negative", 0 <= numbers[2] <= limit / MIB + 1, f"0..{limit // MIB + 1}", numbers[2])
        box = host.run(program, env=slice_.env(), seconds=60)
        report.figure("box", box)
        found = re.search(r"(\d+)MiB\s*/\s*(\d+)MiB", box)
        near = bool(found) and abs(int(found.group(2)) - limit / MIB) <= 1
        report.gate("the table of GPUs shows the limit", near, round(limit / MIB, 1), found and found.group(0))
        report.goal(
            "the table of processes shows the slice's process",
            str(hand.pid) in box,
            hand.pid,
            "there" if str(hand.pid) in box else "not there",
        )
    with_nothing = host.run(program, "-L", env=dict(slice_.env(), CUDA_DISABLE_CONTROL="true"), seconds=60)
    report.figure("list", with_nothing.strip())


def torch_python() -> str | None:
    """Returns a Python interpreter that has PyTorch, or None."""
    for python in [
        sys.executable,
        shutil.which("python3"),
        "/opt/torch/.venv/bin/python3",
        os.environ.get("VGPU_TORCH_PYTHON"),
    ]:
        if not python or not Path(python).exists():
            continue
        ask = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
        if subprocess.run([python, "-c", ask], stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return python
    return None


def _until_full(host: Host, python: str, env: dict[str, str], before: int) -> tuple[str, int, str]:
    """Runs torch_limit.py and returns its figures and its process's usage at the limit, seen from outside the slice."""
    command = [python, str(PROGRAMS / "torch_limit.py")]
    log = host.folder / "torch.stderr"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert process.stdout
    try:
        first = process.stdout.readline()
        held, how = host.held([process.pid], before) if first.strip() == "full" else (0, "not full")
        text, _unused = process.communicate("go\n", timeout=120)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"torch ended with {process.returncode}: {log.read_text(errors='replace')[-500:]}")
    return first + text, held, how


def pytorch(host: Host, report: Report) -> None:
    """Expects OutOfMemoryError at the limit from each of PyTorch's allocators, and right results below the limit."""
    python = torch_python()
    if not python:
        raise Skip("no Python on this host has PyTorch")
    if host.simulated:
        raise Skip("PyTorch needs a real driver")
    free = host.card.memory()["free"]
    limit = min(12 * GIB, free // 2 // MIB * MIB)
    allocators = {
        "native": "",
        "expandable": "expandable_segments:True",
        "async": "backend:cudaMallocAsync",
    }
    first: dict[str, float] = {}
    for name, env in {"bare": host.base_env, "preloaded": host.slice(limit).env()}.items():
        text = host.run(python, PROGRAMS / "torch_limit.py", "first", env=env, seconds=120)
        found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
        if found.get("skipped"):
            raise Skip(found["skipped"])
        first[name] = found["first_use_seconds"]
    report.figure("first_use_seconds", first)
    near = first["preloaded"] < first["bare"] + 1
    report.goal("preload adds less than 1 s to PyTorch's first use", near, first["bare"], first["preloaded"])
    for name, setting in allocators.items():
        slice_ = host.slice(limit)
        before = host.card.memory()["used"]
        env = slice_.env()
        if setting:
            env.update(PYTORCH_CUDA_ALLOC_CONF=setting, PYTORCH_ALLOC_CONF=setting)
        try:
            text, held, how = _until_full(host, python, env, before)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            report.gate(f"{name}: runs", False, "exit 0", str(error)[-400:])
            continue
        found = json.loads(text.strip().splitlines()[-1])
        report.figure(name, found)
        context = found["total"] - found["free"]
        report.gate(f"{name}: the context is charged", context > 64 * MIB, f"> {64 * MIB}", context)
        report.gate(f"{name}: mem_get_info shows the limit", found["total"] == limit, limit, found["total"])
        report.gate(
            f"{name}: OutOfMemoryError", found["error"] == "OutOfMemoryError", "OutOfMemoryError", found["error"]
        )
        report.gate(
            f"{name}: gets more than 60 % of the slice",
            found["allocated"] > 0.6 * limit,
            f"> {0.6 * limit:.0f}",
            found["allocated"],
        )
        report.gate(
            f"{name}: gets no more than the slice", found["allocated"] <= limit, f"<= {limit}", found["allocated"]
        )
        report.gate(f"{name}: can allocate after the error", found["again"], True, found["again"])
        report.gate(f"{name}: a matrix product is right", found["product"], True, found["product"])
        report.gate(
            f"{name}: the replay of a graph is right", found["graph"] in (True, "not tried"), True, found["graph"]
        )
        report.figure(name + "_on_card", [held, how])
        report.gate(f"{name}: bytes used on the GPU ({how})", held <= limit + 96 * MIB, f"<= {limit + 96 * MIB}", held)
