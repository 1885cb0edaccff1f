# SPDX-License-Identifier: Apache-2.0
"""Chooses which container engine of the host runs the isolation check, and makes the container's root file system.

If no image is named, the root is made of the host's own files (image.py): an image for docker or podman, a folder for
containerd. The name of the image or folder holds the id of the run that made it (host/run_id.py). The run removes it at
the end; the next run removes the leftovers of a killed run (leftovers.py).
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from typing import Any, Mapping, NamedTuple, Sequence

from ..host import run_id
from ..host.mount_namespace import Mount
from . import containerd as isolation_containerd
from . import image as isolation_image
from .leftovers import CLIENTS, CONTAINERD, DOCKER, ENGINES, PODMAN, begin, listed_by, own_image, own_root, record
from .runner import (
    LABEL,
    DockerRunner,
    EngineHangs,
    NamespaceRunner,
    PodmanRunner,
    RunnerError,
    ask_engine,
    image_at_hand,
)

AUTO, NAMESPACE = "auto", "namespace"
RUNTIMES = (AUTO, DOCKER, PODMAN, CONTAINERD, NAMESPACE)
OWN_FILES = "the host's own files"
CDI_KIND = "vgpu.fleet/gpu"


class Lease(NamedTuple):
    """Describes a slice (share of a GPU) that the device plugin leases to the check. ``words``: mounts of /dev/null,
    whose paths name a GPU to NVIDIA's runtime.
    """

    uuid: str
    minors: Sequence[int]
    probe: str
    mounts: Sequence[Mount]
    words: Sequence[Mount]
    environment: dict[str, str]
    devices: Sequence[dict[str, Any]]
    cdi_devices: Sequence[str]


class Engines:
    """Holds the engines of one run of the module. ``params``: its options. ``close`` removes what the run created."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = params
        self._made: dict[str, str] = {}  # Maps an engine to the image or folder that this run made.
        self._begun: set[str] = set()
        self._silent: dict[str, str] = {}  # Maps a client that did not reply to the error message about it.
        # Two values for the report: the image of the containers, and the reasons why engines of higher priority were
        # not used.
        self.image = ""
        self.reasons: list[str] = []

    def runner(self, lease: Lease) -> Any:
        """Returns the runner. Raises RunnerError if the requested runtime cannot run a container with a GPU."""
        wanted = self._params["runtime"]
        self.image, self.reasons = "", []
        if wanted == NAMESPACE:
            return self.namespace(lease)
        engines = ENGINES if wanted == AUTO else (wanted,)
        for engine in engines:
            try:
                return self._container(engine, lease)
            except (RunnerError, isolation_image.ImageError, OSError) as fault:
                self.reasons.append(str(fault))
                self.heed(fault)
        if wanted == AUTO:
            self.image = ""
            return self.namespace(lease)
        raise RunnerError(f"runtime: {wanted} is requested, and {'; '.join(self.reasons)}")

    def heed(self, fault: Exception) -> None:
        """If this fault shows that an engine hangs, excludes the engine from the rest of this run, because each slice
        would wait for the time-out again.
        """
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
            raise RunnerError(f"{self._silent[client]}; this run does not ask it again")
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
            # Add this variable, because NVIDIA's runtime reads it and the device plugin's reply, which is meant for the
            # kubelet, may lack it.
            asked = dict({"NVIDIA_VISIBLE_DEVICES": lease.uuid}, **lease.environment)
            if asked["NVIDIA_VISIBLE_DEVICES"] == "void":
                asked["NVIDIA_VISIBLE_DEVICES"] = lease.uuid
            mounts = [*lease.mounts, *lease.words]
            return isolation_containerd.ContainerdRunner(client, root, runtime, mounts, asked)
        maker = DockerRunner if engine == DOCKER else PodmanRunner
        words = lease.words if engine == DOCKER else ()
        return maker(client, root, [*lease.mounts, *words], lease.environment, lease.devices, devices)

    def _begin(self, engine: str, client: str) -> None:
        """Removes the leftovers of killed runs at an engine, once for all slices of a run. This is done even if the
        user named an image, because a leftover container may still hold GPU memory.
        """
        if engine in self._begun:
            return
        begin(engine, client)
        self._begun.add(engine)

    def _own(self, engine: str, client: str, probe: str) -> str:
        """Returns the image or folder made of the host's own files; made once for all slices of a run."""
        if engine not in self._made:
            tar = isolation_image.pack(probe)
            if engine == CONTAINERD:
                folder = own_root()
                isolation_image.lay_out(tar, folder)
                self._made[engine] = folder
            else:
                name = own_image()
                done = ask_engine(client, "import", "--change", f"LABEL {LABEL}=image", "-", name, given=tar)
                if done.returncode != 0:
                    raise RunnerError(f"{engine} import: {done.stderr.strip()}")
                self._made[engine] = name
        return self._made[engine]

    def close(self) -> None:
        """Removes what the run created. If an engine hangs or refuses, the records of its objects stay for a later
        clean-up.
        """
        for engine in self._begun:
            client = self._params[CLIENTS[engine]]
            if client in self._silent:
                continue
            made = self._made.pop(engine, "")
            if engine == CONTAINERD:
                if isolation_containerd.remove_traces(client):
                    shutil.rmtree(made, ignore_errors=True)
            elif _has_nothing(client, made):
                os.unlink(record(engine))
        self._begun = set()


def _has_nothing(client: str, made: str) -> bool:
    """Returns whether an engine has no objects of this run left. An engine does not remove an image while a container
    of the check still uses it.
    """
    try:
        if made:
            return bool(ask_engine(client, "rmi", made).returncode == 0)
        return not listed_by(client, "ps", "--all", "--quiet", "--filter", f"label={LABEL}={run_id.own()}")
    except RunnerError:
        return False


def has_runtime(docker: str) -> bool:
    """Returns whether docker's daemon knows NVIDIA's runtime. Raises RunnerError if the daemon does not answer."""
    done = ask_engine(docker, "info", "--format", "{{json .Runtimes}}")
    if done.returncode != 0:
        raise RunnerError(f"docker info: {done.stderr.strip()}")
    return DockerRunner.runtime in done.stdout


def cdi_device(uuid: str, folders: Sequence[str]) -> str:
    """Returns the CDI name of the GPU for podman; the device plugin writes its CDI file. Raises RunnerError."""
    for path in [one for folder in folders for one in sorted(glob.glob(f"{folder}/*.json"))]:
        try:
            with open(path, encoding="utf-8") as stream:
                spec = json.load(stream)
            if spec["kind"] == CDI_KIND and uuid in [one["name"] for one in spec["devices"]]:
                return f"{CDI_KIND}={uuid}"
        except (OSError, ValueError, KeyError, TypeError):
            continue
    raise RunnerError(f"no CDI file in {' or '.join(folders)} has {CDI_KIND}={uuid}, so podman passes no GPU")
