# SPDX-License-Identifier: Apache-2.0
"""The kubelet's file kubelet_internal_checkpoint: it lists the containers that hold devices, and the devices that
plugins advertise.

The real checksum is FNV over Go's dump of the structure, which only Go can compute, so this double uses CRC-32.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vgpu_plugin._proto import deviceplugin_pb2 as api

NO_NUMA = -1


@dataclass
class Held:
    """The devices of one resource that one container holds, with the plugin's response."""

    pod_uid: str
    pod: str
    namespace: str
    container: str
    resource: str
    by_numa: dict[int, list[str]]
    answer: api.ContainerAllocateResponse

    @property
    def ids(self) -> list[str]:
        return [one for ids in self.by_numa.values() for one in ids]


def write(path: Path, held: list[Held], registered: dict[str, list[str]]) -> None:
    data = {
        "PodDeviceEntries": [
            {
                "PodUID": one.pod_uid,
                "ContainerName": one.container,
                "ResourceName": one.resource,
                "DeviceIDs": {str(node): ids for node, ids in one.by_numa.items()},
                "AllocResp": base64.b64encode(one.answer.SerializeToString()).decode(),
            }
            for one in held
        ],
        "RegisteredDevices": registered,
    }
    text = json.dumps({"Data": data, "Checksum": zlib.crc32(json.dumps(data, sort_keys=True).encode())})
    # The file is replaced as by the kubelet's file store: a temporary file is written and renamed.
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    os.chmod(fresh, 0o600)
    os.replace(fresh, path)


def read(path: Path, names: dict[str, tuple[str, str]]) -> list[Held]:
    """Returns the devices of each container. ``names``: uid → (pod, namespace); a real kubelet gets these from the API
    server.
    """
    if not path.exists():
        return []
    entries: list[dict[str, Any]] = json.loads(path.read_text())["Data"]["PodDeviceEntries"] or []
    return [
        Held(
            pod_uid=one["PodUID"],
            pod=names.get(one["PodUID"], (one["PodUID"], "default"))[0],
            namespace=names.get(one["PodUID"], ("", "default"))[1],
            container=one["ContainerName"],
            resource=one["ResourceName"],
            by_numa={int(node): ids for node, ids in one["DeviceIDs"].items()},
            answer=api.ContainerAllocateResponse.FromString(base64.b64decode(one["AllocResp"])),
        )
        for one in entries
    ]
