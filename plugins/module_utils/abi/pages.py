# SPDX-License-Identifier: Apache-2.0
"""Packs and parses the GPU page (which tenant may run) and the tenant page (what the container reports).

A tenant is a container with a share of a GPU. Containers share these pages with the node's arbiter, which decides which
tenant may run on each GPU. fields.py defines the fields. This file does no I/O.
"""

from __future__ import annotations

import functools
from typing import Any, Sequence

from . import fields
from .fields import LayoutError, encoded, get_field, header_of, named, put_header, put_uuids, text_of


def pack_gpu_page(uuid: str, allocation: str = "") -> bytes:
    """Returns a new GPU page of an allocation. Until the arbiter writes this page for the first time, the tenant's
    library itself limits the tenant to its share.
    """
    return named(_gpu_page(uuid), fields.GPU_PAGE_FIELDS, allocation)


# The cached pages hold no allocation id. So a node packs only a few different pages, and the cache holds them.
@functools.lru_cache(maxsize=32)
def _gpu_page(uuid: str) -> bytes:
    out = bytearray(fields.GPU_PAGE_FILE_SIZE)
    put_header(out, fields.GPU_PAGE, uuid=encoded(uuid, fields.UUID_SIZE, "uuid"))
    return bytes(out)


def parse_gpu_page(data: bytes) -> dict[str, Any]:
    """Returns every field of a GPU page by name; the values of ``gate`` (whether the tenant may run) and ``flags`` are
    returned as words. Raises LayoutError.
    """
    get = header_of(data, fields.GPU_PAGE, fields.GPU_PAGE_FIELDS["uuid"][0])
    found = {name: get(name) for name in fields.GPU_PAGE_FIELDS if name not in ("magic", "reserved")}
    gates = {number: name for name, number in fields.GATES.items()}
    found["gate"] = gates.get(found["gate"], "none")
    found["flags"] = [name for name, bit in sorted(fields.GPU_PAGE_FLAGS.items()) if found["flags"] & bit]
    for name in ("uuid", "allocation"):
        found[name] = text_of(found[name], name + " of the gpu page")
    return found


def pack_tenant_page(uuids: Sequence[str], allocation: str = "") -> bytes:
    """Returns an empty tenant page for these devices, in the order of the limits file."""
    return named(_tenant_page(tuple(uuids)), fields.TENANT_FIELDS, allocation)


@functools.lru_cache(maxsize=32)
def _tenant_page(uuids: Sequence[str]) -> bytes:
    if len(uuids) > fields.MAX_DEVICES:
        raise LayoutError(f"a tenant page of {len(uuids)} devices, at most {fields.MAX_DEVICES} are possible")
    out = bytearray(fields.TENANT_FILE_SIZE)
    where = {"device_offset": fields.TENANT_FIELDS["devices"][0], "device_size": fields.TENANT_DEVICE_SIZE}
    put_header(out, fields.TENANT, device_count=len(uuids), **where)
    put_uuids(out, fields.TENANT_FIELDS["uuids"][0], uuids)
    return bytes(out)


def parse_tenant_page(data: bytes) -> dict[str, Any]:
    """Returns ``{"allocation", "devices": [{"uuid", "balance_ns", "used_ns", ...}]}``; times in ns of CLOCK_MONOTONIC.

    The tenant can write this file, so every figure is only the tenant's own report.
    """
    get = header_of(data, fields.TENANT, fields.TENANT_FIELDS["devices"][0])
    count, offset, stride = get("device_count"), get("device_offset"), get("device_size")
    if count > fields.MAX_DEVICES or (count and (stride < 40 or offset + count * stride > len(data))):
        raise LayoutError(f"the tenant page names {count} devices of {stride} bytes at {offset}, more than fit")
    names, devices = get("uuids"), []
    for i in range(count):
        base = offset + i * stride
        device = {"uuid": text_of(names[i * fields.UUID_SIZE : (i + 1) * fields.UUID_SIZE], f"uuid of device {i}")}
        for name in fields.TENANT_DEVICE_FIELDS:
            if name != "reserved":
                device[name] = get_field(data, base, stride, fields.TENANT_DEVICE_FIELDS, name)
        devices.append(device)
    return {"allocation": text_of(get("allocation"), "allocation"), "devices": devices}
