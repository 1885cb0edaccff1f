# SPDX-License-Identifier: Apache-2.0
"""Packs and parses two files that a tenant (container with a share of a GPU) shares with the node: the limits file (its
GPU limits) and the ledger (the GPU memory that its processes use, one slot for each process). fields.py defines the
offsets of the fields. native/vcuda/include/vgpu_abi.h declares the same layout in C. pages.py packs and parses the
other two shared files. The functions that take a path read or change files in place; the others do no I/O.
"""

from __future__ import annotations

import functools
import os
import struct
import zlib
from typing import Any, Mapping, Sequence

from . import fields
from .fields import (
    LEDGER_FILE_SIZE,
    TENANT_FILE_SIZE,
    LayoutError,
    encoded,
    get_field,
    header_of,
    named,
    put_field,
    put_header,
    put_uuids,
    text_of,
    whole_number,
)
from .ledger_locks import any_slot_is_alive, handle_is_open, is_locked, slot_is_alive
from .pages import pack_gpu_page, pack_tenant_page, parse_gpu_page, parse_tenant_page

# Re-exported, because callers import these names from this module.
__all__ = (
    "LEDGER_FILE_SIZE",
    "TENANT_FILE_SIZE",
    "pack_gpu_page",
    "pack_tenant_page",
    "parse_gpu_page",
    "parse_tenant_page",
)


def limits_crc(data: bytes | bytearray) -> int:
    """Computes the crc32 field for these bytes of a limits file."""
    clean = bytearray(data)
    for name in ("sequence", "crc32"):
        put_field(clean, 0, fields.LIMITS_FIELDS, name, 0)
    return zlib.crc32(bytes(clean))


def pack_limits(limits: Mapping[str, Any]) -> bytes:
    """Returns the bytes of an allocation's limits file. Raises LayoutError for invalid values.

    Keys: ``allocation``, ``devices`` (a list of ``uuid``, ``memory_bytes``, ``sm_percent``, ``unlimited``,
    ``card_bytes``), and, each with a default: ``count_context`` (True), ``deny``, ``oom_killer``,
    ``allow_disable_control``, ``oversubscribe`` (False), ``core_policy`` ("default"), ``priority`` (1), ``log_level``
    (1), ``sequence`` (0).
    """
    known = {"allocation", "devices", "core_policy", "priority", "log_level", "sequence", "version", "min_reader"}
    for key in limits:
        if key not in known and key not in fields.LIMITS_FLAGS:
            raise LayoutError(f"a limits file has no key {key!r}")
    devices = limits.get("devices", [])
    if len(devices) > fields.MAX_DEVICES:
        raise LayoutError(f"{len(devices)} devices for a limits file, expected at most {fields.MAX_DEVICES}")
    policy = limits.get("core_policy", "default")
    if policy not in fields.CORE_POLICIES:
        raise LayoutError(
            ("core_policy {!r}: expected one of {}").format(policy, ", ".join(sorted(fields.CORE_POLICIES)))
        )
    flags = 0
    for name, bit in fields.LIMITS_FLAGS.items():
        if limits.get(name, name == "count_context"):
            flags |= bit

    out = bytearray(fields.LIMITS_FILE_SIZE)
    put_header(
        out,
        fields.LIMITS,
        sequence=whole_number(limits.get("sequence", 0), 0xFFFFFFFF, "sequence"),
        flags=flags,
        core_policy=fields.CORE_POLICIES[policy],
        priority=whole_number(limits.get("priority", 1), 1, "priority"),
        log_level=whole_number(limits.get("log_level", 1), 5, "log_level"),
        device_count=len(devices),
        device_offset=fields.LIMITS_FIELDS["devices"][0],
        device_size=fields.LIMITS_DEVICE_SIZE,
        allocation=encoded(limits.get("allocation", ""), fields.ALLOCATION_SIZE, "allocation"),
    )
    seen = set()
    for i, device in enumerate(devices):
        base = fields.LIMITS_FIELDS["devices"][0] + i * fields.LIMITS_DEVICE_SIZE
        what = f"devices[{i}]"
        uuid = device.get("uuid", "")
        if not uuid or uuid in seen:
            raise LayoutError(f"{what}.uuid {uuid!r} is empty or occurs twice")
        seen.add(uuid)
        memory = whole_number(device.get("memory_bytes", 0), 2**64 - 1, what + ".memory_bytes")
        unlimited = bool(device.get("unlimited", False))
        if unlimited == bool(memory):
            raise LayoutError(
                f"{what} ({uuid}): memory_bytes is {memory} and unlimited is {unlimited}; "
                "give a size, or 0 together with unlimited"
            )
        values = {
            "uuid": encoded(uuid, fields.UUID_SIZE, what + ".uuid"),
            "memory_bytes": memory,
            "sm_percent": whole_number(device.get("sm_percent", 0), 100, what + ".sm_percent"),
            "flags": fields.DEVICE_UNLIMITED_MEMORY if unlimited else 0,
            "card_bytes": whole_number(device.get("card_bytes", 0), 2**64 - 1, what + ".card_bytes"),
        }
        for name, value in values.items():
            put_field(out, base, fields.LIMITS_DEVICE_FIELDS, name, value)
    put_field(out, 0, fields.LIMITS_FIELDS, "crc32", limits_crc(out))
    return bytes(out)


def parse_limits(data: bytes) -> dict[str, Any]:
    """Returns the content of a limits file, in the keys of pack_limits. Raises LayoutError if libvgpu.so would refuse
    it.
    """
    get = header_of(data, fields.LIMITS, fields.LIMITS_FIELDS["devices"][0])
    size = get("size")
    if size > len(data) or size < fields.LIMITS_FIELDS["devices"][0]:
        raise LayoutError(f"the limits file states a size of {size} bytes, found {len(data)} bytes")
    if get("sequence") % 2:
        raise LayoutError(
            ("the limits file is being written, or its writer was interrupted: sequence {} is odd").format(
                get("sequence")
            )
        )
    if get("crc32") != limits_crc(data[:size]):
        raise LayoutError(
            f"the limits file is incomplete: crc32 is {get('crc32'):#x}, expected {limits_crc(data[:size]):#x}"
        )
    count, offset, stride = get("device_count"), get("device_offset"), get("device_size")
    end = offset + count * stride
    if count > fields.MAX_DEVICES or end > size or (count and not 56 <= stride <= size):
        raise LayoutError(f"the limits file names {count} devices of {stride} bytes at {offset}, more than fit")

    policies = {number: name for name, number in fields.CORE_POLICIES.items()}
    if get("core_policy") not in policies:
        raise LayoutError("the limits file has the unknown core policy {}".format(get("core_policy")))
    out = {
        "version": get("version"),
        "min_reader": get("min_reader"),
        "sequence": get("sequence"),
        # This field is for people who read the file; libvgpu.so ignores it.
        "allocation": get("allocation").split(b"\0", 1)[0].decode("ascii", "replace"),
        "core_policy": policies[get("core_policy")],
        "priority": get("priority"),
        "log_level": get("log_level"),
        "devices": [],
    }
    for name, bit in fields.LIMITS_FLAGS.items():
        out[name] = bool(get("flags") & bit)
    for i in range(count):
        base = offset + i * stride
        uuid = get_field(data, base, stride, fields.LIMITS_DEVICE_FIELDS, "uuid")
        if uuid[0] == 0 or uuid[-1] != 0:
            raise LayoutError(
                f"the limits file gives device {i} the UUID {uuid!r}; expected a text that ends with a zero byte"
            )
        flags = get_field(data, base, stride, fields.LIMITS_DEVICE_FIELDS, "flags")
        percent = get_field(data, base, stride, fields.LIMITS_DEVICE_FIELDS, "sm_percent")
        if percent > 100:
            raise LayoutError(f"the limits file gives device {i} {percent} % of the SMs, expected at most 100 %")
        card = get_field(data, base, stride, fields.LIMITS_DEVICE_FIELDS, "card_bytes")
        out["devices"].append(
            {
                "uuid": text_of(uuid, f"uuid of device {i}"),
                "memory_bytes": get_field(data, base, stride, fields.LIMITS_DEVICE_FIELDS, "memory_bytes"),
                "sm_percent": percent,
                "unlimited": bool(flags & fields.DEVICE_UNLIMITED_MEMORY),
                **({"card_bytes": card} if card else {}),
            }
        )
    return out


def pack_ledger(uuids: Sequence[str], allocation: str = "") -> bytes:
    """Returns an empty ledger for these devices, in the order of the limits file."""
    return ledger_head(uuids, allocation).ljust(LEDGER_FILE_SIZE, b"\0")


def ledger_head(uuids: Sequence[str], allocation: str = "") -> bytes:
    """Returns the bytes of an empty ledger that precede its slots. The slots are zero, so they need not be written to a
    new file.
    """
    return named(_empty_ledger(tuple(uuids)), fields.LEDGER_FIELDS, allocation)


@functools.lru_cache(maxsize=32)
def _empty_ledger(uuids: Sequence[str]) -> bytes:
    if len(uuids) > fields.MAX_DEVICES:
        raise LayoutError(f"a ledger of {len(uuids)} devices, at most {fields.MAX_DEVICES} are possible")
    out = bytearray(fields.LEDGER_SLOT_OFFSET)
    slots = {"slot_count": fields.LEDGER_SLOTS, "slot_offset": fields.LEDGER_SLOT_OFFSET}
    put_header(out, fields.LEDGER, **slots, slot_size=fields.LEDGER_SLOT_SIZE, device_count=len(uuids))
    put_uuids(out, fields.LEDGER_FIELDS["devices"][0], uuids)
    return bytes(out)


def open_shared(path: str, access: int = os.O_RDONLY) -> int:
    """Opens a file that a container can also open; returns the descriptor. If a process of the container holds a lease
    on the file (fcntl(2), F_SETLEASE), a plain open would wait for 45 seconds. This function raises BlockingIOError
    instead.
    """
    return os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def parse_ledger(data: bytes) -> dict[str, Any]:
    """Returns the devices, the used slots and their sums. The result includes the slots of dead processes. read_ledger
    removes these slots, because only the kernel knows which processes are alive.

    Returns ``{"devices": [uuid], "allocation", "slots": [{"slot", "pid", "pid_namespace", "used": [..], "context":
    [..], "exported": [..]}], "totals": [{"uuid", "used", "context"}]}`` with bytes in the order of the devices;
    ``used`` includes ``exported``. The tenant (the container) can write this file, so every figure is only the tenant's
    own report.
    """
    devices, allocation, slots, offset, stride = _ledger_head(data, len(data))
    count = len(devices)
    found = []
    # Skip unused slots early: most slots were never used, and the device plugin reads every ledger every two seconds.
    empty = bytes(stride if slots else 0)
    for slot in range(slots):
        base = offset + slot * stride
        if data[base : base + stride] == empty:
            continue
        used = get_field(data, base, stride, fields.LEDGER_SLOT_FIELDS, "used")[:count]
        context = get_field(data, base, stride, fields.LEDGER_SLOT_FIELDS, "context")[:count]
        pid = get_field(data, base, stride, fields.LEDGER_SLOT_FIELDS, "pid")
        if pid or any(used) or any(context):
            space = get_field(data, base, stride, fields.LEDGER_SLOT_FIELDS, "pid_namespace")
            exported = get_field(data, base, stride, fields.LEDGER_SLOT_FIELDS, "exported_mib") or []
            one = {"slot": slot, "pid": pid, "pid_namespace": space, "used": used, "context": context}
            one["exported"] = [min(mib << 20, most) for mib, most in zip([*exported, *[0] * count], used)]
            found.append(one)
    return {"devices": devices, "allocation": allocation, "slots": found, "totals": _totals(devices, found)}


def is_ledger_of(path: str, uuids: Sequence[str], allocation: str) -> bool:
    """Returns whether a file is the ledger of these devices and this allocation. Reads only the head, because reading
    the slots takes a hundred times as long. If the ledger has this program's version, its slots must also lie at this
    version's offsets. Slots beyond LEDGER_FILE_SIZE are invalid: a tenant can enlarge its file, and no reader reads
    that part.

    Raises OSError, and LayoutError for what parse_ledger refuses.
    """
    fd = open_shared(path)
    try:
        head = os.read(fd, fields.LEDGER_SLOT_OFFSET)
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    devices, found, slots, offset, stride = _ledger_head(head, min(size, LEDGER_FILE_SIZE))
    if (devices, found) != (list(uuids), allocation):
        return False
    if get_field(head, 0, len(head), fields.LEDGER_FIELDS, "version") != fields.LEDGER_VERSION:
        return True
    own = (fields.LEDGER_SLOTS, fields.LEDGER_SLOT_OFFSET, fields.LEDGER_SLOT_SIZE)
    said = get_field(head, 0, len(head), fields.LEDGER_FIELDS, "size")
    return (slots, offset, stride) == own and said == LEDGER_FILE_SIZE <= size


def _ledger_head(data: bytes, size: int) -> tuple[list[str], str, int, int, int]:
    """Returns devices, allocation, and count, offset and size of the slots. ``size``: size of the file. Raises
    LayoutError.
    """
    get = header_of(data, fields.LEDGER, fields.LEDGER_SLOT_OFFSET)
    count, slots, offset, stride = get("device_count"), get("slot_count"), get("slot_offset"), get("slot_size")
    if count > fields.MAX_DEVICES or slots > fields.LEDGER_SLOTS or stride < 264 or offset + slots * stride > size:
        raise LayoutError(
            f"the ledger names {count} devices and {slots} slots of {stride} bytes at {offset}, "
            f"more than its {size} bytes hold"
        )
    names = get("devices")
    devices = [
        text_of(names[i * fields.UUID_SIZE : (i + 1) * fields.UUID_SIZE], f"uuid of device {i}") for i in range(count)
    ]
    return devices, text_of(get("allocation"), "allocation"), slots, offset, stride


def _totals(devices: Sequence[str], slots: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"uuid": uuid, "used": sum(s["used"][i] for s in slots), "context": sum(s["context"][i] for s in slots)}
        for i, uuid in enumerate(devices)
    ]


def read_ledger(path: str) -> dict[str, Any]:
    """Returns parse_ledger of a file without the slots of dead processes. Adds the key ``exported``: for each device,
    the bytes that dead processes had exported to other processes. ``exported`` is 0 if no living process still
    holds exported memory of this ledger; ``totals`` includes ``exported``. A slot of a dead process counts only
    below the index ``slot_high`` (a field of the ledger), because the library does not read the slots from there on.
    """
    fd = open_shared(path)
    try:
        # A tenant can enlarge its file: read no more than a ledger can hold.
        with os.fdopen(os.dup(fd), "rb") as stream:
            data = stream.read(1 << 20)
        ledger = parse_ledger(data)
        alive = [slot for slot in ledger["slots"] if slot_is_alive(fd, slot["slot"])]
        high = get_field(data, 0, len(data), fields.LEDGER_FIELDS, "slot_high")
        dead = [slot for slot in ledger["slots"] if slot["slot"] < high and slot not in alive]
        ledger["exported"] = [sum(slot["exported"][at] for slot in dead) for at in range(len(ledger["devices"]))]
        ledger["slots"] = alive
        if any(ledger["exported"]) and not (
            is_locked(fd, fields.LEDGER_IMPORT_BASE, fields.LEDGER_IMPORT_SPAN)
            or handle_is_open(fd, data[: fields.LEDGER_SLOT_OFFSET])
        ):
            ledger["exported"] = [0] * len(ledger["devices"])
    finally:
        os.close(fd)
    ledger["totals"] = _totals(ledger["devices"], ledger["slots"])
    for one, exported in zip(ledger["totals"], ledger["exported"]):
        one["used"] += exported
    return ledger


def ledger_in_use(path: str) -> bool:
    """Returns whether a process holds a slot of the ledger. The kernel's locks decide, because a tenant can write any
    content into the file. A ledger that cannot be opened counts as unused, unless a process of the container holds a
    lease on it.
    """
    try:
        fd = open_shared(path)
    except BlockingIOError:
        return True
    except OSError:
        return False
    try:
        return any_slot_is_alive(fd)
    finally:
        os.close(fd)


def rewrite_ledger(path: str, uuids: Sequence[str], allocation: str) -> None:
    """Empties a ledger in place, because a starting container may have mounted the file. Call it only while no process
    uses the ledger. The head is written last: until then no reader reads a slot. Raises OSError.
    """
    data = pack_ledger(uuids, allocation)
    fd = open_shared(path, os.O_RDWR)
    try:
        os.ftruncate(fd, LEDGER_FILE_SIZE)
        os.pwrite(fd, bytes(fields.LEDGER_SLOT_OFFSET), 0)
        os.pwrite(fd, data[fields.LEDGER_SLOT_OFFSET :], fields.LEDGER_SLOT_OFFSET)
        os.pwrite(fd, data[: fields.LEDGER_SLOT_OFFSET], 0)
    finally:
        os.close(fd)


def as_packed(parsed: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns the arguments of pack_limits from a result of parse_limits, without sequence and versions."""
    kept = {key: value for key, value in parsed.items() if key not in ("version", "min_reader", "sequence")}
    return dict(kept, **changes)


def says(data: bytes, limits: Mapping[str, Any]) -> bool:
    """Returns whether a limits file holds exactly these values. The sequence number, which counts its writes, is not
    compared.
    """
    try:
        return as_packed(parse_limits(data)) == as_packed(parse_limits(pack_limits(limits)))
    except LayoutError:
        return False


def rewrite_limits(path: str, limits: Mapping[str, Any]) -> None:
    """Changes a limits file in place while containers have it mapped. The first version of a limits file must be
    written to a new file instead.

    The order of the three writes is the contract with the readers: odd sequence, body, even sequence.
    """
    offset, fmt = fields.LIMITS_FIELDS["sequence"]
    fd = open_shared(path, os.O_RDWR)
    try:
        if os.fstat(fd).st_size < fields.LIMITS_FILE_SIZE:
            raise LayoutError(f"{path} is shorter than a limits file; replace it before its container starts")
        found = struct.unpack("<" + fmt, os.pread(fd, 4, offset))[0]
        busy = found | 1
        rest = (busy + 1) & 0xFFFFFFFF
        data = pack_limits(dict(limits, sequence=busy))
        os.pwrite(fd, struct.pack("<" + fmt, busy), offset)
        os.pwrite(fd, data, 0)
        os.pwrite(fd, struct.pack("<" + fmt, rest), offset)
    finally:
        os.close(fd)
