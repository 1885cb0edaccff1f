# SPDX-License-Identifier: Apache-2.0
"""Which engine of a host runs the isolation check in a real container, and the root that the container gets.

Where no image is named one is made of the host's own files (slice_image.py): an image of docker or podman, a folder
for containerd. It is named after the run that made it (run_mark.py), and is gone with it; what a killed run left, the
next one takes away, or ``sweep``. A run that has docker or podman make something leaves a record of that first, so that
an engine without a record is never asked: podman lays out its storage when it is asked for the first time.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import time
from typing import Any, Mapping, NamedTuple, Sequence

from . import run_mark, slice_containerd, slice_image
from .mount_namespace import Mount
from .slice_runner import (
    LABEL,
    DockerRunner,
    EngineHangs,
    NamespaceRunner,
    PodmanRunner,
    RunnerError,
    ask_engine,
    image_at_hand,
)

AUTO, DOCKER, PODMAN, CONTAINERD, NAMESPACE = "auto", "docker", "podman", "containerd", "namespace"
RUNTIMES = (AUTO, DOCKER, PODMAN, CONTAINERD, NAMESPACE)
# In the order in which a host of ours has them below its kubelet. Podman is never there; it is for hosts without one.
ENGINES = (DOCKER, CONTAINERD, PODMAN)
CLIENTS = {DOCKER: "docker", PODMAN: "podman", CONTAINERD: "ctr"}
REPOSITORY = "localhost/vgpu-isolation"
OWN_FILES = "the host's own files"
# Roots of containerd's containers; not below /run, which may forbid programs.
ROOTS = "/var/lib/vgpu/isolation-"
# Of an engine and a run: there from before docker or podman makes something until nothing of it is left. For containerd
# its folder says the same.
RECORDS = "/var/lib/vgpu/check-"
CDI_KIND = "vgpu.fleet/gpu"


class Lease(NamedTuple):
    """What a container of a slice gets. ``words``: mounts of /dev/null, which name a GPU to NVIDIA's runtime."""

    uuid: str
    minors: Sequence[int]
    probe: str
    mounts: Sequence[Mount]
    words: Sequence[Mount]
    environment: dict[str, str]
    devices: Sequence[dict[str, Any]]
    cdi_devices: Sequence[str]


class Engines:
    """One run of the module. ``params``: its options. ``close`` removes what was made."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = params
        self._made: dict[str, str] = {}  # engine → image or folder
        self._begun: set[str] = set()
        self._silent: dict[str, str] = {}  # client → how it did not answer
        # What the containers are of, and why nothing better was taken; for people.
        self.image = ""
        self.reasons: list[str] = []

    def runner(self, lease: Lease) -> Any:
        """Raises RunnerError where the runtime that is asked for cannot run a container with a GPU."""
        wanted = self._params["runtime"]
        self.image, self.reasons = "", []
        if wanted == NAMESPACE:
            return self.namespace(lease)
        engines = ENGINES if wanted == AUTO else (wanted,)
        for engine in engines:
            try:
                return self._container(engine, lease)
            except (RunnerError, slice_image.ImageError, OSError) as fault:
                self.reasons.append(str(fault))
                self.heed(fault)
        if wanted == AUTO:
            self.image = ""
            return self.namespace(lease)
        raise RunnerError(f"runtime: {wanted} is asked for, and {'; '.join(self.reasons)}")

    def heed(self, fault: Exception) -> None:
        """An engine that hung once is not asked again in this run: each slice would wait for it anew."""
        if isinstance(fault, EngineHangs):
            self._silent.setdefault(fault.program, str(fault))

    @staticmethod
    def namespace(lease: Lease) -> NamespaceRunner:
        return NamespaceRunner(lease.mounts, lease.minors, lease.environment)

    def _container(self, engine: str, lease: Lease) -> Any:
        client, image = self._params[CLIENTS[engine]], self._params["image"]
        if not os.path.exists(client):
            raise RunnerError(f"{client} does not exist")
        if client in self._silent:
            raise RunnerError(f"{self._silent[client]}; it is not asked again in this run")
        named = engine != CONTAINERD and bool(image)
        if named:
            reason = image_at_hand(client, image)
            if reason:
                raise RunnerError(reason)
        devices = list(lease.cdi_devices)
        if engine == PODMAN:
            devices = devices or [cdi_device(lease.uuid, self._params["cdi_folders"])]
        elif engine == DOCKER and not named and not devices and not has_runtime(client):
            raise RunnerError("docker has no runtime nvidia, so its containers get no GPU")
        runtime = self._params["nvidia_runtime"]
        if engine == CONTAINERD and not os.path.exists(runtime):
            raise RunnerError(f"{runtime} does not exist, so containers of containerd get no GPU")
        self._begin(engine, client)
        root = image if named else self._own(engine, client, lease.probe)
        self.image = image if named else OWN_FILES
        if engine == CONTAINERD:
            # Its runtime is asked by the variable where the answer of the plugin asks the kubelet's way.
            asked = dict({"NVIDIA_VISIBLE_DEVICES": lease.uuid}, **lease.environment)
            if asked["NVIDIA_VISIBLE_DEVICES"] == "void":
                asked["NVIDIA_VISIBLE_DEVICES"] = lease.uuid
            mounts = [*lease.mounts, *lease.words]
            return slice_containerd.ContainerdRunner(client, root, runtime, mounts, asked)
        maker = DockerRunner if engine == DOCKER else PodmanRunner
        words = lease.words if engine == DOCKER else ()
        return maker(client, root, [*lease.mounts, *words], lease.environment, lease.devices, devices)

    def _begin(self, engine: str, client: str) -> None:
        """Once for all slices of a run. Of a named image too: a container that was left may still hold memory."""
        if engine in self._begun:
            return
        sweep_engine(engine, client)
        if engine != CONTAINERD:
            os.makedirs(os.path.dirname(RECORDS), 0o755, exist_ok=True)
            with open(_record(engine), "w", encoding="utf-8"):
                pass
        self._begun.add(engine)

    def _own(self, engine: str, client: str, probe: str) -> str:
        """The image, or the folder, of the host's own files; made once for all slices of a run."""
        if engine not in self._made:
            tar = slice_image.pack(probe)
            if engine == CONTAINERD:
                folder = f"{ROOTS}{run_mark.own()}"
                slice_image.lay_out(tar, folder)
                self._made[engine] = folder
            else:
                name = f"{REPOSITORY}:{run_mark.own()}-{time.time_ns()}"
                done = ask_engine(client, "import", "--change", f"LABEL {LABEL}=image", "-", name, given=tar)
                if done.returncode != 0:
                    raise RunnerError(f"{engine} import: {done.stderr.strip()}")
                self._made[engine] = name
        return self._made[engine]

    def close(self) -> None:
        """What is not gone then, because its engine hangs or refuses, stays recorded for a later sweep."""
        for engine in self._begun:
            client = self._params[CLIENTS[engine]]
            if client in self._silent:
                continue
            made = self._made.pop(engine, "")
            if engine == CONTAINERD:
                if slice_containerd.forget(client):
                    shutil.rmtree(made, ignore_errors=True)
            elif _has_nothing(client, made):
                os.unlink(_record(engine))
        self._begun = set()


def _has_nothing(client: str, made: str) -> bool:
    """Whether an engine has nothing of this run any more. An image with a container of ours is not removed."""
    try:
        if made:
            return bool(ask_engine(client, "rmi", made).returncode == 0)
        return not _listed(client, "ps", "--all", "--quiet", "--filter", f"label={LABEL}={run_mark.own()}")
    except RunnerError:
        return False


def _record(engine: str) -> str:
    return f"{RECORDS}{engine}-{run_mark.own()}"


def has_runtime(docker: str) -> bool:
    """Whether docker's daemon knows NVIDIA's runtime. Raises RunnerError where it does not answer."""
    done = ask_engine(docker, "info", "--format", "{{json .Runtimes}}")
    if done.returncode != 0:
        raise RunnerError(f"docker info: {done.stderr.strip()}")
    return DockerRunner.runtime in done.stdout


def cdi_device(uuid: str, folders: Sequence[str]) -> str:
    """The name by which podman hands the GPU in: the device plugin writes what it means. Raises RunnerError."""
    for path in [one for folder in folders for one in sorted(glob.glob(f"{folder}/*.json"))]:
        try:
            with open(path, encoding="utf-8") as stream:
                spec = json.load(stream)
            if spec["kind"] == CDI_KIND and uuid in [one["name"] for one in spec["devices"]]:
                return f"{CDI_KIND}={uuid}"
        except (OSError, ValueError, KeyError, TypeError):
            continue
    raise RunnerError(f"no CDI file in {' or '.join(folders)} has {CDI_KIND}={uuid}, so podman hands in no GPU")


def _listed(client: str, *arguments: str) -> list[str]:
    """Lines of an answer. Raises RunnerError where there is none."""
    done = ask_engine(client, *arguments)
    if done.returncode != 0:
        raise RunnerError(f"{os.path.basename(client)} {arguments[0]}: {done.stderr.strip()}")
    return [line for line in str(done.stdout).splitlines() if line.strip()]


class Left(NamedTuple):
    """What runs that do not live any more left at an engine."""

    containers: list[str]
    roots: list[str]
    records: list[str]


def _records(engine: str) -> list[str]:
    start = f"{RECORDS}{engine}-"
    return [one for one in sorted(glob.glob(f"{start}*")) if run_mark.is_over(one[len(start) :])]


def _left(engine: str, client: str) -> Left:
    """Raises RunnerError where the engine has something of ours, by a record, and does not say what."""
    if engine == CONTAINERD:
        # Its containers are never without their folder.
        roots = [one for one in sorted(glob.glob(f"{ROOTS}*")) if run_mark.is_over(one[len(ROOTS) :])]
        return Left([], roots, [])
    records = _records(engine)
    if not records or not os.path.exists(client):  # what an engine had is gone with it
        return Left([], [], records)
    listed = _listed(client, "ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.ID}} {{.Labels}}")
    # Docker writes labels as name=value, podman as name:value.
    found = [(line.split()[0], re.search(rf"{re.escape(LABEL)}[=:]([0-9a-f.]+)", line)) for line in listed]
    containers = [name for name, maker in found if maker and run_mark.is_over(maker[1])]
    listed = _listed(client, "image", "ls", "--filter", f"label={LABEL}", "--format", "{{.Repository}}:{{.Tag}}")
    named = [(one.strip(), *one.strip().rpartition(":")[::2]) for one in listed]
    roots = [one for one, repository, tag in named if repository == REPOSITORY and run_mark.is_over(tag.split("-")[0])]
    return Left(containers, roots, records)


def sweep_engine(engine: str, client: str) -> tuple[list[str], list[str]]:
    """Takes away what killed runs left at an engine; answers the names of what is gone, and of what stays. Raises
    RunnerError where the engine does not answer.
    """
    left = _left(engine, client)
    gone = [one for one in left.containers if ask_engine(client, "rm", "--force", one).returncode == 0]
    for one in left.roots:
        if engine == CONTAINERD:
            if not os.path.exists(client) or slice_containerd.forget(client):
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
    """What ``sweep`` would take away, as far as the engines say it."""
    names: list[str] = []
    for engine in ENGINES:
        try:
            names += [name for part in _left(engine, params[CLIENTS[engine]]) for name in part]
        except RunnerError:
            names += _records(engine)
    return names


def sweep(params: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The same at any engine of the host; one that does not answer is known by its records, which stay."""
    all_gone: list[str] = []
    all_stays: list[str] = []
    for engine in ENGINES:
        try:
            gone, stays = sweep_engine(engine, params[CLIENTS[engine]])
        except RunnerError as fault:
            gone, stays = [], [f"{', '.join(_records(engine))} ({fault})"]
        all_gone += gone
        all_stays += stays
    return all_gone, all_stays
