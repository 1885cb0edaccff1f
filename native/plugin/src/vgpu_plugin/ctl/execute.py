# SPDX-License-Identifier: Apache-2.0
"""``vgpuctl exec``: runs a program in a slice (part of a GPU) of this host, and frees the slice when the
program ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from .._proto import admin_pb2 as api
from ..admin.admin_socket import Client, Fault
from ..admin.plain import plain
from ..allocation.records import EXEC
from . import descendants

USAGE = 2


def holder(program: Sequence[str]) -> str:
    """Returns a text that names the holder of the slice: the user who called sudo, and the program."""
    try:
        user = os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return f"{user}: {os.path.basename(program[0])}"


def execute(given: argparse.Namespace, plugin: Client) -> int:
    """Runs a program in a leased slice, and frees the slice at the end. Returns the program's exit status as a shell
    would report it.
    """
    program = given.program[1:] if given.program[:1] == ["--"] else given.program
    if not program:
        print("vgpuctl: exec needs a program: vgpuctl exec -- nvidia-smi", file=sys.stderr)
        return USAGE
    # If this program gets one of these signals, it kills the program in the slice and frees the slice.
    _on_ends(_end, signal.SIGTERM, signal.SIGHUP)
    descendants.adopt()
    request = api.LeaseRequest(uuid=given.uuid, ttl_s=given.ttl, kind=EXEC, holder=holder(program))
    found = plugin.call("Lease", request)
    try:
        gpus = {one.uuid: one.minor for one in plugin.call("Status", api.StatusRequest()).gpus}
        uuids = [one.partition("::")[0] for one in found.ids]
        answer = plain(found.answer)
        wanted = {
            "mounts": [[one["container_path"], one["host_path"], one["read_only"]] for one in answer["mounts"]],
            "minors": [gpus[one] for one in uuids if one in gpus],
            "envs": answer["envs"],
        }
        command = [sys.executable, "-I", "-c", _enter(), json.dumps(wanted), *program]
        with contextlib.suppress(KeyboardInterrupt):
            done = subprocess.run(command, check=False)
            return done.returncode if done.returncode >= 0 else 128 - done.returncode
        return 128 + signal.SIGINT
    finally:
        _on_ends(_ends_already)
        _give_back(plugin, found.allocation)


def _give_back(plugin: Client, allocation: str) -> None:
    # Background processes of the program still use the memory of the slice. So they are killed before the slice is
    # freed.
    left = descendants.end()
    if left:
        names = ", ".join(str(pid) for pid in left)
        print(f"vgpuctl: the slice was not released, because process {names} in it does not end", file=sys.stderr)
        return
    try:
        plugin.call("Release", api.ReleaseRequest(allocation=allocation))
    except Fault as fault:  # The error is only printed, so that the exit status is still that of the program.
        print(
            f"vgpuctl: the slice was not released; it is free when the time of its lease is over: {fault}",
            file=sys.stderr,
        )


def _on_ends(handler: Callable[[int, FrameType | None], None], *numbers: int) -> None:
    """Installs a signal handler. A signal that was ignored when this program started (nohup) stays ignored, so that the
    program in the slice ignores it too.
    """
    for number in numbers or (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    # Only the first signal is handled. A second one, which for example comes when the session ends, could interrupt the
    # cleanup.
    _on_ends(_ends_already)
    sys.exit(128 + number)


def _ends_already(_number: int, _frame: FrameType | None) -> None:
    """Handler for further signals. It does nothing, so that these signals do not interrupt the cleanup that frees the
    slice.
    """


def _enter() -> str:
    """Returns the Python code that starts enter.py. Python runs it in isolated mode, without imports from the working
    directory or PYTHONPATH, because root may be in another user's folder. The path of this package is added, because a
    checkout of the repository is not installed.
    """
    root = str(Path(__file__).resolve().parents[2])
    return f"import sys; sys.path.append({root!r}); from {__package__}.enter import main; sys.exit(main())"
