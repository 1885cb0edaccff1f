# SPDX-License-Identifier: Apache-2.0
"""Checks whether a cluster's nodes are ready for the scheduler. The cluster must have a node of the given name, and
site.yml must have set it up. The scheduler's images must fit the node's architecture, and the node's container engine
must be able to load them. This module works on Node objects and does no I/O.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from ..pods import annotations as pod_annotations
from . import node_images

# Maps the kernel's name of an architecture (`uname -m`) to Go's name, which a Node object has.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
JOIN = "join the host to the cluster, or set device_plugin_node_name to its name in `kubectl get nodes`"


def faults(nodes: Mapping[str, dict[str, Any]], hosts: Mapping[str, str]) -> list[str]:
    """Returns a line for each GPU host whose node is unknown or not set up by site.yml. ``hosts`` maps each host to the
    name of its node.
    """
    found = []
    for host, name in sorted(hosts.items()):
        node = nodes.get(name)
        if node is None:
            found.append(f"{host}: the cluster has no node {name}; {JOIN}")
            continue
        text = (node["metadata"].get("annotations") or {}).get(pod_annotations.GPUS)
        if not text:
            found.append(
                f"{host}: node {name} has no annotation {pod_annotations.GPUS}, which the device plugin writes if "
                "pods may request any size; run site.yml with vgpu_slice_sizing: requested for this host, then "
                "this playbook again"
            )
    return found


def loading(
    nodes: Mapping[str, dict[str, Any]],
    hosts: Mapping[str, str],
    arch: str,
    repository: str,
    images: Sequence[str],
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Returns how each host loads the scheduler's images, and a line for each host that cannot. ``hosts`` maps each
    host to the name of its node. ``arch``: the architecture of the built image, as ``uname -m`` prints it.
    """
    found: dict[str, dict[str, Any]] = {}
    lines = []
    for host, name in sorted(hosts.items()):
        node = nodes.get(name)
        if node is None:
            lines.append(f"{host}: the cluster has no node {name}; {JOIN}")
            continue
        info = (node.get("status") or {}).get("nodeInfo") or {}
        engine = node_images.engine_of(node)
        if not engine:
            runs = info.get("containerRuntimeVersion") or "an unknown engine"
            lines.append(
                f"{host}: its kubelet runs containers with {runs}; expected containerd, CRI-O or docker to load an "
                "image into; choose other nodes (scheduler_hosts), or set scheduler_image to an image that the nodes "
                "can pull"
            )
        elif info.get("architecture") not in ("", None, ARCHITECTURES.get(arch, arch)):
            lines.append(
                f"{host}: its architecture is {info.get('architecture')}, and the image is built for {arch}; choose "
                "nodes of one architecture (scheduler_hosts) and set scheduler_image_arch"
            )
        else:
            found[host] = {"node": name, "engine": engine, **node_images.commands(engine, repository, images)}
    return found, lines
