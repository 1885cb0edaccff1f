# SPDX-License-Identifier: Apache-2.0
"""A node of the release before folders were mounted, which is upgraded under its containers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from former import VERSION as FORMER
from former import Former

from .conftest import BUILD, SOURCES, RealNode

# The folder of this version's library.
NEW = "0.1.0-aaaaaaaaaaaa"


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
