# SPDX-License-Identifier: Apache-2.0
"""Returns the commands that find, load and remove images on a node, for the engine that its kubelet reports. No I/O.

A host may have both docker and containerd, and the kubelet finds only images in its own engine. So the engine is taken
from the kubelet's report.
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
# Label that keeps the kubelet from removing an unused image, because no registry has the image.
PINNED = "io.cri-containerd.pinned=pinned"


def engine_of(node: dict[str, Any]) -> str:
    """Returns the engine of a Node object: docker, containerd, crio, k3s or rke2; empty if it is unknown."""
    info = (node.get("status") or {}).get("nodeInfo") or {}
    scheme = str(info.get("containerRuntimeVersion") or "").partition("://")[0]
    version = str(info.get("kubeletVersion") or "")
    if scheme == "containerd":
        return next((name for name in ("k3s", "rke2") if f"+{name}" in version), "containerd")
    return {"docker": "docker", "cri-o": "crio"}.get(scheme, "")


def commands(engine: str, repository: str, images: Sequence[str]) -> dict[str, Any]:
    """Returns command lines for the node. ``all`` prints every image of ``repository``, one a line. The caller appends
    a file name to ``load`` and an image name to ``remove``. ``images`` maps each image to two commands: ``find`` prints
    nothing if the image is missing; ``pin`` is empty if the engine cannot pin images.
    """
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
