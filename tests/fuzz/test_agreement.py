# SPDX-License-Identifier: Apache-2.0
"""Compares two parsers of the same files: the library's in the container (C) and the node's (Python). For any bytes
both must return the same result."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import layouts
import pytest
from conftest import LEDGER, compile_program
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FIELDS = [
    name for name in layouts.fields.LIMITS_FIELDS if name not in ("magic", "crc32", "allocation", "devices", "reserved")
]
EXTREMES = st.one_of(
    st.integers(0, 20),
    st.sampled_from([48, 55, 56, 57, 58, 60, 64, 71, 72, 100, 101, 127, 128, 129, 200, 4024, 4095, 4096, 4097]),
    st.sampled_from([2**31 - 1, 2**31, 2**32 - 72, 2**32 - 2, 2**32 - 1]),
    st.integers(0, 2**32 - 1),
)
DEVICE = st.fixed_dictionaries(
    {
        "uuid": st.text("GPU-0123abc", min_size=1, max_size=47),
        "memory_bytes": st.integers(1, 2**64 - 1),
        "sm_percent": st.integers(0, 100),
    }
)


@pytest.fixture(scope="module")
def verdicts(folder: Path):
    program = compile_program(folder, "verdicts", ("limits/limits_file.c", *LEDGER), "address,undefined")
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        def ask(kind: bytes, data: bytes) -> list:
            assert process.stdin and process.stdout
            process.stdin.write(kind + struct.pack("<I", len(data)) + data)
            process.stdin.flush()
            answer = process.stdout.readline().decode()
            assert answer, "expected an answer of the program `verdicts` to each input; it ended"
            return answer.split()

        yield ask
        assert process.stdin
        process.stdin.close()
        assert process.wait() == 0


@st.composite
def limits_files(draw: st.DrawFn) -> bytes:
    """Draws a valid limits file with some fields, bytes or its length changed, mostly with a matching crc32."""
    devices = draw(st.lists(DEVICE, max_size=4, unique_by=lambda one: one["uuid"]))
    data = bytearray(layouts.pack_limits({"allocation": "a", "devices": devices}))
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=3)):
        offset, fmt = layouts.fields.LIMITS_FIELDS[name]
        struct.pack_into("<" + fmt, data, offset, draw(EXTREMES))
    for _unused in range(draw(st.integers(0, 3))):
        data[draw(st.one_of(st.integers(0, 300), st.integers(0, len(data) - 1)))] = draw(st.integers(0, 255))
    if draw(st.integers(0, 3)) == 0:
        data = data[: draw(st.integers(0, len(data)))]
    size = struct.unpack_from("<I", data, 16)[0] if len(data) >= 128 else 0
    if 128 <= size <= len(data) and draw(st.integers(0, 5)):
        struct.pack_into("<I", data, layouts.fields.LIMITS_FIELDS["crc32"][0], layouts.limits_crc(data[:size]))
    return bytes(data)


def node_view(data: bytes) -> list:
    try:
        found = layouts.parse_limits(data)
    except layouts.LayoutError:
        return ["no"]
    flags = struct.unpack_from("<I", data, layouts.fields.LIMITS_FIELDS["flags"][0])[0]
    words = [
        found["sequence"],
        flags,
        layouts.fields.CORE_POLICIES[found["core_policy"]],
        found["priority"],
        found["log_level"],
    ]
    words.append(len(found["devices"]))
    for device in found["devices"]:
        words += [device["uuid"].encode().hex(), device["memory_bytes"], device["sm_percent"], int(device["unlimited"])]
    return ["yes", *(str(word) for word in words)]


def library_view(words: list) -> list:
    """Returns the library's words with each device's flags reduced to bit 0, the only flag that the node reads."""
    return [str(int(word) & 1) if i >= 7 and (i - 7) % 4 == 3 else word for i, word in enumerate(words)]


@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=limits_files())
def test_library_and_node_parse_limits_files_alike(verdicts, data: bytes) -> None:
    assert library_view(verdicts(b"L", data)) == node_view(data)


@st.composite
def ledger_headers(draw: st.DrawFn) -> bytes:
    data = bytearray(layouts.pack_ledger(["GPU-0", "GPU-1"]))
    names = [name for name, (_offset, fmt) in layouts.fields.LEDGER_FIELDS.items() if fmt == "I"]
    for name in draw(st.lists(st.sampled_from(names), max_size=2)):
        offset, fmt = layouts.fields.LEDGER_FIELDS[name]
        struct.pack_into("<" + fmt, data, offset, draw(EXTREMES))
    if not draw(st.integers(0, 4)):
        data[draw(st.integers(0, 7))] = draw(st.integers(0, 255))
    return bytes(data)


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=ledger_headers())
def test_node_can_read_each_ledger_that_the_library_accepts(verdicts, data: bytes) -> None:
    """The reverse is not tested: the library accepts only its own layout, while the node also reads later layouts."""
    if verdicts(b"H", data) == ["yes"]:
        assert (
            layouts.parse_ledger(data)["devices"][:2]
            == ["GPU-0", "GPU-1"][: len(layouts.parse_ledger(data)["devices"])]
        )


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.one_of(st.binary(max_size=6000), limits_files()), where=st.integers(0, 5000))
def test_node_parses_or_refuses_any_bytes(data: bytes, where: int) -> None:
    """The node's parsers raise no exception other than LayoutError for any bytes of a tenant."""
    whole = bytearray(layouts.pack_ledger(["GPU-0"]))
    whole[where : where + len(data)] = data[: max(0, len(whole) - where)]
    for parse, given_bytes in (
        (layouts.parse_limits, data),
        (layouts.parse_ledger, data),
        (layouts.parse_ledger, bytes(whole)),
        (layouts.parse_gpu_page, data),
        (layouts.parse_tenant_page, data),
    ):
        try:
            parse(given_bytes)
        except layouts.LayoutError as error:
            assert str(error)
