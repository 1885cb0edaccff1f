# SPDX-License-Identifier: Apache-2.0
"""Checks whether this controller can pack the programs that run on nodes (device plugin, scheduler) for a Python
version and an architecture. Used on the controller only.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import pathlib
import sys
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def built(folders: list[str], *patterns: str) -> bool:
    """Returns True if a file in one of the folders matches one of the patterns."""
    places = [os.path.join(glob.escape(os.path.expanduser(folder)), one) for folder in folders for one in patterns]
    return any(glob.glob(place) for place in places)


def packer() -> str:
    """Returns what this controller is missing to pack any program, separated by commas; empty if nothing is missing."""
    missing = []
    if not any(importlib.util.find_spec(name) for name in ("pip", "ensurepip")):
        missing.append("pip, or the module ensurepip (package python3-venv)")
    if sys.version_info < (3, 11):
        missing.append("Python 3.11 or newer")
    return ", ".join(missing)


def lacks(name: str, version: str, python: str, arch: str, folders: list[str], cache: str) -> str:
    """Returns what this controller is missing to make the archive of one program. Empty if the archive is in ``cache``,
    or if all wheels for it are in ``folders``. ``name``: the program's name in wheelhouse.py; ``python``: such as 3.11;
    ``arch``: as uname -m prints it.
    """
    missing = packer()
    if not missing:
        return ""
    wheelhouse = _loaded(os.path.join(ROOT, "native", "plugin", "tools", "wheelhouse.py"))
    wanted = wheelhouse.Wanted(name, version, python, arch)
    if built([cache], f"{name}-{glob.escape(version)}-{wanted.tag}-{arch}.pyz"):
        return ""
    wheels = [pathlib.Path(os.path.expanduser(folder)) for folder in folders if folder]
    complete = wheelhouse.found_ours(wheels, wanted) and wheelhouse.found_foreign(wheels, wanted)
    return "" if complete else missing


def _loaded(path: str) -> Any:
    """Imports a program of the collection from a file. Raises ImportError if the file cannot be loaded."""
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[: -len(".py")], path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
