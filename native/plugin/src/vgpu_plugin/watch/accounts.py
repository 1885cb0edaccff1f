# SPDX-License-Identifier: Apache-2.0
"""Reads the limit of an allocation (the slices of one container), and how much of it the container uses. The usage
comes from the container's ledger, the shared file in which our library in the container counts GPU memory.

The limit comes from the node's own record (/var/lib/vgpu/allocations.json), which no container can see. A slice for
containers outside Kubernetes has no record. Its limits come from its limits file on the node, which containers mount
read-only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .._shared.abi import files as abi_files
from ..allocation.allocation_files import STATIC, AllocationFiles
from ..allocation.records import Record
from .finding import STATIC_KIND, UNKNOWN
from .rule import Account


class Accounts:
    """Reads limits and usage. ``library`` returns the folder of the library version for new containers; it returns an
    empty text if there is none.
    """

    def __init__(self, files: AllocationFiles, library: Callable[[], str]) -> None:
        self._files = files
        self._library = library
        # Allocation → its limits as last read, for allocations without a record. They are kept because a read fails
        # while the file is being rewritten.
        self._limits: dict[str, dict[str, Any]] = {}

    def record(self, allocation: str, records: Mapping[str, Record]) -> Record | None:
        """Returns the record of an allocation; None if the node does not know the allocation (any more)."""
        if (known := records.get(allocation)) is not None:
            return known
        limits = self._file_limits(allocation)
        if limits is None:
            return None
        static = allocation.startswith(STATIC)
        return Record(
            allocation, STATIC_KIND if static else UNKNOWN, (), limits, library=self._library() if static else ""
        )

    def _file_limits(self, allocation: str) -> dict[str, Any] | None:
        try:
            data = (self._files.folder(allocation) / "limits").read_bytes()
            self._limits[allocation] = abi_files.parse_limits(data)
        except abi_files.LayoutError:
            pass  # The file is being rewritten, so the limits that were read before are used.
        except OSError:
            self._limits.pop(allocation, None)
        return self._limits.get(allocation)

    def account(self, record: Record, uuid: str) -> Account | None:
        """Returns the limit and the usage of an allocation on one GPU. Returns None if there is nothing to enforce: the
        allocation has no memory limit on that GPU, or its container is allowed to disable the library.
        """
        mine = device_of(record, uuid)
        if mine is None or record.limits.get("allow_disable_control", False):
            return None
        limit = int(mine.get("memory_bytes", 0))
        if not limit or mine.get("unlimited", False):
            return None
        counted = bool(record.limits.get("count_context", True))
        nobody = Account({}, limit, counted)
        try:
            ledger = abi_files.read_ledger(str(self._files.folder(record.id) / "rw" / "ledger"))
        except FileNotFoundError:
            return None if record.kind == UNKNOWN else nobody
        except (OSError, abi_files.LayoutError):
            # The ledger is damaged, which only the tenant can have done, because only its container writes the ledger.
            # So the ledger is treated as one without processes.
            return nobody
        if uuid not in ledger["devices"]:
            return nobody
        at = ledger["devices"].index(uuid)
        slots: dict[tuple[int, int], int] = {}
        for slot in ledger["slots"]:
            key = slot["pid_namespace"], slot["pid"]
            slots[key] = slots.get(key, 0) + slot["used"][at] + slot["context"][at]
        return Account(slots, limit, counted, ledger["exported"][at])

    def gpu_page(self, allocation: str, uuid: str) -> dict[str, Any] | None:
        """Returns the data that the arbiter (the node's program that divides GPU time) publishes for a container; None
        if they cannot be read.
        """
        try:
            return abi_files.parse_gpu_page((self._files.folder(allocation) / f"gpu-{uuid}").read_bytes())
        except (OSError, abi_files.LayoutError):
            return None


def device_of(record: Record, uuid: str) -> Mapping[str, Any] | None:
    """Returns the entry of a GPU in a record; None if the record does not contain the GPU."""
    return next((one for one in record.limits.get("devices") or [] if one["uuid"] == uuid), None)
