# SPDX-License-Identifier: Apache-2.0
"""Arguments of vgpuctl: commands, options, examples."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from pathlib import Path

from .. import version
from ..allocation.engine_lists import ENGINES
from ..node.paths import Paths

SHORTEST_INTERVAL_S = 0.1
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "K": 10**3, "M": 10**6, "G": 10**9}
EXITS = (
    "exit status:\n"
    "  0\n"
    "  1  the plugin refuses or does not answer, or knows no such thing\n"
    "  2  the command line is wrong\n"
    "  3  no slice is free\n"
    "  of exec and run: the program's own; 125 to 127 where it cannot be started"
)
FIRST = ("vgpuctl status", "vgpuctl top", "vgpuctl run -- -it ubuntu:24.04 nvidia-smi", "vgpuctl run --help")
# Command → (description, examples), in the order of --help.
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "status": (
        "GPUs with their load, slices in sum, who holds what, warnings",
        ("vgpuctl status", "vgpuctl status --json | jq '.gpus[] | select(.healthy | not)'"),
    ),
    "slices": (
        "every slice: free, in use or unhealthy, its size, who holds it",
        ("vgpuctl slices", "vgpuctl slices --json | jq -r '.slices[] | select(.state == \"free\").id'"),
    ),
    "top": (
        "who holds and uses what of which GPU, as a live screen (q ends it)",
        ("vgpuctl top", "vgpuctl top --once", "vgpuctl top --interval 0.5"),
    ),
    "explain": (
        "why a GPU, a slice, a pod or the node is as it is",
        ("vgpuctl explain", "vgpuctl explain 3", "vgpuctl explain 0::2", "vgpuctl explain pod ml/train-0"),
    ),
    "watch": (
        "processes that bypass the library, as the watcher found them",
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
        "take one free slice from the kubelet for a check (exit 3: none is free)",
        ("vgpuctl lease --json", "vgpuctl lease --ttl 600"),
    ),
    "resize": (
        "another size for a slice in use, while its container runs",
        (
            "vgpuctl resize ml/train-0/main --memory 8Gi",
            "vgpuctl resize 0::2 --cores 30",
            "vgpuctl resize 1f2e3d4c5b6a7988 --memory 2Gi --oom-killer",
        ),
    ),
    "release": ("give a leased slice back", ("vgpuctl release 1f2e3d4c5b6a7988",)),
    "forget": (
        "a lost GPU was removed for good: show it no more",
        ("vgpuctl forget GPU-58761ffe-067d-967c-c921-df91885a18d2",),
    ),
    "metrics": ("Prometheus metrics, as --metrics-listen serves them", ("vgpuctl metrics | grep vgpu_gpu_healthy",)),
    "completion": (
        "completion for a shell, to be read by it",
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
        description="What this host's device plugin offers and has given out.",
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
            made[name].add_argument("--json", action="store_true", help="for programs; a fault is JSON too")
    _of_people(made)
    _of_slices(made)
    return out


def _examples(lines: tuple[str, ...]) -> str:
    return "\n".join(f"  {one}" for one in lines)


def _of_people(made: dict[str, argparse.ArgumentParser]) -> None:
    top = made["top"]
    top.add_argument("--once", action="store_true", help="one table and no more, over the interval")
    top.add_argument("--live", action="store_true", help="a live screen (the default of a terminal)")
    top.add_argument("--interval", type=_interval, default=2.0, metavar="SECONDS", help="default: %(default)s")
    why = made["explain"]
    why.add_argument("what", nargs="?", default="", help="index or UUID of a GPU, the id of a slice, or: pod")
    why.add_argument("pod", nargs="?", default="", metavar="NAMESPACE/NAME", help="after the word pod: which one")
    why.add_argument(
        "--scheduler", default="127.0.0.1:8880", metavar="HOST:PORT", help="for pod (default: %(default)s)"
    )
    why.add_argument("--kubeconfig", default="", metavar="FILE", help="for pod (default: KUBECONFIG, ~/.kube/config)")
    made["watch"].add_argument("--all", action="store_true", help="also what this host's own checks did, and is over")
    made["completion"].add_argument("shell", choices=("bash", "zsh"))


def _of_slices(made: dict[str, argparse.ArgumentParser]) -> None:
    for name in ("lease", "exec", "run"):
        made[name].add_argument("--uuid", default="", help="a slice of this GPU (default: any)")
    made["lease"].add_argument(
        "--ttl", type=_ttl, default=0, metavar="SECONDS", help="the lease ends after so long (default: 300)"
    )
    size = made["resize"]
    size.add_argument("what", help="an allocation, a slice, or NAMESPACE/POD/CONTAINER")
    size.add_argument(
        "--memory", type=_memory, default=0, metavar="SIZE", help="of each GPU, such as 8Gi (default: as it is)"
    )
    size.add_argument(
        "--cores",
        type=_cores_or_none,
        default=None,
        metavar="PERCENT",
        help="of each GPU; 0: no limit (default: as it is)",
    )
    size.add_argument("--uuid", default="", help="of this GPU alone (default: of each that it has)")
    size.add_argument(
        "--oom-killer",
        action="store_true",
        help="allow less than is in use: the largest process is ended until it fits",
    )
    made["release"].add_argument("allocation", help="as lease answered")
    made["forget"].add_argument("uuid", help="as status has it")
    run = made["exec"]
    run.add_argument("--ttl", type=_ttl, default=3600, metavar="SECONDS", help="the slice is kept for (default: 3600)")
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM …", help="and its arguments")
    run = made["run"]
    run.add_argument("--gpus", type=_count, default=1, metavar="N", help="slices of so many GPUs (default: 1)")
    run.add_argument(
        "--memory", type=_memory, default=0, metavar="SIZE", help="of each slice, such as 4Gi (default: all)"
    )
    run.add_argument("--cores", type=_cores, default=0, metavar="PERCENT", help="of each GPU (default: the slice's)")
    run.add_argument("--engine", choices=ENGINES, default="", help="default: docker where it runs, else podman")
    run.add_argument(
        "--detach", "-d", action="store_true", help="leave it running; its slices are its own until it is removed"
    )
    run.add_argument(
        "--compose", default="", metavar="SERVICE", help="run nothing: print what docker compose is to add to a service"
    )
    run.add_argument(
        "--cdi-dir", type=Path, default=Paths().cdi_dir, help="the plugin's CDI files (default: %(default)s)"
    )
    run.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="-- [OPTIONS] IMAGE …", help="as docker run and podman run take them"
    )


def _whole(text: str, most: int, what: str, unit: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 < int(text) <= most:
            return int(text)
    raise argparse.ArgumentTypeError(f"{what} {text}{unit}; expected a whole number from 1 to {most}")


def _ttl(text: str) -> int:
    """Parses a duration in seconds. The plugin checks the maximum; this limit is the largest number that fits in the
    message.
    """
    return _whole(text, (1 << 31) - 1, "a lease of", " s")


def _count(text: str) -> int:
    return _whole(text, 1024, "slices of", " GPUs")


def _cores(text: str) -> int:
    return _whole(text.removesuffix("%"), 100, "a share of", " %")


def _cores_or_none(text: str) -> int:
    return 0 if text.removesuffix("%") == "0" else _cores(text)


def _memory(text: str) -> int:
    found = re.fullmatch(r"(\d+)(Ki|Mi|Gi|K|M|G)", text)
    if found and 0 < int(found[1]) * UNITS[found[2]] < 1 << 62:
        return int(found[1]) * UNITS[found[2]]
    raise argparse.ArgumentTypeError(f"memory of {text}; expected a number with its unit, such as 4Gi or 512Mi")


def _interval(text: str) -> float:
    with contextlib.suppress(ValueError):
        if SHORTEST_INTERVAL_S <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"every {text} s; expected {SHORTEST_INTERVAL_S} or more")
