# SPDX-License-Identifier: Apache-2.0
"""``vgpuctl run``: runs a docker or podman container in slices (parts of GPUs) of this host.

A label of the container shows the plugin whether the container still exists. So the container keeps its slices until it
is removed, even if this program is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from .._proto import admin_pb2 as api
from ..admin.admin_socket import Client, Fault
from ..allocation.engine_lists import DOCKER, ENGINES, LABEL, PODMAN
from ..allocation.records import CONTAINER
from .container_edits import Edits, EditsError, of_lease

# Exit statuses of the engine's command which mean that the container did not start.
NOT_STARTED = (125, 126, 127)
# The first version of podman that can read the CDI files of vgpu.fleet.
PODMAN_WITH_CDI = (4, 3)
PODMAN_FOLDERS = ("/etc/cdi", "/var/run/cdi")
# Seconds within which the container must appear. The time is long, because its image may have to be pulled first.
TTL_S = 3600
FAILED, USAGE = 1, 2


class EngineError(Exception):
    """Raised if no engine can run the container. The text says why, and what to do."""


def ask(*words: str) -> str | None:
    """Returns the output of an engine's command, or None if the command fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def chosen(named: str) -> str:
    """Returns the named engine, or the first installed engine that responds. Raises EngineError."""
    for engine in [named] if named else ENGINES:
        if shutil.which(engine) and ask(engine, "info", "--format", "json") is not None:
            return engine
    raise EngineError(
        f"{named or ' and '.join(ENGINES)} cannot be used: not installed, or no response to the command "
        f"{named or DOCKER} info; see: systemctl status docker"
    )


def knows_cdi(engine: str, folder: str) -> bool:
    """Returns whether an engine reads CDI files from a folder. docker does so since version 25 if CDI is enabled, and
    podman since version 4.3.
    """
    folders: Sequence[str] = ()
    if engine == PODMAN:
        found = re.search(r"(\d+)\.(\d+)", ask(PODMAN, "version", "--format", "{{.Client.Version}}") or "")
        if found and (int(found[1]), int(found[2])) >= PODMAN_WITH_CDI:
            folders = PODMAN_FOLDERS
    else:
        with contextlib.suppress(ValueError):
            # An older docker does not know this field. Then the command fails.
            folders = json.loads(ask(DOCKER, "info", "--format", "{{json .CDISpecDirs}}") or "null") or ()
    return os.path.realpath(folder) in {os.path.realpath(one) for one in folders}


def compose_makes_folders() -> bool:
    """Returns whether docker compose creates a folder for a missing source of a bind mount. Version 2 does so unless
    the service forbids it. Version 1.29 never does, and rejects a service that forbids it.
    """
    if ask(DOCKER, "compose", "version") is not None:
        return True
    return not (ask("docker-compose", "version", "--short") or "").startswith("1.")


def run(given: argparse.Namespace, plugin: Client) -> int:
    """Returns the exit status of the container, or that of the engine if the container did not start. Raises Fault."""
    words = given.words[1:] if given.words[:1] == ["--"] else given.words
    if bool(words) == bool(given.compose):
        hint = "run needs an image (vgpuctl run -- IMAGE COMMAND), or --compose SERVICE without an image"
        print(f"vgpuctl: {hint}", file=sys.stderr)
        return USAGE
    try:
        engine = DOCKER if given.compose else chosen(given.engine)
        # The printed service must work with every version of the engine, so it does not use CDI.
        by_cdi = not given.compose and knows_cdi(engine, str(given.cdi_dir))
        lease = _lease(given, plugin, engine, by_cdi)
        try:
            edits = _edits(given, plugin, lease, by_cdi)
        except BaseException:
            _release(plugin, lease.allocation)
            raise
    except (EngineError, EditsError) as fault:
        print(f"vgpuctl: {fault}", file=sys.stderr)
        return FAILED
    if given.compose:
        print(json.dumps({"services": {given.compose: edits.service(compose_makes_folders())}}, indent=1))
        return 0
    return _supervise(plugin, engine, lease.allocation, command(engine, edits, words, given.detach))


def command(engine: str, edits: Edits, words: Sequence[str], detach: bool) -> list[str]:
    """Returns the engine's command. Without --detach and --restart it includes the option that removes the container
    when it ends, which frees the slices.
    """
    kept = detach or any(one.split("=")[0] in ("--restart", "--rm") for one in words)
    return [engine, "run", *(["--detach"] if detach else []), *([] if kept else ["--rm"]), *edits.options(), *words]


def _lease(given: argparse.Namespace, plugin: Client, engine: str, by_cdi: bool) -> Any:
    return plugin.call(
        "Lease",
        api.LeaseRequest(
            uuid=given.uuid,
            ttl_s=TTL_S,
            kind=CONTAINER,
            holder=engine,
            engine=engine,
            gpus=given.gpus,
            memory_bytes=given.memory,
            sm_percent=given.cores,
            by_cdi=by_cdi,
        ),
    )


def _edits(given: argparse.Namespace, plugin: Client, lease: Any, by_cdi: bool) -> Edits:
    pieces = {one.id: one.device for one in plugin.call("Status", api.StatusRequest()).slices}
    answer = {
        "allocation": lease.allocation,
        "envs": dict(lease.answer.envs),
        "mounts": [
            {"container_path": one.container_path, "host_path": one.host_path, "read_only": one.read_only}
            for one in lease.answer.mounts
        ],
    }
    return of_lease(answer, [pieces[one] for one in lease.ids], by_cdi, given.cdi_dir)


def _supervise(plugin: Client, engine: str, allocation: str, words: list[str]) -> int:
    with subprocess.Popen(words) as process:

        def forward(number: int, _frame: FrameType | None) -> None:
            process.send_signal(number)

        # Signals are forwarded to the engine's command, which forwards them to the container. SIGINT is not forwarded
        # here, because at Ctrl-C the terminal sends it to the engine's command directly.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, forward)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = process.wait()
    status = status if status >= 0 else 128 - status
    mine = f"label={LABEL}={allocation}"
    if status in NOT_STARTED:
        # If the container was created but did not start, it is removed, because it would keep the slices.
        left = (ask(engine, "ps", "--all", "--quiet", "--filter", mine, "--filter", "status=created") or "").split()
        if left:
            ask(engine, "rm", "--force", *left)
    found = ask(engine, "ps", "--all", "--quiet", "--filter", mine)
    if found is not None and not found.strip():
        _release(plugin, allocation)
    return status


def _release(plugin: Client, allocation: str) -> None:
    # An error of this call is ignored. The plugin has noticed the end of the container already, or will notice it
    # later.
    with contextlib.suppress(Fault):
        plugin.call("Release", api.ReleaseRequest(allocation=allocation))
