# SPDX-License-Identifier: Apache-2.0
"""Defines the kinds of values in group variables and node.yaml, and reads each kind strictly.

A kind reads a raw value (from YAML, from JSON, or from ``-e name=value``, where everything is a string) into its clean
form. Faults are collected as findings and never raised one by one, so that a user sees all of them at once.
"""

from __future__ import annotations

import difflib
import re
from decimal import Decimal
from typing import Any, NamedTuple, Sequence

# Pattern of a port, 0 to 65535.
PORT = "([0-5]?[0-9]{1,4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
DECIMAL_TEXT = re.compile(r"^[0-9]{1,9}(\.[0-9]{1,12})?\Z")


class Finding(NamedTuple):
    """Describes one fault or warning of an input: ``level`` is ``error`` or ``warning``, ``path`` names the variable or
    key.
    """

    level: str
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def error(path: str, message: str) -> Finding:
    return Finding("error", path, message)


def warning(path: str, message: str) -> Finding:
    return Finding("warning", path, message)


def errors(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "error"]


# Maps names that do not exist, but that users expect, to the variable they mean. The suggestion by similar spelling
# would name other variables.
EXPECTED_NAMES = dict.fromkeys(
    ("vgpu_slice", "vgpu_slices", "vgpu_slice_count", "vgpu_slices_per_gpu", "vgpu_replicas"), "vgpu_split_count"
)


def nearest(name: str, valid: Sequence[str], cutoff: float = 0.6) -> str | None:
    """Returns the valid name that a mistyped name most likely meant. ``cutoff``: least similarity, from 0 to 1."""
    close = difflib.get_close_matches(str(name), [str(one) for one in valid], n=1, cutoff=cutoff)
    return close[0] if close else None


def unknown(what: str, name: str, path: str, valid: Sequence[str]) -> Finding:
    """Returns the error for an unknown name, with the nearest valid name."""
    meant = nearest(name, valid)
    hint = f'did you mean "{meant}"?' if meant else "valid: {}".format(", ".join(sorted(valid)))
    return error(path, f'unknown {what} "{name}"; {hint}')


def show(value: Any) -> str:
    """Returns a value in the form for messages: strings in quotes, long values shortened."""
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def decimal_text(value: Any) -> str | None:
    """Returns the decimal as its author wrote it, or None if the value is no decimal. YAML parses a decimal to a binary
    float, and arithmetic on that float gives 28 for 100 * 0.29. The float's shortest repr equals the text that YAML
    read.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        text = str(int(value))
    elif isinstance(value, float):
        text = format(Decimal(repr(float(value))), "f")
    elif isinstance(value, str):
        text = str(value).strip()
    else:
        return None
    return text if DECIMAL_TEXT.match(text) else None


class Kind:
    """Reads one value; the text ``expected`` completes the error message "expected ..."."""

    expected = "a value"

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        raise NotImplementedError

    def wrong(self, value: Any, path: str, findings: list[Finding]) -> None:
        findings.append(error(path, f"expected {self.expected}, found {show(value)}"))


class Int(Kind):
    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.expected = f"a whole number from {low} to {high}"

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        number = value
        if isinstance(value, str) and re.match(r"^-?[0-9]{1,9}\Z", value.strip()):
            number = int(value)
        if isinstance(number, bool) or not isinstance(number, int) or not self.low <= number <= self.high:
            return self.wrong(value, path, findings)
        return int(number)


class Scaling(Kind):
    """Reads a decimal above 0. Returns its text instead of a float, because the exact digits count."""

    expected = 'a decimal above 0, such as 1.5 or "0.29"'

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        text = decimal_text(value)
        if text is None or Decimal(text) <= 0:
            return self.wrong(value, path, findings)
        return text


class Bool(Kind):
    expected = "true or false"

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        if isinstance(value, bool):
            return bool(value)
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            return value.strip().lower() == "true"
        return self.wrong(value, path, findings)


_UNITS_S = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile("([0-9]+(?:[.][0-9]*)?|[.][0-9]+)({})".format("|".join(_UNITS_S)))


def duration_s(value: Any) -> float | None:
    """Returns the seconds of a duration in Go's notation (``60s``, ``1m30s``) or of a number of nanoseconds.
    Returns None for any other value.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value * 1e-9
    if value == "0":
        return 0.0
    if not isinstance(value, str) or not re.match(f"({_PART.pattern})+\\Z", value):
        return None
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(value))


class Duration(Kind):
    """Reads a duration of NVIDIA's files and returns it unchanged."""

    expected = "a duration such as 60s or 1m30s, or a number of nanoseconds"

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        return self.wrong(value, path, findings) if duration_s(value) is None else value


class Choice(Kind):
    def __init__(self, *words: str) -> None:
        self.words = words
        self.expected = "one of {}".format(", ".join(words))

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        if isinstance(value, str) and value in self.words:
            return str(value)
        meant = nearest(value, self.words) if isinstance(value, str) else None
        hint = f'; did you mean "{meant}"?' if meant else ""
        findings.append(error(path, f"expected {self.expected}, found {show(value)}{hint}"))
        return None


class Text(Kind):
    """Reads a text that matches a pattern. Patterns end with \\Z, because $ also matches before a last line break."""

    def __init__(self, expected: str = "a text", pattern: str = "") -> None:
        self.expected = expected
        self.pattern = re.compile(pattern) if pattern else None

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        if not isinstance(value, str) or (self.pattern and not self.pattern.match(value)):
            return self.wrong(value, path, findings)
        return str(value)


class Either(Kind):
    """Reads a value with the first kind that accepts it without a fault."""

    def __init__(self, *kinds: Kind) -> None:
        self.kinds = kinds
        self.expected = " or ".join(kind.expected for kind in kinds)

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        for kind in self.kinds:
            trial: list[Finding] = []
            clean = kind.read(value, path, trial)
            if not trial:
                return clean
        return self.wrong(value, path, findings)


class ListOf(Kind):
    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.expected = "a list"

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        if not isinstance(value, (list, tuple)):
            return self.wrong(value, path, findings)
        return [self.kind.read(item, f"{path}[{n}]", findings) for n, item in enumerate(value)]


class Record(Kind):
    """Reads a mapping with a fixed set of keys. For any other key the error names the nearest valid key."""

    expected = "a mapping"

    def __init__(self, fields: dict[str, Kind], required: tuple[str, ...] = (), at_least_one: bool = False) -> None:
        self.fields, self.required, self.at_least_one = fields, required, at_least_one

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        if not isinstance(value, dict):
            return self.wrong(value, path, findings)
        clean = {}
        for key, item in value.items():
            where = f"{path}.{key}" if path else str(key)
            kind = self.fields.get(key) if isinstance(key, str) else None
            if kind is None:
                findings.append(unknown("key", key, where, list(self.fields)))
            else:
                clean[str(key)] = kind.read(item, where, findings)
        for key in self.required:
            if key not in value:
                findings.append(error(path, f'the key "{key}" is missing'))
        if self.at_least_one and not value:
            findings.append(error(path, "needs at least one of {}".format(", ".join(self.fields))))
        return clean


class Mapping(Kind):
    """Reads a mapping whose keys the user chooses."""

    expected = "a mapping"

    def __init__(self, key: Kind, item: Kind) -> None:
        self.key, self.item = key, item

    def read(self, value: Any, path: str, findings: list[Finding]) -> Any:
        if not isinstance(value, dict):
            return self.wrong(value, path, findings)
        clean = {}
        for key, item in value.items():
            where = f"{path}.{key}"
            clean[self.key.read(key, where, findings)] = self.item.read(item, where, findings)
        return clean
