# SPDX-License-Identifier: Apache-2.0
"""Bytes of the limits file, the ledger, the gpu pages and the tenant page that a container receives.

The twin of native/vcuda/include/vgpu_abi.h, where the meaning of every field is told; a test compiles that header and
holds the two equal. Pure but for the three functions at the end, which read or change files in place.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from typing import Any, Mapping, Sequence, Tuple

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
LEDGER_LENT_BASE = 0x60000000
LEDGER_LENT_SPAN = 0x10000000

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

# Field → (offset, struct format). Offsets are spelled out so that the test can compare them with offsetof().
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
    "reserved": (64, "Q"),
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
}
LEDGER_SLOT_FIELDS: Fields = {
    "used": (0, "16Q"),
    "context": (128, "16Q"),
    "generation": (256, "I"),
    "pid": (260, "I"),
    "pid_namespace": (264, "Q"),
    "lent_mib": (272, "12I"),
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
    "tenants": (68, "I"),
    "wanting": (72, "I"),
    "turns": (76, "I"),
    "reserved": (80, "6Q"),
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
    "wanted_ns": (24, "Q"),
    "waiting_ns": (32, "Q"),
    "wish": (40, "Q"),
    "throttled_ns": (48, "Q"),
    "reserved": (56, "1Q"),
    "busy_until_ns": (64, "16Q"),
}
TENANT_DEVICE_SIZE = 192
GATES = {"none": 0, "open": 1, "turn": 2, "closed": 3}
TENANT_WISHES = {"low": 1 << 0}
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

# Values of <fcntl.h>; the fcntl module has no names for them before Python 3.9.
F_OFD_GETLK = 36


class LayoutError(ValueError):
    """Bytes or values that cannot be a limits file or a ledger; the text is a sentence for the operator."""


def _put(buffer: bytearray, base: int, fields: Fields, name: str, *values: Any) -> None:
    offset, fmt = fields[name]
    struct.pack_into("<" + fmt, buffer, base + offset, *values)


def _get(data: bytes, base: int, limit: int, fields: Fields, name: str) -> Any:
    """The field's value, or 0 where the writer's header or entry ends before it."""
    offset, fmt = fields[name]
    if offset + struct.calcsize("<" + fmt) > limit:
        return b"" if fmt.endswith("s") else 0
    values = struct.unpack_from("<" + fmt, data, base + offset)
    return values[0] if len(values) == 1 else list(values)


def _text(raw: bytes, what: str) -> str:
    try:
        return raw.split(b"\0", 1)[0].decode("ascii")
    except UnicodeDecodeError:
        raise LayoutError(f"{what} is not ASCII text") from None


def _encode(value: Any, size: int, what: str) -> bytes:
    raw = str(value).encode("ascii", "strict") if str(value).isascii() else None
    if raw is None or b"\0" in raw or len(raw) >= size:
        raise LayoutError(f"{what} {value!r} must be ASCII text shorter than {size} bytes")
    return raw


def _number(value: Any, top: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= top:
        raise LayoutError(f"{what} must be a whole number from 0 to {top}, found {value!r}")
    return value


def limits_crc(data: bytes | bytearray) -> int:
    """The crc32 field that belongs to these bytes of a limits file."""
    clean = bytearray(data)
    for name in ("sequence", "crc32"):
        _put(clean, 0, LIMITS_FIELDS, name, 0)
    return zlib.crc32(bytes(clean)) & 0xFFFFFFFF


def pack_limits(limits: Mapping[str, Any]) -> bytes:
    """The limits file of an allocation.

    Keys: ``allocation``, ``devices`` (a list of ``uuid``, ``memory_bytes``, ``sm_percent``, ``unlimited``), and, each
    with a default: ``count_context`` (True), ``deny``, ``oom_killer``, ``allow_disable_control``, ``oversubscribe``
    (False), ``core_policy`` ("default"), ``priority`` (1), ``log_level`` (1), ``sequence`` (0).
    """
    known = {"allocation", "devices", "core_policy", "priority", "log_level", "sequence", "version", "min_reader"}
    for key in limits:
        if key not in known and key not in LIMITS_FLAGS:
            raise LayoutError(f"limits have no key {key!r}")
    devices = limits.get("devices", [])
    if len(devices) > MAX_DEVICES:
        raise LayoutError(f"limits name {len(devices)} devices, at most {MAX_DEVICES} are possible")
    policy = limits.get("core_policy", "default")
    if policy not in CORE_POLICIES:
        raise LayoutError("core_policy {!r} is none of {}".format(policy, ", ".join(sorted(CORE_POLICIES))))
    flags = 0
    for name, bit in LIMITS_FLAGS.items():
        if limits.get(name, name == "count_context"):
            flags |= bit

    out = bytearray(LIMITS_FILE_SIZE)
    header = {
        "magic": LIMITS_MAGIC,
        "version": LIMITS_VERSION,
        "min_reader": LIMITS_MIN_READER,
        "size": LIMITS_FILE_SIZE,
        "sequence": _number(limits.get("sequence", 0), 0xFFFFFFFF, "sequence"),
        "flags": flags,
        "core_policy": CORE_POLICIES[policy],
        "priority": _number(limits.get("priority", 1), 1, "priority"),
        "log_level": _number(limits.get("log_level", 1), 5, "log_level"),
        "device_count": len(devices),
        "device_offset": LIMITS_FIELDS["devices"][0],
        "device_size": LIMITS_DEVICE_SIZE,
        "allocation": _encode(limits.get("allocation", ""), ALLOCATION_SIZE, "allocation"),
    }
    for name, value in header.items():
        _put(out, 0, LIMITS_FIELDS, name, value)
    seen = set()
    for i, device in enumerate(devices):
        base = LIMITS_FIELDS["devices"][0] + i * LIMITS_DEVICE_SIZE
        what = f"devices[{i}]"
        uuid = device.get("uuid", "")
        if not uuid or uuid in seen:
            raise LayoutError(f"{what}.uuid {uuid!r} is empty or given twice")
        seen.add(uuid)
        memory = _number(device.get("memory_bytes", 0), 2**64 - 1, what + ".memory_bytes")
        unlimited = bool(device.get("unlimited", False))
        if unlimited == bool(memory):
            raise LayoutError(
                f"{what} ({uuid}): memory_bytes is {memory} and unlimited is {unlimited}; "
                "give a size, or 0 together with unlimited"
            )
        _put(out, base, LIMITS_DEVICE_FIELDS, "uuid", _encode(uuid, UUID_SIZE, what + ".uuid"))
        _put(out, base, LIMITS_DEVICE_FIELDS, "memory_bytes", memory)
        _put(
            out,
            base,
            LIMITS_DEVICE_FIELDS,
            "sm_percent",
            _number(device.get("sm_percent", 0), 100, what + ".sm_percent"),
        )
        _put(out, base, LIMITS_DEVICE_FIELDS, "flags", DEVICE_UNLIMITED_MEMORY if unlimited else 0)
    _put(out, 0, LIMITS_FIELDS, "crc32", limits_crc(out))
    return bytes(out)


def parse_limits(data: bytes) -> dict[str, Any]:
    """What a limits file says, in the keys of pack_limits; LayoutError where libvgpu.so would refuse it."""
    if len(data) < LIMITS_FIELDS["devices"][0]:
        raise LayoutError("limits hold {} bytes, a header is {}".format(len(data), LIMITS_FIELDS["devices"][0]))

    def get(name: str) -> Any:
        return _get(data, 0, len(data), LIMITS_FIELDS, name)

    if get("magic") != LIMITS_MAGIC:
        raise LayoutError("limits begin with {!r}, expected {!r}".format(get("magic"), LIMITS_MAGIC))
    if get("min_reader") > LIMITS_VERSION or get("version") == 0:
        raise LayoutError(
            "limits of version {} need a reader of version {}, this one is {}".format(
                get("version"), get("min_reader"), LIMITS_VERSION
            )
        )
    size = get("size")
    if size > len(data) or size < LIMITS_FIELDS["devices"][0]:
        raise LayoutError(f"limits say they are {size} bytes long, {len(data)} were read")
    if get("sequence") % 2:
        raise LayoutError("limits are being written or were torn: sequence {} is odd".format(get("sequence")))
    if get("crc32") != limits_crc(data[:size]):
        raise LayoutError(f"limits are torn: crc32 is {get('crc32'):#x}, expected {limits_crc(data[:size]):#x}")
    count, offset, stride = get("device_count"), get("device_offset"), get("device_size")
    end = offset + count * stride
    if count > MAX_DEVICES or end > size or (count and not 56 <= stride <= size):
        raise LayoutError(f"limits name {count} devices of {stride} bytes at {offset}, more than fit")

    policies = {number: name for name, number in CORE_POLICIES.items()}
    if get("core_policy") not in policies:
        raise LayoutError("limits have the unknown core policy {}".format(get("core_policy")))
    out = {
        "version": get("version"),
        "min_reader": get("min_reader"),
        "sequence": get("sequence"),
        # For people alone: libvgpu.so does not look at it.
        "allocation": get("allocation").split(b"\0", 1)[0].decode("ascii", "replace"),
        "core_policy": policies[get("core_policy")],
        "priority": get("priority"),
        "log_level": get("log_level"),
        "devices": [],
    }
    for name, bit in LIMITS_FLAGS.items():
        out[name] = bool(get("flags") & bit)
    for i in range(count):
        base = offset + i * stride
        uuid = _get(data, base, stride, LIMITS_DEVICE_FIELDS, "uuid")
        if uuid[0] == 0 or uuid[-1] != 0:
            raise LayoutError(f"limits give device {i} the UUID {uuid!r}, which is no name that ends")
        flags = _get(data, base, stride, LIMITS_DEVICE_FIELDS, "flags")
        percent = _get(data, base, stride, LIMITS_DEVICE_FIELDS, "sm_percent")
        if percent > 100:
            raise LayoutError(f"limits give device {i} {percent} % of the SMs, at most 100 are there")
        out["devices"].append(
            {
                "uuid": _text(uuid, f"uuid of device {i}"),
                "memory_bytes": _get(data, base, stride, LIMITS_DEVICE_FIELDS, "memory_bytes"),
                "sm_percent": percent,
                "unlimited": bool(flags & DEVICE_UNLIMITED_MEMORY),
            }
        )
    return out


def pack_ledger(uuids: Sequence[str], allocation: str = "") -> bytes:
    """An empty ledger for these devices, in the order of the limits file."""
    return ledger_head(uuids, allocation).ljust(LEDGER_FILE_SIZE, b"\0")


def ledger_head(uuids: Sequence[str], allocation: str = "") -> bytes:
    """What comes before the slots of an empty ledger. All behind it is zero, and need not be written to a new file."""
    if len(uuids) > MAX_DEVICES:
        raise LayoutError(f"a ledger of {len(uuids)} devices, at most {MAX_DEVICES} are possible")
    out = bytearray(LEDGER_SLOT_OFFSET)
    header = {
        "magic": LEDGER_MAGIC,
        "version": LEDGER_VERSION,
        "min_reader": LEDGER_MIN_READER,
        "size": LEDGER_FILE_SIZE,
        "slot_count": LEDGER_SLOTS,
        "slot_offset": LEDGER_SLOT_OFFSET,
        "slot_size": LEDGER_SLOT_SIZE,
        "device_count": len(uuids),
        "allocation": _encode(allocation, ALLOCATION_SIZE, "allocation"),
    }
    for name, value in header.items():
        _put(out, 0, LEDGER_FIELDS, name, value)
    for i, uuid in enumerate(uuids):
        raw = _encode(uuid, UUID_SIZE, f"uuid of device {i}")
        start = LEDGER_FIELDS["devices"][0] + i * UUID_SIZE
        out[start : start + len(raw)] = raw
    return bytes(out)


def parse_ledger(data: bytes) -> dict[str, Any]:
    """Devices, the slots that hold anything, and their sums; what only the kernel knows (liveness) is in read_ledger.

    Returns ``{"devices": [uuid], "allocation", "slots": [{"slot", "pid", "pid_namespace", "used": [..], "context":
    [..], "lent": [..]}], "totals": [{"uuid", "used", "context"}]}`` with bytes in the order of the devices; what is
    lent is part of what is used. The tenant can write this file: every figure is what it says about itself.
    """
    devices, allocation, slots, offset, stride = _ledger_head(data, len(data))
    count = len(devices)
    found = []
    for slot in range(slots):
        base = offset + slot * stride
        used = _get(data, base, stride, LEDGER_SLOT_FIELDS, "used")[:count]
        context = _get(data, base, stride, LEDGER_SLOT_FIELDS, "context")[:count]
        pid = _get(data, base, stride, LEDGER_SLOT_FIELDS, "pid")
        if pid or any(used) or any(context):
            space = _get(data, base, stride, LEDGER_SLOT_FIELDS, "pid_namespace")
            lent = _get(data, base, stride, LEDGER_SLOT_FIELDS, "lent_mib") or []
            one = {"slot": slot, "pid": pid, "pid_namespace": space, "used": used, "context": context}
            one["lent"] = [min(mib << 20, most) for mib, most in zip([*lent, *[0] * count], used)]
            found.append(one)
    return {"devices": devices, "allocation": allocation, "slots": found, "totals": _totals(devices, found)}


def is_ledger_of(path: str, uuids: Sequence[str], allocation: str) -> bool:
    """Whether a file is the ledger of these devices and this allocation, by its head alone: at a hundredth of what its
    slots cost. One of this version has its slots where this version puts them. Slots that lie behind the size of a
    ledger are none: a tenant can grow its file, and nobody reads what is there.

    Raises OSError, and LayoutError for what parse_ledger refuses.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        head = os.read(fd, LEDGER_SLOT_OFFSET)
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    devices, found, slots, offset, stride = _ledger_head(head, min(size, LEDGER_FILE_SIZE))
    if (devices, found) != (list(uuids), allocation):
        return False
    if _get(head, 0, len(head), LEDGER_FIELDS, "version") != LEDGER_VERSION:
        return True
    own = (LEDGER_SLOTS, LEDGER_SLOT_OFFSET, LEDGER_SLOT_SIZE)
    said = _get(head, 0, len(head), LEDGER_FIELDS, "size")
    return (slots, offset, stride) == own and said == LEDGER_FILE_SIZE <= size


def _ledger_head(data: bytes, size: int) -> tuple[list[str], str, int, int, int]:
    """Devices, allocation, count, offset and size of the slots; ``size`` is that of the file. Raises LayoutError."""
    if len(data) < LEDGER_SLOT_OFFSET:
        raise LayoutError(f"the ledger holds {len(data)} bytes, its header is {LEDGER_SLOT_OFFSET}")

    def get(name: str) -> Any:
        return _get(data, 0, len(data), LEDGER_FIELDS, name)

    if get("magic") != LEDGER_MAGIC:
        raise LayoutError("the ledger begins with {!r}, expected {!r}".format(get("magic"), LEDGER_MAGIC))
    if get("min_reader") > LEDGER_VERSION or get("version") == 0:
        raise LayoutError(
            "the ledger of version {} needs a reader of version {}, this one is {}".format(
                get("version"), get("min_reader"), LEDGER_VERSION
            )
        )
    count, slots, offset, stride = get("device_count"), get("slot_count"), get("slot_offset"), get("slot_size")
    if count > MAX_DEVICES or slots > LEDGER_SLOTS or stride < 264 or offset + slots * stride > size:
        raise LayoutError(
            f"the ledger names {count} devices and {slots} slots of {stride} bytes at {offset}, "
            f"more than its {size} bytes hold"
        )
    names = get("devices")
    devices = [_text(names[i * UUID_SIZE : (i + 1) * UUID_SIZE], f"uuid of device {i}") for i in range(count)]
    return devices, _text(get("allocation"), "allocation"), slots, offset, stride


def pack_gpu_page(uuid: str, allocation: str = "") -> bytes:
    """The gpu page of an allocation before an arbiter has written it: the tenant keeps its own share."""
    out = bytearray(GPU_PAGE_FILE_SIZE)
    header = {
        "magic": GPU_PAGE_MAGIC,
        "version": GPU_PAGE_VERSION,
        "min_reader": GPU_PAGE_MIN_READER,
        "size": GPU_PAGE_FILE_SIZE,
        "uuid": _encode(uuid, UUID_SIZE, "uuid"),
        "allocation": _encode(allocation, ALLOCATION_SIZE, "allocation"),
    }
    for name, value in header.items():
        _put(out, 0, GPU_PAGE_FIELDS, name, value)
    return bytes(out)


def parse_gpu_page(data: bytes) -> dict[str, Any]:
    """Every field of a gpu page by name, ``gate`` and ``flags`` in words. Raises LayoutError."""
    if len(data) < GPU_PAGE_FIELDS["uuid"][0]:
        raise LayoutError(f"the gpu page holds {len(data)} bytes, expected {GPU_PAGE_FILE_SIZE}")
    found = {name: _get(data, 0, len(data), GPU_PAGE_FIELDS, name) for name in GPU_PAGE_FIELDS if name != "reserved"}
    if found["magic"] != GPU_PAGE_MAGIC:
        raise LayoutError("the gpu page begins with {!r}, expected {!r}".format(found["magic"], GPU_PAGE_MAGIC))
    _versions("gpu page", found["version"], found["min_reader"], GPU_PAGE_VERSION)
    gates = {number: name for name, number in GATES.items()}
    found["gate"] = gates.get(found["gate"], "none")
    found["flags"] = [name for name, bit in sorted(GPU_PAGE_FLAGS.items()) if found["flags"] & bit]
    for name in ("uuid", "allocation"):
        found[name] = _text(found[name], name + " of the gpu page")
    del found["magic"]
    return found


def _versions(what: str, version: int, min_reader: int, mine: int) -> None:
    if min_reader > mine or version == 0:
        raise LayoutError(f"the {what} of version {version} needs a reader of version {min_reader}, this one is {mine}")


def pack_tenant_page(uuids: Sequence[str], allocation: str = "") -> bytes:
    """An empty tenant page for these devices, in the order of the limits file."""
    if len(uuids) > MAX_DEVICES:
        raise LayoutError(f"a tenant page of {len(uuids)} devices, at most {MAX_DEVICES} are possible")
    out = bytearray(TENANT_FILE_SIZE)
    header = {
        "magic": TENANT_MAGIC,
        "version": TENANT_VERSION,
        "min_reader": TENANT_MIN_READER,
        "size": TENANT_FILE_SIZE,
        "device_count": len(uuids),
        "device_offset": TENANT_FIELDS["devices"][0],
        "device_size": TENANT_DEVICE_SIZE,
        "allocation": _encode(allocation, ALLOCATION_SIZE, "allocation"),
    }
    for name, value in header.items():
        _put(out, 0, TENANT_FIELDS, name, value)
    for i, uuid in enumerate(uuids):
        raw = _encode(uuid, UUID_SIZE, f"uuid of device {i}")
        start = TENANT_FIELDS["uuids"][0] + i * UUID_SIZE
        out[start : start + len(raw)] = raw
    return bytes(out)


def parse_tenant_page(data: bytes) -> dict[str, Any]:
    """``{"allocation", "devices": [{"uuid", "balance_ns", "used_ns", ...}]}``; times in ns of CLOCK_MONOTONIC.

    The tenant can write this file: every figure is what it says about itself.
    """
    if len(data) < TENANT_FIELDS["devices"][0]:
        raise LayoutError(
            "the tenant page holds {} bytes, its header is {}".format(len(data), TENANT_FIELDS["devices"][0])
        )

    def get(name: str) -> Any:
        return _get(data, 0, len(data), TENANT_FIELDS, name)

    if get("magic") != TENANT_MAGIC:
        raise LayoutError("the tenant page begins with {!r}, expected {!r}".format(get("magic"), TENANT_MAGIC))
    _versions("tenant page", get("version"), get("min_reader"), TENANT_VERSION)
    count, offset, stride = get("device_count"), get("device_offset"), get("device_size")
    if count > MAX_DEVICES or (count and (stride < 40 or offset + count * stride > len(data))):
        raise LayoutError(f"the tenant page names {count} devices of {stride} bytes at {offset}, more than fit")
    names, devices = get("uuids"), []
    for i in range(count):
        base = offset + i * stride
        device = {"uuid": _text(names[i * UUID_SIZE : (i + 1) * UUID_SIZE], f"uuid of device {i}")}
        for name in TENANT_DEVICE_FIELDS:
            if name != "reserved":
                device[name] = _get(data, base, stride, TENANT_DEVICE_FIELDS, name)
        devices.append(device)
    return {"allocation": _text(get("allocation"), "allocation"), "devices": devices}


def _totals(devices: Sequence[str], slots: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"uuid": uuid, "used": sum(s["used"][i] for s in slots), "context": sum(s["context"][i] for s in slots)}
        for i, uuid in enumerate(devices)
    ]


def _is_locked(fd: int, first: int, count: int) -> bool:
    # A write lock is probed with a descriptor that may be read-only: GETLK only asks.
    probe = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
    answer = fcntl.fcntl(fd, F_OFD_GETLK, probe)
    return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)


def slot_is_alive(fd: int, slot: int) -> bool:
    """Whether a process holds this slot of the open ledger: the kernel's answer, valid in every pid namespace."""
    return _is_locked(fd, LEDGER_ALIVE_BASE + slot, 1)


def _handle_is_open(fd: int, head: bytes) -> bool:
    """Whether a descriptor that stands for memory of this ledger is open anywhere: the twin of shareable.c, which says
    what the bytes are. There the file of all handles is opened by the name that the ledger has; here, where a tenant
    could have written any name, the kernel's list of locks is read instead. True where it cannot be.
    """
    if not _get(head, 0, len(head), LEDGER_FIELDS, "shareable").startswith(b"/"):
        return False
    inode = _get(head, 0, len(head), LEDGER_FIELDS, "shareable_file")[1]
    status = os.fstat(fd)
    mixed = ((status.st_dev * 0x9E3779B97F4A7C15 ^ status.st_ino) * 0xFF51AFD7ED558CCD) & 0xFFFFFFFFFFFFFFFF
    first = 1 << 62 | (mixed >> 34) << 32
    try:
        with open("/proc/locks", encoding="ascii", errors="replace") as stream:
            lines = stream.readlines()
    except OSError:
        return True
    for line in lines:
        words = line.split()
        if "OFDLCK" not in words or words[-3].rpartition(":")[2] != str(inode) or not words[-2].isdigit():
            continue
        if first <= int(words[-2]) < first + (1 << 32):
            return True
    return False


def read_ledger(path: str) -> dict[str, Any]:
    """parse_ledger of a file, with the slots of dead processes left out. ``lent``: bytes of each device that those had
    lent. They stay charged, and are in ``totals``, for as long as another process holds any of them.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # A tenant can grow its file: no more is read than a ledger can hold.
        with os.fdopen(os.dup(fd), "rb") as stream:
            data = stream.read(1 << 20)
        ledger = parse_ledger(data)
        alive = [slot for slot in ledger["slots"] if slot_is_alive(fd, slot["slot"])]
        dead = [slot for slot in ledger["slots"] if slot not in alive]
        ledger["lent"] = [sum(slot["lent"][at] for slot in dead) for at in range(len(ledger["devices"]))]
        ledger["slots"] = alive
        held = any(ledger["lent"]) and (
            _is_locked(fd, LEDGER_LENT_BASE, LEDGER_LENT_SPAN) or _handle_is_open(fd, data[:LEDGER_SLOT_OFFSET])
        )
    finally:
        os.close(fd)
    ledger["totals"] = _totals(ledger["devices"], ledger["slots"])
    for one, lent in zip(ledger["totals"], ledger["lent"]):
        one["used"] += lent if held else 0
    return ledger


def any_slot_is_alive(fd: int) -> bool:
    """Whether any process holds a slot of the open ledger."""
    return _is_locked(fd, LEDGER_ALIVE_BASE, LEDGER_SLOTS)


def as_packed(parsed: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """What pack_limits takes, out of what parse_limits gave; the sequence and versions are the writer's."""
    kept = {key: value for key, value in parsed.items() if key not in ("version", "min_reader", "sequence")}
    return dict(kept, **changes)


def says(data: bytes, limits: Mapping[str, Any]) -> bool:
    """Whether a limits file says exactly this, whatever its sequence."""
    try:
        return as_packed(parse_limits(data)) == as_packed(parse_limits(pack_limits(limits)))
    except LayoutError:
        return False


def rewrite_limits(path: str, limits: Mapping[str, Any]) -> None:
    """Change a limits file in place while containers have it mapped; a first one is written to a new file instead.

    The order of the three writes is the contract with the readers: odd sequence, body, even sequence.
    """
    offset, fmt = LIMITS_FIELDS["sequence"]
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_size < LIMITS_FILE_SIZE:
            raise LayoutError(f"{path} is shorter than a limits file; write it anew before the start")
        found = struct.unpack("<" + fmt, os.pread(fd, 4, offset))[0]
        busy = (found | 1) & 0xFFFFFFFF
        rest = (busy + 1) & 0xFFFFFFFF
        data = pack_limits(dict(limits, sequence=busy))
        os.pwrite(fd, struct.pack("<" + fmt, busy), offset)
        os.pwrite(fd, data, 0)
        os.pwrite(fd, struct.pack("<" + fmt, rest), offset)
    finally:
        os.close(fd)
