# SPDX-License-Identifier: Apache-2.0
"""Parses the entries of package lists and patterns of names. An entry is ``name`` or ``name=version``; the version may
end in ``*``. No I/O.
"""

from __future__ import annotations

import fnmatch
from typing import Iterable, Sequence


def split_pin(package: str) -> tuple[str, str]:
    """Returns name and version of ``name=version``; the version is empty, or may end in ``*``."""
    name, _equals, version = package.partition("=")
    return name, "" if version == "*" else version


def name_of(package: str) -> str:
    """Returns the name in ``name`` or ``name=version``."""
    return str(package).partition("=")[0]


def version_of(package: str, default: str = "") -> str:
    """Returns the pinned version, empty if any version is accepted."""
    return str(package).partition("=")[2] or default


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Returns the names that match a pattern. A pattern that begins with ``!`` excludes the names that it matches."""
    given = list(patterns)
    without = [one[1:] for one in given if one.startswith("!")]

    def matches(name: str, wanted: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, one) for one in wanted)

    return sorted(name for name in set(names) if matches(name, given) and not matches(name, without))
