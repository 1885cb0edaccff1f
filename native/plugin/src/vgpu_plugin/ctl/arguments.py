# SPDX-License-Identifier: Apache-2.0
"""The command line arguments of vgpuctl: its commands and options, with examples for --help."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from pathlib import Path

from .. import version
from ..admin.holder_names import EXPECTED
from ..allocation.engine_lists import ENGINES
from ..node.paths import Paths

SHORTEST_INTERVAL_S = 0.1
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "K": 10**3, "M": 10**6, "G": 10**9}
EXITS = (
    "exit status:\n"
    "  0\n"
    "  1  the plugin refuses the request, does not respond, or cannot find the named object\n"
    "  2  the command line is wrong\n"
    "  3  no slice is free\n"
    "  exec and run return the program's exit status; 125 to 127 if the program cannot be started"
)
FIRST = ("vgpuctl status", "vgpuctl top", "vgpuctl run -- -it ubuntu:24.04 nvidia-smi", "vgpuctl run --help")
# Command → (description, examples), in the order of --help.
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "status": (
        "show the GPUs with their load, the number of slices, the holders and the warnings",
        ("vgpuctl status", "vgpuctl status --json | jq '.gpus[] | select(.healthy | not)'"),
    ),
    "slices": (
        "show each slice's state (free, in use, unhealthy), size and holder",
        ("vgpuctl slices", "vgpuctl slices --json | jq -r '.slices[] | select(.state == \"free\").id'"),
    ),
    "top": (
        "show memory and time of each GPU by container, as a live screen (q ends it)",
        ("vgpuctl top", "vgpuctl top --once", "vgpuctl top --interval 0.5"),
    ),
    "explain": (
        "explain the state of a GPU, a slice, a holder of slices, a pod or the node",
        ("vgpuctl explain", "vgpuctl explain 3", "vgpuctl explain 0::2", "vgpuctl explain pod ml/train-0"),
    ),
    "watch": (
        "show processes that bypass the library, as found by the watcher",
        ("vgpuctl watch", "vgpuctl watch --all"),
    ),
    "run": (
        "run a container of docker or podman in free slices (exit 3: none is free)",
        (
            "vgpuctl run -- -it ubuntu:24.04 nvidia-smi",
            "vgpuctl run --memory 4Gi --cores 25 -- -v /data:/data trainer:7 python train.py",
            "vgpuctl run --gpus 2 --detach -- --name web --restart always server:3",
            "vgpuctl run --compose trainer > compose.gpu.json",
        ),
    ),
    "exec": (
        "run a command of this host in a free slice (exit 3: none is free)",
        ("vgpuctl exec -- nvidia-smi", "vgpuctl exec --uuid GPU-58761ffe-067d-967c-c921-df91885a18d2 -- ./train"),
    ),
    "lease": (
        "reserve a free slice for a check, so that no container gets it (exit 3: none is free)",
        ("vgpuctl lease --json", "vgpuctl lease --ttl 600"),
    ),
    "resize": (
        "change the size of a slice in use, while its container runs",
        (
            "vgpuctl resize ml/train-0/main --memory 8Gi",
            "vgpuctl resize web --memory 512Mi",
            "vgpuctl resize 0::2 --cores 30",
            "vgpuctl resize 1f2e3d4c5b6a7988 --memory 2Gi --oom-killer",
        ),
    ),
    "release": ("end a lease, so that its slice is free again", ("vgpuctl release 1f2e3d4c5b6a7988",)),
    "forget": (
        "stop showing a lost GPU that was removed for good",
        ("vgpuctl forget GPU-58761ffe-067d-967c-c921-df91885a18d2",),
    ),
    "metrics": ("print the Prometheus metrics of --metrics-listen", ("vgpuctl metrics | grep vgpu_gpu_healthy",)),
    "completion": (
        "print the completion script for a shell",
        (
            "vgpuctl completion bash > /usr/share/bash-completion/completions/vgpuctl",
            'vgpuctl completion zsh > "${fpath[1]}/_vgpuctl"',
        ),
    ),
}
WITHOUT_JSON = ("run", "exec", "completion")


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="vgpuctl",
        description="Shows and changes the GPU slices of this host's device plugin.",
        epilog=f"examples:\n{_examples(FIRST)}\n\n{EXITS}\n\nThe fields of --json: docs/vgpuctl.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument(
        "--socket", type=Path, default=Paths().admin_socket, help="the plugin's socket (default: %(default)s)"
    )
    out.add_argument("--version", action="version", version=version())
    commands = out.add_subparsers(dest="command", required=True, metavar="COMMAND")
    made = {}
    for name, (about, examples) in COMMANDS.items():
        made[name] = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog=f"examples:\n{_examples(examples)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name not in WITHOUT_JSON:
            made[name].add_argument("--json", action="store_true", help="print JSON, also for errors")
    _of_people(made)
    _of_slices(made)
    return out


def _examples(lines: tuple[str, ...]) -> str:
    return "\n".join(f"  {one}" for one in lines)


def _of_people(made: dict[str, argparse.ArgumentParser]) -> None:
    top = made["top"]
    top.add_argument("--once", action="store_true", help="print one table for one interval and exit")
    top.add_argument("--live", action="store_true", help="show a live screen (default in a terminal)")
    top.add_argument(
        "--interval", type=_interval, default=2.0, metavar="SECONDS", help="time between updates (default: %(default)s)"
    )
    why = made["explain"]
    why.add_argument(
        "what", nargs="?", default="", help=f"index or UUID of a GPU, {EXPECTED}, or the word pod (default: the node)"
    )
    why.add_argument(
        "pod", nargs="?", default="", metavar="NAMESPACE/NAME", help="the pod to explain, after the word pod"
    )
    why.add_argument(
        "--scheduler",
        default="127.0.0.1:8880",
        metavar="HOST:PORT",
        help="address of the scheduler, to explain a pod (default: %(default)s)",
    )
    why.add_argument(
        "--kubeconfig",
        default="",
        metavar="FILE",
        help="kubeconfig, to explain a pod without the scheduler (default: KUBECONFIG, ~/.kube/config)",
    )
    made["watch"].add_argument("--all", action="store_true", help="include ended findings of this host's own checks")
    made["completion"].add_argument("shell", choices=("bash", "zsh"))


def _of_resize(size: argparse.ArgumentParser) -> None:
    size.add_argument("what", metavar="HOLDER", help=EXPECTED)
    size.add_argument(
        "--memory",
        type=_memory,
        default=0,
        metavar="SIZE",
        help=f"memory on each GPU, such as 8Gi; units: {', '.join(UNITS)} (default: unchanged)",
    )
    size.add_argument(
        "--cores",
        type=_cores_or_none,
        default=None,
        metavar="PERCENT",
        help="share of each GPU's time, 1 to 100; 0: no limit (default: unchanged)",
    )
    size.add_argument("--uuid", default="", help="resize only on this GPU (default: each GPU of the allocation)")
    size.add_argument(
        "--oom-killer",
        action="store_true",
        help="allow a limit below the used memory: ends the largest process until the rest fits",
    )


def _of_slices(made: dict[str, argparse.ArgumentParser]) -> None:
    for name in ("lease", "exec", "run"):
        made[name].add_argument("--uuid", default="", help="use a slice of this GPU (default: any GPU)")
    made["lease"].add_argument(
        "--ttl", type=_ttl, default=0, metavar="SECONDS", help="duration of the lease (default: 300)"
    )
    _of_resize(made["resize"])
    made["release"].add_argument("allocation", help="id of the allocation, as lease printed it")
    made["forget"].add_argument("uuid", help="UUID of the GPU, as status shows it")
    run = made["exec"]
    run.add_argument("--ttl", type=_ttl, default=3600, metavar="SECONDS", help="duration of the lease (default: 3600)")
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM …", help="program and its arguments")
    run = made["run"]
    run.add_argument("--gpus", type=_count, default=1, metavar="N", help="number of GPUs, one slice each (default: 1)")
    run.add_argument(
        "--memory",
        type=_memory,
        default=0,
        metavar="SIZE",
        help="memory of each slice, such as 4Gi (default: all of it)",
    )
    run.add_argument(
        "--cores", type=_cores, default=0, metavar="PERCENT", help="share of each GPU's time (default: the slice's)"
    )
    run.add_argument("--engine", choices=ENGINES, default="", help="default: docker if it runs, else podman")
    run.add_argument(
        "--detach",
        "-d",
        action="store_true",
        help="run in the background; the container keeps its slices until it is removed",
    )
    run.add_argument(
        "--compose",
        default="",
        metavar="SERVICE",
        help="run nothing; print the fields to add to this docker compose service",
    )
    run.add_argument(
        "--cdi-dir", type=Path, default=Paths().cdi_dir, help="folder of the plugin's CDI files (default: %(default)s)"
    )
    run.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="-- [OPTIONS] IMAGE …", help="arguments of docker run or podman run"
    )


def _whole(text: str, most: int, what: str, unit: str, least: int = 1) -> int:
    with contextlib.suppress(ValueError):
        if least <= int(text) <= most:
            return int(text)
    raise argparse.ArgumentTypeError(f"{what} {text}{unit}; expected a whole number from {least} to {most}")


def _ttl(text: str) -> int:
    """Parses a duration in seconds. This limit is only the largest number that fits in the message; the plugin checks
    the real maximum.
    """
    return _whole(text, (1 << 31) - 1, "a lease of", " s")


def _count(text: str) -> int:
    return _whole(text, 1024, "slices of", " GPUs")


def _cores(text: str, least: int = 1) -> int:
    return _whole(text.removesuffix("%"), 100, "a share of", " %", least)


def _cores_or_none(text: str) -> int:
    return _cores(text, 0)


def _memory(text: str) -> int:
    found = re.fullmatch(r"(\d+)(Ki|Mi|Gi|K|M|G)", text)
    if found and 0 < int(found[1]) * UNITS[found[2]] < 1 << 62:
        return int(found[1]) * UNITS[found[2]]
    raise argparse.ArgumentTypeError(
        f"memory of {text}; expected a number with its unit, such as 4Gi or 512Mi; units: {', '.join(UNITS)}"
    )


def _interval(text: str) -> float:
    with contextlib.suppress(ValueError):
        if SHORTEST_INTERVAL_S <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"every {text} s; expected {SHORTEST_INTERVAL_S} or more")
