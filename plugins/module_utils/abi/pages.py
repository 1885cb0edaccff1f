# SPDX-License-Identifier: Apache-2.0
"""The two pages that a container and the arbiter of the node share: whose turn it is, what the tenant says of itself.

Their fields are in fields.py. Pure.
"""

from __future__ import annotations

import functools
from typing import Any, Sequence

from .fields import (
    GATES,
    GPU_PAGE_FIELDS,
    GPU_PAGE_FILE_SIZE,
    GPU_PAGE_FLAGS,
    GPU_PAGE_MAGIC,
    GPU_PAGE_MIN_READER,
    GPU_PAGE_VERSION,
    MAX_DEVICES,
    TENANT_DEVICE_FIELDS,
    TENANT_DEVICE_SIZE,
    TENANT_FIELDS,
    TENANT_FILE_SIZE,
    TENANT_MAGIC,
    TENANT_MIN_READER,
    TENANT_VERSION,
    UUID_SIZE,
    LayoutError,
    check_versions,
    encoded,
    get_field,
    named,
    put_header,
    put_uuids,
    text_of,
)


def pack_gpu_page(uuid: str, allocation: str = "") -> bytes:
    """The gpu page of an allocation before an arbiter has written it: the tenant keeps its own share."""
    return named(_gpu_page(uuid), GPU_PAGE_FIELDS, allocation)


# A page but for its allocation: a node packs the same few again and again.
@functools.lru_cache(maxsize=32)
def _gpu_page(uuid: str) -> bytes:
    out = bytearray(GPU_PAGE_FILE_SIZE)
    header = {
        "magic": GPU_PAGE_MAGIC,
        "version": GPU_PAGE_VERSION,
        "min_reader": GPU_PAGE_MIN_READER,
        "size": GPU_PAGE_FILE_SIZE,
        "uuid": encoded(uuid, UUID_SIZE, "uuid"),
    }
    put_header(out, GPU_PAGE_FIELDS, header)
    return bytes(out)


def parse_gpu_page(data: bytes) -> dict[str, Any]:
    """Every field of a gpu page by name, ``gate`` and ``flags`` in words. Raises LayoutError."""
    if len(data) < GPU_PAGE_FIELDS["uuid"][0]:
        raise LayoutError(f"the gpu page holds {len(data)} bytes, expected {GPU_PAGE_FILE_SIZE}")
    found = {
        name: get_field(data, 0, len(data), GPU_PAGE_FIELDS, name) for name in GPU_PAGE_FIELDS if name != "reserved"
    }
    if found["magic"] != GPU_PAGE_MAGIC:
        raise LayoutError("the gpu page begins with {!r}, expected {!r}".format(found["magic"], GPU_PAGE_MAGIC))
    check_versions("gpu page", found["version"], found["min_reader"], GPU_PAGE_VERSION)
    gates = {number: name for name, number in GATES.items()}
    found["gate"] = gates.get(found["gate"], "none")
    found["flags"] = [name for name, bit in sorted(GPU_PAGE_FLAGS.items()) if found["flags"] & bit]
    for name in ("uuid", "allocation"):
        found[name] = text_of(found[name], name + " of the gpu page")
    del found["magic"]
    return found


def pack_tenant_page(uuids: Sequence[str], allocation: str = "") -> bytes:
    """An empty tenant page for these devices, in the order of the limits file."""
    return named(_tenant_page(tuple(uuids)), TENANT_FIELDS, allocation)


@functools.lru_cache(maxsize=32)
def _tenant_page(uuids: Sequence[str]) -> bytes:
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
    }
    put_header(out, TENANT_FIELDS, header)
    put_uuids(out, TENANT_FIELDS["uuids"][0], uuids)
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
        return get_field(data, 0, len(data), TENANT_FIELDS, name)

    if get("magic") != TENANT_MAGIC:
        raise LayoutError("the tenant page begins with {!r}, expected {!r}".format(get("magic"), TENANT_MAGIC))
    check_versions("tenant page", get("version"), get("min_reader"), TENANT_VERSION)
    count, offset, stride = get("device_count"), get("device_offset"), get("device_size")
    if count > MAX_DEVICES or (count and (stride < 40 or offset + count * stride > len(data))):
        raise LayoutError(f"the tenant page names {count} devices of {stride} bytes at {offset}, more than fit")
    names, devices = get("uuids"), []
    for i in range(count):
        base = offset + i * stride
        device = {"uuid": text_of(names[i * UUID_SIZE : (i + 1) * UUID_SIZE], f"uuid of device {i}")}
        for name in TENANT_DEVICE_FIELDS:
            if name != "reserved":
                device[name] = get_field(data, base, stride, TENANT_DEVICE_FIELDS, name)
        devices.append(device)
    return {"allocation": text_of(get("allocation"), "allocation"), "devices": devices}
