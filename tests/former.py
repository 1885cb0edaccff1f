# SPDX-License-Identifier: Apache-2.0
"""Builds an old release from this repository's history: the last release that mounted single files into containers.
Upgrade tests start from this release.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMIT = "bf48933"
# Name of the folder that holds the old release's library.
VERSION = f"0.1.0-{COMMIT}"
NEEDED = ("native/plugin", "native/vcuda", "plugins/module_utils")
NO_HISTORY = f"this checkout has no commit {COMMIT}: clone the repository with its full history"
GIT = ["git", "-C", str(ROOT)]


@dataclass(frozen=True)
class Former:
    """Folders of the old release: ``sources`` of its device plugin, and ``build`` with its libvgpu.so, vgpu-probe and
    vgpu-arbiter."""

    sources: Path
    build: Path


def has_history() -> bool:
    found = subprocess.run([*GIT, "cat-file", "-e", f"{COMMIT}^{{commit}}"], capture_output=True, check=False)
    return found.returncode == 0


def check_out(folder: Path) -> Former:
    """Unpacks the old release into ``folder`` and builds it there."""
    archive = subprocess.run([*GIT, "archive", COMMIT, *NEEDED], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    # Variables of the make that runs this test must not affect the build of the old release.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    for target in (["native/vcuda"], ["native/plugin", "proto", f"PYTHON={sys.executable}"]):
        subprocess.run(["make", "-s", "-C", *target], cwd=folder, env=environment, check=True)
    return Former(folder / "native/plugin/src", folder / "native/build")
