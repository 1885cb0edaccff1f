# SPDX-License-Identifier: Apache-2.0
"""Finds and removes the containers and images that killed isolation checks left at the engines of a host. Their names
contain the id of the run. Before docker or podman creates something, a run writes a record file. An engine without such
a record is not queried, because the first query makes podman create its storage. Former versions wrote no record. Only
``clean_up`` and ``left_behind`` search for leftovers of former versions, and only at an engine that is in use (IN_USE).
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import time
from datetime import datetime
from typing import Any, Mapping, NamedTuple

from ..host import run_id
from . import containerd as isolation_containerd
from .runner import LABEL, RunnerError, ask_engine

DOCKER, PODMAN, CONTAINERD = "docker", "podman", "containerd"
# Engines in the order of preference. Podman is the last, because a kubelet cannot use it.
ENGINES = (DOCKER, CONTAINERD, PODMAN)
CLIENTS = {DOCKER: "docker", PODMAN: "podman", CONTAINERD: "ctr"}
REPOSITORY = "localhost/vgpu-isolation"
# Folder with the root file systems of containerd's containers. It is not below /run, which may be mounted noexec.
ROOTS = "/var/lib/vgpu/isolation-"
# Prefix of the record of an engine and a run. A run writes its record before docker or podman creates something, and
# deletes the record when it has removed everything. For containerd the run's folder serves as the record.
RECORDS = "/var/lib/vgpu/check-"
# Files that show that an engine is in use: docker's daemon runs, or podman's storage has an image. A query of such an
# engine changes nothing.
IN_USE = {DOCKER: "/var/run/docker.pid", PODMAN: "/var/lib/containers/storage/*-images/images.json"}
# Docker and podman write a container's creation time in this format; podman adds fractions of a second.
CREATED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)? ([+-]\d{4})")


def begin(engine: str, client: str) -> None:
    """Prepares an engine before a run creates something there: removes old leftovers and, for docker and podman, writes
    the record.

    Raises RunnerError if the engine does not answer.
    """
    clean_up_engine(engine, client)
    if engine != CONTAINERD:
        os.makedirs(os.path.dirname(RECORDS), 0o755, exist_ok=True)
        with open(record(engine), "w", encoding="utf-8"):
            pass


def record(engine: str) -> str:
    """Returns the path of this run's record."""
    return f"{RECORDS}{engine}-{run_id.own()}"


def own_root() -> str:
    """Returns the folder with the root file system of this run's containers at containerd."""
    return f"{ROOTS}{run_id.own()}"


def own_image() -> str:
    """Returns a name for an image of this run."""
    return f"{REPOSITORY}:{run_id.own()}-{time.time_ns()}"


def listed_by(client: str, *arguments: str) -> list[str]:
    """Returns the lines of a client's output. Raises RunnerError if the engine does not answer."""
    done = ask_engine(client, *arguments)
    if done.returncode != 0:
        raise RunnerError(f"{os.path.basename(client)} {arguments[0]}: {done.stderr.strip()}")
    return [line for line in str(done.stdout).splitlines() if line.strip()]


class Leftover(NamedTuple):
    """Holds the objects that ended runs left at an engine."""

    containers: list[str]
    roots: list[str]
    records: list[str]


def _records(engine: str) -> list[str]:
    start = f"{RECORDS}{engine}-"
    return [one for one in sorted(glob.glob(f"{start}*")) if run_id.has_ended(one[len(start) :])]


def _left(engine: str, client: str, former: bool) -> Leftover:
    """Returns the leftovers at an engine. ``former``: also those of former versions, which wrote no record. Raises
    RunnerError if an ended run left a record and the engine does not answer.
    """
    if engine == CONTAINERD:
        # For containerd it is enough to list the folders, because every container of a run has one.
        return Leftover([], [one for one in sorted(glob.glob(f"{ROOTS}?*")) if _has_root_ended(one)], [])
    records = _records(engine)
    ask = bool(records) or (former and bool(glob.glob(IN_USE[engine])))
    if not ask or not os.path.exists(client):  # An engine that was removed has no leftovers.
        return Leftover([], [], records)
    try:
        return Leftover(_containers(client), _images(client), records)
    except RunnerError:
        if records:
            raise
        return Leftover([], [], [])


def _has_root_ended(path: str) -> bool:
    try:
        made = os.lstat(path).st_ctime
    except FileNotFoundError:  # Skip this folder: its run has ended and removed it meanwhile.
        return False
    return run_id.has_ended(path[len(ROOTS) :], made=made)


def _containers(client: str) -> list[str]:
    """Returns the containers of ended runs."""
    shown = "{{.ID}} {{.CreatedAt}} {{.Labels}}"
    listed = listed_by(client, "ps", "--all", "--filter", f"label={LABEL}", "--format", shown)
    # Docker writes labels as name=value, podman as name:value in brackets.
    found = [(line, re.search(rf"{re.escape(LABEL)}[=:]([^,\s\]]*)", line)) for line in listed]
    return [line.split()[0] for line, maker in found if maker and run_id.has_ended(maker[1], made=_created(line))]


def _created(line: str) -> float | None:
    found = CREATED.search(line)
    return datetime.strptime(f"{found[1]} {found[2]}", "%Y-%m-%d %H:%M:%S %z").timestamp() if found else None


def _images(client: str) -> list[str]:
    """Returns the images of ended runs; the tag holds the run id and the creation time."""
    listed = listed_by(client, "image", "ls", "--filter", f"label={LABEL}", "--format", "{{.Repository}}:{{.Tag}}")
    found = []
    for one in [line.strip() for line in listed]:
        repository, tag = one.rpartition(":")[::2]
        mark, made = tag.partition("-")[::2]
        moment = int(made) / 1e9 if made.isdigit() else None
        if repository == REPOSITORY and mark and run_id.has_ended(mark, made=moment):
            found.append(one)
    return found


def clean_up_engine(engine: str, client: str, former: bool = False) -> tuple[list[str], list[str]]:
    """Removes what killed runs left at an engine. Returns the names of removed objects, and of those that stay.

    Raises RunnerError if the engine does not answer.
    """
    left = _left(engine, client, former)
    gone = [one for one in left.containers if ask_engine(client, "rm", "--force", one).returncode == 0]
    for one in left.roots:
        if engine == CONTAINERD:
            if not os.path.exists(client) or isolation_containerd.remove_traces(client, one[len(ROOTS) :]):
                shutil.rmtree(one, ignore_errors=True)
            gone += [] if os.path.exists(one) else [one]
        elif ask_engine(client, "rmi", one).returncode == 0:
            gone.append(one)
    stays = [one for one in (*left.containers, *left.roots) if one not in gone]
    if stays:
        return gone, stays
    for one in left.records:
        os.unlink(one)
    return gone + left.records, []


def left_behind(params: Mapping[str, Any]) -> list[str]:
    """Returns the names of the objects that ``clean_up`` would remove. For an engine that does
    not answer, returns the names of its record files instead.
    """
    names: list[str] = []
    for engine in ENGINES:
        try:
            names += [name for part in _left(engine, params[CLIENTS[engine]], True) for name in part]
        except RunnerError:
            names += _records(engine)
    return names


def clean_up(params: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Removes leftovers at every engine of the host. If an engine does not answer, its record files are kept, and are
    reported instead of its leftovers.
    """
    all_gone: list[str] = []
    all_stays: list[str] = []
    for engine in ENGINES:
        try:
            gone, stays = clean_up_engine(engine, params[CLIENTS[engine]], True)
        except RunnerError as fault:
            gone, stays = [], [f"{', '.join(_records(engine)) or engine} ({fault})"]
        all_gone += gone
        all_stays += stays
    return all_gone, all_stays
