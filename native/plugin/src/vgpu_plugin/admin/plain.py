# SPDX-License-Identifier: Apache-2.0
"""Converts protobuf messages to dictionaries, which vgpuctl prints as JSON or text."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict


def plain(message: Any) -> dict[str, Any]:
    """Returns every field of a message under its own name, including empty fields. 64-bit numbers are int, not the
    strings of protobuf's JSON.
    """
    out = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return dict(_numbers(out, message.DESCRIPTOR))


def _numbers(value: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    for field in descriptor.fields:
        found = value.get(field.name)
        if field.message_type is not None and isinstance(found, list):
            value[field.name] = [_numbers(one, field.message_type) for one in found]
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) and isinstance(found, str):
            value[field.name] = int(found)
    return value
