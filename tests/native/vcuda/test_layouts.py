# SPDX-License-Identifier: Apache-2.0
"""The C header vgpu_abi.h and the Python module abi/fields.py must describe the same layouts of the files that the
programs share. abi/files.py must reject invalid files. The files are the limits file, the ledger (the record of a
container's GPU memory), the tenant page (in which programs report their launches) and the GPU page, in which the
arbiter, the node's service that gives containers turns, says whether they may launch now (the gate), and regularly
writes the time (the heartbeat)."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import layouts
import pytest

pytestmark = pytest.mark.own_build

ROOT = Path(__file__).resolve().parents[3]

TABLES = {
    "vgpu_limits": (layouts.fields.LIMITS_FIELDS, None),
    "vgpu_limits_device": (layouts.fields.LIMITS_DEVICE_FIELDS, layouts.fields.LIMITS_DEVICE_SIZE),
    "vgpu_ledger": (layouts.fields.LEDGER_FIELDS, None),
    "vgpu_ledger_slot": (layouts.fields.LEDGER_SLOT_FIELDS, layouts.fields.LEDGER_SLOT_SIZE),
    "vgpu_gpu_page": (layouts.fields.GPU_PAGE_FIELDS, None),
    "vgpu_tenant_page": (layouts.fields.TENANT_FIELDS, None),
    "vgpu_tenant_device": (layouts.fields.TENANT_DEVICE_FIELDS, layouts.fields.TENANT_DEVICE_SIZE),
}
CONSTANTS = {
    "VGPU_MAX_DEVICES": layouts.fields.MAX_DEVICES,
    "VGPU_UUID_SIZE": layouts.fields.UUID_SIZE,
    "VGPU_ALLOCATION_SIZE": layouts.fields.ALLOCATION_SIZE,
    "VGPU_LIMITS_VERSION": layouts.fields.LIMITS_VERSION,
    "VGPU_LIMITS_MIN_READER": layouts.fields.LIMITS_MIN_READER,
    "VGPU_LIMITS_FILE_SIZE": layouts.fields.LIMITS_FILE_SIZE,
    "VGPU_LEDGER_VERSION": layouts.fields.LEDGER_VERSION,
    "VGPU_LEDGER_MIN_READER": layouts.fields.LEDGER_MIN_READER,
    "VGPU_LEDGER_SLOTS": layouts.fields.LEDGER_SLOTS,
    "VGPU_LEDGER_SLOT_OFFSET": layouts.fields.LEDGER_SLOT_OFFSET,
    "VGPU_LEDGER_FILE_SIZE": layouts.fields.LEDGER_FILE_SIZE,
    "VGPU_LEDGER_ALIVE_BASE": layouts.fields.LEDGER_ALIVE_BASE,
    "VGPU_LEDGER_IMPORT_BASE": layouts.fields.LEDGER_IMPORT_BASE,
    "VGPU_LEDGER_IMPORT_SPAN": layouts.fields.LEDGER_IMPORT_SPAN,
    "VGPU_LIMITS_COUNT_CONTEXT": layouts.fields.LIMITS_FLAGS["count_context"],
    "VGPU_LIMITS_DENY": layouts.fields.LIMITS_FLAGS["deny"],
    "VGPU_LIMITS_OOM_KILLER": layouts.fields.LIMITS_FLAGS["oom_killer"],
    "VGPU_LIMITS_ALLOW_DISABLE_CONTROL": layouts.fields.LIMITS_FLAGS["allow_disable_control"],
    "VGPU_LIMITS_OVERSUBSCRIBE": layouts.fields.LIMITS_FLAGS["oversubscribe"],
    "VGPU_CORE_DEFAULT": layouts.fields.CORE_POLICIES["default"],
    "VGPU_CORE_FORCE": layouts.fields.CORE_POLICIES["force"],
    "VGPU_CORE_DISABLE": layouts.fields.CORE_POLICIES["disable"],
    "VGPU_DEVICE_UNLIMITED_MEMORY": layouts.fields.DEVICE_UNLIMITED_MEMORY,
    "VGPU_GPU_PAGE_VERSION": layouts.fields.GPU_PAGE_VERSION,
    "VGPU_GPU_PAGE_MIN_READER": layouts.fields.GPU_PAGE_MIN_READER,
    "VGPU_GPU_PAGE_FILE_SIZE": layouts.fields.GPU_PAGE_FILE_SIZE,
    "VGPU_ARBITER_SILENT_NS": layouts.fields.ARBITER_SILENT_NS,
    "VGPU_ARBITER_DRAIN_NS": layouts.fields.ARBITER_DRAIN_NS,
    "VGPU_TENANT_VERSION": layouts.fields.TENANT_VERSION,
    "VGPU_TENANT_MIN_READER": layouts.fields.TENANT_MIN_READER,
    "VGPU_TENANT_FILE_SIZE": layouts.fields.TENANT_FILE_SIZE,
    "VGPU_TENANT_LANES": layouts.fields.TENANT_LANES,
    "VGPU_TENANT_LOW": layouts.fields.TENANT_REQUESTS["low"],
    "VGPU_GATE_NONE": layouts.fields.GATES["none"],
    "VGPU_GATE_OPEN": layouts.fields.GATES["open"],
    "VGPU_GATE_TURN": layouts.fields.GATES["turn"],
    "VGPU_GATE_CLOSED": layouts.fields.GATES["closed"],
    "VGPU_GPU_EXCLUSIVE": layouts.fields.GPU_PAGE_FLAGS["exclusive"],
    "VGPU_GPU_PRIORITY": layouts.fields.GPU_PAGE_FLAGS["priority"],
}


@pytest.fixture(scope="module")
def c_layout(tmp_path_factory):
    """Returns a dict from each field or constant to its offset, size or value, as compiled from the C header."""
    lines = []
    for struct_name, (fields, _size) in TABLES.items():
        lines.append(f'printf("sizeof {struct_name} %zu\\n", sizeof(struct {struct_name}));')
        for field in fields:
            where, what = f"offsetof(struct {struct_name}, {field})", f"sizeof(((struct {struct_name} *)0)->{field})"
            lines.append(f'printf("{struct_name}.{field} %zu\\n{struct_name}.{field}# %zu\\n", {where}, {what});')
    lines += [f'printf("{name} %llu\\n", (unsigned long long){name});' for name in CONSTANTS]
    folder = tmp_path_factory.mktemp("abi")
    source = folder / "abi.c"
    source.write_text("#include <stdio.h>\n#include <vgpu_abi.h>\nint main(void){\n" + "\n".join(lines) + "\n}\n")
    include = ROOT / "native" / "vcuda" / "include"
    command = [os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-Werror", "-I", include, source, "-o", folder / "abi"]
    subprocess.run(command, check=True)
    text = subprocess.run([folder / "abi"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return {line.rsplit(" ", 1)[0]: int(line.rsplit(" ", 1)[1]) for line in text.splitlines()}


@pytest.mark.parametrize("struct_name", TABLES)
def test_fields_have_the_offsets_of_the_header(c_layout, struct_name):
    fields, size = TABLES[struct_name]
    python = {}
    for name, (offset, fmt) in fields.items():
        python[f"{struct_name}.{name}"] = offset
        python[f"{struct_name}.{name}#"] = struct.calcsize("<" + fmt)
    assert {key: c_layout[key] for key in python} == python
    # Together the fields in Python cover the whole C structure without a gap.
    assert sum(struct.calcsize("<" + fmt) for _unused, fmt in fields.values()) == c_layout[f"sizeof {struct_name}"]
    if size is not None:
        assert c_layout[f"sizeof {struct_name}"] == size


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_match_the_header(c_layout, name):
    assert c_layout[name] == CONSTANTS[name]


UUID = "GPU-00000000-1111-2222-3333-444444444444"
LIMITS = {
    "allocation": "a1b2",
    "count_context": True,
    "deny": False,
    "oom_killer": True,
    "allow_disable_control": False,
    "oversubscribe": True,
    "core_policy": "force",
    "priority": 0,
    "log_level": 3,
    "sequence": 8,
    "devices": [
        {"uuid": UUID, "memory_bytes": 5386 << 20, "sm_percent": 33, "unlimited": False},
        {"uuid": "MIG-5", "memory_bytes": 0, "sm_percent": 0, "unlimited": True},
    ],
}


def test_packed_limits_parse_to_the_same_values():
    data = layouts.pack_limits(LIMITS)
    assert len(data) == 4096
    assert layouts.parse_limits(data) == dict(LIMITS, version=1, min_reader=1)


def with_field(name, value, crc=True, at=None):
    """Returns limits with one field changed; ``at`` is the offset of a 4-byte number inside a text or table field."""
    data = bytearray(layouts.pack_limits(LIMITS))
    offset, fmt = layouts.fields.LIMITS_FIELDS[name]
    struct.pack_into("<" + (fmt if at is None else "I"), data, offset + (at or 0), value)
    if crc and name != "crc32":
        struct.pack_into("<I", data, layouts.fields.LIMITS_FIELDS["crc32"][0], layouts.limits_crc(data))
    return bytes(data)


# Columns: the content of a limits file with one fault; expected words of the error message.
@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "0 bytes"),
        (layouts.pack_limits(LIMITS)[:100], "100 bytes"),
        (layouts.pack_limits(LIMITS)[:1000], "4096 bytes, found 1000"),
        (b"X" * 4096, "begins with"),
        (with_field("min_reader", 2), "reader of version 2"),
        (with_field("version", 0), "version 0"),
        (with_field("sequence", 9), "odd"),
        (with_field("crc32", 1), "crc32"),
        (with_field("priority", 1, crc=False), "crc32"),
        (with_field("device_count", 17), "17 devices"),
        (with_field("device_size", 40), "40 bytes"),
        (with_field("core_policy", 9), "core policy 9"),
        (with_field("devices", 101, at=layouts.fields.LIMITS_DEVICE_FIELDS["sm_percent"][0]), "device 0 101 %"),
    ],
)
def test_bad_limits_are_rejected_with_a_reason(data, sentence):
    with pytest.raises(layouts.LayoutError, match=sentence):
        layouts.parse_limits(data)


def test_limits_of_the_next_version_are_read():
    """A reader of version 1 must accept a limits file of version 2, whose device entries are longer."""
    data = bytearray(layouts.pack_limits(dict(LIMITS, devices=[])))
    for name, value in {"version": 2, "device_count": 2, "device_offset": 256, "device_size": 96}.items():
        struct.pack_into("<I", data, layouts.fields.LIMITS_FIELDS[name][0], value)
    for i, memory in enumerate((1 << 30, 2 << 30)):
        struct.pack_into("<48sQI", data, 256 + i * 96, f"GPU-{i}".encode(), memory, 50)
    struct.pack_into("<I", data, layouts.fields.LIMITS_FIELDS["crc32"][0], layouts.limits_crc(data))
    found = layouts.parse_limits(bytes(data))
    assert [(d["uuid"], d["memory_bytes"]) for d in found["devices"]] == [("GPU-0", 1 << 30), ("GPU-1", 2 << 30)]


# Columns: the invalid values of a limits file; expected words of the error message.
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"memory": 1}, "no key 'memory'"),
        ({"core_policy": "hard"}, "core_policy 'hard'"),
        ({"priority": 2}, "priority"),
        ({"log_level": 6}, "log_level"),
        ({"allocation": "x" * 64}, "allocation"),
        ({"devices": [{"uuid": UUID, "memory_bytes": 0}]}, "memory_bytes is 0"),
        ({"devices": [{"uuid": UUID, "memory_bytes": 5, "unlimited": True}]}, "unlimited is True"),
        ({"devices": [{"uuid": UUID, "memory_bytes": 5}] * 2}, "occurs twice"),
        ({"devices": [{"uuid": UUID, "memory_bytes": 5, "sm_percent": 101}]}, "sm_percent"),
        ({"devices": [{"uuid": f"GPU-{i}", "memory_bytes": 5} for i in range(17)]}, "17 devices"),
    ],
)
def test_invalid_values_are_not_packed(change, sentence):
    with pytest.raises(layouts.LayoutError, match=sentence):
        layouts.pack_limits(dict(LIMITS, **change))


def test_rewrite_keeps_the_inode_and_leaves_an_even_sequence(tmp_path):
    path = tmp_path / "limits"
    path.write_bytes(layouts.pack_limits(LIMITS))
    inode = path.stat().st_ino
    layouts.rewrite_limits(str(path), dict(LIMITS, deny=True))
    found = layouts.parse_limits(path.read_bytes())
    assert (found["deny"], found["sequence"], path.stat().st_ino) == (True, 10, inode)


def test_rewrite_repairs_a_torn_file(tmp_path):
    path = tmp_path / "limits"
    path.write_bytes(with_field("sequence", 9))
    layouts.rewrite_limits(str(path), LIMITS)
    assert layouts.parse_limits(path.read_bytes())["sequence"] == 10


def test_packed_empty_ledger_parses_to_the_same_values():
    found = layouts.parse_ledger(layouts.pack_ledger([UUID, "MIG-5"], "a1b2"))
    totals = [{"uuid": u, "used": 0, "context": 0} for u in (UUID, "MIG-5")]
    assert found == {"devices": [UUID, "MIG-5"], "allocation": "a1b2", "slots": [], "totals": totals}


def test_ledger_totals_sum_the_slots():
    data = bytearray(layouts.pack_ledger([UUID, "MIG-5"]))
    for slot, (used, context, pid) in {0: (7, 1, 11), 1023: (5, 2, 12)}.items():
        base = layouts.fields.LEDGER_SLOT_OFFSET + slot * layouts.fields.LEDGER_SLOT_SIZE
        struct.pack_into("<Q", data, base + 8, used)
        struct.pack_into("<Q", data, base + 128, context)
        struct.pack_into("<I", data, base + 260, pid)
    found = layouts.parse_ledger(bytes(data))
    assert [(s["slot"], s["pid"], s["used"], s["context"]) for s in found["slots"]] == [
        (0, 11, [0, 7], [1, 0]),
        (1023, 12, [0, 5], [2, 0]),
    ]
    assert [(t["used"], t["context"]) for t in found["totals"]] == [(0, 3), (12, 0)]


@pytest.mark.parametrize("data", [b"", b"x" * 4096, layouts.pack_ledger([UUID])[:8192], b"\0" * 400000])
def test_bad_ledgers_are_refused(data):
    with pytest.raises(layouts.LayoutError):
        layouts.parse_ledger(data)


def test_new_gpu_page_has_no_gate_and_no_heartbeat():
    data = layouts.pack_gpu_page(UUID, "a1b2")
    found = layouts.parse_gpu_page(data)
    assert len(data) == 4096
    assert (found["uuid"], found["allocation"], found["gate"], found["flags"]) == (UUID, "a1b2", "none", [])
    assert found["heartbeat_ns"] == 0


def test_gpu_page_of_the_arbiter_is_parsed():
    data = bytearray(layouts.pack_gpu_page(UUID))
    for name, value in {"gate": 2, "flags": 3, "rate_ppm": 250000, "turn_end_ns": 7}.items():
        offset, fmt = layouts.fields.GPU_PAGE_FIELDS[name]
        struct.pack_into("<" + fmt, data, offset, value)
    found = layouts.parse_gpu_page(bytes(data))
    assert (found["gate"], found["flags"], found["rate_ppm"]) == ("turn", ["exclusive", "priority"], 250000)
    assert found["turn_end_ns"] == 7


def test_packed_tenant_page_parses_to_the_same_values():
    data = bytearray(layouts.pack_tenant_page([UUID, "MIG-5"], "a1b2"))
    struct.pack_into("<qQQ", data, 896 + 192, -5, 6, 7)
    found = layouts.parse_tenant_page(bytes(data))
    assert len(data) == 4096
    assert (found["allocation"], [one["uuid"] for one in found["devices"]]) == ("a1b2", [UUID, "MIG-5"])
    second = found["devices"][1]
    assert (second["balance_ns"], second["accrued_ns"], second["used_ns"]) == (-5, 6, 7)
    assert second["busy_until_ns"] == [0] * 16


@pytest.mark.parametrize("parse", [layouts.parse_gpu_page, layouts.parse_tenant_page])
@pytest.mark.parametrize("data", [b"", b"x" * 4096, b"\0" * 4096])
def test_bad_pages_are_refused(parse, data):
    with pytest.raises(layouts.LayoutError):
        parse(data)


@pytest.mark.parametrize(
    ("parse", "data"),
    [
        (layouts.parse_gpu_page, layouts.pack_gpu_page(UUID)),
        (layouts.parse_tenant_page, layouts.pack_tenant_page([UUID])),
    ],
)
def test_pages_for_later_readers_are_refused(parse, data):
    with pytest.raises(layouts.LayoutError, match="reader of version 2"):
        parse(data[:12] + struct.pack("<I", 2) + data[16:])
