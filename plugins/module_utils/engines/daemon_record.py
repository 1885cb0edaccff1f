# SPDX-License-Identifier: Apache-2.0
"""Records the changes that the collection makes in daemon.json, and reverts them.

If nobody edited the file since, a removal restores the former bytes, or deletes the file if there was none. If the file
was edited, each of our keys that still has our value gets its former value again, and the edits stay.
"""

from __future__ import annotations

import hashlib
from typing import Any, Iterable, Sequence

from ..text import json_text
from ..text.json_text import Path, same
from .daemon_json import Change, compare, lookup, parse, split
from .daemon_json import merge as merge_settings

VERSION = 1
_MISSING = object()


def digest(text: str | None) -> str:
    return hashlib.sha256((text or "").encode("utf-8", "surrogatepass")).hexdigest()


def leaves(path: Path, value: Any) -> Iterable[tuple[Path, Any]]:
    """Returns, at any depth inside a JSON value, every value that is no object, and every empty object."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves((*path, key), item)
    else:
        yield path, value


def update(
    record: dict[str, Any] | None, text: str | None, new_text: str | None, changes: list[Change]
) -> dict[str, Any]:
    """Returns the record for the change from ``text`` to ``new_text``. For a key in an earlier record (``record``), the
    value before the first change is kept, until a run reverts the key or finds it without our value: the next change
    may then follow a change of others, whose value is the former one.

    The caller writes the record before the file. So if the run is killed in between, the file is unchanged and no
    former value is lost.
    """
    fresh = record is None
    known: dict[str, Any] = record or {"version": VERSION, "before": text, "exact": True, "members": []}
    touched = text != known["before"] and digest(text) != known.get("written")
    members = {tuple(one["path"]): dict(one) for one in known["members"]}
    for change in changes:
        for path, value in leaves(change.path, change.before if change.action == "remove" else change.after):
            former = lookup(parse(text), path, _MISSING)
            member = members.setdefault(path, {"path": list(path), "had": former is not _MISSING})
            if member["had"] and "before" not in member:
                member["before"] = former
            member["ours_removed"] = change.action == "remove"
            member["ours"] = None if change.action == "remove" else value
    document = parse(new_text)
    kept = [member for member in members.values() if _is_changed(document, member)]
    if record is not None and not changes:
        return {**known, "members": kept}
    return {
        "version": VERSION,
        "before": known["before"],
        "exact": bool(known["exact"] and (fresh or not touched)),
        "written": digest(new_text),
        "members": kept,
    }


def _is_changed(document: dict[str, Any], member: dict[str, Any]) -> bool:
    """Returns True if the key has our value and not its former one."""
    held = lookup(document, tuple(member["path"]), _MISSING)
    return _equal(held, _ours(member)) and not _equal(held, member["before"] if member["had"] else _MISSING)


def _ours(member: dict[str, Any]) -> Any:
    return _MISSING if member["ours_removed"] else member["ours"]


def _equal(one: Any, other: Any) -> bool:
    """Compares two values of a file, either of which may be missing."""
    return one is other or not (one is _MISSING or other is _MISSING or not same(one, other))


def merge(
    text: str | None, record: dict[str, Any] | None, settings: dict[str, Any], remove: Iterable[Sequence[str]] = ()
) -> tuple[str | None, list[Change]]:
    """Returns the text with ``settings`` merged and the keys of ``remove`` removed, and the changes. Also reverts the
    recorded keys that are no longer in ``settings`` or ``remove``.
    """
    body = split(text)[1]
    desired = {path for path, _value in leaves((), settings)}
    removed = [tuple(path) for path in remove]
    for member in (record or {}).get("members", ()):
        path = tuple(member["path"])
        if path not in desired and not any(path[: len(one)] == one for one in removed):
            body = undo_member(body, member)
    merged = merge_settings(body, settings, removed)[0]
    changes = compare(parse(text), parse(merged))
    return (merged, changes) if changes else (text, [])


def undo(text: str | None, record: dict[str, Any]) -> tuple[str | None, list[Change]]:
    """Returns the text without our changes, and the reverted changes. A text of None means that there was no file
    before.
    """
    before = record["before"]
    document = parse(text)
    if record["exact"] and digest(text) == record["written"]:
        return before, compare(document, parse(before))
    mark, body = split(text)
    for member in record["members"]:
        body = undo_member(body, member)
    after = parse(body)
    if before is None and not after:
        return None, compare(document, after)
    changes = compare(document, after)
    return (mark + body if changes else text), changes


def undo_member(body: str, member: dict[str, Any]) -> str:
    path = tuple(member["path"])
    held = lookup(parse(body), path, _MISSING)
    if not _equal(held, _ours(member)):
        return body
    if member["had"]:
        return json_text.assign(body if body.strip() else "{}\n", path, member["before"])
    return drop(body, path)


def drop(body: str, path: Path) -> str:
    """Returns the text without this member, and without the objects around it that thereby become empty."""
    if not body.strip() or lookup(parse(body), path, _MISSING) is _MISSING:
        return body
    body = json_text.delete(body, path)
    parent = path[:-1]
    return drop(body, parent) if parent and lookup(parse(body), parent) == {} else body


def take_out(text: str | None, settings: dict[str, Any]) -> tuple[str | None, list[Change]]:
    """Returns the text without the members of ``settings``, as far as they still have the value in ``settings``. A
    removal uses this function if there is no record.
    """
    mark, body = split(text)
    for path, value in leaves((), settings):
        held = lookup(parse(body), path, _MISSING) if path else _MISSING
        if held is not _MISSING and same(held, value):
            body = drop(body, path)
    changes = compare(parse(text), parse(body))
    return (mark + body if changes else text), changes
