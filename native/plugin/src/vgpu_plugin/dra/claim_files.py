# SPDX-License-Identifier: Apache-2.0
"""The CDI (Container Device Interface) file of a claim (a ResourceClaim of Kubernetes, which requests devices). The
file has one CDI device for each request of the claim. The device's name consists only of the claim's uid and the
request's name.

A name must never get another meaning, and must be defined as long as a container uses it, for three reasons. The
kubelet saves the CDI names of a claim and, up to 1.36, adds the names of a later response to them. A container that
uses a name that no file defines does not start. And container runtimes cache what they have read for a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..allocation.allocation_files import AllocationFiles
from ..allocation.records import Record
from ..errors import Refused
from ..inject import cdi
from ..inject.driver_files import DriverFiles
from ..node.gpus import Gpu
from ..node.paths import Paths

KIND = "vgpu.fleet/claim"
PREFIX = cdi.OF_CLAIMS
# Pattern of valid uids of claims. A uid is checked, because it becomes part of a file name and of a device's name.
UID = re.compile(r"^[0-9A-Za-z]([-0-9A-Za-z]{0,61}[0-9A-Za-z])?\Z")


def check_uid(uid: str) -> str:
    """Returns the uid of a claim. Raises Refused if it cannot be part of a file name."""
    if not UID.match(uid):
        raise Refused(f"the uid of the claim is {uid!r:.80}, expected letters, digits and dashes")
    return uid


def device_id(uid: str, request: str) -> str:
    """Returns the CDI name of the device that stands for a request of a claim."""
    return f"{KIND}={uid}.{request}"


class ClaimFiles:
    """Writes and removes the CDI files of claims. ``configure`` sets which files of the driver containers get."""

    def __init__(self, paths: Paths, files: AllocationFiles, hooks: Callable[[], list[dict[str, Any]]] = list) -> None:
        """``hooks`` returns the CDI hooks for a container whose memory the driver limits."""
        self._paths = paths
        self._files = files
        self._hooks = hooks
        self._driver = DriverFiles()
        self._dev_root = Path("/")

    def configure(self, driver: DriverFiles, dev_root: Path) -> None:
        self._driver, self._dev_root = driver, dev_root

    def write(self, uid: str, records: Sequence[Record], gpus: Iterable[Gpu]) -> None:
        """Writes the CDI file of a claim. Raises OSError. Raises Refused if a device has no device node, or if the
        driver's library libcuda.so.1 was not found.
        """
        folder = self._folder()
        if not self._driver.complete:
            raise Refused(
                "containers get claims by CDI, which needs the driver's files, and no libcuda.so.1 is found on this "
                "host; install the driver, or set flags.nvidiaDriverRoot, and restart this program"
            )
        common = cdi.common_edits(self._driver, self._dev_root)
        gpus = list(gpus)
        devices = []
        for one in records:
            named = [(f"{uid}.{one.request}", self._edits(one, gpus))]
            devices += cdi.with_hooks(named, self._hooks()) if one.limits else named
        cdi.write(folder, cdi.specification(KIND, common, devices), self.name(uid))

    def remove(self, uid: str) -> None:
        (self._folder() / self.name(uid)).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Returns the uids of the claims that have a file."""
        found = self._folder().glob(f"{PREFIX}*.json")
        return sorted(one.name.removeprefix(PREFIX).removesuffix(".json") for one in found)

    @staticmethod
    def name(uid: str) -> str:
        return f"{PREFIX}{uid}.json"

    def _folder(self) -> Path:
        if self._paths.cdi_dir is None:
            raise Refused("claims need CDI, and this program writes no CDI files; give --cdi-dir")
        return self._paths.cdi_dir

    def _edits(self, record: Record, gpus: list[Gpu]) -> dict[str, Any]:
        nodes: list[dict[str, Any]] = []
        for uuid in dict.fromkeys(one.partition("::")[0] for one in record.slice_ids):
            for node in self._nodes(uuid, gpus):
                if node not in nodes:
                    nodes.append(node)
        mounts = self._files.expected_mounts(record) if record.limits else []
        return {"deviceNodes": nodes, "mounts": [cdi.mount(inside, host, ro) for inside, host, ro in mounts]}

    def _nodes(self, uuid: str, gpus: list[Gpu]) -> list[dict[str, Any]]:
        for gpu in gpus:
            if gpu.uuid == uuid:
                return cdi.gpu_nodes(gpu, self._dev_root)
            for mig in gpu.mig:
                if mig.uuid == uuid:
                    try:
                        return cdi.mig_nodes(gpu, mig, self._paths.host_root / "proc", self._dev_root)
                    except OSError as fault:
                        raise Refused(f"{uuid} cannot be given to a container by CDI: {fault}") from None
        raise Refused(f"this node has no device {uuid}")
