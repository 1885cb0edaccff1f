# SPDX-License-Identifier: Apache-2.0
"""Sets keys in the text of a TOML file and leaves every other byte as it is. No I/O.

Python's own TOML parser is not used, because Python before 3.11 has none and because it would lose comments and order.
This file reads TOML line by line: tables, keys, and where a value of several lines ends. It refuses text that it cannot
read.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, Union

Value = Union[str, int, bool, list]

BARE = r"[A-Za-z0-9_-]+"
PART = rf'(?:{BARE}|"[^"\\\n]*"|\'[^\'\n]*\')'
KEY = re.compile(rf"^\s*({PART}(?:\s*\.\s*{PART})*)\s*=\s*")
TABLE = re.compile(rf"^\s*(\[\[?)\s*({PART}(?:\s*\.\s*{PART})*)\s*(\]\]?)\s*(?:#.*)?$")


class TomlError(Exception):
    """A text cannot be changed safely; the message names the line, the expected and the found text."""


class Entry(NamedTuple):
    """Holds a key with its value. ``first``, ``last``: its lines, counted from 0, inclusive; ``start``: column of the
    value in line ``first``.
    """

    key: tuple[str, ...]
    first: int
    last: int
    start: int
    value: str


class Scan(NamedTuple):
    """Holds entries by full key, and for each table the line of its header and the line after its last entry."""

    entries: dict[tuple[str, ...], Entry]
    tables: dict[tuple[str, ...], tuple[int, int]]


def split_key(text: str) -> tuple[str, ...]:
    """Splits ``a.b`` into a path; dots inside a quoted name do not split."""
    return tuple(part.strip("\"'") for part in re.findall(PART, text))


def scan(text: str) -> Scan:
    lines = text.split("\n")
    entries: dict[tuple[str, ...], Entry] = {}
    tables: dict[tuple[str, ...], tuple[int, int]] = {(): (-1, 0)}
    table: tuple[str, ...] = ()
    several = False
    place = 0
    while place < len(lines):
        line = lines[place]
        header = TABLE.match(line)
        found = KEY.match(line)
        if header and len(header.group(1)) == len(header.group(3)):
            table, several = split_key(header.group(2)), header.group(1) == "[["
            if not several:
                if table in tables:
                    raise TomlError(f"line {place + 1}: the table [{'.'.join(table)}] occurs twice")
                tables[table] = (place, place + 1)
        elif found:
            last = _end_of_value(lines, place, found.end())
            if not several:
                key = (*table, *split_key(found.group(1)))
                if key in entries:
                    raise TomlError(f"line {place + 1}: {'.'.join(key)} is set twice")
                value = "\n".join([line[found.end() :], *lines[place + 1 : last + 1]])
                entries[key] = Entry(key, place, last, found.end(), _without_comment(value).strip())
                tables[table] = (tables[table][0], last + 1)
            place = last
        elif line.strip() and not line.lstrip().startswith("#"):
            raise TomlError(f"line {place + 1}: expected a key, a table or a comment, found {line.strip()[:60]!r}")
        place += 1
    return Scan(entries, tables)


def _end_of_value(lines: list[str], first: int, start: int) -> int:
    """Returns the last line of the value that begins at ``start`` of line ``first``."""
    depth, quote = 0, ""
    for place in range(first, len(lines)):
        line = lines[place]
        at = start if place == first else 0
        while at < len(line):
            rest = line[at:]
            if quote:
                if quote in ('"', '"""') and rest[0] == "\\":
                    at += 2
                elif rest.startswith(quote):
                    at, quote = at + len(quote), ""
                else:
                    at += 1
                continue
            if rest[0] == "#":
                break
            opening = next((mark for mark in ('"""', "'''", '"', "'") if rest.startswith(mark)), "")
            if opening:
                quote, at = opening, at + len(opening)
                continue
            depth += (rest[0] in "[{") - (rest[0] in "]}")
            at += 1
        if len(quote) == 1:
            raise TomlError(f"line {place + 1}: the text has no closing {quote}")
        if not quote and depth <= 0:
            return place
    raise TomlError(f"line {first + 1}: the value does not end")


def _without_comment(value: str) -> str:
    """Returns a value of one line without its trailing comment; a value of several lines is returned unchanged."""
    if "\n" in value:
        return value
    quote = ""
    for at, char in enumerate(value):
        if quote:
            quote = "" if char == quote and value[at - 1] != "\\" else quote
        elif char in "\"'":
            quote = char
        elif char == "#":
            return value[:at]
    return value


def literal(value: Value) -> str:
    """Returns a value in TOML's notation."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(literal(one) for one in value) + "]"
    return json.dumps(str(value), ensure_ascii=False)


def get(text: str, key: str) -> str | None:
    """Returns a key's value in TOML's notation, None if the key is not set."""
    entry = scan(text).entries.get(split_key(key))
    return entry.value if entry else None


def put(text: str, key: str, written: str) -> str:
    """Returns the text with one key set to ``written``, a value in TOML's notation; every other byte stays."""
    path = split_key(key)
    found = scan(text)
    lines = text.split("\n")
    entry = found.entries.get(path)
    if entry is not None:
        if entry.value == written:
            return text
        tail = lines[entry.last][len(_without_comment(lines[entry.last])) :] if entry.first == entry.last else ""
        lines[entry.first : entry.last + 1] = [
            (lines[entry.first][: entry.start] + written + ("  " + tail if tail else "")).rstrip()
        ]
        return "\n".join(lines)
    _refuse_inline(found, path)
    table, name = path[:-1], path[-1]
    line = f"{name if re.match(BARE + '$', name) else json.dumps(name)} = {written}"
    if table in found.tables:
        lines.insert(_place(lines, found, table, name), line)
        return "\n".join(lines)
    header = "[" + ".".join(part if re.match(BARE + "$", part) else json.dumps(part) for part in table) + "]"
    body = text.rstrip("\n")
    return (body + "\n\n" if body else "") + f"{header}\n{line}\n"


def _refuse_inline(found: Scan, path: tuple[str, ...]) -> None:
    for length in range(1, len(path)):
        if path[:length] in found.entries:
            where = found.entries[path[:length]]
            raise TomlError(
                f"line {where.first + 1}: {'.'.join(path[:length])} is a value in one line, and {'.'.join(path)} "
                f"would "
                "have to be set inside it; write it as a table"
            )


def _place(lines: list[str], found: Scan, table: tuple[str, ...], name: str) -> int:
    """Returns the number of the line at which a new key is inserted: below the comment that shows its default, else at
    the end of its table.
    """
    header, end = found.tables[table]
    after = min([place for place, _end in found.tables.values() if place > header], default=len(lines))
    after = min([n for n, line in enumerate(lines) if n > header and line.lstrip().startswith("[")] + [after])
    for number in range(header + 1, after):
        if re.match(rf"^\s*#\s*{re.escape(name)}\s*=", lines[number]):
            return number + 1
    if table or (found.entries and end):
        return end
    return _top(lines, after)


def _top(lines: list[str], after: int) -> int:
    """Returns the number of the line at which a new top-level key is inserted if the file has none yet: below the
    comment at the file's head.
    """
    place = 0
    while place < after and lines[place].startswith("#"):
        place += 1
    return place


def remove(text: str, key: str) -> str:
    """Returns the text without one key. A table that becomes empty stays, because it has no effect."""
    entry = scan(text).entries.get(split_key(key))
    if entry is None:
        return text
    lines = text.split("\n")
    del lines[entry.first : entry.last + 1]
    return "\n".join(lines)


def merge(text: str | None, wanted: dict[str, Any]) -> tuple[str, list[str]]:
    """Returns the text with every key set, and the changes in sentences. Keys are dotted:
    ``nvidia-container-cli.no-cgroups``.
    """
    result, changes = text or "", []
    for key, value in wanted.items():
        before, written = get(result, key), literal(value)
        if before == written:
            continue
        result = put(result, key, written)
        if get(result, key) != written:
            raise TomlError(f"{key} could not be set to {written}; set it by hand")
        changes.append(f"set {key} to {written}" if before is None else f"change {key} from {before} to {written}")
    return result, changes
