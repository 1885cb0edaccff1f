# SPDX-License-Identifier: Apache-2.0
"""Changes the limits of a running container and reads its memory usage, both in the files of its allocation (the slices
of GPUs that the container has).
"""

from __future__ import annotations

from .._shared.abi import files as abi_files
from ..errors import NotNow
from .allocation_files import AllocationFiles
from .records import Record


def rewrite(files: AllocationFiles, record: Record) -> None:
    """Writes the limits of a record (the saved data of an allocation) into the limits file. The file is changed in
    place, so every process of the container sees the new limits. Raises NotNow.
    """
    path = f"{files.root}/{record.id}/limits"
    try:
        with open(path, "rb") as stream:
            if abi_files.says(stream.read(), record.limits):
                return
        abi_files.rewrite_limits(path, record.limits)
    except (OSError, abi_files.LayoutError) as fault:
        raise NotNow(f"allocation {record.id}: {path} cannot be changed: {fault}; see: vgpuctl status") from None


def used(files: AllocationFiles, record: Record) -> dict[str, int]:
    """Returns GPU UUID → bytes in use, including CUDA contexts. The source is the allocation's ledger, the file in
    which the container's processes record their usage. Raises NotNow.
    """
    path = f"{files.root}/{record.id}/rw/ledger"
    try:
        found = abi_files.read_ledger(path)
    except (OSError, abi_files.LayoutError) as fault:
        raise NotNow(
            f"allocation {record.id}: its memory usage is unknown, because {path} cannot be read: {fault}; to make it "
            "smaller, first start the container again"
        ) from None
    return {one["uuid"]: one["used"] + one["context"] for one in found["totals"]}
