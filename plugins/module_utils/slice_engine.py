# SPDX-License-Identifier: Apache-2.0
"""Which engine of a host runs the isolation check in a real container, and the root that the container gets.

Where no image is named one is made of the host's own files (slice_image.py): an image of docker or podman, a folder
for containerd. It is named after the process that made it, and is gone with it; what a killed run left, the next one
takes away, or ``sweep``.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import time
from typing import Any, Mapping, NamedTuple, Sequence

from . import slice_containerd, slice_image
from .mount_namespace import Mount
from .slice_runner import (
    LABEL,
    DockerRunner,
    NamespaceRunner,
    PodmanRunner,
    RunnerError,
    ask_engine,
    image_at_hand,
    is_over,
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
        self._swept: set[str] = set()
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
        if wanted == AUTO:
            self.image = ""
            return self.namespace(lease)
        raise RunnerError(f"runtime: {wanted} is asked for, and {'; '.join(self.reasons)}")

    @staticmethod
    def namespace(lease: Lease) -> NamespaceRunner:
        return NamespaceRunner(lease.mounts, lease.minors, lease.environment)

    def _container(self, engine: str, lease: Lease) -> Any:
        client, image = self._params[CLIENTS[engine]], self._params["image"]
        if not os.path.exists(client):
            raise RunnerError(f"{client} does not exist")
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
        if engine not in self._swept:  # of a named image too: a container that was left may still hold memory
            self._swept.add(engine)
            sweep_engine(engine, client)
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

    def _own(self, engine: str, client: str, probe: str) -> str:
        """The image, or the folder, of the host's own files; made once for all slices of a run."""
        if engine not in self._made:
            tar = slice_image.pack(probe)
            if engine == CONTAINERD:
                folder = f"{ROOTS}{os.getpid()}"
                if os.path.isdir(folder):  # of a killed run that had our pid
                    slice_containerd.forget(client)
                    shutil.rmtree(folder, ignore_errors=True)
                slice_image.lay_out(tar, folder)
                self._made[engine] = folder
            else:
                name = f"{REPOSITORY}:{os.getpid()}-{time.time_ns()}"
                done = ask_engine(client, "import", "--change", f"LABEL {LABEL}=image", "-", name, given=tar)
                if done.returncode != 0:
                    raise RunnerError(f"{engine} import: {done.stderr.strip()}")
                self._made[engine] = name
        return self._made[engine]

    def close(self) -> None:
        for engine, made in self._made.items():
            client = self._params[CLIENTS[engine]]
            if engine == CONTAINERD:
                shutil.rmtree(made, ignore_errors=True)
                slice_containerd.forget(client)
            else:
                _quietly(client, "rmi", made)
        self._made = {}


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


def _quietly(client: str, *arguments: str) -> str:
    try:
        return str(ask_engine(client, *arguments).stdout)
    except RunnerError:
        return ""


def _is_done(client: str, *arguments: str) -> bool:
    try:
        return bool(ask_engine(client, *arguments).returncode == 0)
    except RunnerError:
        return False


class Left(NamedTuple):
    """What runs that do not live any more left at an engine."""

    containers: list[str]
    roots: list[str]


def _left(engine: str, client: str) -> Left:
    if engine == CONTAINERD:
        # Its containers are never without their folder.
        return Left([], [one for one in sorted(glob.glob(f"{ROOTS}*")) if is_over(one[len(ROOTS) :])])
    if not os.path.exists(client):
        return Left([], [])
    listed = _quietly(client, "ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.ID}} {{.Labels}}")
    # Docker writes labels as name=value, podman as name:value.
    found = [(line.split()[0], re.search(rf"{re.escape(LABEL)}[=:](\d+)", line)) for line in listed.splitlines()]
    containers = [name for name, maker in found if maker and is_over(maker[1])]
    listed = _quietly(client, "image", "ls", "--filter", f"label={LABEL}", "--format", "{{.Repository}}:{{.Tag}}")
    named = [(one, *one.rpartition(":")[::2]) for one in listed.split()]
    roots = [one for one, repository, tag in named if repository == REPOSITORY and is_over(tag.split("-")[0])]
    return Left(containers, roots)


def sweep_engine(engine: str, client: str) -> tuple[list[str], list[str]]:
    """Takes away what killed runs left at an engine; answers the names of what is gone, and of what stays."""
    left = _left(engine, client)
    gone = [one for one in left.containers if _is_done(client, "rm", "--force", one)]
    for one in left.roots:
        if engine == CONTAINERD:
            slice_containerd.forget(client)
            shutil.rmtree(one, ignore_errors=True)
            gone += [] if os.path.exists(one) else [one]
        elif _is_done(client, "rmi", one):
            gone.append(one)
    return gone, [one for one in (*left.containers, *left.roots) if one not in gone]


def left_behind(params: Mapping[str, Any]) -> list[str]:
    """What ``sweep`` would take away."""
    found = [_left(engine, params[CLIENTS[engine]]) for engine in ENGINES]
    return [name for one in found for name in (*one.containers, *one.roots)]


def sweep(params: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The same at any engine of the host."""
    both = [sweep_engine(engine, params[CLIENTS[engine]]) for engine in ENGINES]
    return [one for gone, _stays in both for one in gone], [one for _gone, stays in both for one in stays]
