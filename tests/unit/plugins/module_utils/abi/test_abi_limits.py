# SPDX-License-Identifier: Apache-2.0
"""Tests the binary limits file, from which the library reads how much memory and compute of each GPU a container may
use. pack_limits must write the smallest and greatest valid values, and parse_limits must refuse invalid bytes.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.abi import fields, files

DEVICE = {"uuid": "GPU-a", "memory_bytes": 1 << 30}
AT = fields.LIMITS_FIELDS["devices"][0]


def packed(**device: Any) -> bytes:
    return files.pack_limits({"allocation": "one", "devices": [{**DEVICE, **device}]})


def with_field(name: str, value: Any, device: bool, checksum: bool = True) -> bytes:
    """Returns the bytes of a limits file with one device, in which one field was set to a value. With ``checksum``, the
    checksum is recalculated, so only this field can make the file invalid."""
    data = bytearray(packed())
    files.put_field(
        data, AT if device else 0, fields.LIMITS_DEVICE_FIELDS if device else fields.LIMITS_FIELDS, name, value
    )
    if checksum:
        files.put_field(data, 0, fields.LIMITS_FIELDS, "crc32", files.limits_crc(data))
    return bytes(data)


def test_device_has_these_default_values() -> None:
    (device,) = files.parse_limits(packed())["devices"]
    assert device == {**DEVICE, "sm_percent": 0, "unlimited": False}


# columns: key of a device, greatest value that fits its field
GREATEST = [("sm_percent", 100), ("card_bytes", 2**64 - 1), ("memory_bytes", 2**64 - 1)]


@pytest.mark.parametrize(("key", "greatest"), GREATEST)
def test_the_greatest_value_is_packed_and_the_next_is_refused(key: str, greatest: int) -> None:
    (device,) = files.parse_limits(packed(**{key: greatest}))["devices"]
    assert device[key] == greatest
    with pytest.raises(files.LayoutError, match=rf"devices\[0\]\.{key}"):
        packed(**{key: greatest + 1})


@pytest.mark.parametrize(("key", "greatest"), [("sequence", 0xFFFFFFFF), ("priority", 1), ("log_level", 5)])
def test_the_greatest_value_of_a_file_is_packed_and_the_next_is_refused(key: str, greatest: int) -> None:
    files.pack_limits({"devices": [DEVICE], key: greatest})
    with pytest.raises(files.LayoutError, match=f"{key} must be a whole number from 0 to {greatest}, found"):
        files.pack_limits({"devices": [DEVICE], key: greatest + 1})


# columns: field, its invalid value, whether the field belongs to a device (otherwise to the file's header); expected
# words of the refusal
REFUSED = [
    ("uuid", b"", True, "expected a text that ends with a zero byte"),
    ("uuid", b"G" * fields.UUID_SIZE, True, "expected a text that ends with a zero byte"),
    ("sm_percent", 101, True, "101 % of the SMs"),
    ("sequence", 1, False, "sequence 1 is odd"),
    ("core_policy", 99, False, "unknown core policy 99"),
    ("device_count", fields.MAX_DEVICES + 1, False, "more than fit"),
    ("device_size", 55, False, "more than fit"),
    ("size", fields.LIMITS_FILE_SIZE + 1, False, "states a size of"),
]


@pytest.mark.parametrize(("name", "value", "device", "words"), REFUSED)
def test_field_out_of_range_is_refused(name: str, value: Any, device: bool, words: str) -> None:
    with pytest.raises(files.LayoutError, match=words):
        files.parse_limits(with_field(name, value, device))


def test_wrong_checksum_is_refused() -> None:
    with pytest.raises(files.LayoutError, match="the limits file is incomplete: crc32"):
        files.parse_limits(with_field("memory_bytes", 1, device=True, checksum=False))


@pytest.mark.parametrize("sequence", [0, 4])
def test_checksum_is_of_the_bytes_with_sequence_and_checksum_as_zero(sequence: int) -> None:
    """libvgpu.so computes the checksum in this way. The sequence (byte 20) and the checksum (byte 24) have 4 bytes."""
    data = files.pack_limits({"devices": [DEVICE], "sequence": sequence})
    assert int.from_bytes(data[24:28], "little") == zlib.crc32(data[:20] + bytes(8) + data[28:])


# columns: keys of a limits file without devices; expected: the bits of its flags at byte 28, its priority at byte 36,
# its log level at byte 40
HEADERS: list[tuple[dict[str, Any], int, int, int]] = [
    ({}, 1, 1, 1),
    ({"count_context": False, "priority": 0}, 0, 0, 1),
    ({"deny": True}, 3, 1, 1),
    ({"count_context": False, "oom_killer": True, "oversubscribe": True, "log_level": 0}, 20, 1, 0),
    ({"allow_disable_control": True, "log_level": 5}, 9, 1, 5),
]


@pytest.mark.parametrize(("keys", "flags", "priority", "log_level"), HEADERS)
def test_header_has_these_bits_and_defaults(keys: dict[str, Any], flags: int, priority: int, log_level: int) -> None:
    data = files.pack_limits(keys)
    found = [int.from_bytes(data[at : at + 4], "little") for at in (28, 36, 40)]
    assert found == [flags, priority, log_level]


# columns: content that cannot be packed; expected words of the refusal
NOT_PACKED: list[tuple[dict[str, Any], str]] = [
    ({"devices": [{**DEVICE, "uuid": ""}]}, r"devices\[0\]\.uuid '' is empty or occurs twice"),
    ({"devices": [{"memory_bytes": 1}]}, r"devices\[0\]\.uuid '' is empty or occurs twice"),
    ({"devices": [DEVICE, DEVICE]}, r"devices\[1\]\.uuid 'GPU-a' is empty or occurs twice"),
    ({"devices": [DEVICE], "oom_kiler": True}, "a limits file has no key 'oom_kiler'"),
]


@pytest.mark.parametrize(("content", "words"), NOT_PACKED)
def test_invalid_content_is_not_packed(content: dict[str, Any], words: str) -> None:
    with pytest.raises(files.LayoutError, match=words):
        files.pack_limits(content)


def test_every_device_is_read() -> None:
    devices = [{"uuid": f"GPU-{n}", "memory_bytes": n << 20, "sm_percent": n} for n in range(1, fields.MAX_DEVICES + 1)]
    found = files.parse_limits(files.pack_limits({"allocation": "one", "devices": devices}))["devices"]
    assert [{key: one[key] for key in ("uuid", "memory_bytes", "sm_percent")} for one in found] == devices


def test_an_unlimited_device_needs_no_size() -> None:
    (device,) = files.parse_limits(files.pack_limits({"devices": [{"uuid": "GPU-a", "unlimited": True}]}))["devices"]
    assert (device["unlimited"], device["memory_bytes"]) == (True, 0)


def test_devices_of_an_older_library_are_read() -> None:
    """An older library's entries of 56 bytes end with the percent of the SMs."""
    (device,) = files.parse_limits(with_field("device_size", 56, device=False))["devices"]
    assert {key: device[key] for key in ("uuid", "memory_bytes")} == {
        key: DEVICE[key] for key in ("uuid", "memory_bytes")
    }


def test_a_header_without_devices_is_a_whole_file() -> None:
    data = bytearray(packed()[:AT])
    for name, value in (("size", AT), ("device_count", 0)):
        files.put_field(data, 0, fields.LIMITS_FIELDS, name, value)
    files.put_field(data, 0, fields.LIMITS_FIELDS, "crc32", files.limits_crc(data))
    assert files.parse_limits(bytes(data))["devices"] == []


def test_devices_beyond_the_end_of_the_file_are_refused() -> None:
    data = bytearray(packed())
    room = (fields.LIMITS_FILE_SIZE - AT) // fields.LIMITS_DEVICE_SIZE
    files.put_field(data, 0, fields.LIMITS_FIELDS, "device_count", 1)
    files.put_field(data, 0, fields.LIMITS_FIELDS, "device_offset", AT + room * fields.LIMITS_DEVICE_SIZE)
    files.put_field(data, 0, fields.LIMITS_FIELDS, "crc32", files.limits_crc(data))
    with pytest.raises(files.LayoutError, match="more than fit"):
        files.parse_limits(bytes(data))


# columns: sequence number in the file; expected sequence number after a change. The number is odd during a change and
# even afterwards.
SEQUENCES = [(0, 2), (4, 6), (5, 6), (0xFFFFFFFE, 0)]


@pytest.mark.parametrize(("before", "after"), SEQUENCES)
def test_change_in_place_advances_the_sequence(tmp_path: Path, before: int, after: int) -> None:
    path = tmp_path / "limits"
    path.write_bytes(files.pack_limits({"devices": [DEVICE], "sequence": before}))
    changed = {"allocation": "one", "devices": [{**DEVICE, "memory_bytes": 5}]}
    files.rewrite_limits(str(path), changed)
    assert path.read_bytes() == files.pack_limits({**changed, "sequence": after})


ONE = {"allocation": "one", "devices": [DEVICE]}
# columns: bytes of a limits file; expected: whether they have exactly the limits ONE
SAYS = [
    (files.pack_limits(ONE), True),
    (files.pack_limits({**ONE, "sequence": 4}), True),
    (files.pack_limits({**ONE, "log_level": 2}), False),
    (files.pack_limits({**ONE, "sequence": 5}), False),  # A program is writing the file.
    (b"", False),
]


@pytest.mark.parametrize(("data", "same"), SAYS)
def test_file_with_the_same_limits_is_known(data: bytes, same: bool) -> None:
    assert files.says(data, ONE) is same


@pytest.mark.parametrize("uuid", ["G", "G" * (fields.UUID_SIZE - 1)], ids=["shortest", "longest"])
def test_shortest_and_longest_uuid_are_accepted(uuid: str) -> None:
    (device,) = files.parse_limits(packed(uuid=uuid))["devices"]
    assert device["uuid"] == uuid
