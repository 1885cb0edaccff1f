# SPDX-License-Identifier: Apache-2.0
"""Defines the offset and the range of each field of the files that a container shares with its node.

The limits file holds the container's GPU limits. The ledger holds the GPU memory that its processes use. A GPU page
says which tenant (container with a share of the GPU) may run now. The tenant page holds what the container reports
about its use.

native/vcuda/include/vgpu_abi.h declares the same layout in C and documents every field; a test compiles that header and
compares the two layouts. files.py and pages.py read and write the fields. This file does no I/O.
"""

from __future__ import annotations

import struct
from typing import Any, Callable, Mapping, NamedTuple, Sequence, Tuple

MAX_DEVICES = 16
UUID_SIZE = 48
ALLOCATION_SIZE = 64

LIMITS_MAGIC = b"VGPULIM1"
LIMITS_VERSION = 1
LIMITS_MIN_READER = 1
LIMITS_FILE_SIZE = 4096

LEDGER_MAGIC = b"VGPULED1"
LEDGER_VERSION = 1
LEDGER_MIN_READER = 1
LEDGER_SLOTS = 1024
LEDGER_SLOT_OFFSET = 4096
LEDGER_ALIVE_BASE = 0x40000000
LEDGER_IMPORT_BASE = 0x60000000
LEDGER_IMPORT_SPAN = 0x10000000

GPU_PAGE_MAGIC = b"VGPUGPU1"
GPU_PAGE_VERSION = 1
GPU_PAGE_MIN_READER = 1
GPU_PAGE_FILE_SIZE = 4096
ARBITER_SILENT_NS = 200000000
ARBITER_DRAIN_NS = 25000000

TENANT_MAGIC = b"VGPUTEN1"
TENANT_VERSION = 1
TENANT_MIN_READER = 1
TENANT_FILE_SIZE = 4096
TENANT_LANES = 16

Fields = Mapping[str, Tuple[int, str]]

# Each table maps a field to its offset and its struct format. The offsets are written as numbers, so that the test can
# compare them with offsetof().
LIMITS_FIELDS: Fields = {
    "magic": (0, "8s"),
    "version": (8, "I"),
    "min_reader": (12, "I"),
    "size": (16, "I"),
    "sequence": (20, "I"),
    "crc32": (24, "I"),
    "flags": (28, "I"),
    "core_policy": (32, "I"),
    "priority": (36, "I"),
    "log_level": (40, "I"),
    "device_count": (44, "I"),
    "device_offset": (48, "I"),
    "device_size": (52, "I"),
    "reserved": (56, "2I"),
    "allocation": (64, "64s"),
    "devices": (128, "1152s"),
}
LIMITS_DEVICE_FIELDS: Fields = {
    "uuid": (0, "48s"),
    "memory_bytes": (48, "Q"),
    "sm_percent": (56, "I"),
    "flags": (60, "I"),
    "card_bytes": (64, "Q"),
}
LIMITS_DEVICE_SIZE = 72
LEDGER_FIELDS: Fields = {
    "magic": (0, "8s"),
    "version": (8, "I"),
    "min_reader": (12, "I"),
    "size": (16, "I"),
    "slot_count": (20, "I"),
    "slot_offset": (24, "I"),
    "slot_size": (28, "I"),
    "device_count": (32, "I"),
    "slot_high": (36, "I"),
    "lock": (40, "Q"),
    "reserved1": (48, "2Q"),
    "allocation": (64, "64s"),
    "total": (128, "16Q"),
    "context_bytes": (256, "16Q"),
    "devices": (384, "768s"),
    "shareable": (1152, "240s"),
    "shareable_file": (1392, "2Q"),
    "shareable_unmarked": (1408, "Q"),
    "beyond_bytes": (1416, "16Q"),
}
LEDGER_SLOT_FIELDS: Fields = {
    "used": (0, "16Q"),
    "context": (128, "16Q"),
    "generation": (256, "I"),
    "pid": (260, "I"),
    "pid_namespace": (264, "Q"),
    "exported_mib": (272, "12I"),
}
LEDGER_SLOT_SIZE = 320
LEDGER_FILE_SIZE = LEDGER_SLOT_OFFSET + LEDGER_SLOTS * LEDGER_SLOT_SIZE
GPU_PAGE_FIELDS: Fields = {
    "magic": (0, "8s"),
    "version": (8, "I"),
    "min_reader": (12, "I"),
    "size": (16, "I"),
    "sequence": (20, "I"),
    "heartbeat_ns": (24, "Q"),
    "wake": (32, "I"),
    "gate": (36, "I"),
    "flags": (40, "I"),
    "rate_ppm": (44, "I"),
    "turn_start_ns": (48, "Q"),
    "turn_end_ns": (56, "Q"),
    "outstanding_max_us": (64, "I"),
    "unused": (68, "2I"),
    "turns": (76, "I"),
    "open_ns": (80, "Q"),
    "reserved": (88, "5Q"),
    "uuid": (128, "48s"),
    "allocation": (176, "64s"),
}
TENANT_FIELDS: Fields = {
    "magic": (0, "8s"),
    "version": (8, "I"),
    "min_reader": (12, "I"),
    "size": (16, "I"),
    "device_count": (20, "I"),
    "device_offset": (24, "I"),
    "device_size": (28, "I"),
    "wake": (32, "I"),
    "reserved": (36, "7I"),
    "allocation": (64, "64s"),
    "uuids": (128, "768s"),
    "devices": (896, "3072s"),
}
TENANT_DEVICE_FIELDS: Fields = {
    "balance_ns": (0, "q"),
    "accrued_ns": (8, "Q"),
    "used_ns": (16, "Q"),
    "active_ns": (24, "Q"),
    "waiting_ns": (32, "Q"),
    "requests": (40, "Q"),
    "throttled_ns": (48, "Q"),
    "reserved": (56, "1Q"),
    "busy_until_ns": (64, "16Q"),
}
TENANT_DEVICE_SIZE = 192
GATES = {"none": 0, "open": 1, "turn": 2, "closed": 3}
TENANT_REQUESTS = {"low": 1 << 0}
GPU_PAGE_FLAGS = {"exclusive": 1 << 0, "priority": 1 << 1}

LIMITS_FLAGS = {
    "count_context": 1 << 0,
    "deny": 1 << 1,
    "oom_killer": 1 << 2,
    "allow_disable_control": 1 << 3,
    "oversubscribe": 1 << 4,
}
CORE_POLICIES = {"default": 0, "force": 1, "disable": 2}
DEVICE_UNLIMITED_MEMORY = 1 << 0


class Kind(NamedTuple):
    """Describes one kind of file: the contents of its header and the offsets of its fields."""

    what: str
    magic: bytes
    version: int
    min_reader: int
    size: int
    fields: Fields


LIMITS = Kind("limits file", LIMITS_MAGIC, LIMITS_VERSION, LIMITS_MIN_READER, LIMITS_FILE_SIZE, LIMITS_FIELDS)
LEDGER = Kind("ledger", LEDGER_MAGIC, LEDGER_VERSION, LEDGER_MIN_READER, LEDGER_FILE_SIZE, LEDGER_FIELDS)
GPU_PAGE = Kind("gpu page", GPU_PAGE_MAGIC, GPU_PAGE_VERSION, GPU_PAGE_MIN_READER, GPU_PAGE_FILE_SIZE, GPU_PAGE_FIELDS)
TENANT = Kind("tenant page", TENANT_MAGIC, TENANT_VERSION, TENANT_MIN_READER, TENANT_FILE_SIZE, TENANT_FIELDS)


class LayoutError(ValueError):
    """Bytes or values do not fit a limits file, a ledger or a page; the text is a sentence for the operator."""


def put_field(buffer: bytearray, base: int, fields: Fields, name: str, *values: Any) -> None:
    offset, fmt = fields[name]
    struct.pack_into("<" + fmt, buffer, base + offset, *values)


def put_header(buffer: bytearray, kind: Kind, **more: Any) -> None:
    own = {"magic": kind.magic, "version": kind.version, "min_reader": kind.min_reader, "size": kind.size}
    for name, value in {**own, **more}.items():
        put_field(buffer, 0, kind.fields, name, value)


def put_uuids(buffer: bytearray, start: int, uuids: Sequence[str]) -> None:
    """Writes the GPUs' UUIDs in their order into a file's bytes, each in UUID_SIZE bytes."""
    for i, uuid in enumerate(uuids):
        raw = encoded(uuid, UUID_SIZE, f"uuid of device {i}")
        buffer[start + i * UUID_SIZE : start + i * UUID_SIZE + len(raw)] = raw


def named(page: bytes, fields: Fields, allocation: str) -> bytes:
    """Writes the id of the page's allocation into the page, and returns the page."""
    out = bytearray(page)
    put_field(out, 0, fields, "allocation", encoded(allocation, ALLOCATION_SIZE, "allocation"))
    return bytes(out)


def get_field(data: bytes, base: int, limit: int, fields: Fields, name: str) -> Any:
    """Returns the field's value. Returns 0 if the header or entry is too short to have the field, because an older
    version wrote it.
    """
    offset, fmt = fields[name]
    if offset + struct.calcsize("<" + fmt) > limit:
        return b"" if fmt.endswith("s") else 0
    values = struct.unpack_from("<" + fmt, data, base + offset)
    return values[0] if len(values) == 1 else list(values)


def text_of(raw: bytes, what: str) -> str:
    try:
        return raw.split(b"\0", 1)[0].decode("ascii")
    except UnicodeDecodeError:
        raise LayoutError(f"{what} is not ASCII text") from None


def encoded(value: Any, size: int, what: str) -> bytes:
    raw = str(value).encode("ascii", "strict") if str(value).isascii() else None
    if raw is None or b"\0" in raw or len(raw) >= size:
        raise LayoutError(f"{what} {value!r} must be ASCII text shorter than {size} bytes")
    return raw


def whole_number(value: Any, top: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= top:
        raise LayoutError(f"{what} must be a whole number from 0 to {top}, found {value!r}")
    return value


def header_of(data: bytes, kind: Kind, size: int) -> Callable[[str], Any]:
    """Returns a function that reads a header's fields by name. ``size``: the number of bytes that the header needs.
    Raises LayoutError if the data is no file of this kind, or has a version that this reader must not read.
    """
    if len(data) < size:
        raise LayoutError(f"the {kind.what} has {len(data)} bytes, expected at least {size} for its header")

    def get(name: str) -> Any:
        return get_field(data, 0, len(data), kind.fields, name)

    if get("magic") != kind.magic:
        raise LayoutError(f"the {kind.what} begins with {get('magic')!r}, expected {kind.magic!r}")
    version, min_reader = get("version"), get("min_reader")
    if min_reader > kind.version or version == 0:
        raise LayoutError(
            f"the {kind.what} of version {version} needs a reader of version {min_reader} or newer, this "
            f"reader has version {kind.version}"
        )
    return get
