# SPDX-License-Identifier: Apache-2.0
"""Copies apt's sources and lists to a separate folder, so that check mode can query an archive and change nothing.

The lists start as a copy of the host's lists, so apt fetches only changed lists.
"""

from __future__ import annotations

import os
import shutil
from typing import Mapping

from . import apt_index
from .manager import write_texts

LISTS = "/var/lib/apt/lists"


def lay_out(folder: str, sources: Mapping[str, str], changed: Mapping[str, str | None], main: str) -> list[str]:
    """Writes sources and lists below ``folder`` and returns the options by which apt reads them there.

    ``sources``: maps the path of each source file of the host to its text. ``changed``: maps the path of each file that
    would be written (sources, keys, indexes) to its text, or to None if it would be removed. ``main``: the path of
    sources.list.
    """
    # apt fetches as a separate user, who must be able to read the folder.
    os.chmod(folder, 0o755)
    texts = {**sources, **changed}
    others = [path for path in changed if path not in sources and not path.endswith((".sources", ".list"))]
    parts, lists = os.path.join(folder, "sources.list.d"), os.path.join(folder, "lists")
    os.makedirs(parts)
    written: dict[str, str | None] = {os.path.join(folder, "sources.list"): ""}
    for path, text in texts.items():
        if text is None:
            continue
        if path in others:
            written[folder + path] = text
            continue
        for other in others:
            # Replace the paths of changed files by their paths in the folder. A source contains the path of its key,
            # and for package files the folder of their index, relative to the root.
            inside = os.path.dirname(other) if other.startswith(apt_index.FOLDER) else other
            text = text.replace(inside.lstrip("/"), (folder + inside).lstrip("/"))
        name = "sources.list" if path == main else os.path.join("sources.list.d", os.path.basename(path))
        written[os.path.join(folder, name)] = text
    write_texts(written)
    _copy_lists(lists)
    for base, _folders, names in os.walk(folder):
        if not base.startswith(lists):
            os.chmod(base, 0o755)
            for name in names:
                os.chmod(os.path.join(base, name), 0o644)
    options = {
        "Dir::State::lists": lists,
        "Dir::Etc::SourceList": os.path.join(folder, "sources.list"),
        "Dir::Etc::SourceParts": parts,
        # Set apt's two caches. Container images switch them off, and then every call of apt would parse all lists
        # again.
        "Dir::Cache::pkgcache": os.path.join(folder, "pkgcache.bin"),
        "Dir::Cache::srcpkgcache": os.path.join(folder, "srcpkgcache.bin"),
    }
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def _copy_lists(target: str) -> None:
    os.makedirs(os.path.join(target, "partial"))
    for name in os.listdir(LISTS) if os.path.isdir(LISTS) else []:
        path = os.path.join(LISTS, name)
        if os.path.isfile(path) and name != "lock":
            shutil.copy2(path, os.path.join(target, name))
