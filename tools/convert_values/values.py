# SPDX-License-Identifier: Apache-2.0
"""Reads the settings in other projects' files: converts quoted integers and booleans, parses texts that contain YAML,
and names nested settings by dotted paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml


def plain(value: Any) -> Any:
    """Returns a text's integer or boolean value; decimals stay text, because a binary float would change them."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdigit() else text


def as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted path, value) for every value that is neither a mapping nor empty. A list is one value, but each
    entry of a list ``extraArgs`` is a value with a path such as ``extraArgs[0]``.
    """
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves_of(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and path.endswith("extraArgs"):
        for number, inner in enumerate(value):
            yield f"{path}[{number}]", inner
    elif path and value not in (None, {}, []):
        yield path, value


def parse(text: Any) -> Any:
    try:
        return yaml.safe_load(text) if isinstance(text, str) else text
    except yaml.YAMLError:
        return None
