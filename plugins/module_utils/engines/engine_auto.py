# SPDX-License-Identifier: Apache-2.0
"""Resolves ``container_runtime_engine: auto`` on a host, and names the collection's file that an engine reads. No I/O.

If a kubelet runs, its configured engine is used. Else the installed engines decide: a host that will join a cluster
later must not get docker in addition to its containerd.
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
# Variables of container_runtime that name the record of an engine's state before its configuration.
RECORDS = {"docker": "docker_record", "containerd": "containerd_record"}


class Engine(NamedTuple):
    """Names the chosen engine. ``reason``: why an engine was chosen that the host does not have; empty if the host has
    it.
    """

    name: str
    reason: str = ""


def units(engine: str) -> list[str]:
    """Returns the units whose state ``resolve`` and the plan need."""
    if engine != AUTO:
        return ENGINE_UNITS.get(engine, [DOCKER_UNIT])
    return [DOCKER_UNIT, KUBELET_UNIT, *(unit for several in ENGINE_UNITS.values() for unit in several)]


def files(engine: str) -> list[str]:
    """Returns the collection's files that the engine, or any engine that ``auto`` may mean, reads."""
    return [path for name, path in DROP_INS.items() if engine in (AUTO, name)]


def resolve(wanted: dict[str, Any], state: dict[str, Any]) -> Engine:
    """Returns the engine for a host. ``state``: ``units`` (at least those of ``units()``), ``files``, ``kubelet`` and
    ``kubelet_engine`` of host_state.
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
    """Returns the engines with changes by the collection. ``found``: state of each file by path,
    None if it is missing.
    """
    engine = wanted["engine"]
    if engine != AUTO:
        return [engine]
    by_record = [name for name, key in RECORDS.items() if wanted.get(key) and found.get(wanted[key]) is not None]
    return by_record + [name for name, path in DROP_INS.items() if found.get(path) is not None]


def drop_in(engine: str, wanted: dict[str, Any]) -> tuple[str, str]:
    """Returns path and text of our file for an engine; empty for an engine without such a file."""
    program = str((wanted["runtimes"].get("nvidia") or {}).get("path") or containerd_text.Desired().path)
    desired = containerd_text.Desired(path=program, default=wanted["default_runtime"] == "nvidia")
    text = containerd_text.crio(desired) if engine == "crio" else containerd_text.rancher(desired)
    return (DROP_INS[engine], text) if engine in DROP_INS else ("", "")


def _begun(wanted: dict[str, Any], found: dict[str, Any]) -> bool:
    """Returns whether a killed run had installed docker's containerd but not docker. The record of packages shows this,
    because it is written before the installation.
    """
    return found.get(wanted["packages_record"]) is not None and found.get(wanted["containerd_record"]) is None


def _present(state: dict[str, Any], unit: str) -> bool:
    return bool((state["units"].get(unit) or {}).get("present"))
