# SPDX-License-Identifier: Apache-2.0
"""Prepares the cluster for a Deployment with a Service: it starts the controllers, makes a pod network, and builds
images of the programs."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from . import images
from .cluster import Cluster

# Controllers that create a Deployment's pods and a Service's endpoints.
CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "endpoints-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
    "root-ca-certificate-publisher-controller",
)
# Each pod has a point-to-point link to the node; the node has the API server's address.
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
    """Returns the path of the CNI file; the runtime has a pod network while this file exists."""
    return cluster.folder / "cni" / "05-pods.conflist"


def write_network(cluster: Cluster) -> None:
    network_file(cluster).write_text(json.dumps(NETWORK))


def version(cluster: Cluster) -> str:
    """Returns the API server's version, which is also the tag of the kube-scheduler's image."""
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
