# SPDX-License-Identifier: Apache-2.0
"""Calls the programs of package managers, and reads and writes the record of what a role installed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from typing import Any, Container, Mapping, NamedTuple

from ..host.files import read_bytes, write_bytes

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class PackageError(Exception):
    """A package manager refused; the text gives the reason and the remedy."""


class Done(NamedTuple):
    code: int
    out: str
    fault: str


def run(*arguments: str, environment: Mapping[str, str], together: bool = False) -> Done:
    """Runs a program without a terminal and with English messages. ``together``: whether stderr is merged into the
    output, in the order in which the program wrote. Raises FileNotFoundError if there is no such program.
    """
    done = subprocess.run(
        arguments,
        env={**os.environ, "LC_ALL": "C.UTF-8", "PATH": PATH, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if together else subprocess.PIPE,
        check=False,
    )
    return Done(
        done.returncode, done.stdout.decode("utf-8", "replace"), (done.stderr or b"").decode("utf-8", "replace")
    )


def read_text(path: str | None) -> str | None:
    """Returns the text of a file, None if it is missing. ``write_texts`` writes the same bytes again, even if they are
    no valid UTF-8.
    """
    data = read_bytes(path) if path else None
    return None if data is None else data.decode("utf-8", "surrogateescape")


def write_texts(files: Mapping[str, str | None]) -> None:
    """Writes each file, or removes it if its text is None."""
    for path, text in files.items():
        if text is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        else:
            write_bytes(path, text.encode("utf-8", "surrogateescape"))


def read_record(path: str | None) -> dict[str, Any]:
    """Returns the record of a role's packages on this host; empty if there is none. Raises
    PackageError if unreadable.
    """
    text = read_text(path)
    if text is None:
        return {}
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as fault:
        raise PackageError(f"the record {path} cannot be read ({fault}); restore it or remove it") from None


def write_record(path: str, record: Mapping[str, Any]) -> None:
    write_bytes(path, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode("utf-8"), 0o600)


def forget(path: str | None, key: str, names: Container[str]) -> None:
    """Removes these names from a list in the record of a role."""
    if path:
        record = read_record(path)
        write_record(path, {**record, key: [one for one in record.get(key, []) if one not in names]})


def difference(title: str, before: str, after: str) -> dict[str, str]:
    """Returns one entry of a diff in Ansible's form."""
    return {"before_header": title, "after_header": title, "before": before, "after": after}
