# SPDX-License-Identifier: Apache-2.0
"""Makes a container image of one layer from a root file system, without any registry."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
TYPE = "application/vnd.oci.image."
# The program exits at once on SIGTERM and reaps children, because the image is also the pods' pause image.
PAUSE = ["/bin/sh", "-c", 'trap "exit 0" TERM INT; while :; do sleep 3600 & wait $!; done']


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def archive(root: Path, name: str, out: Path) -> None:
    """Writes an OCI archive of the tar file ``root`` as image ``name`` to ``out``."""
    layer = root.read_bytes()
    config = json.dumps(
        {
            "architecture": MACHINES[platform.machine()],
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest(layer)}"]},
            "config": {"Cmd": PAUSE, "Env": ["PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]},
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": TYPE + "manifest.v1+json",
            "config": _described(config, "config.v1+json"),
            "layers": [_described(layer, "layer.v1.tar")],
        }
    ).encode()
    entry = {
        **_described(manifest, "manifest.v1+json"),
        "platform": {"architecture": MACHINES[platform.machine()], "os": "linux"},
        "annotations": {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rpartition(":")[2]},
    }
    index = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    with tarfile.open(out, "w") as stream:
        files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": index}
        files.update({f"blobs/sha256/{digest(data)}": data for data in (layer, config, manifest)})
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            stream.addfile(info, io.BytesIO(data))


def _described(data: bytes, kind: str) -> dict[str, object]:
    return {"mediaType": TYPE + kind, "digest": f"sha256:{digest(data)}", "size": len(data)}
