# SPDX-License-Identifier: Apache-2.0
"""Returns the commands that find, load and remove images on a node, for the engine that its kubelet reports. Pure.

Only the kubelet knows its engine: a host may have docker and containerd, and an image in the wrong one is not found.
"""

from __future__ import annotations

from typing import Any, Sequence

CTR: dict[str, list[str]] = {
    "containerd": ["ctr", "--namespace", "k8s.io", "images"],
    "k3s": ["k3s", "ctr", "--namespace", "k8s.io", "images"],
    "rke2": [
        *("/var/lib/rancher/rke2/bin/ctr", "--address", "/run/k3s/containerd/containerd.sock"),
        *("--namespace", "k8s.io", "images"),
    ],
}
# CRI-O and podman share their images.
LOADERS = {"docker": "docker", "crio": "podman"}
# The kubelet's collector of unused images leaves such an image alone; no registry could bring it back.
PINNED = "io.cri-containerd.pinned=pinned"


def engine_of(node: dict[str, Any]) -> str:
    """docker, containerd, crio, k3s or rke2 of a Node object; empty of one that is not known."""
    info = (node.get("status") or {}).get("nodeInfo") or {}
    scheme = str(info.get("containerRuntimeVersion") or "").partition("://")[0]
    version = str(info.get("kubeletVersion") or "")
    if scheme == "containerd":
        return next((name for name in ("k3s", "rke2") if f"+{name}" in version), "containerd")
    return {"docker": "docker", "cri-o": "crio"}.get(scheme, "")


def commands(engine: str, repository: str, images: Sequence[str]) -> dict[str, Any]:
    """Command lines for the node: ``all`` prints every image of ``repository``, one a line; ``load`` ends with a file
    and ``remove`` with an image, which are added to them; ``images`` has ``find`` (prints nothing where the image is
    not there) and ``pin`` (empty where the engine has none) for each of ``images``."""
    if engine in LOADERS:
        program = LOADERS[engine]
        return {
            "all": [program, "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", repository],
            "load": [program, "load", "--quiet", "--input"],
            "remove": [program, "image", "rm"],
            "images": {one: {"find": [program, "image", "ls", "--quiet", one], "pin": []} for one in images},
        }
    base = CTR[engine]
    return {
        "all": [*base, "ls", "--quiet", f"name~=^{repository}:"],
        "load": [*base, "import"],
        "remove": [*base, "rm"],
        "images": {
            one: {"find": [*base, "ls", "--quiet", f"name=={one}"], "pin": [*base, "label", one, PINNED]}
            for one in images
        },
    }
