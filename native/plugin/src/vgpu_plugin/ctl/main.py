# SPDX-License-Identifier: Apache-2.0
"""Command line of vgpuctl: asks and tells the device plugin of this host. Root only, for the socket is."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from .. import version
from .._proto import admin_pb2 as api
from ..admin import metrics
from ..admin.admin_socket import EXHAUSTED, Client, Fault
from ..admin.plain import plain
from ..node.paths import Paths
from . import descendants
from . import text as ctl_text

FAILED, USAGE, NO_FREE_SLICE = 1, 2, 3
TIMEOUT_S = 45.0
SHORTEST_INTERVAL_S = 0.1
EXITS = (
    "Exit status: 0; 1 the plugin refuses or does not answer, or knows no such thing; 2 the command line is wrong; "
    "3 no slice is free; of exec the program's own, 126 and 127 where it cannot be started."
)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="vgpuctl", description="What this host's device plugin offers and has given out.", epilog=EXITS
    )
    out.add_argument(
        "--socket", type=Path, default=Paths().admin_socket, help="the plugin's socket (default: %(default)s)"
    )
    out.add_argument("--version", action="version", version=version())
    commands = out.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="GPUs, slices, allocations, registration")
    lease = commands.add_parser("lease", help="take one free slice from the kubelet for a check (exit 3: none is free)")
    lease.add_argument("--uuid", default="", help="a slice of this GPU (default: any)")
    lease.add_argument(
        "--ttl", type=_ttl, default=0, metavar="SECONDS", help="the lease ends after so long (default: 300)"
    )
    release = commands.add_parser("release", help="give a leased slice back")
    release.add_argument("allocation", help="as lease answered")
    gone = commands.add_parser("forget", help="a lost GPU was removed for good: show it no more")
    gone.add_argument("uuid", help="as status has it")
    top = commands.add_parser("top", help="what each container holds and uses, again and again")
    top.add_argument("--once", action="store_true", help="one table and no more")
    top.add_argument("--interval", type=_interval, default=2.0, metavar="SECONDS", help="default: %(default)s")
    pieces = commands.add_parser("slices", help="every slice: size, health, who holds it")
    why = commands.add_parser("explain", help="why a GPU, a slice or the node is as it is")
    why.add_argument("what", nargs="?", default="", help="index or UUID of a GPU, the id of a slice, or: pod")
    why.add_argument("pod", nargs="?", default="", metavar="NAMESPACE/NAME", help="after the word pod: which one")
    why.add_argument(
        "--scheduler", default="127.0.0.1:8880", metavar="HOST:PORT", help="for pod (default: %(default)s)"
    )
    why.add_argument("--kubeconfig", default="", metavar="FILE", help="for pod (default: KUBECONFIG, ~/.kube/config)")
    figures = commands.add_parser("metrics", help="Prometheus metrics, as --metrics-listen serves them")
    found = commands.add_parser("watch", help="processes that bypass the library, as the watcher found them")
    for one in (status, lease, release, gone, top, pieces, why, figures, found):
        one.add_argument("--json", action="store_true", help="for programs")
    run = commands.add_parser("exec", help="run a command in a free slice on this host (exit 3: none is free)")
    run.add_argument("--uuid", default="", help="a slice of this GPU (default: any)")
    run.add_argument("--ttl", type=_ttl, default=3600, metavar="SECONDS", help="the slice is kept for (default: 3600)")
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM …", help="and its arguments")
    return out


def _ttl(text: str) -> int:
    """How long is too long is for the plugin to say; beyond this no message holds it."""
    with contextlib.suppress(ValueError):
        if 0 < int(text) < 1 << 31:
            return int(text)
    raise argparse.ArgumentTypeError(f"a lease of {text} s; expected a whole number from 1 to {(1 << 31) - 1}")


def _interval(text: str) -> float:
    with contextlib.suppress(ValueError):
        if SHORTEST_INTERVAL_S <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"every {text} s; expected {SHORTEST_INTERVAL_S} or more")


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        # A terminal that has not every character gets a question mark for it.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except UnicodeError:
        print("vgpuctl: an argument is no text in UTF-8", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        _lose_output()
        return 128 + signal.SIGPIPE
    except OSError as fault:
        _lose_output()
        print(f"vgpuctl: {fault}", file=sys.stderr)
        return FAILED


def _lose_output() -> None:
    """Nobody takes it any more, and Python would try once more at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    reader = parser()
    given = reader.parse_args(arguments)
    if given.command == "explain" and given.pod and given.what != "pod":
        reader.error(f"explain takes one thing, or: pod NAMESPACE/NAME; found {given.what} and {given.pod}")
    if given.command == "explain" and given.what == "pod":
        from . import pod as ctl_pod  # of this command alone

        return ctl_pod.explain(given)
    if given.command in PROGRAMS:
        try:
            return PROGRAMS[given.command](given)
        except Fault as fault:
            return complain(fault)
    try:
        answer = COMMANDS[given.command](Client(given.socket, TIMEOUT_S), given)
    except Fault as fault:
        return complain(fault)
    unknown = given.command == "explain" and not answer["lines"]
    if given.json:
        print(json.dumps(answer, indent=1))
    elif unknown:
        print(f"vgpuctl: this node has no GPU and no slice {given.what}; see: vgpuctl slices", file=sys.stderr)
    else:
        print(TEXTS[given.command](answer))
    return FAILED if unknown else 0


def complain(fault: Fault) -> int:
    print(f"vgpuctl: {fault}", file=sys.stderr)
    return NO_FREE_SLICE if fault.code == EXHAUSTED else FAILED


def status(plugin: Client, _given: argparse.Namespace) -> dict[str, Any]:
    return plain(plugin.call("Status", api.StatusRequest()))


def lease(plugin: Client, given: argparse.Namespace) -> dict[str, Any]:
    found = plugin.call("Lease", api.LeaseRequest(uuid=given.uuid, ttl_s=given.ttl))
    answer = plain(found.answer)
    return {
        "allocation": found.allocation,
        "ids": list(found.ids),
        "envs": answer["envs"],
        "mounts": answer["mounts"],
        "devices": answer["devices"],
        "cdi_devices": [one["name"] for one in answer["cdi_devices"]],
        "annotations": answer["annotations"],
    }


def release(plugin: Client, given: argparse.Namespace) -> dict[str, Any]:
    plugin.call("Release", api.ReleaseRequest(allocation=given.allocation))
    return {"released": given.allocation}


def forget(plugin: Client, given: argparse.Namespace) -> dict[str, Any]:
    plugin.call("Forget", api.ForgetRequest(uuid=given.uuid))
    return {"forgotten": given.uuid}


def usage(plugin: Client) -> list[dict[str, Any]]:
    return list(plain(plugin.call("Usage", api.UsageRequest()))["usages"])


def metrics_of(plugin: Client, given: argparse.Namespace) -> dict[str, Any]:
    return {"status": status(plugin, given), "usages": usage(plugin), "watch": watched(plugin, given)}


def watched(plugin: Client, _given: argparse.Namespace) -> dict[str, Any]:
    return plain(plugin.call("Watch", api.WatchRequest()))


def explain(plugin: Client, given: argparse.Namespace) -> dict[str, Any]:
    found = status(plugin, given)
    return {"what": given.what, "lines": ctl_text.explain(found, given.what)}


def explain_text(answer: dict[str, Any]) -> str:
    return "\n".join(answer["lines"])


def top(given: argparse.Namespace) -> int:
    before: dict[tuple[str, str], float] | None = None
    then = 0.0
    plugin = Client(given.socket, TIMEOUT_S)
    live = sys.stdout.isatty() and not given.once and not given.json
    clear = "\033[H\033[2J" if live else ""
    while True:
        try:
            usages, now = usage(plugin), time.monotonic()
        except Fault as fault:
            if not live or before is None:
                raise
            # A plugin that is started again answers again soon.
            print(f"{clear}vgpuctl: {fault}", flush=True)
        else:
            if given.json:
                print(json.dumps({"usages": usages}, indent=1))
            else:
                width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
                print(clear + ctl_text.top(usages, before, now - then, width), flush=True)
            if given.once or given.json:
                return 0
            before, then = {(one["allocation"], one["uuid"]): one["device_seconds"] for one in usages}, now
        try:
            time.sleep(given.interval)
        except KeyboardInterrupt:
            return 0


def execute(given: argparse.Namespace) -> int:
    """Runs a program in a leased slice and gives the slice back; its exit status, as shells have it."""
    program = given.program[1:] if given.program[:1] == ["--"] else given.program
    if not program:
        print("vgpuctl: exec needs a program: vgpuctl exec -- nvidia-smi", file=sys.stderr)
        return USAGE
    plugin = Client(given.socket, TIMEOUT_S)
    # The slice is given back also where this program gets a signal; the program in it is killed then.
    _on_ends(_end, signal.SIGTERM, signal.SIGHUP)
    descendants.adopt()
    found = lease(plugin, given)
    try:
        gpus = {one["uuid"]: one for one in status(plugin, given)["gpus"]}
        uuids = [one.partition("::")[0] for one in found["ids"]]
        wanted = {
            "mounts": [[one["container_path"], one["host_path"], one["read_only"]] for one in found["mounts"]],
            "minors": [gpus[one]["minor"] for one in uuids if one in gpus],
            "envs": found["envs"],
        }
        command = [sys.executable, "-I", "-c", _enter(), json.dumps(wanted), *program]
        with contextlib.suppress(KeyboardInterrupt):
            done = subprocess.run(command, check=False)
            return done.returncode if done.returncode >= 0 else 128 - done.returncode
        return 128 + signal.SIGINT
    finally:
        _on_ends(_ends_already)
        _give_back(plugin, found["allocation"])


def _give_back(plugin: Client, allocation: str) -> None:
    # Before the slice is another's: what the program started in the background still holds memory in it.
    left = descendants.end()
    if left:
        names = ", ".join(str(pid) for pid in left)
        print(f"vgpuctl: the slice was not given back, process {names} in it does not end", file=sys.stderr)
        return
    try:
        plugin.call("Release", api.ReleaseRequest(allocation=allocation))
    except Fault as fault:  # what the program returned counts all the same
        print(f"vgpuctl: the slice was not given back, its lease ends after its time: {fault}", file=sys.stderr)


def _on_ends(handler: Callable[[int, FrameType | None], None], *numbers: int) -> None:
    """But for those that this program was started to ignore, as by nohup: then the program in the slice does too."""
    for number in numbers or (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    # Once: a second one, as of a session that ends, would come between this and the kill of the program in the slice.
    _on_ends(_ends_already)
    sys.exit(128 + number)


def _ends_already(_number: int, _frame: FrameType | None) -> None:
    """Nothing keeps the slice from being given back."""


def _enter() -> str:
    """Text of a program for an isolated Python, which imports nothing from the working directory or PYTHONPATH: root
    may stand in a folder of others. The package is found where this one was, for a checkout is not installed.
    """
    root = str(Path(__file__).resolve().parents[2])
    return f"import sys; sys.path.append({root!r}); from {__package__}.enter import main; sys.exit(main())"


def status_text(answer: dict[str, Any]) -> str:
    state = "registered" if answer["registered"] else f"not registered: {answer['kubelet_error']}"
    names = ", ".join(answer["resources"]) or answer["resource"]
    lines = [
        f"plugin {answer['version']} (pid {answer['pid']}), resource {names}, {state}",
        f"configuration {answer['config_path']} (sha256 {answer['config_sha256'][:12]})",
        f"library {answer['library'] or 'none'}",
        "",
        f"{'SLICE':46} {'MEMORY MiB':>10} {'SM %':>5} {'HEALTH':10} IN USE",
    ]
    for one in answer["slices"]:
        used, health = "yes" if one["in_use"] else "no", ctl_text.health(answer, one)
        lines.append(f"{one['id']:46} {one['memory_mib']:>10} {one['sm_percent']:>5} {health:10} {used}")
    lines += [f"GPU {one['index']} {one['uuid']}: {one['reason']}" for one in answer["gpus"] if one["reason"]]
    lines.append(f"containers get their GPU by {answer['hand_over']}: {answer['hand_over_reason']}")
    for one in answer["allocations"]:
        ends = f", ends in {one['expires_in_s']} s" if one["kind"] == "lease" else ""
        lines.append(f"allocation {one['id']} ({one['kind']}): {', '.join(one['slice_ids'])}{ends}")
    return "\n".join(lines + [f"warning: {one}" for one in answer["warnings"]])


def lease_text(answer: dict[str, Any]) -> str:
    lines = [f"leased {', '.join(answer['ids'])}; give it back with: vgpuctl release {answer['allocation']}"]
    lines += [f"env {name}={value}" for name, value in sorted(answer["envs"].items())]
    for one in answer["mounts"]:
        lines.append(f"mount {one['host_path']} at {one['container_path']}{' read-only' if one['read_only'] else ''}")
    return "\n".join(lines)


COMMANDS = {
    "status": status,
    "lease": lease,
    "release": release,
    "forget": forget,
    "slices": status,
    "explain": explain,
    "metrics": metrics_of,
    "watch": watched,
}
# These print by themselves.
PROGRAMS = {"top": top, "exec": execute}
TEXTS = {
    "status": status_text,
    "lease": lease_text,
    "slices": ctl_text.slices,
    "explain": explain_text,
    "metrics": lambda answer: metrics.text(answer["status"], answer["usages"], answer["watch"]).rstrip(),
    "watch": ctl_text.watch,
    "release": lambda answer: f"released {answer['released']}",
    "forget": lambda answer: f"forgotten {answer['forgotten']}",
}

if __name__ == "__main__":
    sys.exit(main())
