# SPDX-License-Identifier: Apache-2.0
"""What a Deployment with a Service needs besides a kubelet: controllers, a network of pods, images of its programs."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from . import images
from .cluster import Cluster

# What turns a Deployment into pods, and a Service into their addresses.
CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "endpoints-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
    "root-ca-certificate-publisher-controller",
)
# Each pod has a wire of its own to the node; the API server's address is the node's.
NETWORK = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "ptp",
            "ipMasq": False,
            "ipam": {"type": "host-local", "subnet": "10.77.0.0/24", "routes": [{"dst": "0.0.0.0/0"}]},
        }
    ],
}


def network_file(cluster: Cluster) -> Path:
    """Where the container runtime finds the network of pods, which is there as long as this file."""
    return cluster.folder / "cni" / "05-pods.conflist"


def write_network(cluster: Cluster) -> None:
    network_file(cluster).write_text(json.dumps(NETWORK))


def version(cluster: Cluster) -> str:
    """Of the API server, which is the tag of a kube-scheduler's image."""
    return str(cluster.api.get("/version")["gitVersion"]).partition("+")[0].partition("-")[0]


def pack_program(program: Path, name: str, out: Path) -> None:
    """Writes an archive of the image ``name`` with this one program, below /usr/local/bin."""
    root = out.with_name(out.name + ".root")
    with tarfile.open(root, "w") as stream:
        for folder in ("usr", "usr/local", "usr/local/bin", "tmp"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            stream.addfile(entry, io.BytesIO())
        entry = tarfile.TarInfo(f"usr/local/bin/{program.name}")
        content = program.read_bytes()
        entry.size, entry.mode = len(content), 0o755
        stream.addfile(entry, io.BytesIO(content))
    images.archive(root, name, out)
    root.unlink()
