# SPDX-License-Identifier: Apache-2.0
"""Finds the engine that starts the containers of this host's pods, from its kubelet's configuration.

This matters because a role that configures NVIDIA's runtime in another engine reports success, but no pod gets a GPU.
In addition, docker as a second engine changes the firewall rules of the pods.
"""

from __future__ import annotations

import os
import re
from typing import Any, Sequence

from ..host.host import Host

FLAG = "--container-runtime-endpoint"
# Matches the line that sets a key in the kubelet's configuration file, which is YAML or JSON.
VALUE = r"""(?:^|[{,])\s*["']?%s["']?\s*:[ \t]*["']?([^\s"'#,}]+)"""
IN_CONFIG = re.compile(VALUE % "containerRuntimeEndpoint", re.MULTILINE)
CGROUP_FLAG = "--cgroup-driver"
CGROUP_IN_CONFIG = re.compile(VALUE % "cgroupDriver", re.MULTILINE)
# From this version on the kubelet has no dockershim. If no endpoint is configured, it uses containerd.
WITHOUT_DOCKERSHIM = (1, 24)
CONTAINERD = "unix:///run/containerd/containerd.sock"
# Maps each program that contains a kubelet and its own containerd to its engine.
RANCHER = {"k3s-server": "k3s", "k3s-agent": "k3s", "rke2": "rke2"}
RANCHER_SOCKET = "/run/k3s/containerd/containerd.sock"


def read(host: Host, version: Sequence[int] | None) -> dict[str, str] | None:
    """Returns ``{"engine", "endpoint", "cgroup_driver"}`` of the running kubelet, None if no kubelet runs.

    ``version``: the version of the host's kubelet; ``engine``: ``docker``, ``containerd``, ``crio``, ``k3s`` or
    ``rke2``, empty for an unknown endpoint; ``cgroup_driver``: ``systemd`` or ``cgroupfs``, empty if the configuration
    does not name it.
    """
    running: dict[str, str] = {}
    network = host.link("/proc/1/ns/net")
    for pid in host.names("/proc"):
        comm = (host.text(f"/proc/{pid}/comm") or "").strip() if pid.isdigit() else ""
        # Skip a kubelet with a separate network namespace, because it belongs to another node, for example to a node of
        # kind.
        if (comm == "kubelet" or comm in RANCHER) and host.link(f"/proc/{pid}/ns/net") == network:
            running[comm] = pid
    rancher = sorted({RANCHER[comm] for comm in running if comm in RANCHER})
    if "kubelet" not in running:
        return {"engine": rancher[0], "endpoint": f"unix://{RANCHER_SOCKET}", "cgroup_driver": ""} if rancher else None
    argv = host.argv(int(running["kubelet"]))
    endpoint, driver = _setting(host, argv, FLAG, IN_CONFIG), _setting(host, argv, CGROUP_FLAG, CGROUP_IN_CONFIG)
    if not endpoint:
        # An older kubelet uses dockershim, and so docker, if no endpoint is configured.
        endpoint = "dockershim" if version and tuple(version[:2]) < WITHOUT_DOCKERSHIM else CONTAINERD
    return {"engine": engine_of(endpoint, rancher), "endpoint": endpoint, "cgroup_driver": driver}


def _setting(host: Host, argv: Sequence[str], flag: str, in_config: re.Pattern[str]) -> str:
    """Returns the value of a setting. A flag overrides the configuration file and its drop-ins, of which the last
    counts. Empty if the setting has no value.
    """
    given, path, folder = _option(argv, flag), _option(argv, "--config"), _option(argv, "--config-dir")
    if given:
        return given
    drop_ins = [f"{folder}/{name}" for name in host.names(folder) if name.endswith(".conf")] if folder else []
    value = ""
    for one in [*([path] if path else []), *drop_ins]:
        match = in_config.search(host.text(one) or "")
        value = match.group(1) if match else value
    return value


def _option(argv: Sequence[str], name: str) -> str:
    """Returns the value of an option in ``--name=value`` or ``--name value``. If the option is repeated, the last value
    counts.
    """
    value = ""
    for word, after in zip(argv, [*argv[1:], ""]):
        if word == name:
            value = after
        elif word.startswith(name + "="):
            value = word[len(name) + 1 :]
    return value


def engine_of(endpoint: str, rancher: Sequence[str] = ()) -> str:
    path = endpoint.partition("://")[2] or endpoint
    if path.endswith(RANCHER_SOCKET):
        return rancher[0] if rancher else "k3s"
    if os.path.basename(path) in ("dockershim", "dockershim.sock", "cri-dockerd.sock"):
        return "docker"
    if os.path.basename(path) == "crio.sock":
        return "crio"
    return "containerd" if path in ("/run/containerd/containerd.sock", "/var/run/containerd/containerd.sock") else ""


def findings(found: dict[str, Any] | None, wanted: str, there: bool) -> tuple[list[str], list[str]]:
    """Returns errors that stop the host, and warnings. ``wanted``: the variable container_runtime_engine; ``there``:
    whether the desired engine is on the host.
    """
    if not found or found["engine"] == wanted or (found["engine"] and wanted == "auto"):
        return [], []
    if not found["engine"]:
        text = (
            f"the kubelet of this host starts containers through {found['endpoint']}, which is the endpoint of no "
            "engine that the role knows"
        )
        if wanted != "auto":
            return [], [f"{text}: unless {wanted} has this endpoint, pods get no GPU"]
        way_out = (
            "configure NVIDIA's runtime in the kubelet's engine yourself, and name an engine for containers outside"
        )
        return [
            f"{text}; {way_out} Kubernetes in container_runtime_engine, or leave out the role container_runtime"
        ], []
    text = (
        f"the kubelet of this host starts containers with {found['engine']} ({found['endpoint']}), and "
        f"container_runtime_engine is {wanted}: pods would get no GPU; set container_runtime_engine: {found['engine']}"
    )
    if there:
        return [], [f"{text}, unless {wanted} is meant for containers outside Kubernetes"]
    return [f"{text}. {wanted} is not on this host, and was not installed in addition to {found['engine']}"], []
