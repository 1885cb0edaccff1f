# SPDX-License-Identifier: Apache-2.0
"""Changes single members in a JSON text. All other bytes of a hand-edited configuration file stay: order, indentation,
number literals, escapes. If the whole file were serialised again, 1e400 would become Infinity, and the diff would show
the whole file. This file is independent of docker; daemon_json.py has the rules of daemon.json.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, Sequence, Tuple

WHITESPACE = re.compile(r"[ \t\r\n]*")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
DECODER = json.JSONDecoder()
LITERALS = {"true": True, "false": False, "null": None}
# Greatest depth of nested values: far below Python's recursion limit, far above any configuration file.
MAX_DEPTH = 100
DEFAULT_INDENT = "    "

Path = Tuple[str, ...]


class JsonTextError(ValueError):
    """The text is not the JSON that was expected; ``line`` and ``column`` count from 1."""

    def __init__(self, reason: str, text: str, position: int) -> None:
        before = text[:position]
        self.reason = reason
        self.line = before.count("\n") + 1
        self.column = position - (before.rfind("\n") + 1) + 1
        lines = text.split("\n")
        self.source = lines[self.line - 1].rstrip("\r") if self.line <= len(lines) else ""
        super().__init__(f"line {self.line}, column {self.column}: {reason}")

    def pointer(self) -> str:
        """Returns the faulty line, and below it a mark under the column. The mark's line repeats the tabs, so that the
        mark aligns.
        """
        lead = "".join("\t" if char == "\t" else " " for char in self.source[: self.column - 1])
        return f"{self.source}\n{lead}^"


class Member(NamedTuple):
    key: str
    start: int  # Position of the key's opening quote.
    node: Node


class Node:
    """Holds a value with its position in the text. ``members`` is None unless the value is an object."""

    def __init__(self, start: int, end: int, value: Any, members: list[Member] | None = None) -> None:
        self.start, self.end, self.value, self.members = start, end, value, members

    def find(self, key: str) -> Node | None:
        for member in self.members or ():
            if member.key == key:
                return member.node
        return None


class Reader:
    """Parses the text by recursive descent. json.loads is not used, because it reports neither a value's position nor a
    duplicate key.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def skip(self, position: int) -> int:
        match = WHITESPACE.match(self.text, position)
        return match.end() if match else position

    def fail(self, reason: str, position: int) -> JsonTextError:
        rest = self.text[position : position + 2]
        if rest in ("//", "/*") or rest.startswith("#"):
            reason = "JSON has no comments; " + reason
        elif not rest:
            reason = "the text ends here; " + reason
        return JsonTextError(reason, self.text, position)

    def document(self) -> Node:
        node = self.value(self.skip(0), 0, "the document")
        end = self.skip(node.end)
        if end != len(self.text):
            raise self.fail("expected the end of the text after the closing bracket", end)
        return node

    def value(self, start: int, depth: int, where: str) -> Node:
        if depth > MAX_DEPTH:
            raise self.fail(f"nested deeper than {MAX_DEPTH} levels", start)
        char = self.text[start : start + 1]
        if char == "{":
            return self.object(start, depth)
        if char == "[":
            return self.array(start, depth)
        if char == '"':
            value, end = self.string(start)
            return Node(start, end, value)
        for word, literal in LITERALS.items():
            if self.text.startswith(word, start):
                return Node(start, start + len(word), literal)
        number = NUMBER.match(self.text, start)
        if number:
            digits = number.group()
            whole = number.group(2) is None and number.group(3) is None
            return Node(start, number.end(), whole_number(digits) if whole else float(digits))
        raise self.fail(f"expected a value for {where}", start)

    def string(self, start: int) -> tuple[str, int]:
        try:
            return DECODER.raw_decode(self.text, start)
        except json.JSONDecodeError as fault:
            reason = fault.msg.lower().rsplit(" at", 1)[0] if fault.msg.endswith(" at") else fault.msg.lower()
            raise JsonTextError(f"in a string: {reason}", self.text, fault.pos) from None

    def object(self, start: int, depth: int) -> Node:
        members: list[Member] = []
        seen: dict[str, int] = {}
        position = self.skip(start + 1)
        if self.text.startswith("}", position):
            return Node(start, position + 1, {}, members)
        while True:
            if not self.text.startswith('"', position):
                found = " (a comma stands before the closing bracket)" if self.text.startswith("}", position) else ""
                raise self.fail("expected a key in double quotes" + found, position)
            key, end = self.string(position)
            if key in seen:
                first = JsonTextError("", self.text, seen[key]).line
                raise JsonTextError(f'the key "{key}" already occurs in line {first}', self.text, position)
            seen[key] = position
            colon = self.skip(end)
            if not self.text.startswith(":", colon):
                raise self.fail(f'expected ":" after the key "{key}"', colon)
            node = self.value(self.skip(colon + 1), depth + 1, f'the key "{key}"')
            members.append(Member(key, position, node))
            position = self.skip(node.end)
            if self.text.startswith("}", position):
                return Node(start, position + 1, {one.key: one.node.value for one in members}, members)
            if not self.text.startswith(",", position):
                raise self.fail(f'expected "," or "}}" after the value of "{key}"', position)
            position = self.skip(position + 1)

    def array(self, start: int, depth: int) -> Node:
        items: list[Any] = []
        position = self.skip(start + 1)
        if self.text.startswith("]", position):
            return Node(start, position + 1, items)
        while True:
            node = self.value(position, depth + 1, f"item {len(items) + 1} of a list")
            items.append(node.value)
            position = self.skip(node.end)
            if self.text.startswith("]", position):
                return Node(start, position + 1, items)
            if not self.text.startswith(",", position):
                raise self.fail(f'expected "," or "]" after item {len(items)} of a list', position)
            position = self.skip(position + 1)


def whole_number(digits: str) -> Any:
    """Returns the literal as an int. A literal that is too long for Python's conversion limit is returned as text,
    which equals no number.
    """
    try:
        return int(digits)
    except ValueError:
        return digits


def read(text: str) -> Node:
    """Returns the document's root node. Raises JsonTextError if the text is not strict JSON or names a key twice."""
    return Reader(text).document()


def same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal in JSON: true is not 1, 1 is not 1.0, the order of keys does not count."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other))
    return kind_of(one) is kind_of(other) and bool(one == other)


def kind_of(value: Any) -> Any:
    # Compare by isinstance, because values from Ansible are subclasses of str, int and dict.
    for kind in (bool, int, float, str, dict):
        if isinstance(value, kind):
            return kind
    return list if isinstance(value, (list, tuple)) else type(value)


class Style:
    """Holds the layout of the text, so that additions get the same format."""

    def __init__(self, text: str, root: Node) -> None:
        self.newline = "\r\n" if "\r\n" in text else "\n"
        first = re.search(r"\{[ \t]*\r?\n([ \t]+)", text)
        self.indent = first.group(1) if first else DEFAULT_INDENT
        self.one_line = bool(root.members) and "\n" not in text[root.start : root.end]

    def dump(self, value: Any, base: str, one_line: bool) -> str:
        try:
            text = json.dumps(value, indent=None if one_line else self.indent, ensure_ascii=False)
            text.encode("utf-8")
        except UnicodeEncodeError:  # Keep the escapes, because a lone surrogate cannot be written in any other way.
            text = json.dumps(value, indent=None if one_line else self.indent)
        return text.replace("\n", self.newline + base)


def line_indent(text: str, position: int) -> str:
    """Returns the white space at the beginning of the line that contains this position."""
    start = text.rfind("\n", 0, position) + 1
    match = re.compile(r"[ \t]*").match(text, start, position)
    return match.group() if match else ""


def assign(text: str, path: Sequence[str], value: Any) -> str:
    """Returns the text with the value at this path; creates missing objects on the path."""
    root = read(text)
    style = Style(text, root)
    node = root
    for depth, key in enumerate(path):
        if node.members is None:
            # If the value on the path is not an object, replace the whole value.
            return replace(text, node, nested(path[depth:], value), style)
        child = node.find(key)
        if child is None:
            return insert(text, node, key, nested(path[depth + 1 :], value), style)
        node = child
    return text if same(node.value, value) else replace(text, node, value, style)


def nested(path: Sequence[str], value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def replace(text: str, node: Node, value: Any, style: Style) -> str:
    return text[: node.start] + style.dump(value, line_indent(text, node.start), style.one_line) + text[node.end :]


def insert(text: str, node: Node, key: str, value: Any, style: Style) -> str:
    name = json.dumps(key, ensure_ascii=False) + ": "
    if not node.members:
        outer = line_indent(text, node.start)
        if style.one_line:
            body = "{" + name + style.dump(value, "", True) + "}"
        else:
            inner = outer + style.indent
            body = "{" + style.newline + inner + name + style.dump(value, inner, False) + style.newline + outer + "}"
        return text[: node.start] + body + text[node.end :]
    last = node.members[-1]
    lead = re.compile(r"[ \t\r\n]*$").search(text[: last.start])
    gap = lead.group() if lead else ""
    one_line = "\n" not in gap
    base = "" if one_line else line_indent(text, last.start)
    addition = "," + (" " if one_line else style.newline + base) + name + style.dump(value, base, one_line)
    return text[: last.node.end] + addition + text[last.node.end :]


def delete(text: str, path: Sequence[str]) -> str:
    """Returns the text without the member at this path; unchanged if there is no such member."""
    node = read(text)
    for key in path[:-1]:
        child = node.find(key)
        if child is None:
            return text
        node = child
    members = node.members or []
    for place, member in enumerate(members):
        if member.key != path[-1]:
            continue
        if len(members) == 1:
            return text[: node.start] + "{}" + text[node.end :]
        if place == 0:
            return text[: member.start] + text[members[1].start :]
        return text[: members[place - 1].node.end] + text[member.node.end :]
    return text
