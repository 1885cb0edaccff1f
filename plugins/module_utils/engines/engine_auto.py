# SPDX-License-Identifier: Apache-2.0
"""Chooses the container engine of a host if ``container_runtime_engine`` is ``auto``. Also returns the file of the
collection that an engine reads. No I/O.

If a kubelet runs, its configured engine is chosen. Else an installed engine is chosen, because a host that will join a
cluster later must not get docker in addition to its containerd.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import containerd_text
from .engine_packages import DOCKER_UNIT, ENGINE_UNITS

AUTO = "auto"
KUBELET_UNIT = "kubelet.service"
# From this version on a kubelet has no dockershim, so it can use docker only through cri-dockerd.
WITHOUT_DOCKERSHIM = (1, 24)
# Priority of installed engines. Docker, k3s and RKE2 install their own containerd, so they precede containerd.
ORDER = ("k3s", "rke2", "crio", "docker", "containerd")
# Priority of installed engines on a host with a kubelet that does not run yet.
BEFORE_A_KUBELET = ("k3s", "rke2", "crio", "containerd", "docker")
# CRI-O, k3s and RKE2 read a file of the collection (a drop-in) in addition to their own files.
DROP_INS = {
    "crio": "/etc/crio/crio.conf.d/99-vgpu.conf",
    "k3s": "/etc/rancher/k3s/config.yaml.d/99-vgpu.yaml",
    "rke2": "/etc/rancher/rke2/config.yaml.d/99-vgpu.yaml",
}
# Variables of the role container_runtime with the path of the record in which the role saved an engine's former
# settings.
RECORDS = {"docker": "docker_record", "containerd": "containerd_record"}


class Engine(NamedTuple):
    """Names the chosen engine. ``reason``: why this engine is chosen although it is not installed; empty if it is
    installed.
    """

    name: str
    reason: str = ""


def units(engine: str) -> list[str]:
    """Returns the systemd units whose state must be read before ``resolve`` can choose the engine."""
    if engine != AUTO:
        return ENGINE_UNITS.get(engine, [DOCKER_UNIT])
    return [DOCKER_UNIT, KUBELET_UNIT, *(unit for several in ENGINE_UNITS.values() for unit in several)]


def files(engine: str) -> list[str]:
    """Returns the paths of the collection's files for this engine; if it is ``auto``, for every engine that may be
    chosen.
    """
    return [path for name, path in DROP_INS.items() if engine in (AUTO, name)]


def resolve(wanted: dict[str, Any], state: dict[str, Any]) -> Engine:
    """Returns the engine for a host. ``state``: a result of host_state with the keys ``units`` (the state of the units
    that ``units()`` returns), ``files``, ``kubelet`` and ``kubelet_engine``.
    """
    if wanted["engine"] != AUTO:
        return Engine(wanted["engine"])
    running = (state.get("kubelet_engine") or {}).get("engine")
    if running:
        return Engine(str(running))
    kubelet = _present(state, KUBELET_UNIT) or bool(state.get("kubelet"))
    version = state.get("kubelet")
    if kubelet and version and tuple(version[:2]) < WITHOUT_DOCKERSHIM:
        kubelet = False
    order = BEFORE_A_KUBELET if kubelet else ORDER
    there = [name for name in order if any(_present(state, unit) for unit in units(name))]
    if there == ["containerd"] and not kubelet and _begun(wanted, state["files"]):
        return Engine("docker", "the installation of docker was interrupted")
    if there:
        return Engine(there[0])
    if kubelet:
        return Engine("containerd", "the host has a kubelet and no engine, so containerd is chosen")
    return Engine(
        "docker", ("the host has no engine and no kubelet, so docker is chosen (container_runtime_engine: auto)")
    )


def configured(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Returns the engines that the collection has configured. ``found``: maps each path to the file's state, None if
    the file is missing.
    """
    engine = wanted["engine"]
    if engine != AUTO:
        return [engine]
    by_record = [name for name, key in RECORDS.items() if wanted.get(key) and found.get(wanted[key]) is not None]
    return by_record + [name for name, path in DROP_INS.items() if found.get(path) is not None]


def drop_in(engine: str, wanted: dict[str, Any]) -> tuple[str, str]:
    """Returns path and text of the collection's file for an engine; both are empty if the engine has no such file."""
    program = str((wanted["runtimes"].get("nvidia") or {}).get("path") or containerd_text.Desired().path)
    desired = containerd_text.Desired(path=program, default=wanted["default_runtime"] == "nvidia")
    text = containerd_text.crio(desired) if engine == "crio" else containerd_text.rancher(desired)
    return (DROP_INS[engine], text) if engine in DROP_INS else ("", "")


def _begun(wanted: dict[str, Any], found: dict[str, Any]) -> bool:
    """Returns whether a run was killed after it had installed the containerd that docker needs, and before docker. The
    record of packages shows this, because it is written before the installation.
    """
    return found.get(wanted["packages_record"]) is not None and found.get(wanted["containerd_record"]) is None


def _present(state: dict[str, Any], unit: str) -> bool:
    return bool((state["units"].get(unit) or {}).get("present"))
