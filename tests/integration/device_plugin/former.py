# SPDX-License-Identifier: Apache-2.0
"""The release before folders were mounted, out of this repository's history: its device plugin, its library and its
arbiter, and a node that is upgraded from it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import BUILD, ROOT, SOURCES, RealNode

COMMIT = "bf48933"
# Folders of the library's versions.
FORMER, NEW = f"0.1.0-{COMMIT}", "0.1.0-aaaaaaaaaaaa"
NEEDED = ("native/plugin", "native/vcuda", "plugins/module_utils")


@dataclass(frozen=True)
class Former:
    """``sources``: of the device plugin. ``build``: folder of libvgpu.so, vgpu-probe and vgpu-arbiter."""

    sources: Path
    build: Path


def check_out(folder: Path) -> Former:
    """Builds it in a folder; skips where the checkout has no history."""
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", f"{COMMIT}^{{commit}}"], capture_output=True, check=False).returncode:
        pytest.skip(f"this checkout has no commit {COMMIT}; a clone with its history has")
    archive = subprocess.run([*git, "archive", COMMIT, *NEEDED], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    # Variables that the make around this test was given are not for another release.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    for target in (["native/vcuda"], ["native/plugin", "proto", f"PYTHON={sys.executable}"]):
        subprocess.run(["make", "-s", "-C", *target], cwd=folder, env=environment, check=True)
    return Former(folder / "native/plugin/src", folder / "native/build")


class OldNode:
    """A node of the former release: its library is ``current``, its arbiter and its device plugin run."""

    def __init__(self, node: RealNode, former: Former) -> None:
        self.node = node
        folder = node.folder / "lib" / FORMER
        folder.mkdir()
        for name in ("libvgpu.so", "vgpu-probe", "vgpu-arbiter"):
            shutil.copy(former.build / name, folder / name)
        shutil.copy(BUILD / "vgpu-arbiter", node.folder / "lib" / NEW / "vgpu-arbiter")
        self.use_library(FORMER)
        self._arbiter: subprocess.Popen[bytes] | None = None
        self.use_arbiter()
        self.use_plugin([former.sources])

    def upgrade(self) -> None:
        """In the order of playbooks/upgrade.yml."""
        self.use_library(NEW)
        self.use_arbiter()
        self.use_plugin(SOURCES)

    def use_library(self, version: str) -> None:
        """As the role vcuda does it: ``current`` leads elsewhere from one moment to the next."""
        link = self.node.folder / "lib" / "current"
        fresh = link.with_name(".current.new")
        fresh.symlink_to(version)
        os.replace(fresh, link)

    def use_arbiter(self) -> None:
        """Ends the arbiter that runs, and starts the current one."""
        self.stop_arbiter()
        run = self.node.folder / "run"
        run.mkdir(exist_ok=True)
        program = self.node.folder / "lib" / "current" / "vgpu-arbiter"
        self._arbiter = subprocess.Popen([str(program), "--run", str(run)], env=self.node.environment)

    def stop_arbiter(self) -> None:
        if self._arbiter is not None:
            self._arbiter.terminate()
            self._arbiter.wait(30)

    def use_plugin(self, sources: list[Path]) -> None:
        """Ends the device plugin that runs, and starts the one of ``sources``."""
        self.node.end()
        self.node.environment["PYTHONPATH"] = os.pathsep.join(map(str, sources))
        self.node.start()

    def reboot(self) -> None:
        """What lies in /run is gone, and the kernel's mounts with it."""
        self.node.end()
        self.stop_arbiter()
        run = self.node.folder / "run"
        for mount in reversed(self.node.mounts()):
            if Path(mount).is_relative_to(run):
                subprocess.run(["umount", mount], check=True)
        shutil.rmtree(run)
        self.use_arbiter()
        self.node.start()
