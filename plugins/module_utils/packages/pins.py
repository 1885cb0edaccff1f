# SPDX-License-Identifier: Apache-2.0
"""A package in a list: ``name`` or ``name=version``; the version may end in ``*``. Pure."""

from __future__ import annotations


def split_pin(package: str) -> tuple[str, str]:
    """Name and version of ``name=version``; the version is empty, or may end in ``*``."""
    name, _equals, version = package.partition("=")
    return name, "" if version == "*" else version


def name_of(package: str) -> str:
    """The name in ``name`` or ``name=version``."""
    return str(package).partition("=")[0]


def version_of(package: str, default: str = "") -> str:
    """The version that is pinned, empty where any will do."""
    return str(package).partition("=")[2] or default
