# SPDX-License-Identifier: Apache-2.0
"""A node that starts with the programs of the last release that mounted single files into containers, and is upgraded
while its containers run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from former import VERSION as FORMER
from former import Former

from .conftest import BUILD, SOURCES, RealNode

# This is the folder of this version's library.
NEW = "0.1.0-aaaaaaaaaaaa"


class OldNode:
    """A node of the former release: the link ``current`` points to that release's library, and that release's arbiter
    (which balances compute time) and device plugin run."""

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
        """Upgrades in the order of playbooks/upgrade.yml."""
        self.use_library(NEW)
        self.use_arbiter()
        self.use_plugin(SOURCES)

    def use_library(self, version: str) -> None:
        """Switches the link ``current`` atomically, as the role vcuda does."""
        link = self.node.folder / "lib" / "current"
        fresh = link.with_name(".current.new")
        fresh.symlink_to(version)
        os.replace(fresh, link)

    def use_arbiter(self) -> None:
        """Stops the running arbiter, and starts the arbiter in the folder ``current``."""
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
        """Stops the running device plugin, and starts the device plugin in ``sources``."""
        self.node.end()
        self.node.environment["PYTHONPATH"] = os.pathsep.join(map(str, sources))
        self.node.start()

    def reboot(self) -> None:
        """Simulates a reboot: unmounts and deletes everything below /run, and starts the programs again."""
        self.node.end()
        self.stop_arbiter()
        run = self.node.folder / "run"
        for mount in reversed(self.node.mounts()):
            if Path(mount).is_relative_to(run):
                subprocess.run(["umount", mount], check=True)
        shutil.rmtree(run)
        self.use_arbiter()
        self.node.start()
